"""Roles: whether the sender of feedback may do what it asks for, from the log alone (design, section 6).

The list of authors gives each author roles. The editor records with each decision what the sender was allowed then
(`schemas.deltas.Standing`). So a replay decides the same, whatever the list says by that time.

1. A correction or an exception takes the role `propose`, an undo `undo_own` or `undo_any`.
2. Under `undo_own`, everything that an undo takes back is of its own author. That includes feedback that is undone
   again because the undo of its undo goes.
3. Where there is a list, unsigned feedback is never allowed more than `UNSIGNED_STANDING`. Its own is unsigned too, and
   of the same name. So it never takes back what a listed author sent, since a listed name must be signed.
4. Without a list of authors everything is allowed.

Not promised: that a correction leaves those of other authors as they are. It replaces an earlier one of the same input.
"""

from collections.abc import Collection

from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook import EditMemory, resolve_undos
from gracestream.schemas.deltas import Standing
from gracestream.schemas.messages import Feedback


def may_propose(standing: Standing | UnsetType) -> bool:
    """Whether the sender may make corrections and exceptions."""
    return standing is UNSET or "propose" in standing.roles


def explain_propose_denial(feedback: Feedback, standing: Standing | UnsetType) -> str | None:
    """Why a correction or an exception is not allowed; None where it is."""
    what = "exceptions" if feedback.is_exception else "corrections"
    return (
        None
        if may_propose(standing)
        else f"{_describe_sender(feedback)} may not make {what} without the role 'propose'"
    )


def explain_undo_denial(
    feedback: Feedback, standing: Standing | UnsetType, memory: EditMemory, ids: Collection[str]
) -> str | None:
    """Why an undo of the feedback with these ids is not allowed; None where it is."""
    if standing is UNSET or "undo_any" in standing.roles:
        return None
    if "undo_own" not in standing.roles:
        return f"{_describe_sender(feedback)} may not undo without the role 'undo_own' or 'undo_any'"
    if feedback.undo_author is not UNSET and feedback.undo_author != feedback.author:
        return f"{_describe_sender(feedback)} may not undo what {feedback.undo_author!r} sent; {_REMEDY}"
    undone = resolve_undos(memory.undo_targets | {feedback.feedback_id: tuple(ids)}) - memory.undone_ids()
    author = None if feedback.author is UNSET else feedback.author
    for name in sorted({*ids, *undone}):
        theirs, is_signed = memory.authors.get(name), name in memory.signed_ids
        if theirs != author or is_signed > standing.signed:
            again = "" if name in ids else ", which would be undone again,"
            ours = _describe_author(author, signed=standing.signed)
            owner = _describe_author(theirs, signed=is_signed)
            return f"feedback {name!r}{again} is {owner}, and this undo is {ours}; {_REMEDY}"
    return None


_REMEDY = "to undo it, sign as an author with the role 'undo_any'"


def _describe_sender(feedback: Feedback) -> str:
    return "feedback without an author" if feedback.author is UNSET else f"author {feedback.author!r}"


def _describe_author(author: str | None, *, signed: bool) -> str:
    return "without an author" if author is None else f"by {author!r}, {'signed' if signed else 'not signed'}"
