"""The history for an undo: all that the editor has written, though Kafka may show the last of it a moment late."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import ClassVar, Self

import pytest
from kafka.errors import KafkaTimeoutError

from gracestream.pipeline.editor.log import is_retriable
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.history import kafka_history as history
from gracestream.pipeline.history.kafka_history import KafkaHistory
from gracestream.pipeline.kafka.reader import RecordsAndNext
from gracestream.pipeline.settings import load_settings

SETTINGS = load_settings()
RECORDS = [b"1", b"2", b"3"]


class Log:
    """In the place of a reader of `deltas`: `ends` are the numbers of records that it shows, one after the other.

    It shows the last number for ever after. A control record follows each record.
    """

    ends: ClassVar[list[int]] = []

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def follow(self) -> Iterator[RecordsAndNext]:
        shown = 0
        for end in itertools.chain(self.ends, itertools.repeat(self.ends[-1])):
            records = [SimpleNamespace(offset=2 * number, value=RECORDS[number]) for number in range(shown, end)]
            shown = end
            yield records, max(0, 2 * shown - 1)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records the log shows, one number after the other."""
    monkeypatch.setattr(history, "TopicReader", Log)
    monkeypatch.setattr(Log, "ends", [])
    return Log.ends


def until_third(found: list[bytes]) -> Callable[[bytes], bool]:
    def take(record: bytes) -> bool:
        found.append(record)
        return record != RECORDS[2]

    return take


@pytest.mark.parametrize("ends", [[3], [2, 3], [0, 1, 1, 2, 2, 3]])
def test_a_log_that_does_not_show_everything_yet_is_read_on(shown: list[int], ends: list[int]) -> None:
    shown.extend(ends)
    found: list[bytes] = []
    KafkaHistory(SETTINGS.kafka).for_each_delta(until_third(found))
    assert found == RECORDS


def test_nothing_is_read_after_what_was_needed(shown: list[int]) -> None:
    shown.append(3)
    found: list[bytes] = []
    KafkaHistory(SETTINGS.kafka).for_each_delta(lambda record: found.append(record) or len(found) < 2)  # type: ignore[func-returns-value]
    assert found == RECORDS[:2]


def test_a_log_that_never_shows_it_counts_as_kafka_being_away(
    shown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The editor begins again then, and learns the history anew."""
    monkeypatch.setattr(history, "READ_TIMEOUT_SECONDS", 0.1)
    shown.append(2)
    with pytest.raises(
        KafkaTimeoutError, match="deltas ends before offset 3, and the editor has written more"
    ) as raised:
        KafkaHistory(SETTINGS.kafka).for_each_delta(until_third([]))
    assert is_retriable(raised.value)


def test_a_fault_is_one_at_once(shown: list[int]) -> None:
    def reject(_: bytes) -> bool:
        raise HistoryError("a gap")

    shown.append(2)
    with pytest.raises(HistoryError, match="the record at offset 0 of deltas cannot be applied: a gap"):
        KafkaHistory(SETTINGS.kafka).for_each_delta(reject)
