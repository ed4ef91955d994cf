"""The result of a decision on one feedback record: an outcome, and a delta if the decision changes anything."""

from dataclasses import dataclass

from msgspec import UNSET

from gracestream.schemas.deltas import DecisionContext, Delta, Op
from gracestream.schemas.messages import SCHEMA_VERSION, Feedback, Inputs, LeftOut, Outcome, Status

STATUS_BY_OP: dict[Op, Status] = {
    "add": "added",
    "expand": "expanded",
    "split": "split",
    "replace": "replaced",
    "undo": "undone",
    "except": "excepted",
}
"""The status of an outcome, by the operation of its delta."""


@dataclass(frozen=True, slots=True)
class DecisionResult:
    """The result of a decision on one feedback record.

    Attributes:
        outcome: The outcome to report; None only for an unreadable record whose id is unknown.
        delta_record: The record for `deltas`; None if nothing changes.
        dead_letter_reason: Why the feedback is invalid, so that it belongs on the dead-letter topic too; None if it is
            valid.
        context: For a result without a delta: the traffic distances that could have changed its status, if any.
    """

    outcome: Outcome | None
    delta_record: bytes | None = None
    dead_letter_reason: str | None = None
    context: DecisionContext | None = None

    @property
    def rejection_reason(self) -> str:
        """Why the feedback was rejected; empty if it was not."""
        if self.outcome is None:
            return self.dead_letter_reason or ""
        return self.outcome.reason or "" if self.outcome.status == "rejected" else ""


def rejected_result(
    feedback: Feedback, reason: str, *, is_dead_letter: bool = False, **fields: object
) -> DecisionResult:
    """A rejection with its reason and further `fields` of `Outcome`; with `is_dead_letter` also a dead letter."""
    outcome = Outcome(v=SCHEMA_VERSION, feedback_id=feedback.feedback_id, status="rejected", reason=reason, **fields)  # type: ignore[arg-type]
    return DecisionResult(outcome, dead_letter_reason=reason if is_dead_letter else None)


def unchanged_outcome(feedback: Feedback, loss: float) -> Outcome:
    """The outcome of a correction whose target the model predicts already; `loss` is its mean cross entropy there."""
    return Outcome(v=SCHEMA_VERSION, feedback_id=feedback.feedback_id, status="unchanged", loss=loss)


def committed_outcome(delta: Delta) -> Outcome:
    """The outcome of a delta that was committed without one, made from the delta alone.

    `steps`, `loss` and the reasons of left-out rephrases are not in a delta, so they are missing or replaced.
    """
    assert delta.cause is not UNSET
    status: Status = (
        "unchanged" if delta.op == "expand" and not (delta.entries or delta.exceptions) else STATUS_BY_OP[delta.op]
    )
    reason = "its delta was committed without an outcome; a later editor reports it"
    left_out = [number for number, key in enumerate(delta.cause.rephrases, 1) if key.left_out]
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
    """A feedback record that corrects `inputs` to `target`, without author and rephrases."""
    return Feedback(v=SCHEMA_VERSION, feedback_id=feedback_id, inputs=inputs, target=target)
