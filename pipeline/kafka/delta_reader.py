"""Reads the topic `deltas` from an offset to its current end, and adds the offset to errors."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka.reader import read_topic
from gracestream.pipeline.kafka.topics import DELTAS
from gracestream.pipeline.settings import KafkaSettings

DELTA_CONSUMER_OPTIONS: dict[str, Any] = {"check_crcs": False, "max_poll_records": 2000}
"""Options of every consumer of `deltas`.

Checking Kafka's CRC would take nine tenths of the time of a replay. The chain of digests covers every byte of a delta.
"""


def history_error_at(offset: int, error: HistoryError) -> HistoryError:
    """The same error, with the offset of the record in `deltas`."""
    return HistoryError(f"the record at offset {offset} of {DELTAS} cannot be applied: {error}")


def read_history(
    settings: KafkaSettings, on_record: Callable[[bytes, int, int], object], start_offset: int = 0
) -> None:
    """Read `deltas` from `start_offset` to its current end.

    It calls `on_record(record, offset, timestamp_ms)` for each record, and ends early when this returns False.

    Raises:
        TopicError: the topic does not exist.
        HistoryError: raised by `on_record`, with the offset added.
        KafkaTimeoutError: no progress for `READ_TIMEOUT_SECONDS`.
    """
    with closing(read_topic(settings, DELTAS, start_offset, **DELTA_CONSUMER_OPTIONS)) as records:
        for record in records:
            try:
                if on_record(record.value, record.offset, record.timestamp) is False:
                    return
            except HistoryError as error:
                raise history_error_at(record.offset, error) from error
