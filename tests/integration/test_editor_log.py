"""The editor's end of the log: all of a correction or nothing, one writer, and no feedback lost or taken twice."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka import TopicPartition
from kafka.errors import KafkaError
from msgspec import UNSET

from pipeline.clients import admin
from pipeline.codebook import Codebook
from pipeline.editor_log import EditorLog, Result
from pipeline.replay import replay_deltas
from pipeline.settings import Settings
from pipeline.topics import DELTAS, EDITS, FEEDBACK, FEEDBACK_DLQ
from schemas.messages import Outcome
from tests.integration.forked import Forked
from tests.integration.history import History
from tests.integration.running import (
    Users,
    deltas_in_log,
    flag,
    headers_of,
    outcomes_in_log,
    question,
    records,
    wait_until,
)
from tests.unit.engine.tiny import LAYER, MODEL, added, sealed, texts

PROMPTS = texts(40, seed=11, shortest=6, longest=9)


@contextlib.contextmanager
def opened(settings: Settings) -> Iterator[EditorLog]:
    """An editor's log, closed at the end."""
    log = EditorLog(settings)
    try:
        yield log
    finally:
        log.close()


def outcome_of(feedback_id: str) -> Outcome:
    return Outcome(v=1, feedback_id=feedback_id, status="rejected", reason="a test")


def forget_group(settings: Settings) -> None:
    """What Kafka does to a group that was idle for a week."""
    client = admin(settings)
    client.delete_group_offsets(settings.topic("editor"), [TopicPartition(settings.topic(FEEDBACK), 0)])
    client.close()


class TestTransactions:
    def test_everything_of_one_feedback_record_commits_together(self, deployment: Settings) -> None:
        with opened(deployment) as log:
            log.commit(Result(4, outcome_of("f"), b"a delta", "no good", b"a key", b"\xff\x00 a record"))
            assert log.seek() == 5
        assert [record.value for record in records(deployment, DELTAS)] == [b"a delta"]
        (outcome,) = records(deployment, EDITS)
        assert (outcome.key, headers_of(outcome)) == (b"f", {"feedback_offset": "4"})
        (letter,) = records(deployment, FEEDBACK_DLQ)
        assert (letter.key, letter.value) == (b"a key", b"\xff\x00 a record")
        assert headers_of(letter) == {
            "reason": "no good",
            "source_topic": deployment.topic(FEEDBACK),
            "source_partition": "0",
            "source_offset": "4",
        }

    def test_a_writer_that_is_gone_before_its_commit_leaves_nothing(self, deployment: Settings) -> None:
        with opened(deployment) as log:
            log._producer.begin_transaction()
            for topic in (DELTAS, EDITS, FEEDBACK_DLQ):
                log._send(topic, b"half", None)
            log._producer.flush()
        for topic in (DELTAS, EDITS, FEEDBACK_DLQ):
            assert records(deployment, topic) == []
        with opened(deployment) as successor:
            assert successor.seek() == 0
            successor.commit(Result(0, outcome_of("f"), b"whole"))
        assert [record.value for record in records(deployment, DELTAS)] == [b"whole"]

    def test_a_second_editor_fences_the_first(self, deployment: Settings) -> None:
        with opened(deployment) as first:
            first.commit(Result(0, outcome_of("f0")))
            with opened(deployment) as second:
                with pytest.raises(KafkaError):
                    first.commit(Result(1, outcome_of("by the first"), b"by the first"))
                assert second.seek() == 1
                second.commit(Result(1, outcome_of("by the second"), b"by the second"))
        assert [outcome.feedback_id for outcome in outcomes_in_log(deployment)] == ["f0", "by the second"]
        assert [record.value for record in records(deployment, DELTAS)] == [b"by the second"]


class TestPosition:
    def test_it_is_the_first_record_of_a_new_topic(self, deployment: Settings) -> None:
        with opened(deployment) as log:
            assert log.seek() == 0

    @pytest.mark.parametrize("outcomes", [1, 3, 40])
    def test_it_is_after_the_last_outcome_when_kafka_forgot_the_group(
        self, deployment: Settings, outcomes: int
    ) -> None:
        with opened(deployment) as log:
            for offset in range(outcomes):
                log.commit(Result(offset, outcome_of(f"f{offset}")))
        forget_group(deployment)
        with opened(deployment) as log:
            assert log.seek() == outcomes

    def test_a_record_without_an_outcome_counts_as_done_by_its_offset(self, deployment: Settings) -> None:
        with opened(deployment) as log:
            log.commit(Result(0, outcome_of("f0")))
            for offset in range(1, 30):
                log.commit(Result(offset, None, None, "unreadable", None, b"?"))
        with opened(deployment) as log:
            assert log.seek() == 30
        forget_group(deployment)
        with opened(deployment) as log:
            assert log.seek() == 1, "what has no outcome is set aside again"

    def test_feedback_is_handed_out_from_there_on(self, deployment: Settings, users: Users) -> None:
        users.client.send([flag(f"f{number}", "a", "b") for number in range(5)])
        with opened(deployment) as log:
            log.commit(Result(2, outcome_of("f2")))
            log.seek()
            assert wait_until(lambda: [offset for offset, _, _ in log.poll(0.5)]) == [3, 4]
            assert log.behind() == 0


