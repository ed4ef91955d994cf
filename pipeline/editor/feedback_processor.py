"""Processes one feedback record: admission, then the decision of the engine.

Phases, in the order of offsets (docs/explanation/method.md):

1. `parse`: decode the record, and check whether it is accepted.
2. `draft_values`: train the values of several waiting corrections as one batch.
3. `decide`: make the decision. It changes nothing before the engine applies its delta.

One record never stops the stream. An unreadable record, or one on which the model fails, is dead-lettered. Errors that
are no fault of a record are raised: Kafka, files, settings, the device.
"""

from collections.abc import Callable, Sequence

import msgspec
import structlog
from kafka.errors import KafkaError
from msgspec import UNSET

from gracestream.pipeline.auth import Admission, DuplicateFeedback, FeedbackRejected, mark_header
from gracestream.pipeline.device import raise_if_device_lost
from gracestream.pipeline.editing import (
    DecisionResult,
    DraftValue,
    EditEngine,
    History,
    committed_outcome,
    decide_exception,
    may_propose,
    rejected_result,
    undo,
)
from gracestream.pipeline.editor.feedback import DecidedFeedback, FeedbackRecord, Headers, ParsedFeedback
from gracestream.pipeline.errors import UserError
from gracestream.schemas.deltas import Delta, decode_delta
from gracestream.schemas.messages import SCHEMA_VERSION, Feedback, InvalidMessage, Outcome, decode, peek_id, to_one_line
from gracestream.schemas.no_change import NoChangeDecision

log = structlog.get_logger()


