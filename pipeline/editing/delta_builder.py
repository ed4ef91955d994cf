"""The build phase: turn a decision on feedback into a delta and its outcome.

1. A delta holds all of its decision: the correction's entry, keys of rephrases, retention entries, ended exceptions.
   So an undo of the correction takes all of it back.
2. With the retention guard, each earlier edit that a change would shadow gets an entry of its own with the same value.
3. A delta that a reader would reject, or that is too large for the topic, is not returned: the feedback is rejected.
4. The outcome and the delta follow from the arguments alone. Nothing is applied here.

The rules of radii, values and retention are those of docs/explanation/method.md; sequence numbers and digests are those
of docs/explanation/consistency.md.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook import UNEDITED_MODEL, Codebook, PolicyDecision
from gracestream.pipeline.editing.candidate import EditCandidate
from gracestream.pipeline.editing.rephrases import (
    RephraseCandidate,
    RephrasePlacement,
    place_rephrases,
    protect_rephrases,
)
from gracestream.pipeline.editing.result import STATUS_BY_OP, DecisionResult, rejected_result, unchanged_outcome
from gracestream.pipeline.editing.workspace import EditWorkspace
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.search import NO_SLOT
from gracestream.pipeline.wording import mark_as_excerpt
from gracestream.schemas.deltas import (
    Cause,
    Delta,
    EntryChange,
    ExceptionChange,
    Op,
    Tensor,
    seal_delta,
)
from gracestream.schemas.messages import SCHEMA_VERSION, Feedback, Outcome

MAX_RECORD_BYTES = 60 * 2**20
"""Bytes of the largest delta that fits the topic. Only a delta with thousands of retention entries gets near it."""


def next_delta(codebook: Codebook, op: Op, **fields: object) -> bytes:
    """The record that continues the history of `codebook`, with these fields of `Delta`; it is not applied.

    Digest, sequence number and term follow from the codebook. `fields` may override them: a lead starts a new term.
    """
    header = {
        "v": SCHEMA_VERSION,
        "codebook": codebook.name,
        "model": codebook.model,
        "layer": codebook.layer,
    }
    position = {"term": codebook.term, "seq": codebook.seq + 1, "digest": b""}
    return seal_delta(Delta(op=op, **(header | position | fields)), codebook.digest)[0]  # type: ignore[arg-type]


def build_result(codebook: Codebook, feedback: Feedback, outcome: Outcome, op: Op, **fields: object) -> DecisionResult:
    """The outcome with the next delta, or a rejection if no reader would apply that delta.

    Args:
        codebook: The codebook that the delta changes.
        feedback: The feedback behind the delta.
        outcome: The outcome to report; its `seq` is set here.
        op: The operation of the delta.
        **fields: The other fields of `Delta`.
    """
    record = next_delta(codebook, op, **fields)
    try:
        # Before it is committed: a delta cannot be taken back, and one that cannot be applied stops every replica.
        codebook.check(record)
    except HistoryError as fault:
        return rejected_result(feedback, f"no reader would take its delta: {fault}")
    if len(record) > MAX_RECORD_BYTES:
        return rejected_result(feedback, f"its delta would have {len(record)} bytes; {MAX_RECORD_BYTES} are allowed")
    return DecisionResult(msgspec.structs.replace(outcome, seq=codebook.seq + 1), record)


def build_confirmation(workspace: EditWorkspace, candidate: EditCandidate) -> DecisionResult:
    """The delta of a correction whose target the model predicts already; it often changes no entry.

    It remembers the input as an edit, so that the retention guard protects it. Otherwise a later edit could shadow the
    query, and the answer that a reviewer confirmed would become wrong.
    """
    served_by, changes = candidate.inspection.served_by, []
    outcome = unchanged_outcome(candidate.feedback, candidate.inspection.target_check.loss)
    if served_by is not None:
        outcome = msgspec.structs.replace(outcome, entry_id=served_by.entry_id)
        # The query may lie so near the edge of the radius that another batch computes it outside. Grow if allowed.
        covering_radius = round_to_float32(candidate.policy.covering_radius(served_by.distance))
        protected_distance = workspace.entry_protected_distance(served_by.slot, candidate)
        if served_by.radius < covering_radius <= candidate.policy.max_allowed_radius(protected_distance):
            changes = [EntryChange(entry_id=served_by.entry_id, radius=covering_radius)]
    memory, codebook = workspace.memory, workspace.codebook
    contradicted = [
        other
        for other in memory.edits_of_input(candidate.query_D, candidate.policy.tolerance)
        if (entry_id := memory.serving_entry_id(other)) not in (UNEDITED_MODEL, outcome.entry_id)
        and codebook.labels[codebook.slot(entry_id)] != candidate.inspection.label
    ]
    placement = protect_rephrases(workspace, candidate)
    ended_exceptions = _ended_exceptions(workspace, candidate, outcome.entry_id, placement)
    if workspace.config.retention_guard:
        same_input = memory.edits_of_input(candidate.query_D, candidate.policy.tolerance)
        changes += _retention_entries(workspace, candidate, changes, same_input, 0.0, ended_exceptions)
    return _build_with_cause(
        workspace,
        candidate,
        outcome,
        "expand",
        changes,
        UNSET if served_by is None else served_by.entry_id,
        [*contradicted, *ended_exceptions],
        placement,
    )


def build_correction(
    workspace: EditWorkspace,
    candidate: EditCandidate,
    decision: PolicyDecision,
    value_V: np.ndarray | None,
    rephrases: list[RephraseCandidate],
    **outcome_fields: object,
) -> DecisionResult:
    """The delta of a correction that needs a value.

    Args:
        workspace: The codebook, and the state around it.
        candidate: The correction.
        decision: The change of the nearest entry, and the radius of a new entry if there is one.
        value_V: The value (V) of the new or replaced entry; None if the value of the nearest entry serves.
        rephrases: The inspected rephrases.
        **outcome_fields: Further fields of `Outcome`, such as `steps` and `loss`.
    """
    codebook, policy = workspace.codebook, candidate.policy
    feedback_id, label = candidate.feedback.feedback_id, candidate.inspection.label
    own_key = decision.radius is not None
    neighbour_id = codebook.entry_ids[candidate.nearest_slot] if candidate.nearest_slot != NO_SLOT else ""
    entry_id = feedback_id if own_key else neighbour_id
    if own_key and entry_id in codebook:
        return rejected_result(
            candidate.feedback, f"an entry named {entry_id!r} exists; a correction needs an id of its own"
        )
    changes: list[EntryChange] = []
    radius: float | UnsetType = UNSET
    if decision.neighbour_radius is not None and decision.neighbour_radius != codebook.radii_N[candidate.nearest_slot]:
        radius = round_to_float32(decision.neighbour_radius)
    wording: str | UnsetType = UNSET
    if not own_key and workspace.shares_nearest_key(candidate):
        # The entry serves both wordings from now on, so it loses its own. Inputs that its wording ruled out so far now
        # limit its radius. The radius still covers the query in every batch.
        wording = ""
        current_radius = codebook.radii_N[candidate.nearest_slot] if radius is UNSET else radius
        limit = policy.max_allowed_radius(workspace.entry_protected_distance(candidate.nearest_slot, candidate))
        radius = round_to_float32(max(min(current_radius, limit), policy.covering_radius(candidate.nearest_distance)))
    if decision.action != "replace" and not (radius is UNSET and wording is UNSET):
        changes.append(EntryChange(entry_id=neighbour_id, radius=radius, wording=wording))
    if value_V is not None:
        value = Tensor.from_array(value_V)
        if decision.action == "replace":
            changes.append(EntryChange(entry_id=entry_id, value=value, radius=radius, label=label, wording=wording))
        else:
            assert decision.radius is not None
            changes.append(
                EntryChange(
                    entry_id=entry_id,
                    key=Tensor.from_array(candidate.query_D),
                    value=value,
                    radius=round_to_float32(decision.radius),
                    label=candidate.inspection.label,
                    wording=workspace.entry_wording(candidate.inspection) or UNSET,
                )
            )
    serving_value_V = codebook.values_NV[candidate.nearest_slot].copy() if value_V is None else value_V
    changes_by_entry = {change.entry_id: change for change in changes}
    placement = place_rephrases(workspace, candidate, serving_value_V, changes_by_entry, rephrases)
    changes = list(changes_by_entry.values())
    same_input = workspace.memory.edits_of_input(candidate.query_D, policy.tolerance)
    superseded = [
        *workspace.superseded_edits(same_input, label, workspace.entry_wording(candidate.inspection)),
        *_ended_exceptions(workspace, candidate, entry_id, placement),
    ]
    ended_exceptions = [name for name in (*superseded, *placement.supersedes) if name in codebook.exceptions]
    if workspace.config.retention_guard:
        # Last, since the guard looks at every key and radius that the changes above add, grow or shrink.
        changes += _retention_entries(
            workspace,
            candidate,
            changes,
            [*same_input, *placement.same_input_edits],
            placement.tolerance,
            ended_exceptions,
        )
    is_unchanged = decision.action == "expand" and not changes and not ended_exceptions
    outcome = Outcome(
        v=SCHEMA_VERSION,
        feedback_id=feedback_id,
        status="unchanged" if is_unchanged else STATUS_BY_OP[decision.action],
        entry_id=entry_id,
        **outcome_fields,  # type: ignore[arg-type]
    )
    return _build_with_cause(workspace, candidate, outcome, decision.action, changes, entry_id, superseded, placement)


def round_to_float32(radius: float) -> float:
    """The float32 that the codebook stores for this radius, so that the log, the codebook and Redis agree."""
    return float(np.float32(radius))


def _build_with_cause(
    workspace: EditWorkspace,
    candidate: EditCandidate,
    outcome: Outcome,
    op: Op,
    changes: list[EntryChange],
    entry_id: str | UnsetType,
    supersedes: Sequence[str],
    placement: RephrasePlacement,
) -> DecisionResult:
    """The outcome with the delta; its cause records the decision context, so that a repeated decision is the same."""
    codebook = workspace.codebook
    nearest_id = None if candidate.nearest_slot == NO_SLOT else codebook.entry_ids[candidate.nearest_slot]
    own_key = any(change.entry_id == entry_id and change.key is not UNSET for change in changes)
    cause = Cause(
        feedback_id=candidate.feedback.feedback_id,
        offset=candidate.offset,
        author=candidate.feedback.author,
        entry_id=entry_id,
        # A new entry's key is the query and bears the wording. Otherwise the delta would lose both.
        query=UNSET if own_key else Tensor.from_array(candidate.query_D),
        wording="" if own_key else candidate.inspection.wording,
        supersedes=tuple(dict.fromkeys([*supersedes, *placement.supersedes])),
        together=() if candidate.draft is None or op == "expand" else candidate.draft.trained_with,
        context=candidate.context_recorder.record(nearest_id, candidate.nearest_distance),
        traffic={str(partition): end for partition, end in sorted(workspace.traffic_sample.positions.items())} or UNSET,
        standing=candidate.standing,
        rephrases=tuple(placement.keys),
    )
    if placement.left_out:
        outcome = msgspec.structs.replace(outcome, left_out=tuple(placement.left_out))
    ended_exceptions = tuple(
        ExceptionChange(feedback_id=name, removed=True) for name in cause.supersedes if name in codebook.exceptions
    )
    return build_result(
        codebook,
        candidate.feedback,
        outcome,
        op,
        entries=tuple(changes),
        exceptions=ended_exceptions,
        cause=cause,
    )


def _ended_exceptions(
    workspace: EditWorkspace, candidate: EditCandidate, entry_id: str | UnsetType, placement: RephrasePlacement
) -> list[str]:
    """The exceptions that would keep the entries of this edit from serving the correction or one of its rephrases."""
    prompts = [(candidate.query_D, workspace.entry_wording(candidate.inspection), entry_id)]
    prompts += [
        (key.query.array(), key.wording, key.entry_id)
        for key in placement.keys
        if key.query is not UNSET and not key.left_out
    ]
    return [
        exception.feedback_id
        for query_D, wording, serving_entry in prompts
        for exception in workspace.codebook.exceptions.find_matching(query_D, wording, workspace.tolerance(query_D))
        if serving_entry in exception.entry_ids
    ]


def _retention_entries(
    workspace: EditWorkspace,
    candidate: EditCandidate,
    changes: list[EntryChange],
    same_input: list[str],
    tolerance: float,
    ended_exceptions: list[str],
) -> list[EntryChange]:
    """Entries for the earlier edits that the changes would shadow: each has the edit's query, value and label.

    Args:
        workspace: The codebook and the edits in force.
        candidate: The correction.
        changes: The changes of entries so far.
        same_input: Edits of the corrected inputs. They are superseded or served by the correction, so they get none.
        tolerance: The largest tolerance of a rephrase; 0 without rephrases.
        ended_exceptions: Exceptions that the delta ends. Their entries may shadow edits that they did not serve before.
    """
    codebook, memory = workspace.codebook, workspace.memory
    keys = {change.entry_id: _entry_key(codebook, change) for change in changes if _changes_coverage(change)}
    for exception in (one for one in codebook.exceptions if one.feedback_id in ended_exceptions):
        for entry_id in exception.entry_ids:
            keys.setdefault(entry_id, _entry_key(codebook, EntryChange(entry_id=entry_id)))
    shadowed = memory.edits_needing_entry(
        keys=keys,
        shrunk={change.entry_id: change.radius for change in changes if change.radius is not UNSET},
        relabelled={c.entry_id for c in changes if c.value is not UNSET and c.key is UNSET},
        tolerance=max(candidate.policy.tolerance, tolerance),
        ignore=same_input,
    )
    retained = []
    for feedback_id in shadowed:
        query_D = memory.query(feedback_id)
        wording = _retention_wording(workspace, memory.wording(feedback_id)) if workspace.config.check_wording else ""
        server = codebook.entry(codebook.slot(memory.serving_entry_id(feedback_id)))
        policy = replace(candidate.policy, tolerance=workspace.tolerance(query_D))
        protected_distance = workspace.protected_distance(feedback_id, query_D, wording, candidate)
        retained.append(
            EntryChange(
                entry_id=feedback_id,
                key=Tensor.from_array(query_D),
                value=Tensor.from_array(server.value_V),
                radius=round_to_float32(policy.new_entry_radius(protected_distance)),
                label=server.label,
                wording=wording or UNSET,
            )
        )
    return retained


def _retention_wording(workspace: EditWorkspace, wording: str) -> str:
    """The wording of a retention entry.

    An entry also serves prompts with the same words outside its radius. If a confirmed input has the same words, the
    wording is marked as an excerpt: an excerpt equals no other wording.
    """
    return mark_as_excerpt(wording) if workspace.memory.confirmed_with_same_words(wording) else wording


def _entry_key(codebook: Codebook, change: EntryChange) -> np.ndarray:
    """The key (D) of a new or changed entry."""
    if change.key is not UNSET:
        return change.key.array()
    return codebook.entry(codebook.slot(change.entry_id)).key_D


def _changes_coverage(change: EntryChange) -> bool:
    """Whether a change alters which prompts the entry serves.

    A smaller radius counts too: prompts beyond it go to an entry farther away.
    """
    return any(field is not UNSET for field in (change.key, change.radius, change.wording))
