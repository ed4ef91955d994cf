"""Reads `deltas` from an offset to its present end, and says which record an error is about."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka.reader import read_topic
from gracestream.pipeline.kafka.topics import DELTAS
from gracestream.pipeline.settings import Settings

DELTA_CONSUMER_OPTIONS: dict[str, Any] = {"check_crcs": False, "max_poll_records": 2000}
"""Options of every consumer of `deltas`. Kafka's CRC would take nine tenths of a replay, and the chain of digests
covers every byte of a delta."""


def history_error_at(offset: int, error: HistoryError) -> HistoryError:
    """The fault, with which record of `deltas` it is about."""
    return HistoryError(f"the record at offset {offset} of {DELTAS} cannot be applied: {error}")


def read_history(settings: Settings, on_record: Callable[[bytes, int, int], object], start_offset: int = 0) -> None:
    """Read `deltas` from `start_offset` to its present end, and call `on_record(record, offset, timestamp_ms)`.

    Reading ends early when `on_record` returns False.

    Raises:
        TopicError: there is no such topic.
        HistoryError: as `on_record` raised it, with the offset.
    """
    with closing(read_topic(settings, DELTAS, start_offset, **DELTA_CONSUMER_OPTIONS)) as records:
        for record in records:
            try:
                if on_record(record.value, record.offset, record.timestamp) is False:
                    return
            except HistoryError as fault:
                raise history_error_at(record.offset, fault) from fault
