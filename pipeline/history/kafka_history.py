"""The history in Kafka: all deltas, the feedback behind them, and decisions without a delta."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress

from kafka.errors import KafkaTimeoutError

from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka import (
    DELTA_CONSUMER_OPTIONS,
    DELTAS,
    EDITS,
    FEEDBACK,
    READ_TIMEOUT_SECONDS,
    TopicReader,
    history_error_at,
    read_topic,
)
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.headers import feedback_offset_of
from gracestream.schemas.messages import Feedback, InvalidMessage, Outcome, decode
from gracestream.schemas.no_change import NoChangeDecision, parse_no_change


class KafkaHistory:
    """The present content of `deltas`, `feedback` and `edits`.

    Its methods raise kafka-python's KafkaError if Kafka fails.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings

    def for_each_delta(self, on_record: Callable[[bytes], bool]) -> None:
        """Pass the records of `deltas` to `on_record` in order, until it returns False.

        The caller knows that the record it looks for exists. A recently committed record may be invisible until the
        brokers have ended its transaction. So the topic is followed beyond the visible end.

        Raises:
            KafkaTimeoutError: no further record came for `READ_TIMEOUT_SECONDS`.
        """
        progress_at = time.monotonic()
        with (
            TopicReader(self._settings, DELTAS, **DELTA_CONSUMER_OPTIONS) as reader,
            closing(reader.follow()) as batches,
        ):
            for records, next_offset in batches:
                for record in records:
                    try:
                        if on_record(record.value) is False:
                            return
                    except HistoryError as error:
                        raise history_error_at(record.offset, error) from error
                    progress_at = time.monotonic()
                if time.monotonic() > progress_at + READ_TIMEOUT_SECONDS:
                    raise KafkaTimeoutError(
                        f"{DELTAS} ends before offset {next_offset}, and the editor has written more"
                    )

    def feedback_since(self, since: int) -> Mapping[int, Feedback]:
        """The feedback from offset `since` on, by offset. Records that cannot be decoded are left out."""
        feedback: dict[int, Feedback] = {}
        for record in read_topic(self._settings, FEEDBACK, since):
            try:
                feedback[record.offset] = decode(record.value, Feedback)
            except InvalidMessage:
                continue  # the editor rejected it
        return feedback

    def outcome_statuses(self) -> Mapping[int, str]:
        """The status of each outcome by the offset of its feedback. Records that cannot be decoded are left out."""
        statuses: dict[int, str] = {}
        for record in read_topic(self._settings, EDITS):
            with suppress(InvalidMessage):
                statuses[feedback_offset_of(record)] = decode(record.value, Outcome).status
        return statuses

    def no_change_decisions(self) -> Iterator[NoChangeDecision]:
        """The decisions without a delta, in the order of feedback."""
        for record in read_topic(self._settings, EDITS):
            if (decision := parse_no_change(record)) is not None:
                yield decision