class FeedbackProcessor:
    """Processes records in the order of their offsets.

    Args:
        engine: Decides on feedback.
        admission: Decides which feedback is accepted.
        history: The log, for undos and for outcomes that are missing.
        max_bytes: The largest record.
        refresh_traffic: Called before each decision on a correction.
        heartbeat: Called during a long undo, and while several values are trained.
    """

    def __init__(
        self,
        engine: EditEngine,
        admission: Admission,
        history: History,
        max_bytes: int,
        refresh_traffic: Callable[[], object] = lambda: None,
        heartbeat: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine, self._admission, self._history = engine, admission, history
        self._max_bytes, self._refresh_traffic, self._heartbeat = max_bytes, refresh_traffic, heartbeat

    def reset(self) -> None:
        """Forget state that another editor may have changed. Call it at the beginning of a term."""
        self._admission.reset()

    def catch_up(self) -> None:
        """Read the spent signatures of earlier records in advance, so that a new term begins sooner.

        Raises:
            KafkaError: `edits` cannot be read.
        """
        self._admission.catch_up()

    def parse(self, record: FeedbackRecord) -> ParsedFeedback:
        """Decode one record, and check whether it is accepted."""
        offset, value = record.offset, record.value or b""
        try:
            feedback = decode(record.value, Feedback, self._max_bytes)
        except InvalidMessage as error:
            headers = _spent_headers(self._admission.unverified_mark(value, offset))
            return ParsedFeedback(record, early_result=_unreadable_result(record.value, str(error)), headers=headers)
        if self._engine.memory.offsets.get(feedback.feedback_id) == offset:
            return ParsedFeedback(
                record, early_result=DecisionResult(self._committed_outcome(feedback.feedback_id, offset))
            )
        try:
            accepted = self._admission.accept(feedback, value, offset, record.timestamp_ms)
        except DuplicateFeedback as duplicate:
            return ParsedFeedback(
                record, early_result=rejected_result(feedback, str(duplicate)), copy_of_offset=duplicate.first_offset
            )
        except FeedbackRejected as rejection:
            return ParsedFeedback(
                record, early_result=rejected_result(feedback, str(rejection)), headers=_spent_headers(rejection.mark)
            )
        return ParsedFeedback(record, feedback, tuple(accepted.headers()), standing=accepted.standing)

    def draft_values(self, parsed: Sequence[ParsedFeedback]) -> dict[int, DraftValue]:
        """The values of waiting corrections by offset, as far as they can be trained as one batch.

        Empty if fewer than two corrections wait, or if the model fails: then `decide` trains each value alone, and
        finds the record at fault.

        Raises:
            UserError, KafkaError, OSError, DeviceLostError: no fault of a record.
        """
        allowed = [item for item in parsed if may_propose(item.standing)]
        corrections = [
            (item.feedback, item.offset) for item in allowed if item.feedback and item.feedback.is_correction
        ]
        if len(corrections) < 2:
            return {}
        try:
            return self._engine.draft_values(corrections, self._heartbeat)
        except Exception as error:  # any record may be at fault; `decide` finds out which
            _raise_unless_record_fault(error)
            log.exception(
                "draft_training_failed",
                offset=corrections[0][1],
                consequence="each correction of the batch is trained alone, which takes longer",
            )
            return {}

    def decide(self, parsed: ParsedFeedback, draft: DraftValue | None = None) -> DecidedFeedback:
        """Decide on one record. Nothing changes before the engine applies the delta.

        Raises:
            UserError, KafkaError, OSError: the log could not be read, which is no fault of the record.
            DeviceLostError: the device failed, which is no fault of the record.
        """
        if parsed.feedback is None:
            assert parsed.early_result is not None
            result = self._resolve_copy(parsed.early_result, parsed.copy_of_offset)
            return DecidedFeedback(parsed.record, result, parsed.headers)
        result, codebook = self._run_engine(parsed.feedback, parsed, draft), self._engine.codebook
        headers = parsed.headers
        if result.delta_record is None:
            assert result.outcome is not None
            position = (parsed.offset, codebook.term, codebook.seq)
            headers += tuple(NoChangeDecision(*position, result.outcome, result.context, parsed.standing).headers())
        return DecidedFeedback(parsed.record, result, headers)

    def _committed_outcome(self, feedback_id: str, offset: int) -> Outcome:
        """The outcome of feedback whose delta is in the log, but whose outcome is missing."""
        matches: list[Delta] = []

        def continue_search(record: bytes) -> bool:
            delta = decode_delta(record)
            cause = delta.cause
            if cause is not UNSET and (cause.feedback_id, cause.offset) == (feedback_id, offset):
                matches.append(delta)
            return not matches

        self._history.for_each_delta(continue_search)
        return committed_outcome(matches[0])

    def _resolve_copy(self, result: DecisionResult, first_offset: int | None) -> DecisionResult:
        """The result of a copy of signed feedback: `unchanged` if the original is in force, else the rejection.

        Other results are returned as they are.
        """
        memory, outcome = self._engine.memory, result.outcome
        if outcome is None or first_offset is None or memory.offsets.get(outcome.feedback_id) != first_offset:
            return result
        if outcome.feedback_id in memory.undone_ids():
            return result
        return DecisionResult(msgspec.structs.replace(outcome, status="unchanged"))

    def _run_engine(self, feedback: Feedback, parsed: ParsedFeedback, draft: DraftValue | None) -> DecisionResult:
        """The engine's decision; a failure of the model rejects the feedback."""
        offset, standing = parsed.offset, parsed.standing
        if feedback.is_correction:
            self._refresh_traffic()  # outside `try`: a failure here is no fault of the record
        try:
            if feedback.is_undo:
                return undo(self._engine, feedback, offset, self._history, self._heartbeat, standing)
            if feedback.is_exception:
                return decide_exception(self._engine, feedback, offset, standing)
            return self._engine.edit(feedback, offset, draft=draft, standing=standing)
        except Exception as error:  # a record that breaks the model must not stop the stream
            result = model_failure(feedback, error)
            log.exception(
                "decision_failed", offset=offset, consequence="this feedback is rejected, and the editor goes on"
            )
            return result


def model_failure(feedback: Feedback, error: Exception) -> DecisionResult:
    """The rejection of feedback on which the model failed.

    Raises:
        UserError, KafkaError, OSError, DeviceLostError: `error`, if it is no fault of the record.
    """
    _raise_unless_record_fault(error)
    return rejected_result(
        feedback, f"the model failed: {type(error).__name__}: {to_one_line(error)}", is_dead_letter=True
    )


def _raise_unless_record_fault(error: Exception) -> None:
    """Raise `error` again if it is no fault of a record."""
    if isinstance(error, (UserError, KafkaError, OSError)):
        raise error
    raise_if_device_lost(error)


def _spent_headers(mark: bytes | None) -> Headers:
    """The outcome's headers that spend a signature's mark; empty without a mark."""
    return () if mark is None else (mark_header(mark),)


def _unreadable_result(value: bytes | None, reason: str) -> DecisionResult:
    """A dead letter for an unreadable record, and a rejection if its id can be read."""
    feedback_id = peek_id(value, "feedback_id")
    outcome = None
    if feedback_id is not None:
        outcome = Outcome(v=SCHEMA_VERSION, feedback_id=feedback_id, status="rejected", reason=reason)
    return DecisionResult(outcome, dead_letter_reason=reason)
