"""The history in Kafka: all deltas, the feedback behind them, and decisions without a delta."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from kafka.errors import KafkaTimeoutError

from gracestream.pipeline.editing import NoChangeDecision, parse_no_change
from gracestream.pipeline.kafka import DELTAS, EDITS, FEEDBACK, READ_TIMEOUT_SECONDS, read_history, read_topic
from gracestream.pipeline.settings import Settings
from gracestream.schemas.headers import feedback_offset_of
from gracestream.schemas.messages import Feedback, InvalidMessage, Outcome, decode

REREAD_DELAY_SECONDS = 0.02
"""Seconds between two reads for a record that is not visible yet. Brokers end a transaction within milliseconds."""


class KafkaHistory:
    """The present content of `deltas`, `feedback` and `edits`.

    Its methods raise kafka-python's KafkaError if Kafka fails.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def for_each_delta(self, on_record: Callable[[bytes], bool]) -> None:
        """Pass the records of `deltas` to `on_record` in order, until it returns False.

        The caller knows that the record it looks for exists. A recently committed record may be invisible until the
        brokers have ended its transaction. So reading goes on beyond the visible end.

        Raises:
            KafkaTimeoutError: no further record came for `READ_TIMEOUT_SECONDS`.
        """
        next_offset, last_progress_at = 0, time.monotonic()
        finished = False

        def hand_over(record: bytes, offset: int, _time: int) -> bool:
            nonlocal next_offset, last_progress_at, finished
            finished = on_record(record) is False
            next_offset, last_progress_at = offset + 1, time.monotonic()
            return not finished

        while True:
            read_history(self._settings, hand_over, next_offset)
            if finished:
                return
            if time.monotonic() > last_progress_at + READ_TIMEOUT_SECONDS:
                raise KafkaTimeoutError(f"{DELTAS} ends before offset {next_offset}, and the editor has written more")
            time.sleep(REREAD_DELAY_SECONDS)

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
