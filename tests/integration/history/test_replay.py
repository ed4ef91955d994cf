"""Replay restores any state of the history from `deltas`; an invalid history is an error."""

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.file import CodebookFileError, load_codebook, save_codebook
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.history.kafka_history import KafkaHistory
from gracestream.pipeline.history.steps import history_steps
from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.replay.replay import replay_deltas
from gracestream.pipeline.settings import Settings
from gracestream.schemas.deltas import Cause, EntryChange, decode_delta
from tests.support.running import flag, records
from tests.support.tiny_models import LAYER, MODEL, added, sealed
from tests.support.written_history import History, same


@pytest.fixture
def history(deployment: Settings) -> Iterator[History]:
    """A history of two terms."""
    made = History(deployment)
    steps: list[tuple[tuple[EntryChange, ...], dict[str, Any]]] = [
        ((), {"op": "lead"}),
        ((added("a", [1.0, 0.0], 0.1),), {"feedback": flag("a", "who?", "me")}),
        ((added("b", [0.0, 1.0], 0.3),), {"feedback": flag("b", "what?", "this")}),
        ((EntryChange(entry_id="a", radius=0.7),), {"op": "expand"}),
        ((), {"op": "lead"}),
        ((EntryChange(entry_id="b", removed=True),), {"op": "undo"}),
        ((added("c", [0.5, 0.5], 1 / 3),), {"feedback": flag("c", "where?", "here")}),
    ]
    for seq, (entries, fields) in enumerate(steps, start=1):
        assert made.step(*entries, **fields) == seq
        time.sleep(0.005)  # so that no two deltas have the same timestamp
    yield made
    made.close()


def applied(history: History, count: int) -> Codebook:
    """The codebook after the first records, applied one by one."""
    codebook = Codebook(history.settings.model.codebook, MODEL, LAYER)
    for record in records(history.settings, "deltas")[:count]:
        codebook.apply(record.value)
    return codebook


def moment(history: History, seq: int) -> datetime:
    """Kafka's timestamp of a delta."""
    milliseconds: int = records(history.settings, "deltas")[seq - 1].timestamp
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def replayed(settings: Settings, seq: int | None = None, until: datetime | None = None) -> Codebook:
    codebook = replay_deltas(settings.kafka, seq, until)
    assert codebook is not None
    return codebook


class TestStates:
    def test_the_whole_log_gives_the_present_codebook(self, history: History) -> None:
        assert same(replayed(history.settings), history.codebook)

    def test_every_seq_gives_its_codebook(self, history: History) -> None:
        for seq in (1, 2, 4, 5, 6, 7):
            assert same(replayed(history.settings, seq), applied(history, seq))

    def test_every_time_gives_its_codebook(self, history: History) -> None:
        for seq in (1, 3, 5, 7):
            for milliseconds in (0, 1):
                at = moment(history, seq) + timedelta(milliseconds=milliseconds)
                assert same(replayed(history.settings, until=at), applied(history, seq))

    def test_there_is_nothing_before_the_first_delta(self, history: History) -> None:
        assert replay_deltas(history.settings.kafka, 0) is None
        assert replay_deltas(history.settings.kafka, until=moment(history, 1) - timedelta(milliseconds=1)) is None

    def test_there_is_nothing_in_an_empty_log(self, deployment: Settings) -> None:
        assert replay_deltas(deployment.kafka) is None
        assert list(history_steps(deployment.kafka)) == []

    def test_a_seq_beyond_the_log_is_named(self, history: History) -> None:
        with pytest.raises(HistoryError, match="the log ends at delta 7; there is no 8 yet"):
            replay_deltas(history.settings.kafka, 8)

    def test_deltas_of_a_fenced_editor_do_not_count(self, history: History) -> None:
        stale = applied(history, 4)
        for _ in range(5):
            record = sealed(stale, added(f"stale-{stale.seq}", [9.0, 9.0], 1.0))
            stale.apply(record)
            history.write(record)
        history.add("d", [2.0, 2.0])
        assert same(replayed(history.settings), history.codebook)
        assert [step.seq for step in history_steps(history.settings.kafka)] == list(range(1, 9))


class TestFaults:
    def test_a_record_that_is_no_delta(self, history: History) -> None:
        history.write(b"\xc1")
        history.add("d", [2.0, 2.0])
        with pytest.raises(HistoryError, match="not a valid delta"):
            replay_deltas(history.settings.kafka)
        with pytest.raises(HistoryError, match="the record at offset 7 of deltas cannot be applied: not a valid delta"):
            list(history_steps(history.settings.kafka))
        assert same(replayed(history.settings, 7), applied(history, 7)), "the deltas before it can be replayed"

    def test_a_tombstone(self, history: History) -> None:
        history._producer.send(history.settings.kafka.topic("deltas"), key=b"k", value=None, partition=0).get(30)
        with pytest.raises(HistoryError, match="the record has no value"):
            replay_deltas(history.settings.kafka)

    def test_a_gap(self, history: History) -> None:
        history.codebook.apply(sealed(history.codebook, added("lost", [2.0, 2.0], 1.0)))
        history.add("d", [2.0, 2.0])
        with pytest.raises(HistoryError, match="delta 9 of term 2 follows 7 of term 2: a gap"):
            replay_deltas(history.settings.kafka)

    def test_one_flipped_bit(self, history: History) -> None:
        record = bytearray(sealed(history.codebook, added("d", [2.0, 2.0], 1.0)))
        record[record.index(b"d", 40)] ^= 1
        history.write(bytes(record))
        with pytest.raises(HistoryError):
            replay_deltas(history.settings.kafka)

    def test_a_delta_of_another_model(self, history: History) -> None:
        history.write(sealed(history.codebook, added("d", [2.0, 2.0], 1.0), model="0" * 64))
        with pytest.raises(HistoryError, match="delta 8 is of model '000"):
            replay_deltas(history.settings.kafka)


