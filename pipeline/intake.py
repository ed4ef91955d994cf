"""What becomes of one feedback record: who may edit, what it asks for, and what the engine makes of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from kafka.errors import KafkaError

from pipeline.admission import Admission, Refused
from pipeline.device import raise_if_broken
from pipeline.edited import Edited, rejected
from pipeline.editing import EditEngine
from pipeline.errors import UserError
from pipeline.fruitless import Fruitless
from pipeline.rewriting import History
from pipeline.undo import undo
from schemas.messages import VERSION, Feedback, InvalidMessage, Outcome, decode, one_line, peek_id

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Taken:
    """What is to be written for a record, and the headers of its outcome."""

    edited: Edited
    headers: list[tuple[str, bytes]] = field(default_factory=list)


class Intake:
    """Takes records in the order of their offsets.

    `history` is the log, for undos; `max_bytes` the largest record; `before_edit` is called before a correction is
    decided on, and `at_work` while a long undo goes on.
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

    def take(self, offset: int, timestamp: int, value: bytes | None) -> Taken:
        """Decide on one record; `timestamp` is Kafka's, in ms. Nothing changes before the engine applies it.

        Raises:
            UserError, KafkaError, OSError: the log could not be read, which is no fault of the record.
            DeviceFault: the device failed, likewise.
        """
        try:
            feedback = decode(value, Feedback, self._max_bytes)
        except InvalidMessage as error:
            return Taken(_unreadable(value, str(error)))
        try:
            admitted = self._admission.admit(feedback, value or b"", timestamp)
        except Refused as refused:
            return Taken(rejected(feedback, str(refused)))
        edited, book = self._decide(feedback, offset), self._engine.codebook
        headers = admitted.headers()
        if edited.record is None:
            assert edited.outcome is not None
            headers += Fruitless(offset, book.term, book.seq, edited.outcome, edited.seen).headers()
        return Taken(edited, headers)

    def _decide(self, feedback: Feedback, offset: int) -> Edited:
        if not feedback.undoes:
            self._before_edit()  # what fails here is no fault of the record
        try:
            if feedback.undoes:
                return undo(self._engine, feedback, offset, self._history, self._at_work)
            return self._engine.edit(feedback, offset)
        except Exception as error:  # whatever one record does to the model, the stream moves on
            edited = failed(feedback, error)
            log.exception("edit_failed", offset=offset)
            return edited


def failed(feedback: Feedback, error: Exception) -> Edited:
    """What becomes of feedback on which the model failed. Raises an error that is no fault of the record."""
    if isinstance(error, (UserError, KafkaError, OSError)):
        raise error
    raise_if_broken(error)
    return rejected(feedback, f"the model failed: {type(error).__name__}: {one_line(error)}", invalid=True)


def _unreadable(value: bytes | None, reason: str) -> Edited:
    """Feedback that cannot be taken: to the dead letter queue, and an outcome where it has an id to bear."""
    feedback_id = peek_id(value, "feedback_id")
    outcome = None
    if feedback_id is not None:
        outcome = Outcome(v=VERSION, feedback_id=feedback_id, status="rejected", reason=reason)
    return Edited(outcome, invalid=True, reason=reason)