def test_an_editor_killed_again_and_again_gives_every_feedback_record_one_outcome(
    deployment: Settings, users: Users, folder: Path
) -> None:
    given = [flag(f"f{number}", prompt, "museum") for number, prompt in enumerate(PROMPTS)]
    editor = Forked("editor", "edit", deployment, folder)
    with editor:
        users.client.send(given)
        for share in (0.1, 0.4, 0.75):
            wait_until(lambda share=share: len(records(deployment, EDITS)) > share * len(given), 60)  # type: ignore[misc]
            editor.kill()
            editor.start()
        wait_until(lambda: len(records(deployment, EDITS)) >= len(given), 60, what="every outcome")
        editor.wait_ready()
        wait_until(lambda: editor.state()["seq"] == deltas_in_log(deployment)[-1].seq)
        outcomes, deltas = outcomes_in_log(deployment), deltas_in_log(deployment)
        assert [outcome.feedback_id for outcome in outcomes] == [one.feedback_id for one in given]
        assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
        assert [delta.term for delta in deltas if delta.op == "lead"] == [1, 2, 3, 4]
        causes = Counter(delta.cause.feedback_id for delta in deltas if delta.cause is not UNSET)
        assert max(causes.values()) == 1
        assert {o.feedback_id: o.seq for o in outcomes if o.seq is not UNSET} == {
            delta.cause.feedback_id: delta.seq for delta in deltas if delta.cause is not UNSET
        }
        replayed = replay_deltas(deployment)
        assert replayed is not None
        assert replayed.digest.hex() == editor.state()["digest"]
        assert replayed.state_digest() == editor.state()["state_digest"]


def test_a_second_editor_takes_over_and_the_first_stops(deployment: Settings, users: Users, folder: Path) -> None:
    with Forked("first", "edit", deployment, folder) as first:
        first.wait_ready(90)
        assert users.correct(flag("f0", PROMPTS[0], "museum"))["f0"].seq == 2
        with Forked("second", "edit", deployment, folder) as second:
            second.wait_ready()
            assert users.correct(flag("f1", PROMPTS[1], "river"))["f1"].seq == 4
            assert first.wait() == 1
            assert [delta.term for delta in deltas_in_log(deployment)] == [1, 1, 2, 2]
            assert len(outcomes_in_log(deployment)) == 2
    assert "Traceback" not in first.said()
    assert "editor_stopped" in first.said()


class TestRedis:
    """What an editor makes of a Redis that is not where the log is."""

    def in_redis(self, history: History) -> Codebook:
        """The codebook of the log, once Redis holds all of it."""
        replayed = replay_deltas(history.settings)
        assert replayed is not None
        radii = {entry: float(radius) for entry, radius in zip(replayed.entry_ids, replayed.radii_N, strict=True)}
        head = wait_until(lambda: history.store.head(0))
        wait_until(lambda: (found := history.store.head(0)) is not None and found.seq == replayed.seq)
        assert history.store.radii() == pytest.approx(radii, rel=1e-6)
        head = history.store.head(0)
        assert head is not None
        assert (head.term, head.digest) == (replayed.term, replayed.digest.hex())
        return replayed

    def test_an_emptied_one_is_filled_and_one_that_is_behind_brought_up(
        self, deployment: Settings, users: Users, folder: Path
    ) -> None:
        history = History(deployment)
        with Forked("editor", "edit", deployment, folder) as editor:
            editor.wait_ready(90)
            users.correct(*(flag(f"f{number}", prompt, "museum") for number, prompt in enumerate(PROMPTS[:4])))
            before = self.in_redis(history)

            editor.kill()
            history.empty_redis()
            editor.start()
            editor.wait_ready()
            assert self.in_redis(history).seq == before.seq + 1, "a new term"

            editor.kill()
            older = replay_deltas(deployment, seq=3)
            assert older is not None
            history.empty_redis()
            history.store.rebuild(older)
            editor.start()
            editor.wait_ready()
            assert len(self.in_redis(history)) == len(before)

            history.empty_redis()
            assert len(self.in_redis(history)) == len(before), "an idle editor fills it again"

            editor.pause()
            users.client.send([flag(f"f{number}", PROMPTS[number], "museum") for number in (4, 5)])
            history.empty_redis()
            editor.go_on()
            wait_until(lambda: len(outcomes_in_log(deployment)) == 6)
            assert len(self.in_redis(history)) > len(before), "and so does one that is at work"
        history.close()

    def test_one_that_is_ahead_of_the_log_stops_the_editor(self, deployment: Settings, folder: Path) -> None:
        history = History(deployment)
        elsewhere = Codebook(deployment.codebook, MODEL, LAYER)
        elsewhere.apply(sealed(elsewhere, op="lead", term=7))
        elsewhere.apply(sealed(elsewhere, added("e", [1.0], 1.0)))
        history.store.rebuild(elsewhere)
        editor = Forked("editor", "edit", deployment, folder)
        assert editor.run(90) == 1
        assert "delta 1 of term 1 is not made live: Redis has a newer one" in editor.said()
        assert "Traceback" not in editor.said()
        history.close()


def test_an_editor_becomes_ready_while_traffic_flows(deployment: Settings, users: Users, folder: Path) -> None:
    stop = threading.Event()

    def traffic() -> None:
        number = 0
        while not stop.is_set():
            users.client.send([question(f"q{number}", PROMPTS[number % len(PROMPTS)])])
            number += 1
            time.sleep(0.01)

    flowing = threading.Thread(target=traffic)
    flowing.start()
    try:
        with Forked("editor", "edit", deployment, folder) as editor:
            editor.wait_ready(60)
            wait_until(lambda: editor.state()["traffic"] > 0)
    finally:
        stop.set()
        flowing.join(10)
