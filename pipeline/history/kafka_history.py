"""The history as it lies in Kafka: every delta from the first, the feedback behind them, and what left no delta."""

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
"""Before the log is read on; a transaction is closed within milliseconds."""


class KafkaHistory:
    """What `deltas`, `feedback` and `edits` hold now. Raises kafka-python's KafkaError where Kafka fails."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def for_each_delta(self, on_record: Callable[[bytes], bool]) -> None:
        """Hand over the records of `deltas` in order until `on_record` returns False: it needs no more.

        What was committed a moment ago may be out of sight yet, until the brokers have closed its transaction. So where
        the log ends too early, it is read on.

        Raises:
            KafkaTimeoutError: nothing more has come for `READ_TIMEOUT_SECONDS`.
        """
        following, heard = 0, time.monotonic()
        enough = False

        def hand_over(record: bytes, offset: int, _time: int) -> bool:
            nonlocal following, heard, enough
            enough = on_record(record) is False
            following, heard = offset + 1, time.monotonic()
            return not enough

        while True:
            read_history(self._settings, hand_over, following)
            if enough:
                return
            if time.monotonic() > heard + READ_TIMEOUT_SECONDS:
                raise KafkaTimeoutError(f"{DELTAS} ends before offset {following}, and the editor has written more")
            time.sleep(REREAD_DELAY_SECONDS)

    def feedback_since(self, since: int) -> Mapping[int, Feedback]:
        """The feedback from offset `since` on, by offset; without what is no feedback."""
        found: dict[int, Feedback] = {}
        for record in read_topic(self._settings, FEEDBACK, since):
            try:
                found[record.offset] = decode(record.value, Feedback)
            except InvalidMessage:
                continue  # the editor rejected it
        return found

    def outcome_statuses(self) -> Mapping[int, str]:
        """The status of each outcome, by the offset of its feedback; without what is no outcome."""
        found: dict[int, str] = {}
        for record in read_topic(self._settings, EDITS):
            with suppress(InvalidMessage):
                found[feedback_offset_of(record)] = decode(record.value, Outcome).status
        return found

    def no_change_decisions(self) -> Iterator[NoChangeDecision]:
        """The decisions that left no delta, in the order of feedback."""
        for record in read_topic(self._settings, EDITS):
            if (found := parse_no_change(record)) is not None:
                yield found
