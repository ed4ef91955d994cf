"""Undo: the codebook becomes what it would be, had some feedback never come (design, section 4).

An undo covers feedback of lower offsets than its own, whenever it is decided on.

The log is folded twice, side by side: as it was, and without the feedback that is taken back
(`pipeline.editing.counterfactual`). What differs between the two in the end is the `undo` delta.
"""

from collections.abc import Callable, Collection, Sequence

from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook import EditMemory, resolve_undos
from gracestream.pipeline.editing.counterfactual import CounterfactualReplay, History, MissingFeedbackError
from gracestream.pipeline.editing.delta_builder import build_result
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import EditResult, rejected_result
from gracestream.pipeline.editing.roles import explain_undo_denial
from gracestream.schemas.deltas import Cause, Standing
from gracestream.schemas.messages import SCHEMA_VERSION, Feedback, Outcome

MAX_LISTED_NAMES = 20
"""Names of feedback that stand in an outcome; all of them stand in the delta."""


def undo(
    engine: EditEngine,
    feedback: Feedback,
    offset: int,
    history: History,
    heartbeat: Callable[[], object] = lambda: None,
    standing: Standing | UnsetType = UNSET,
) -> EditResult:
    """Decide on one undo; nothing changes before the engine applies the record.

    `standing` says what its sender is allowed (`pipeline.editing.roles`). `heartbeat` is called with each delta
    that is read: a long history takes its time.

    Raises:
        HistoryError: the log does not fold to what the engine holds.
    """
    memory = engine.memory
    taken = engine.find_id_conflict(feedback)
    if (earlier := memory.offsets.get(feedback.feedback_id)) is not None:
        taken = f"its id was used at offset {earlier}; an undo needs an id of its own"
    if taken is not None:
        return rejected_result(feedback, taken)
    if feedback.undo_author is not UNSET:
        ids = tuple(name for name, author in memory.authors.items() if author == feedback.undo_author)
        ids = tuple(name for name in ids if memory.offsets[name] < offset)
        unknown = f"no feedback of the author {feedback.undo_author!r} has had an effect"
        idle = f"nothing that the author {feedback.undo_author!r} sent is in force"
    else:
        assert feedback.undo is not UNSET
        ids = (feedback.undo,) if memory.offsets.get(feedback.undo, offset) < offset else ()
        unknown, idle = f"no feedback {feedback.undo!r} has had an effect", "it is undone already"
    if (forbidden := explain_undo_denial(feedback, standing, memory, ids)) is not None:
        return rejected_result(feedback, forbidden)
    if not ids:
        return rejected_result(feedback, f"{unknown}, so there is nothing to undo")
    if not _active_feedback(memory, ids):
        return EditResult(Outcome(v=SCHEMA_VERSION, feedback_id=feedback.feedback_id, status="unchanged", reason=idle))
    rewritten = CounterfactualReplay(
        engine, resolve_undos(memory.undo_targets | {feedback.feedback_id: ids}), history, heartbeat
    )
    try:
        history.for_each_delta(rewritten.apply)
    except MissingFeedbackError as error:
        return rejected_result(feedback, str(error))
    differs = rewritten.difference()
    cause = Cause(
        feedback_id=feedback.feedback_id, offset=offset, author=feedback.author, undoes=ids, standing=standing
    )
    reason = f"it takes back {_list_names(ids)}"
    if rewritten.failed:
        reason += f"; these corrections rested on that and cannot be made without: {_list_names(rewritten.failed)}"
    outcome = Outcome(v=SCHEMA_VERSION, feedback_id=feedback.feedback_id, status="undone", reason=reason)
    return build_result(
        engine.codebook,
        feedback,
        outcome,
        "undo",
        entries=differs.entries,
        edits=differs.edits,
        exceptions=differs.exceptions,
        decided=rewritten.redecided,
        cause=cause,
    )


def _list_names(names: Sequence[str]) -> str:
    """The first of them, and how many there are."""
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(names[:MAX_LISTED_NAMES]) + more


def _active_feedback(memory: EditMemory, ids: Collection[str]) -> set[str]:
    """Those of this feedback that count, but for undos of nothing else: these are idle once the others are gone."""
    counts = set(ids) - memory.undone_ids()
    return {
        name for name in counts if name not in memory.undo_targets or not set(memory.undo_targets[name]) <= set(ids)
    }