class TestHistorySteps:
    def test_each_step_has_its_correction(self, history: History) -> None:
        steps = list(history_steps(history.settings.kafka))
        assert [step.op for step in steps] == ["lead", "add", "add", "expand", "lead", "undo", "add"]
        assert [step.term for step in steps] == [1, 1, 1, 1, 2, 2, 2]
        assert (steps[1].feedback_id, steps[1].inputs, steps[1].target) == ("a", "who?", "me")
        assert [step.entries for step in steps[1:4]] == [
            {"a": "new, radius 0.1"},
            {"b": "new, radius 0.3"},
            {"a": "radius 0.7"},
        ]
        assert steps[5].entries == {"b": "removed"}
        assert steps[1].timestamp == moment(history, 2).timestamp()

    def test_an_entry_added_after_its_removal_is_new(self, history: History) -> None:
        history.add("b", [0.0, 1.0], 0.9)
        assert list(history_steps(history.settings.kafka))[-1].entries == {"b": "new, radius 0.9"}

    def test_a_step_without_a_readable_correction_remains(self, history: History) -> None:
        offset = history.write(b"not feedback", "feedback")
        for feedback_id, at in (("d", offset), ("e", 999)):
            cause = Cause(feedback_id=feedback_id, offset=at, entry_id=feedback_id)
            history.step(added(feedback_id, [2.0, 2.0], 1.0), cause=cause)
        history.step(added("f", [2.0, 3.0], 1.0), feedback=flag("f", ("one", "two"), "three"))
        last = list(history_steps(history.settings.kafka))[-3:]
        assert [step.feedback_id for step in last] == ["d", "e", "f"]
        assert [step.inputs for step in last] == [None, None, "one | two"]


def test_reading_goes_on_behind_a_transaction_that_was_open(history: History) -> None:
    """Kafka returns no record after the start of an open transaction, and the last transaction may still be open."""
    writer = producer(history.settings.kafka, transactional_id=history.settings.kafka.topic("late"))
    writer.init_transactions()
    writer.begin_transaction()
    writer.send(history.settings.kafka.topic("deltas"), value=b"aborted", partition=0)
    writer.flush()
    last = history.add("d", [0.25, 0.25])
    assert len(records(history.settings, "deltas")) < last
    ending = threading.Timer(1.0, writer.abort_transaction)
    ending.start()
    found: list[int] = []

    def more(record: bytes) -> bool:
        found.append(decode_delta(record).seq)
        return found[-1] < last

    KafkaHistory(history.settings.kafka).for_each_delta(more)
    ending.join()
    writer.close(timeout=5)
    assert found == list(range(1, last + 1))


class TestFiles:
    def test_a_codebook_is_restored_bit_for_bit(self, history: History, tmp_path: Path) -> None:
        for seq in range(1, 8):
            codebook = replayed(history.settings, seq)
            save_codebook(codebook, tmp_path / "codebook")
            assert same(load_codebook(tmp_path / "codebook"), codebook)
        assert [path.name for path in tmp_path.iterdir()] == ["codebook"]

    def test_a_loaded_codebook_applies_the_rest_of_the_log(self, history: History, tmp_path: Path) -> None:
        for seq in range(1, 7):
            save_codebook(replayed(history.settings, seq), tmp_path / "codebook")
            codebook = load_codebook(tmp_path / "codebook")
            for record in records(history.settings, "deltas")[seq:]:
                codebook.apply(record.value)
            assert same(codebook, history.codebook)

    def test_an_invalid_or_truncated_file_is_an_error(self, history: History, tmp_path: Path) -> None:
        path = tmp_path / "codebook"
        with pytest.raises(CodebookFileError, match="is not a codebook file"):
            load_codebook(path)
        save_codebook(replayed(history.settings), path)
        whole = path.read_bytes()
        for broken in (b"", b"what is this", whole[:100], whole[:-1], whole[: len(whole) // 2], whole + b"more"):
            path.write_bytes(broken)
            with pytest.raises(CodebookFileError):
                load_codebook(path)
        for place in range(len(whole) - 40, len(whole)):
            flipped = bytearray(whole)
            flipped[place] ^= 1
            path.write_bytes(flipped)
            with pytest.raises(CodebookFileError):
                load_codebook(path)
