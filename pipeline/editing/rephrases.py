"""Rephrases of a correction: each becomes a further key of the same edit (docs/explanation/method.md).

1. A rephrase joins the edit only if the model predicts the target there with the edit's value. The outcome names the
   rephrases that were left out. If the value fails at some, it is trained further on all of them and on the forms of
   the correction (`pipeline.editing.forms`); the new value is kept if it serves more texts.
2. Each rephrase gets an entry named by `rephrase_name`, with a copy of the value. If a key lies within the numerical
   tolerance of it already, that entry serves it, and gets the edit's value if its own fails.
3. The delta of the correction holds all of these changes. So an undo of the correction removes every key.

Not promised: that the keys stay together. A later correction of one of the texts changes that text alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from msgspec import UNSET
from msgspec.structs import replace as with_fields

from gracestream.pipeline.codebook import UNEDITED_MODEL, Label, Neighbour, PolicyDecision, decide_action
from gracestream.pipeline.editing.candidate import EditCandidate, Inspection
from gracestream.pipeline.editing.forms import supervised_forms
from gracestream.pipeline.editing.value_training import TrainedValue, TrainingTexts, train_further
from gracestream.pipeline.editing.workspace import EditWorkspace
from gracestream.pipeline.model import InputError
from gracestream.pipeline.search import NO_SLOT, exact_distance
from gracestream.pipeline.wording import find_disagreement
from gracestream.schemas.deltas import EntryChange, RephraseKey, Tensor, rephrase_name
from gracestream.schemas.messages import Feedback, LeftOut, to_one_line

REASON_NO_VALUE = (
    "the model answers the inputs of the correction by itself, so there is no value; correct this text on its own"
)
REASON_VALUE_FAILS = "the value of the correction does not give the target here; correct this text on its own"
REASON_OTHER_WORDS = "the model cannot tell it apart from a text with other words; correct this text on its own"
REASON_AT_EDGE = "it lies at the edge of the entry that answers it; correct this text on its own"


@dataclass(frozen=True, slots=True)
class RephraseCandidate:
    """One rephrase of a correction under decision.

    Attributes:
        number: Its place among the rephrases of the correction, from 1.
        name: The name of its key.
        inspection: The facts from the model; None if the model cannot take the text or its query is not finite.
        query_D: The query; None likewise.
        exclusion_reason: Why it cannot join the edit; empty if it can.
    """

    number: int
    name: str
    inspection: Inspection | None
    query_D: np.ndarray | None
    exclusion_reason: str = ""


@dataclass(slots=True)
class RephrasePlacement:
    """The result for all rephrases of a correction, besides the changes of entries."""

    keys: list[RephraseKey] = field(default_factory=list)
    """One record for each rephrase, in order, for the cause of the delta."""
    left_out: list[LeftOut] = field(default_factory=list)
    """The rephrases that did not join the edit, with reasons, for the outcome."""
    same_input_edits: list[str] = field(default_factory=list)
    """Earlier edits of the same inputs as the rephrases."""
    supersedes: list[str] = field(default_factory=list)
    """The edits among them with another label or without one; confirmed inputs with the same words."""
    tolerance: float = 0.0
    """The largest numerical tolerance of a rephrase."""

    def leave_out(
        self, rephrase: RephraseCandidate, reason: str, nearest: RephraseKey | None = None, wording: str = ""
    ) -> None:
        """Leave a rephrase out, and report the reason in the outcome.

        `nearest` and `wording` are recorded if the reason depends on the codebook around its query. They show whether a
        repeated decision would differ.
        """
        query = UNSET if nearest is None or rephrase.query_D is None else Tensor.from_array(rephrase.query_D)
        self.keys.append(with_fields(nearest or RephraseKey(), query=query, wording=wording, left_out=True))
        self.left_out.append(LeftOut(rephrase=rephrase.number, reason=reason))


def inspect_rephrases(
    workspace: EditWorkspace, candidate: EditCandidate, value_V: np.ndarray | None
) -> list[RephraseCandidate]:
    """Inspect each rephrase with one pass of the model.

    `value_V` is the value of the edit; if it fails at a rephrase, that rephrase is excluded. None: the edit has none.
    """
    inspected = []
    recorded = (*candidate.rephrase_queries_RD, *[None] * len(candidate.feedback.rephrases))  # long enough in any case
    for number, (inputs, recorded_D) in enumerate(zip(candidate.feedback.rephrases, recorded, strict=False), 1):
        name = rephrase_name(candidate.feedback.feedback_id, number)
        assert candidate.feedback.target is not UNSET
        try:
            inspection = workspace.inspect(inputs, candidate.feedback.target)
        except InputError as error:
            inspected.append(RephraseCandidate(number, name, None, None, to_one_line(error)))
            continue
        query_D = inspection.query_D if recorded_D is None else recorded_D.copy()
        if not np.isfinite(query_D).all():
            reason = "the model's activations on this input are not finite"
            inspected.append(RephraseCandidate(number, name, None, None, reason))
            continue
        rephrase = RephraseCandidate(number, name, inspection, query_D)
        inspected.append(rephrase if value_V is None else _check_rephrase(workspace, rephrase, value_V))
    return inspected


def _check_rephrase(workspace: EditWorkspace, rephrase: RephraseCandidate, value_V: np.ndarray) -> RephraseCandidate:
    """The rephrase, excluded if the model does not predict the target there with this value."""
    if rephrase.inspection is None:
        return rephrase
    check = workspace.model.suffix_runner.check_value(rephrase.inspection.suffix, torch.tensor(value_V))
    return replace(rephrase, exclusion_reason="" if check.predicts_target else REASON_VALUE_FAILS)


def fit_shared_value(
    workspace: EditWorkspace, candidate: EditCandidate, trained: TrainedValue
) -> tuple[TrainedValue, list[RephraseCandidate]]:
    """The trained value or, if it serves more texts, that value trained further on rephrases and forms.

    Returns the rephrases with the checks of the returned value.
    """
    rephrases = inspect_rephrases(workspace, candidate, trained.value_V)
    failing = sum(rephrase.exclusion_reason == REASON_VALUE_FAILS for rephrase in rephrases)
    if not failing and candidate.draft is not None:
        return trained, rephrases  # `train_group` has trained a draft on the forms already
    rephrase_passes = tuple(one.inspection.target_pass for one in rephrases if one.inspection is not None)
    texts = make_training_texts(workspace, candidate.feedback, candidate.inspection, trained)
    if not (failing or texts.form_passes) or not workspace.model.suffix_runner.supports_padding():
        return trained, rephrases
    (further,) = train_further(
        workspace.model.suffix_runner,
        [replace(texts, rephrase_passes=rephrase_passes, has_full_budget=bool(failing))],
        workspace.config.recipe,
    )
    checked = [_check_rephrase(workspace, rephrase, further.value_V) for rephrase in rephrases]
    # `train_further` has compared checks of a padded batch. On their own, rephrases may still come out otherwise.
    if sum(rephrase.exclusion_reason == REASON_VALUE_FAILS for rephrase in checked) > failing:
        return trained, rephrases
    return further, checked


def make_training_texts(
    workspace: EditWorkspace, feedback: Feedback, inspection: Inspection, trained: TrainedValue
) -> TrainingTexts:
    """A trained value with the forms of its correction, if the configuration trains on forms."""
    assert feedback.inputs is not UNSET
    assert feedback.target is not UNSET
    forms = (
        supervised_forms(workspace.model, feedback.inputs, feedback.target)
        if workspace.config.train_prompt_forms
        else []
    )
    return TrainingTexts(trained, inspection.target_pass, inspection.suffix, form_passes=tuple(forms))


def any_predicts_target(rephrases: Iterable[RephraseCandidate]) -> bool:
    """Whether any of these rephrases can join the edit."""
    return any(not rephrase.exclusion_reason for rephrase in rephrases)


def place_rephrases(
    workspace: EditWorkspace,
    candidate: EditCandidate,
    value_V: np.ndarray,
    changes: dict[str, EntryChange],
    rephrases: list[RephraseCandidate],
) -> RephrasePlacement:
    """Decide for each rephrase which entry serves it, in the order of the rephrases.

    Args:
        workspace: The codebook, and the state around it.
        candidate: The correction.
        value_V: The value (V) of the edit.
        changes: The changes of entries by entry id; those for the rephrases are added or merged here.
        rephrases: The inspected rephrases.
    """
    placement = RephrasePlacement()
    value = Tensor.from_array(value_V)
    new_keys = {change.entry_id: change.key.array() for change in changes.values() if change.key is not UNSET}
    for rephrase in rephrases:
        if rephrase.exclusion_reason or rephrase.inspection is None or rephrase.query_D is None:
            placement.leave_out(rephrase, rephrase.exclusion_reason)
            continue
        query_D, label = rephrase.query_D, rephrase.inspection.label
        local, slot, distance, nearest = _candidate_at(workspace, candidate, query_D)
        tolerance, query = local.policy.tolerance, Tensor.from_array(query_D)
        wording = workspace.entry_wording(rephrase.inspection)
        nearby_slot = slot if distance <= tolerance else NO_SLOT
        server_id = _entry_with_key(workspace, query_D, new_keys, nearby_slot, tolerance)
        if server_id is not None and find_disagreement(_wording_of_entry(workspace, server_id, changes), wording):
            placement.leave_out(rephrase, REASON_OTHER_WORDS, nearest, wording)
            continue
        if server_id is not None and server_id not in new_keys:
            change = _change_to_serve(workspace, local, rephrase.inspection, server_id, value, changes)
            changes |= {} if change is None else {server_id: change}
        if server_id is None:
            neighbour = None if slot == NO_SLOT else _conflicting_neighbour(workspace, slot, distance, label, changes)
            decision = decide_action(
                local.policy,
                neighbour,
                workspace.protected_distance(rephrase.name, query_D, wording, local),
            )
            # No key lies within the tolerance and the neighbour, if any, has another label. So the policy adds or
            # splits, and both give a radius.
            assert decision.radius is not None
            if (reason := workspace.find_proximity_conflict(decision.radius, local, wording)) is not None:
                placement.leave_out(rephrase, reason, nearest, wording)
                continue
            if neighbour is not None:
                _shrink_neighbour(workspace.codebook.entry_ids[slot], neighbour, decision, changes)
            radius = float(np.float32(decision.radius))
            changes[rephrase.name] = EntryChange(
                entry_id=rephrase.name,
                key=query,
                value=value,
                radius=radius,
                label=label,
                wording=wording or UNSET,
            )
            new_keys[rephrase.name] = query_D
            placement.keys.append(with_fields(nearest, entry_id=rephrase.name))
        else:
            if server_id in new_keys:
                covering_radius = float(
                    np.float32(local.policy.covering_radius(exact_distance(query_D, new_keys[server_id])))
                )
                change = changes[server_id]
                assert change.radius is not UNSET
                changes[server_id] = with_fields(change, radius=max(covering_radius, change.radius))
            placement.keys.append(
                with_fields(nearest, entry_id=server_id, query=query, wording=rephrase.inspection.wording)
            )
        same_input = workspace.memory.edits_of_input(query_D, tolerance)
        placement.same_input_edits += same_input
        placement.supersedes += workspace.superseded_edits(same_input, label, wording)
        placement.tolerance = max(placement.tolerance, tolerance)
    return placement


def protect_rephrases(workspace: EditWorkspace, candidate: EditCandidate) -> RephrasePlacement:
    """Protect the rephrases whose target the model predicts already; leave the others out.

    For a correction that got no value: the model predicts its target already, so there is none to give to rephrases.
    """
    placement = RephrasePlacement()
    for rephrase in inspect_rephrases(workspace, candidate, None):
        if rephrase.exclusion_reason or rephrase.inspection is None or rephrase.query_D is None:
            placement.leave_out(rephrase, rephrase.exclusion_reason)
            continue
        local, _, _, nearest = _candidate_at(workspace, candidate, rephrase.query_D)
        served_by, wording = rephrase.inspection.served_by, workspace.entry_wording(rephrase.inspection)
        if not rephrase.inspection.target_check.predicts_target:
            placement.leave_out(
                rephrase,
                REASON_NO_VALUE if candidate.inspection.served_by is None else REASON_VALUE_FAILS,
                nearest,
                wording,
            )
        elif served_by is not None and served_by.radius < local.policy.covering_radius(served_by.distance):
            # Another batch may compute the query outside the radius, so the edit could not be relied on.
            placement.leave_out(rephrase, REASON_AT_EDGE, nearest, wording)
        else:
            entry_id = UNSET if served_by is None else served_by.entry_id
            query = Tensor.from_array(rephrase.query_D)
            placement.keys.append(
                with_fields(nearest, entry_id=entry_id, query=query, wording=rephrase.inspection.wording)
            )
            placement.supersedes += [
                other
                for other in workspace.memory.edits_of_input(rephrase.query_D, local.policy.tolerance)
                if workspace.memory.serving_entry_id(other) not in (UNEDITED_MODEL, entry_id)
                and workspace.label_of_edit(other) != rephrase.inspection.label
            ]
    return placement


def _candidate_at(
    workspace: EditWorkspace, candidate: EditCandidate, query_D: np.ndarray
) -> tuple[EditCandidate, int, float, RephraseKey]:
    """The candidate moved to a rephrase's query; the slot and distance of the nearest key there, and their record."""
    nearest = workspace.index.nearest(torch.from_numpy(query_D)[None])
    slot, distance = int(nearest.slots_B[0]), float(nearest.distances_B[0])
    policy = replace(candidate.policy, tolerance=workspace.tolerance(query_D))
    local = replace(candidate, query_D=query_D, policy=policy)
    if slot == NO_SLOT:
        return local, slot, distance, RephraseKey()
    return local, slot, distance, RephraseKey(nearest=workspace.codebook.entry_ids[slot], distance=distance)


