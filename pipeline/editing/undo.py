"""Undo: the codebook becomes what it would be, had some feedback never come (design, section 4).

An undo covers feedback of lower offsets than its own, whenever it is decided on.

The log is folded twice, side by side: as it was, and without the feedback that is taken back
(`pipeline.editing.counterfactual`). What differs between the two in the end is the `undo` delta.
"""

from collections.abc import Callable, Collection, Sequence

from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook import EditMemory, still_undone
from gracestream.pipeline.editing.counterfactual import History, MissingFeedbackError, Rewritten
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import Edited, rejected
from gracestream.pipeline.editing.roles import why_not_undo
from gracestream.schemas.deltas import Cause, Standing
from gracestream.schemas.messages import VERSION, Feedback, Outcome

LISTED = 20
"""Names of feedback that stand in an outcome; all of them stand in the delta."""


def undo(
    engine: EditEngine,
    feedback: Feedback,
    offset: int,
    history: History,
    at_work: Callable[[], object] = lambda: None,
    standing: Standing | UnsetType = UNSET,
) -> Edited:
    """Decide on one undo; nothing changes before the engine applies the record.

    `standing` says what its sender is allowed (`pipeline.editing.roles`). `at_work` is called with each delta
    that is read: a long history takes its time.

    Raises:
        HistoryError: the log does not fold to what the engine holds.
    """
    memory = engine.memory
    taken = engine.why_not_named(feedback)
    if (earlier := memory.offsets.get(feedback.feedback_id)) is not None:
        taken = f"its id was used at offset {earlier}; an undo needs an id of its own"
    if taken is not None:
        return rejected(feedback, taken)
    if feedback.undo_author is not UNSET:
        ids = tuple(name for name, author in memory.authors.items() if author == feedback.undo_author)
        ids = tuple(name for name in ids if memory.offsets[name] < offset)
        unknown = f"no feedback of the author {feedback.undo_author!r} has had an effect"
        idle = f"nothing that the author {feedback.undo_author!r} sent is in force"
    else:
        assert feedback.undo is not UNSET
        ids = (feedback.undo,) if memory.offsets.get(feedback.undo, offset) < offset else ()
        unknown, idle = f"no feedback {feedback.undo!r} has had an effect", "it is undone already"
    if (forbidden := why_not_undo(feedback, standing, memory, ids)) is not None:
        return rejected(feedback, forbidden)
    if not ids:
        return rejected(feedback, f"{unknown}, so there is nothing to undo")
    if not _in_force(memory, ids):
        return Edited(Outcome(v=VERSION, feedback_id=feedback.feedback_id, status="unchanged", reason=idle))
    rewritten = Rewritten(engine, still_undone(memory.undoes | {feedback.feedback_id: ids}), history, at_work)
    try:
        history.each_delta(rewritten.fold)
    except MissingFeedbackError as error:
        return rejected(feedback, str(error))
    differs = rewritten.difference()
    cause = Cause(
        feedback_id=feedback.feedback_id, offset=offset, author=feedback.author, undoes=ids, standing=standing
    )
    reason = f"it takes back {_listed(ids)}"
    if rewritten.failed:
        reason += f"; these corrections rested on that and cannot be made without: {_listed(rewritten.failed)}"
    outcome = Outcome(v=VERSION, feedback_id=feedback.feedback_id, status="undone", reason=reason)
    return engine.publish(
        feedback, outcome, "undo", entries=differs.entries, edits=differs.edits, exceptions=differs.exceptions,
        decided=rewritten.decided, cause=cause,
    )  # fmt: skip


def _listed(names: Sequence[str]) -> str:
    """The first of them, and how many there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _in_force(memory: EditMemory, ids: Collection[str]) -> set[str]:
    """Those of this feedback that count, but for undos of nothing else: these are idle once the others are gone."""
    counts = set(ids) - memory.undone()
    return {name for name in counts if name not in memory.undoes or not set(memory.undoes[name]) <= set(ids)}
