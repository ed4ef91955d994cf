"""The right to write to the log, and its loss, on the real Kafka and on its test double."""

import time

import pytest
from kafka.errors import KafkaError

from gracestream.pipeline.editor.log import is_retriable
from gracestream.pipeline.editor.membership import PartitionLostError
from gracestream.pipeline.kafka.topics import DELTAS, EDITS, FEEDBACK
from tests.support.editor_clusters import (
    Cluster,
    decided,
    end_session,
    next_offset,
    outcome_of,
    outcomes,
    write_half_a_transaction,
)
from tests.support.running import TIMEOUT, headers_of, wait_until


class TestOneWriter:
    def test_a_second_editor_stands_by_and_takes_over_when_the_first_leaves(self, cluster: Cluster) -> None:
        first = cluster.leader()
        second = cluster.member()
        assert first.poll(0.05) is None
        first.commit(decided(0, outcome_of("f0")))
        cluster.wait_for_membership(second, "standby")
        first.close()
        cluster.take_over(second)
        second.commit(decided(1, outcome_of("f1")))
        assert [headers_of(record)["feedback_offset"] for record in cluster.records(EDITS)] == ["0", "1"]

    def test_a_fenced_editor_writes_no_more(self, cluster: Cluster) -> None:
        first = cluster.leader()
        second = cluster.editor()
        second.fence()
        with pytest.raises(KafkaError) as raised:
            first.commit(decided(0, outcome_of("f0"), b"too late"))
        assert is_retriable(raised.value)
        with pytest.raises(KafkaError):
            first.commit(decided(0, outcome_of("f0"), b"too late"))
        assert cluster.values(DELTAS) == [b"lead"]
        assert cluster.values(EDITS) == []
        assert first._member.committed(first._feedback) == 0

    def test_an_editor_fenced_within_a_transaction_commits_none_of_it(self, cluster: Cluster) -> None:
        first = cluster.leader()
        write_half_a_transaction(cluster, first)
        second = cluster.member()
        second.fence()
        with pytest.raises(KafkaError):
            first._writer.send(cluster.settings.kafka.topic(DELTAS), value=b"too late", partition=0).get(
                timeout=TIMEOUT
            )
        first.close()  # no editor is fenced, although kafka-python would request another epoch here
        cluster.wait_for_membership(second, "elected")
        list(second.read_new_deltas())
        second.write_lead(b"lead again")
        second.commit(decided(0, outcome_of("f0"), b"by the second"))
        assert cluster.values(DELTAS) == [b"lead", b"lead again", b"by the second"]
        assert [outcome.feedback_id for outcome in outcomes(cluster)] == ["f0"]

    def test_a_commit_of_another_generation_or_of_no_member_is_rejected(self, cluster: Cluster) -> None:
        log = cluster.leader()
        now = log._group_metadata
        for stale in (now._replace(generation_id=now.generation_id + 1), now._replace(member_id="somebody else")):
            log._group_metadata = stale
            with pytest.raises(KafkaError) as raised:
                log.commit(decided(0, outcome_of("f0"), b"too late"))
            assert is_retriable(raised.value)
            log.fence()
            list(log.read_new_deltas())
        log._group_metadata = now
        log.commit(decided(0, outcome_of("f0"), b"in time"))
        assert cluster.values(DELTAS) == [b"lead", b"in time"]

    def test_a_commit_without_a_generation_is_not_checked(self, cluster: Cluster) -> None:
        """Therefore an `EditorLog` keeps the generation in which it was elected."""
        log = cluster.leader()
        log._group_metadata = log._group_metadata._replace(generation_id=-1, member_id="")
        log.commit(decided(0, None, b"unchecked"))
        assert cluster.values(DELTAS) == [b"lead", b"unchecked"]

    def test_poll_reports_the_loss_of_the_membership(self, cluster: Cluster) -> None:
        log = cluster.leader()
        end_session(cluster, log)
        with pytest.raises(KafkaError) as raised:
            wait_until(lambda: log.poll(0.05) is not None)
        assert is_retriable(raised.value)
        with pytest.raises(KafkaError):
            log.commit(decided(0, outcome_of("f0"), b"too late"))
        assert cluster.values(DELTAS) == [b"lead"]


class TestKeepAlive:
    """An editor that works on one record for a long time."""

    def test_keep_alive_returns_no_record_and_loses_none(self, cluster: Cluster) -> None:
        log = cluster.leader()
        cluster.send(FEEDBACK, b"f0", b"f1", b"f2")
        assert next_offset(log) == 0
        for _ in range(20):
            log.keep_alive(0.0)
        log.commit(decided(0, outcome_of("f0"), b"took long"))
        assert [next_offset(log), next_offset(log)] == [1, 2]

    def test_keep_alive_lets_a_standby_join_and_keeps_the_partition(self, cluster: Cluster) -> None:
        cluster.send(FEEDBACK, b"f0", b"f1")
        log = cluster.leader()
        assert next_offset(log) == 0
        standby = cluster.editor()
        list(standby.read_new_deltas())
        standby.join()

        def settled() -> bool:
            log.keep_alive(0.0)
            return (
                standby._is_stable()
                and log._group_metadata.generation_id == standby._member.group_metadata().generation_id
            )

        with cluster.others_polling(log):
            wait_until(settled)
        assert standby.membership(0.05) == "standby"
        log.commit(decided(0, outcome_of("f0"), b"took long"))
        assert next_offset(log) == 1

    def test_keep_alive_reports_the_loss_of_the_membership(self, cluster: Cluster) -> None:
        cluster.send(FEEDBACK, b"f0")
        log = cluster.leader()
        assert next_offset(log) == 0
        end_session(cluster, log)

        def lost() -> bool:
            try:
                log.keep_alive(0.0)
            except KafkaError as error:
                return is_retriable(error)
            return False

        wait_until(lost)
        with pytest.raises(KafkaError):
            log.commit(decided(0, outcome_of("f0"), b"too late"))
        assert cluster.values(DELTAS) == [b"lead"]

    def test_a_decision_that_took_too_long_is_not_committed_and_the_setting_is_named(self, cluster: Cluster) -> None:
        log = cluster.leader()
        log._settings = log._settings.model_copy(update={"stall_timeout": 0.1})
        time.sleep(0.2)
        with pytest.raises(PartitionLostError, match="set GRACESTREAM_STALL_TIMEOUT higher") as raised:
            log.commit(decided(0, outcome_of("f0"), b"took long"))
        assert is_retriable(raised.value)
        assert cluster.values(EDITS) == []