def _shrink_neighbour(
    name: str, neighbour: Neighbour, decision: PolicyDecision, changes: dict[str, EntryChange]
) -> None:
    """Shrink the nearest entry, which has another label, if the policy splits the space between both keys."""
    if decision.neighbour_radius is not None:
        radius = float(np.float32(decision.neighbour_radius))
        if radius < neighbour.radius:
            changes[name] = with_fields(changes.get(name, EntryChange(entry_id=name)), radius=radius)


def _change_to_serve(
    workspace: EditWorkspace,
    candidate: EditCandidate,
    inspection: Inspection,
    entry_id: str,
    value: Tensor,
    changes: dict[str, EntryChange],
) -> EntryChange | None:
    """The change that makes an existing entry serve the rephrase at its key; None if it does already.

    The entry gets the edit's value and label if its own value fails. It gets a larger radius if its own does not cover
    the rephrase in every batch. Earlier changes of the same delta count.
    """
    slot = workspace.codebook.slot(entry_id)
    before = changes.get(entry_id, EntryChange(entry_id=entry_id))
    label = workspace.codebook.labels[slot] if before.label is UNSET else before.label
    value_V = workspace.codebook.values_NV[slot].copy() if before.value is UNSET else before.value.array().copy()
    radius = float(workspace.codebook.radii_N[slot]) if before.radius is UNSET else before.radius
    after = before
    if (
        label != inspection.label
        or not workspace.model.suffix_runner.check_value(inspection.suffix, torch.from_numpy(value_V)).predicts_target
    ):
        after = with_fields(after, value=value, label=inspection.label)
    distance = exact_distance(candidate.query_D, workspace.codebook.keys_ND[slot])
    covering_radius = float(np.float32(candidate.policy.covering_radius(distance)))
    if covering_radius > radius:
        after = with_fields(after, radius=covering_radius)
    return None if after == before else after


