"""`EditorLog` on the real Kafka and on its test double, which the seeded fault tests use."""

import pytest
from kafka.errors import KafkaError, KafkaTimeoutError

from gracestream.pipeline.editor.log import UnexpectedWriterError, is_retriable
from gracestream.pipeline.editor.membership import PartitionLostError
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka.topics import DELTAS, EDITS, FEEDBACK, FEEDBACK_DLQ, TOPICS
from gracestream.pipeline.settings import load_settings
from tests.support.doubles.kafka import MemoryKafka
from tests.support.editor_clusters import (
    Cluster,
    decided,
    next_offset,
    outcome_of,
    outcomes,
    values_of,
    write_half_a_transaction,
)
from tests.support.running import TIMEOUT, headers_of, wait_until


class TestTransactions:
    def test_everything_of_one_feedback_record_commits_together(self, cluster: Cluster) -> None:
        log = cluster.leader()
        log.commit(decided(4, outcome_of("f"), b"a delta", "no good", b"a key", b"\xff\x00 a record"))
        assert cluster.values(DELTAS) == [b"lead", b"a delta"]
        (outcome,) = cluster.records(EDITS)
        assert (outcome.key, headers_of(outcome)) == (b"f", {"feedback_offset": "4"})
        (letter,) = cluster.records(FEEDBACK_DLQ)
        assert (letter.key, letter.value) == (b"a key", b"\xff\x00 a record")
        assert headers_of(letter) == {
            "reason": "no good",
            "source_topic": cluster.settings.kafka.topic(FEEDBACK),
            "source_partition": "0",
            "source_offset": "4",
        }
        assert log._member.committed(log._feedback) == 5

    def test_an_editor_that_ends_before_its_commit_leaves_nothing(self, cluster: Cluster) -> None:
        log = cluster.leader()
        write_half_a_transaction(cluster, log)
        log.close()
        assert cluster.values(DELTAS) == [b"lead"]
        assert cluster.values(EDITS) == []
        successor = cluster.leader(b"lead again")
        successor.commit(decided(0, outcome_of("f"), b"whole"))
        assert cluster.values(DELTAS) == [b"lead", b"lead again", b"whole"]
        assert successor._member.committed(successor._feedback) == 1

    def test_an_open_transaction_ends_the_log_until_its_writer_is_fenced(self, cluster: Cluster) -> None:
        log = cluster.leader()
        write_half_a_transaction(cluster, log)
        cluster.send(DELTAS, b"after it")
        reader = cluster.editor()
        assert values_of(reader) == [b"lead"]
        reader.fence()
        assert values_of(reader) == [b"after it"]

    def test_a_commit_whose_answer_was_lost_is_found_in_the_log(self, cluster: Cluster) -> None:
        log = cluster.leader()
        write_half_a_transaction(cluster, log)
        log._writer.commit_transaction()
        log.close()
        list(log.read_new_deltas())
        log.join()
        cluster.wait_for_membership(log, "elected")
        log.fence()
        list(log.read_new_deltas())
        assert cluster.values(DELTAS) == [b"lead", b"half"]
        assert log.write_lead(b"lead again") == 7

    def test_no_editor_leads_while_a_transaction_of_another_writer_is_open(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gracestream.pipeline.editor.log.READ_TIMEOUT_SECONDS", 2.0)
        other = cluster.producer(transactional_id=f"{cluster.settings.kafka.topic_prefix}another")
        other.init_transactions()
        other.begin_transaction()
        other.send(cluster.settings.kafka.topic(DELTAS), value=b"undecided", partition=0).get(timeout=TIMEOUT)
        log = cluster.member()
        with pytest.raises(KafkaTimeoutError, match="holds records of a transaction that has not ended"):
            log.fence()
        other.abort_transaction()
        other.close()
        log.close()
        cluster.leader()
        assert cluster.values(DELTAS) == [b"lead"]


class TestLostControlRecords:
    """A broker that has just restarted may end a transaction without its control records."""

    @pytest.fixture
    def kafka(self, prefix: str) -> MemoryKafka:
        settings = load_settings(topic_prefix=prefix)
        return MemoryKafka([settings.kafka.topic(topic.name) for topic in TOPICS])

    def test_the_editor_that_knows_its_last_commit_goes_on(self, kafka: MemoryKafka, prefix: str) -> None:
        cluster = Cluster(load_settings(topic_prefix=prefix), kafka)
        log = cluster.leader()
        kafka.skips_markers = True
        log.commit(decided(0, outcome_of("f0"), b"hidden"))
        kafka.skips_markers = False
        assert cluster.values(DELTAS) == [b"lead"]
        log.close()
        list(log.read_new_deltas())
        log.join()
        cluster.take_over(log, b"lead again")
        assert cluster.values(DELTAS) == [b"lead", b"hidden", b"lead again"]
        log.commit(decided(1, outcome_of("f1"), b"next"))
        assert [outcome.feedback_id for outcome in outcomes(cluster)] == ["f0", "f1"]

    def test_another_editor_does_not_write_on(
        self, kafka: MemoryKafka, prefix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gracestream.pipeline.editor.log.READ_TIMEOUT_SECONDS", 0.2)
        cluster = Cluster(load_settings(topic_prefix=prefix), kafka)
        log = cluster.leader()
        kafka.skips_markers = True
        log.commit(decided(0, outcome_of("f0"), b"hidden"))
        log.close()
        other = cluster.member()
        with pytest.raises(KafkaTimeoutError, match="find-hanging"):
            other.fence()
        assert cluster.values(DELTAS) == [b"lead"]


class TestHistory:
    def test_each_delta_of_another_editor_is_read_once_and_own_deltas_never(self, cluster: Cluster) -> None:
        cluster.send(DELTAS, b"one", b"two")
        log = cluster.editor()
        assert list(log.read_new_deltas()) == [(0, b"one"), (1, b"two")]
        assert list(log.read_new_deltas()) == []
        cluster.send(DELTAS, b"three")
        assert list(log.read_new_deltas()) == [(2, b"three")]
        log.join()
        cluster.take_over(log)
        log.commit(decided(0, None, b"four"))
        assert list(log.read_new_deltas()) == []
        log.close()
        cluster.send(DELTAS, b"five")
        assert values_of(log) == [b"five"]

    def test_a_record_is_read_once_even_if_applying_it_fails(self, cluster: Cluster) -> None:
        cluster.send(DELTAS, b"one", b"two")
        log = cluster.editor()
        assert next(log.read_new_deltas()) == (0, b"one")
        assert list(log.read_new_deltas()) == [(1, b"two")]


class TestForeignRecords:
    """Only the editor may write to `deltas`. It reads the records of any other writer before it writes again."""

    def test_nothing_is_committed_behind_a_record_that_was_not_read(self, cluster: Cluster) -> None:
        log = cluster.leader()
        log.commit(decided(0, outcome_of("f0"), b"first"))
        cluster.send(DELTAS, b"foreign")
        with pytest.raises(UnexpectedWriterError, match=r"somebody else has written to .*deltas at offset 4") as raised:
            log.commit(decided(1, outcome_of("f1"), b"second"))
        assert is_retriable(raised.value)
        log.close()
        assert list(log.read_new_deltas()) == [(4, b"foreign")]
        log.join()
        cluster.take_over(log, b"lead again")
        log.commit(decided(1, outcome_of("f1"), b"second"))
        assert cluster.values(DELTAS) == [b"lead", b"first", b"foreign", b"lead again", b"second"]
        assert [outcome.feedback_id for outcome in outcomes(cluster)] == ["f0", "f1"]

    def test_an_editor_begins_no_term_behind_an_unread_record(self, cluster: Cluster) -> None:
        log = cluster.member()
        log.fence()
        list(log.read_new_deltas())
        cluster.send(DELTAS, b"foreign")
        with pytest.raises(UnexpectedWriterError):
            log.write_lead(b"lead")
        log.close()
        assert cluster.values(DELTAS) == [b"foreign"]

    def test_a_record_that_was_read_prevents_no_commit(self, cluster: Cluster) -> None:
        log = cluster.leader()
        cluster.send(DELTAS, b"foreign")
        wait_until(lambda: values_of(log) == [b"foreign"])
        log.commit(decided(0, outcome_of("f0"), b"first"))
        assert cluster.values(DELTAS) == [b"lead", b"foreign", b"first"]

    def test_a_record_between_a_delta_and_the_end_of_its_transaction_is_read(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = cluster.leader()
        commit = log._writer.commit_transaction

        def late() -> None:
            cluster.send(DELTAS, b"foreign")
            commit()

        monkeypatch.setattr(log._writer, "commit_transaction", late)
        log.commit(decided(0, outcome_of("f0"), b"first"))
        monkeypatch.undo()
        assert wait_until(lambda: list(log.read_new_deltas())) == [(3, b"foreign")]
        log.commit(decided(1, outcome_of("f1"), b"second"))
        assert cluster.values(DELTAS) == [b"lead", b"first", b"foreign", b"second"]

    def test_an_outcome_without_a_delta_commits_despite_unread_records(self, cluster: Cluster) -> None:
        log = cluster.leader()
        cluster.send(DELTAS, b"foreign")
        log.commit(decided(0, outcome_of("f0")))
        assert [outcome.feedback_id for outcome in outcomes(cluster)] == ["f0"]


def test_an_editor_does_not_continue_a_log_that_has_lost_records(prefix: str) -> None:
    settings = load_settings(topic_prefix=prefix)
    double = MemoryKafka([settings.kafka.topic(topic.name) for topic in TOPICS])
    log = Cluster(settings, double).leader()
    log.commit(decided(0, outcome_of("f0"), b"first"))
    double.topics[settings.kafka.topic(DELTAS)].clear()
    with pytest.raises(HistoryError, match="deltas ends at offset 0, and was read up to 4: it has lost records"):
        log.commit(decided(1, outcome_of("f1"), b"second"))
    log.close()
    assert not list(double.committed(settings.kafka.topic(DELTAS)))


class TestPosition:
    def test_in_a_new_topic_it_is_the_first_record(self, cluster: Cluster) -> None:
        cluster.send(FEEDBACK, b"f0")
        log = cluster.leader()
        assert next_offset(log) == 0

    @pytest.mark.parametrize("done", [1, 3, 40])
    def test_without_offsets_of_the_group_it_is_after_the_last_outcome(self, cluster: Cluster, done: int) -> None:
        cluster.send(FEEDBACK, *(b"f%d" % number for number in range(done + 1)))
        log = cluster.leader()
        for offset in range(done):
            log.commit(decided(offset, outcome_of(f"f{offset}")))
        log.close()
        cluster.forget_group()
        assert next_offset(cluster.leader()) == done

    def test_a_record_without_an_outcome_counts_as_done_by_its_offset_or_its_dead_letter(
        self, cluster: Cluster
    ) -> None:
        cluster.send(FEEDBACK, *(b"f%d" % number for number in range(31)))
        log = cluster.leader()
        log.commit(decided(0, outcome_of("f0")))
        for offset in range(1, 30):
            log.commit(decided(offset, None, None, "unreadable", None, b"?"))
        log.close()
        log = cluster.leader()
        assert next_offset(log) == 30
        log.close()
        cluster.forget_group()
        log = cluster.leader()
        assert next_offset(log) == 30, "its dead letter has the offset, though it has no outcome"

    def test_headers_with_an_invalid_offset_do_not_move_it_beyond_the_end(self, cluster: Cluster) -> None:
        cluster.send(FEEDBACK, b"one", b"two")
        for header in (None, b"\xff", b"-5", b"9" * 40, b""):
            cluster.send_dead_letter(header)
        log = cluster.leader()
        assert log._next_feedback == 0
        log.close()
        cluster.send_dead_letter(b"999")
        assert cluster.leader()._next_feedback == 2

    def test_a_rebalance_does_not_move_it(self, cluster: Cluster) -> None:
        cluster.send(FEEDBACK, b"f0", b"f1", b"f2", b"f3")
        log = cluster.leader()
        log.commit(decided(0, outcome_of("f0")))
        log.close()
        cluster.forget_group()
        log = cluster.leader()
        assert next_offset(log) == 1
        log.commit(decided(1, outcome_of("f1")))
        standby = cluster.editor()
        list(standby.read_new_deltas())
        standby.join()
        given: list[int] = []

        def both() -> bool:
            place = standby.membership(0.05)
            if (record := log.poll(0.05)) is not None:
                given.append(record[0])
                log.commit(decided(record[0], outcome_of(f"f{record[0]}")))
            return place == "standby" and len(given) > 1

        wait_until(both)
        assert given == [2, 3]
        assert log.lag() == 0

    def test_waiting_feedback_is_counted(self, cluster: Cluster) -> None:
        log = cluster.leader()
        cluster.send(FEEDBACK, b"f0", b"f1", b"f2")
        assert log.lag() == 3
        log.commit(decided(0, outcome_of("f0")))
        assert log.lag() == 2

    def test_feedback_is_read_ahead_once(self, cluster: Cluster) -> None:
        log = cluster.leader()
        cluster.send(FEEDBACK, b"f0", b"f1", b"f2", b"f3")
        assert [next_offset(log) for _ in range(3)] == [0, 1, 2]
        log.commit(decided(0, outcome_of("f0")))
        for _ in range(3):
            log.keep_alive(0.0)
        assert next_offset(log) == 3
        assert log.lag() == 3
        log.commit(*(decided(offset, outcome_of(f"f{offset}")) for offset in (1, 2, 3)))
        assert log.lag() == 0


def test_a_permanent_error_is_not_retriable() -> None:
    from kafka import errors  # noqa: PLC0415 - a module of two hundred classes, of which four matter here

    assert not is_retriable(errors.TransactionalIdAuthorizationFailedError())
    assert not is_retriable(errors.GroupAuthorizationFailedError("editor"))
    assert not is_retriable(errors.MessageSizeTooLargeError())
    assert not is_retriable(KafkaError("we are in an error state: [Error 29] TopicAuthorizationFailedError"))
    assert is_retriable(KafkaError("we are in an error state: [Error 90] ProducerFencedError"))
    assert is_retriable(errors.KafkaTimeoutError())
    assert is_retriable(PartitionLostError())
