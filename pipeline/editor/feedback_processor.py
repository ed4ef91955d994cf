"""What becomes of one feedback record: who may edit, what it asks for, and what the engine makes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog
from kafka.errors import KafkaError
from msgspec import UNSET, UnsetType

from gracestream.pipeline.auth import Admission, DuplicateFeedback, FeedbackRefused, mark_header
from gracestream.pipeline.device import raise_if_device_lost
from gracestream.pipeline.editing import (
    DraftValue,
    EditEngine,
    EditResult,
    History,
    NoChangeDecision,
    committed_outcome,
    decide_exception,
    may_propose,
    rejected_result,
    undo,
)
from gracestream.pipeline.errors import UserError
from gracestream.schemas.deltas import Delta, Standing, decode_delta
from gracestream.schemas.messages import SCHEMA_VERSION, Feedback, InvalidMessage, Outcome, decode, peek_id, to_one_line

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ParsedFeedback:
    """A record that was taken in: the feedback that may edit, or why it may not, with the headers of its outcome.

    `early_result` also holds the outcome of feedback whose delta is committed already. `copy_of_offset` is the offset
    at which a signed record came first, `standing` what the sender is allowed.
    """

    offset: int
    feedback: Feedback | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    early_result: EditResult | None = None
    copy_of_offset: int | None = None
    standing: Standing | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class DecidedFeedback:
    """What is to be written for a record, and the headers of its outcome."""

    result: EditResult
    headers: list[tuple[str, bytes]] = field(default_factory=list)


class FeedbackProcessor:
    """Takes records in the order of their offsets: reads them, may train for several at once, decides on each.

    `history` is the log, for undos; `max_bytes` the largest record; `refresh_traffic` is called before a correction is
    decided on, and `heartbeat` while a long undo, or the training of several values, goes on.
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
        """Forget what another editor may have changed: called by one who takes the lead."""
        self._admission.reset()

    def catch_up(self) -> None:
        """Read ahead what earlier records have spent.

        Raises:
            KafkaError: `edits` cannot be read.
        """
        self._admission.catch_up()

    def parse(self, offset: int, timestamp_ms: int, value: bytes | None) -> ParsedFeedback:
        """Take in one record, which tells whether it may edit at all; `timestamp_ms` is Kafka's, in ms."""
        record = value or b""
        try:
            feedback = decode(value, Feedback, self._max_bytes)
        except InvalidMessage as error:
            headers = _spent_headers(self._admission.unverified_mark(record, offset))
            return ParsedFeedback(offset, early_result=_unreadable_result(value, str(error)), headers=headers)
        if self._engine.memory.offsets.get(feedback.feedback_id) == offset:
            return ParsedFeedback(
                offset, early_result=EditResult(self._committed_outcome(feedback.feedback_id, offset))
            )
        try:
            admitted = self._admission.accept(feedback, record, offset, timestamp_ms)
        except DuplicateFeedback as copied:
            return ParsedFeedback(
                offset, early_result=rejected_result(feedback, str(copied)), copy_of_offset=copied.first_offset
            )
        except FeedbackRefused as refused:
            return ParsedFeedback(
                offset, early_result=rejected_result(feedback, str(refused)), headers=_spent_headers(refused.mark)
            )
        return ParsedFeedback(offset, feedback, tuple(admitted.headers()), standing=admitted.standing)

    def draft_values(self, parsed: Sequence[ParsedFeedback]) -> dict[int, DraftValue]:
        """The values of corrections that wait, by offset, as far as they are trained together; never fails on one.

        Raises:
            UserError, KafkaError, OSError, DeviceFault: what is no fault of a record.
        """
        allowed = [one for one in parsed if may_propose(one.standing)]
        corrections = [(one.feedback, one.offset) for one in allowed if one.feedback and one.feedback.is_correction]
        if len(corrections) < 2:
            return {}
        try:
            return self._engine.draft_values(corrections, self._heartbeat)
        except Exception as error:  # on whichever it is: each is decided on by itself, which tells
            _raise_unless_record_fault(error)
            log.exception("not_trained_ahead", offset=corrections[0][1])
            return {}

    def decide(self, parsed: ParsedFeedback, draft: DraftValue | None = None) -> DecidedFeedback:
        """Decide on one record; nothing changes before the engine applies it.

        Raises:
            UserError, KafkaError, OSError: the log could not be read, which is no fault of the record.
            DeviceFault: the device failed, likewise.
        """
        if parsed.feedback is None:
            assert parsed.early_result is not None
            return DecidedFeedback(self._resolve_copy(parsed.early_result, parsed.copy_of_offset), list(parsed.headers))
        edited, book = self._run_engine(parsed.feedback, parsed, draft), self._engine.codebook
        headers = list(parsed.headers)
        if edited.delta_record is None:
            assert edited.outcome is not None
            place = (parsed.offset, book.term, book.seq)
            headers += NoChangeDecision(*place, edited.outcome, edited.context, parsed.standing).headers()
        return DecidedFeedback(edited, headers)

    def _committed_outcome(self, feedback_id: str, offset: int) -> Outcome:
        """The outcome of feedback whose delta is in the log already, without an outcome."""
        found: list[Delta] = []

        def is_another(record: bytes) -> bool:
            delta = decode_delta(record)
            cause = delta.cause
            if cause is not UNSET and (cause.feedback_id, cause.offset) == (feedback_id, offset):
                found.append(delta)
            return not found

        self._history.for_each_delta(is_another)
        return committed_outcome(found[0])

    def _resolve_copy(self, result: EditResult, first_offset: int | None) -> EditResult:
        """A copy of what is in force changes nothing; any other stays rejected, like what is no copy."""
        memory, outcome = self._engine.memory, result.outcome
        if outcome is None or first_offset is None or memory.offsets.get(outcome.feedback_id) != first_offset:
            return result
        if outcome.feedback_id in memory.undone_ids():
            return result
        return EditResult(msgspec.structs.replace(outcome, status="unchanged"))

    def _run_engine(self, feedback: Feedback, parsed: ParsedFeedback, draft: DraftValue | None) -> EditResult:
        offset, standing = parsed.offset, parsed.standing
        if feedback.is_correction:
            self._refresh_traffic()  # what fails here is no fault of the record
        try:
            if feedback.is_undo:
                return undo(self._engine, feedback, offset, self._history, self._heartbeat, standing)
            if feedback.is_exception:
                return decide_exception(self._engine, feedback, offset, standing)
            return self._engine.edit(feedback, offset, draft=draft, standing=standing)
        except Exception as error:  # whatever one record does to the model, the stream moves on
            edited = model_failure(feedback, error)
            log.exception("edit_failed", offset=offset)
            return edited


def model_failure(feedback: Feedback, error: Exception) -> EditResult:
    """What becomes of feedback on which the model failed. Raises an error that is no fault of the record."""
    _raise_unless_record_fault(error)
    return rejected_result(
        feedback, f"the model failed: {type(error).__name__}: {to_one_line(error)}", is_dead_letter=True
    )


def _raise_unless_record_fault(error: Exception) -> None:
    if isinstance(error, (UserError, KafkaError, OSError)):
        raise error
    raise_if_device_lost(error)


def _spent_headers(mark: bytes | None) -> tuple[tuple[str, bytes], ...]:
    """The header of an outcome that spends this."""
    return () if mark is None else (mark_header(mark),)


def _unreadable_result(value: bytes | None, reason: str) -> EditResult:
    """Feedback that cannot be taken: to the dead letter queue, and an outcome where it has an id to bear."""
    feedback_id = peek_id(value, "feedback_id")
    outcome = None
    if feedback_id is not None:
        outcome = Outcome(v=SCHEMA_VERSION, feedback_id=feedback_id, status="rejected", reason=reason)
    return EditResult(outcome, is_dead_letter=True, reason=reason)
