"""Roles: whether the sender of feedback may do what it asks for (docs/explanation/security-model.md).

The list of authors gives roles to each author. The editor records the sender's permissions of the time with each
decision (`schemas.deltas.Standing`). So a repeated decision is the same, even if the list has changed since.

1. A correction or an exception requires the role `propose`; an undo requires `undo_own` or `undo_any`.
2. Under `undo_own`, all feedback that an undo takes back must come from its own author. That includes feedback whose
   undo was undone, and which this undo therefore undoes again.
3. With a list, unsigned feedback has at most the permissions of `UNSIGNED_STANDING`. Its own feedback is unsigned and
   has the same author name. So it never takes back the feedback of a listed author, whose name requires a signature.
4. Without a list of authors everything is allowed.

Not promised: that a correction leaves those of other authors in force. It supersedes an earlier one of the same input.
"""

from collections.abc import Collection

from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook import EditMemory, resolve_undos
from gracestream.schemas.deltas import Standing
from gracestream.schemas.messages import Feedback


def may_propose(standing: Standing | UnsetType) -> bool:
    """Whether the sender may make corrections and exceptions; UNSET means that there is no list of authors."""
    return standing is UNSET or "propose" in standing.roles


def explain_propose_denial(feedback: Feedback, standing: Standing | UnsetType) -> str | None:
    """Why a correction or an exception is not allowed, or None."""
    kind = "exceptions" if feedback.is_exception else "corrections"
    return (
        None
        if may_propose(standing)
        else f"{_describe_sender(feedback)} may not make {kind} without the role 'propose'"
    )


def explain_undo_denial(
    feedback: Feedback, standing: Standing | UnsetType, memory: EditMemory, ids: Collection[str]
) -> str | None:
    """Why an undo of the feedback with these `ids` is not allowed, or None."""
    if standing is UNSET or "undo_any" in standing.roles:
        return None
    if "undo_own" not in standing.roles:
        return f"{_describe_sender(feedback)} may not undo without the role 'undo_own' or 'undo_any'"
    if feedback.undo_author is not UNSET and feedback.undo_author != feedback.author:
        return f"{_describe_sender(feedback)} may not undo what {feedback.undo_author!r} sent; {_REMEDY}"
    # Removing an undo can bring an earlier undo back into force, and so undo feedback that `ids` does not name.
    undone = resolve_undos(memory.undo_targets | {feedback.feedback_id: tuple(ids)}) - memory.undone_ids()
    author = None if feedback.author is UNSET else feedback.author
    for name in sorted({*ids, *undone}):
        other_author, is_signed = memory.authors.get(name), name in memory.signed_ids
        if other_author != author or is_signed > standing.signed:
            undone_again = "" if name in ids else ", which would be undone again,"
            sender = _describe_author(author, signed=standing.signed)
            owner = _describe_author(other_author, signed=is_signed)
            return f"feedback {name!r}{undone_again} is {owner}, and this undo is {sender}; {_REMEDY}"
    return None


_REMEDY = "to undo it, sign as an author with the role 'undo_any'"


def _describe_sender(feedback: Feedback) -> str:
    return "feedback without an author" if feedback.author is UNSET else f"author {feedback.author!r}"


def _describe_author(author: str | None, *, signed: bool) -> str:
    return "without an author" if author is None else f"by {author!r}, {'signed' if signed else 'not signed'}"
