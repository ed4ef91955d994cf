"""What becomes of one feedback record: who may edit, what it asks for, and what the engine makes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog
from kafka.errors import KafkaError
from msgspec import UNSET, UnsetType

from gracestream.pipeline.auth import Admission, Copied, Refused, mark_header
from gracestream.pipeline.device import raise_if_broken
from gracestream.pipeline.editing import (
    Ahead,
    Edited,
    EditEngine,
    Fruitless,
    History,
    committed_outcome,
    except_from,
    may_propose,
    rejected,
    undo,
)
from gracestream.pipeline.errors import UserError
from gracestream.schemas.deltas import Delta, Standing, decode_delta
from gracestream.schemas.messages import VERSION, Feedback, InvalidMessage, Outcome, decode, one_line, peek_id

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Read:
    """A record that was taken in: the feedback that may edit, or why it may not, with the headers of its outcome.

    `refused` also holds the outcome of feedback whose delta is committed already. `copy_of` is the offset at which a
    signed record came first, `standing` what the sender is allowed.
    """

    offset: int
    feedback: Feedback | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    refused: Edited | None = None
    copy_of: int | None = None
    standing: Standing | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Taken:
    """What is to be written for a record, and the headers of its outcome."""

    edited: Edited
    headers: list[tuple[str, bytes]] = field(default_factory=list)


class Intake:
    """Takes records in the order of their offsets: reads them, may train for several at once, decides on each.

    `history` is the log, for undos; `max_bytes` the largest record; `before_edit` is called before a correction is
    decided on, and `at_work` while a long undo, or the training of several values, goes on.
    """

    def __init__(
        self,
        engine: EditEngine,
        admission: Admission,
        history: History,
        max_bytes: int,
        before_edit: Callable[[], object] = lambda: None,
        at_work: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine, self._admission, self._history = engine, admission, history
        self._max_bytes, self._before_edit, self._at_work = max_bytes, before_edit, at_work

    def begin(self) -> None:
        """Forget what another editor may have changed: called by one who takes the lead."""
        self._admission.forget()

    def catch_up(self) -> None:
        """Read ahead what earlier records have spent.

        Raises:
            KafkaError: `edits` cannot be read.
        """
        self._admission.catch_up()

    def read(self, offset: int, timestamp: int, value: bytes | None) -> Read:
        """Take in one record, which tells whether it may edit at all; `timestamp` is Kafka's, in ms."""
        record = value or b""
        try:
            feedback = decode(value, Feedback, self._max_bytes)
        except InvalidMessage as error:
            headers = _spends(self._admission.unverified(record, offset))
            return Read(offset, refused=_unreadable(value, str(error)), headers=headers)
        if self._engine.memory.offsets.get(feedback.feedback_id) == offset:
            return Read(offset, refused=Edited(self._committed_outcome(feedback.feedback_id, offset)))
        try:
            admitted = self._admission.admit(feedback, record, offset, timestamp)
        except Copied as copied:
            return Read(offset, refused=rejected(feedback, str(copied)), copy_of=copied.first)
        except Refused as refused:
            return Read(offset, refused=rejected(feedback, str(refused)), headers=_spends(refused.mark))
        return Read(offset, feedback, tuple(admitted.headers()), standing=admitted.standing)

    def train_ahead(self, read: Sequence[Read]) -> dict[int, Ahead]:
        """The values of corrections that wait, by offset, as far as they are trained together; never fails on one.

        Raises:
            UserError, KafkaError, OSError, DeviceFault: what is no fault of a record.
        """
        allowed = [one for one in read if may_propose(one.standing)]
        corrections = [(one.feedback, one.offset) for one in allowed if one.feedback and one.feedback.corrects]
        if len(corrections) < 2:
            return {}
        try:
            return self._engine.train_ahead(corrections, self._at_work)
        except Exception as error:  # on whichever it is: each is decided on by itself, which tells
            _raise_if_no_fault_of_a_record(error)
            log.exception("not_trained_ahead", offset=corrections[0][1])
            return {}

    def decide(self, read: Read, ahead: Ahead | None = None) -> Taken:
        """Decide on one record; nothing changes before the engine applies it.

        Raises:
            UserError, KafkaError, OSError: the log could not be read, which is no fault of the record.
            DeviceFault: the device failed, likewise.
        """
        if read.feedback is None:
            assert read.refused is not None
            return Taken(self._of_copy(read.refused, read.copy_of), list(read.headers))
        edited, book = self._decide(read.feedback, read, ahead), self._engine.codebook
        headers = list(read.headers)
        if edited.record is None:
            assert edited.outcome is not None
            place = (read.offset, book.term, book.seq)
            headers += Fruitless(*place, edited.outcome, edited.seen, read.standing).headers()
        return Taken(edited, headers)

    def _committed_outcome(self, feedback_id: str, offset: int) -> Outcome:
        """The outcome of feedback whose delta is in the log already, without an outcome."""
        found: list[Delta] = []

        def is_another(record: bytes) -> bool:
            delta = decode_delta(record)
            cause = delta.cause
            if cause is not UNSET and (cause.feedback_id, cause.offset) == (feedback_id, offset):
                found.append(delta)
            return not found

        self._history.each_delta(is_another)
        return committed_outcome(found[0])

    def _of_copy(self, refused: Edited, first: int | None) -> Edited:
        """A copy of what is in force changes nothing; any other stays rejected, like what is no copy."""
        memory, outcome = self._engine.memory, refused.outcome
        if outcome is None or first is None or memory.offsets.get(outcome.feedback_id) != first:
            return refused
        if outcome.feedback_id in memory.undone():
            return refused
        return Edited(msgspec.structs.replace(outcome, status="unchanged"))

    def _decide(self, feedback: Feedback, read: Read, ahead: Ahead | None) -> Edited:
        offset, standing = read.offset, read.standing
        if feedback.corrects:
            self._before_edit()  # what fails here is no fault of the record
        try:
            if feedback.undoes:
                return undo(self._engine, feedback, offset, self._history, self._at_work, standing)
            if feedback.excepts:
                return except_from(self._engine, feedback, offset, standing)
            return self._engine.edit(feedback, offset, ahead=ahead, standing=standing)
        except Exception as error:  # whatever one record does to the model, the stream moves on
            edited = failed(feedback, error)
            log.exception("edit_failed", offset=offset)
            return edited


def failed(feedback: Feedback, error: Exception) -> Edited:
    """What becomes of feedback on which the model failed. Raises an error that is no fault of the record."""
    _raise_if_no_fault_of_a_record(error)
    return rejected(feedback, f"the model failed: {type(error).__name__}: {one_line(error)}", invalid=True)


def _raise_if_no_fault_of_a_record(error: Exception) -> None:
    if isinstance(error, (UserError, KafkaError, OSError)):
        raise error
    raise_if_broken(error)


def _spends(mark: bytes | None) -> tuple[tuple[str, bytes], ...]:
    """The header of an outcome that spends this."""
    return () if mark is None else (mark_header(mark),)


def _unreadable(value: bytes | None, reason: str) -> Edited:
    """Feedback that cannot be taken: to the dead letter queue, and an outcome where it has an id to bear."""
    feedback_id = peek_id(value, "feedback_id")
    outcome = None
    if feedback_id is not None:
        outcome = Outcome(v=VERSION, feedback_id=feedback_id, status="rejected", reason=reason)
    return Edited(outcome, invalid=True, reason=reason)
