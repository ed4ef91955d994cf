"""Undo: bring the codebook to the state in which some feedback had never been sent (docs/explanation/method.md).

The log is replayed twice, side by side: as it is, and without the undone feedback (`pipeline.editing.counterfactual`).
The difference between the two results is the `undo` delta.

1. An undo covers only feedback with lower offsets than its own, no matter when it is decided.
2. An undo can itself be undone.
3. The outcome names the corrections that depended on the undone feedback and cannot be repeated without it.

Not promised: low cost. An undo reads the whole log, and repeats each decision that depended on the undone feedback.
"""

from collections.abc import Callable, Collection, Sequence

from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook import EditMemory, resolve_undos
from gracestream.pipeline.editing.counterfactual import CounterfactualReplay, History, MissingFeedbackError
from gracestream.pipeline.editing.delta_builder import build_result
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import DecisionResult, rejected_result
from gracestream.pipeline.editing.roles import explain_undo_denial
from gracestream.schemas.deltas import Cause, Standing
from gracestream.schemas.messages import SCHEMA_VERSION, Feedback, Outcome

MAX_LISTED_NAMES = 20
"""Ids of feedback that an outcome lists, so that its record stays small; the delta lists all."""


def undo(
    engine: EditEngine,
    feedback: Feedback,
    offset: int,
    history: History,
    heartbeat: Callable[[], object] = lambda: None,
    standing: Standing | UnsetType = UNSET,
) -> DecisionResult:
    """Decide on one undo; nothing changes before the engine applies the record.

    Args:
        engine: The engine at the end of the log.
        feedback: The undo.
        offset: The offset of `feedback` in its topic.
        history: The log that led to the engine's state.
        heartbeat: Called for each delta read, because a long history may take longer than the editor's timeouts.
        standing: The sender's permissions (`pipeline.editing.roles`); UNSET without a list of authors.

    Raises:
        HistoryError: a replay of the log does not give the state of the engine.
    """
    memory = engine.memory
    id_conflict = engine.find_id_conflict(feedback)
    if (earlier := memory.offsets.get(feedback.feedback_id)) is not None:
        id_conflict = f"its id was used at offset {earlier}; an undo needs an id of its own"
    if id_conflict is not None:
        return rejected_result(feedback, id_conflict)
    if feedback.undo_author is not UNSET:
        ids = tuple(name for name, author in memory.authors.items() if author == feedback.undo_author)
        ids = tuple(name for name in ids if memory.offsets[name] < offset)
        no_effect = f"no feedback of the author {feedback.undo_author!r} has had an effect"
        not_in_force = f"nothing that the author {feedback.undo_author!r} sent is in force"
    else:
        assert feedback.undo is not UNSET
        ids = (feedback.undo,) if memory.offsets.get(feedback.undo, offset) < offset else ()
        no_effect = f"no feedback {feedback.undo!r} has had an effect"
        not_in_force = "it is undone already"
    if (denial := explain_undo_denial(feedback, standing, memory, ids)) is not None:
        return rejected_result(feedback, denial)
    if not ids:
        return rejected_result(feedback, f"{no_effect}, so there is nothing to undo")
    if not _active_feedback(memory, ids):
        return DecisionResult(
            Outcome(v=SCHEMA_VERSION, feedback_id=feedback.feedback_id, status="unchanged", reason=not_in_force)
        )
    replay = CounterfactualReplay(
        engine, resolve_undos(memory.undo_targets | {feedback.feedback_id: ids}), history, heartbeat
    )
    try:
        history.for_each_delta(replay.apply)
    except MissingFeedbackError as error:
        return rejected_result(feedback, str(error))
    difference = replay.difference()
    cause = Cause(
        feedback_id=feedback.feedback_id, offset=offset, author=feedback.author, undoes=ids, standing=standing
    )
    reason = f"it takes back {_list_names(ids)}"
    if replay.failed:
        reason += f"; these corrections depended on that and cannot be made without: {_list_names(replay.failed)}"
    outcome = Outcome(v=SCHEMA_VERSION, feedback_id=feedback.feedback_id, status="undone", reason=reason)
    return build_result(
        engine.codebook,
        feedback,
        outcome,
        "undo",
        entries=difference.entries,
        edits=difference.edits,
        exceptions=difference.exceptions,
        decided=replay.redecided,
        cause=cause,
    )


def _list_names(names: Sequence[str]) -> str:
    """The first `MAX_LISTED_NAMES` names, and the number of the others."""
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(names[:MAX_LISTED_NAMES]) + more


def _active_feedback(memory: EditMemory, ids: Collection[str]) -> set[str]:
    """The feedback among `ids` whose removal would change something.

    That excludes feedback that is undone already. It also excludes undos whose targets are all among `ids`: without its
    targets such an undo has no effect.
    """
    not_undone = set(ids) - memory.undone_ids()
    return {
        name for name in not_undone if name not in memory.undo_targets or not set(memory.undo_targets[name]) <= set(ids)
    }
