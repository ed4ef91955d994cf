"""What comes of one feedback record: its outcome, and the record of `deltas` that carries it out."""

from dataclasses import dataclass

from msgspec import UNSET

from gracestream.schemas.deltas import Delta, Op, Seen
from gracestream.schemas.messages import SCHEMA_VERSION, Feedback, Inputs, LeftOut, Outcome, Status

STATUS_BY_OP: dict[Op, Status] = {
    "add": "added",
    "expand": "expanded",
    "split": "split",
    "replace": "replaced",
    "undo": "undone",
    "except": "excepted",
}
"""What an outcome reports, by the op of its delta."""


@dataclass(frozen=True, slots=True)
class EditResult:
    """The outcome of one feedback record, and the record for `deltas` that carries it out (None: nothing changes).

    `is_dead_letter` marks feedback that cannot be taken at all, for `reason`: it belongs in the dead letter queue. Only
    where it does not even tell its id is there no outcome. `context` is what of the traffic the status of an outcome
    without a record rested on, where it did.
    """

    outcome: Outcome | None
    delta_record: bytes | None = None
    is_dead_letter: bool = False
    reason: str = ""
    context: Seen | None = None


def rejected_result(feedback: Feedback, reason: str, *, is_dead_letter: bool = False, **fields: object) -> EditResult:
    """A rejection with its reason; `is_dead_letter`: the record goes to the dead letter queue as well."""
    outcome = Outcome(v=SCHEMA_VERSION, feedback_id=feedback.feedback_id, status="rejected", reason=reason, **fields)  # type: ignore[arg-type]
    return EditResult(outcome, is_dead_letter=is_dead_letter, reason=reason)


def unchanged_outcome(feedback: Feedback, loss: float) -> Outcome:
    """An outcome that says that the model is right already; `loss` is its loss on the target."""
    return Outcome(v=SCHEMA_VERSION, feedback_id=feedback.feedback_id, status="unchanged", loss=loss)


def committed_outcome(delta: Delta) -> Outcome:
    """The outcome of a delta that was committed without one; `steps` and `loss` are not known any more."""
    assert delta.cause is not UNSET
    status: Status = (
        "unchanged" if delta.op == "expand" and not (delta.entries or delta.exceptions) else STATUS_BY_OP[delta.op]
    )
    reason = "its delta was committed without an outcome; a later editor reports it"
    left_out = [number for number, one in enumerate(delta.cause.rephrases, 1) if one.left_out]
    return Outcome(
        v=SCHEMA_VERSION,
        feedback_id=delta.cause.feedback_id,
        status=status,
        entry_id=delta.cause.entry_id,
        seq=delta.seq,
        reason=reason,
        left_out=tuple(LeftOut(rephrase=number, reason=reason) for number in left_out),
    )


def make_correction(feedback_id: str, inputs: Inputs, target: str) -> Feedback:
    """A feedback record for a correction."""
    return Feedback(v=SCHEMA_VERSION, feedback_id=feedback_id, inputs=inputs, target=target)