def _entry_with_key(
    workspace: EditWorkspace, query_D: np.ndarray, new_keys: dict[str, np.ndarray], slot: int, tolerance: float
) -> str | None:
    """The entry whose key equals the query within the tolerance: a new entry, else the one in this slot, else None."""
    existing = None if slot == NO_SLOT else workspace.codebook.entry_ids[slot]
    return next((name for name, key_D in new_keys.items() if exact_distance(query_D, key_D) <= tolerance), existing)


def _wording_of_entry(workspace: EditWorkspace, entry_id: str, changes: dict[str, EntryChange]) -> str:
    """The wording of an existing or new entry after these changes; empty if it compares none."""
    change = changes.get(entry_id)
    if change is not None and (change.wording is not UNSET or change.key is not UNSET):
        return change.wording or ""
    return workspace.codebook.wordings[workspace.codebook.slot(entry_id)]


def _conflicting_neighbour(
    workspace: EditWorkspace, slot: int, distance: float, label: Label, changes: dict[str, EntryChange]
) -> Neighbour | None:
    """The nearest entry after these changes, if its label differs from the rephrase's; None if the label is equal.

    A neighbour of the same label is left out: each rephrase gets a key of its own rather than a larger radius there.
    """
    change = changes.get(workspace.codebook.entry_ids[slot])
    current_label = workspace.codebook.labels[slot] if change is None or change.label is UNSET else change.label
    if current_label == label:
        return None
    radius = workspace.codebook.radii_N[slot] if change is None or change.radius is UNSET else change.radius
    return Neighbour(distance, float(radius), same_label=False)
