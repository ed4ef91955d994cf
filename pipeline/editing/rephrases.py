"""Rephrases: other words for a correction, each a further key of the same edit (design, section 4).

1. A rephrase joins the edit only where the edit's value gives the target there. The outcome names the others. Where the
   value of the correction alone fails at some, it is trained on for all of them and the correction's forms
   (`pipeline.editing.forms`) at once, and kept if it serves more.
2. Each gets an entry of its own, named by `rephrase_name`, with a copy of the value. Where a key lies at it already,
   within the noise of batches, that entry serves it, with the edit's value if its own is not right.
3. All of it stands in the delta of the correction. So an undo of the correction takes every key back.

Not promised: that the keys stay together. A later correction of one of the texts takes over that text alone.
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
REASON_OTHER_WORDS = "the model does not tell it apart from a text with other words; correct this text on its own"
REASON_AT_EDGE = "it lies at the edge of the entry that answers it; correct this text on its own"


@dataclass(frozen=True, slots=True)
class RephraseCandidate:
    """One rephrase of a correction under decision: what a pass told of it, and why it is left out where it is."""

    number: int
    name: str
    inspection: Inspection | None
    query_D: np.ndarray | None
    exclusion_reason: str = ""


@dataclass(slots=True)
class RephrasePlacement:
    """What becomes of the rephrases of a correction, beside the changes of entries."""

    keys: list[RephraseKey] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    same_input_edits: list[str] = field(default_factory=list)
    """Edits of the same inputs."""
    supersedes: list[str] = field(default_factory=list)
    """Those of them that said something else."""
    tolerance: float = 0.0

    def leave_out(
        self, rephrase: RephraseCandidate, reason: str, nearest: RephraseKey | None = None, wording: str = ""
    ) -> None:
        """Name it in the outcome; `nearest` and its wording stand where the reason is what lies around its query."""
        query = UNSET if nearest is None or rephrase.query_D is None else Tensor.from_array(rephrase.query_D)
        self.keys.append(with_fields(nearest or RephraseKey(), query=query, wording=wording, left_out=True))
        self.left_out.append(LeftOut(rephrase=rephrase.number, reason=reason))


def inspect_rephrases(
    workspace: EditWorkspace, candidate: EditCandidate, value_V: np.ndarray | None
) -> list[RephraseCandidate]:
    """What passes of the model tell of the rephrases; `value_V` is the edit's, which must give the target there."""
    found = []
    known = (*candidate.rephrase_queries_RD, *[None] * len(candidate.feedback.rephrases))
    for number, (inputs, known_D) in enumerate(zip(candidate.feedback.rephrases, known, strict=False), 1):
        name = rephrase_name(candidate.feedback.feedback_id, number)
        assert candidate.feedback.target is not UNSET
        try:
            examined = workspace.inspect(inputs, candidate.feedback.target)
        except InputError as error:
            found.append(RephraseCandidate(number, name, None, None, to_one_line(error)))
            continue
        query_D = examined.query_D if known_D is None else known_D.copy()
        if not np.isfinite(query_D).all():
            why = "the model's activations on this input are not finite"
            found.append(RephraseCandidate(number, name, None, None, why))
            continue
        one = RephraseCandidate(number, name, examined, query_D)
        found.append(one if value_V is None else _check_rephrase(workspace, one, value_V))
    return found


def _check_rephrase(workspace: EditWorkspace, rephrase: RephraseCandidate, value_V: np.ndarray) -> RephraseCandidate:
    """A rephrase with what a value does there."""
    if rephrase.inspection is None:
        return rephrase
    right = workspace.model.suffix_runner.check_value(rephrase.inspection.suffix, torch.tensor(value_V)).predicts_target
    return replace(rephrase, exclusion_reason="" if right else REASON_VALUE_FAILS)


def fit_shared_value(
    workspace: EditWorkspace, candidate: EditCandidate, trained: TrainedValue
) -> tuple[TrainedValue, list[RephraseCandidate]]:
    """The value that serves the most texts: the correction's own, or the same trained on for rephrases and forms."""
    rephrases = inspect_rephrases(workspace, candidate, trained.value_V)
    failing = sum(one.exclusion_reason == REASON_VALUE_FAILS for one in rephrases)
    if not failing and candidate.draft is not None:
        return trained, rephrases  # `train_ahead` has trained it on for the forms
    asked = tuple(one.inspection.target_pass for one in rephrases if one.inspection is not None)
    texts = make_training_texts(workspace, candidate.feedback, candidate.inspection, trained)
    if not (failing or texts.form_passes) or not workspace.model.suffix_runner.supports_padding():
        return trained, rephrases
    (more,) = train_further(
        workspace.model.suffix_runner,
        [replace(texts, rephrase_passes=asked, has_full_budget=bool(failing))],
        workspace.config.recipe,
    )
    again = [_check_rephrase(workspace, one, more.value_V) for one in rephrases]
    if sum(one.exclusion_reason == REASON_VALUE_FAILS for one in again) > failing:
        return trained, rephrases
    return more, again


def make_training_texts(
    workspace: EditWorkspace, feedback: Feedback, inspection: Inspection, trained: TrainedValue
) -> TrainingTexts:
    """A value with the forms of its correction, where the plan has any."""
    assert feedback.inputs is not UNSET
    assert feedback.target is not UNSET
    forms = supervised_forms(workspace.model, feedback.inputs, feedback.target) if workspace.config.forms else []
    return TrainingTexts(trained, inspection.target_pass, inspection.suffix, form_passes=tuple(forms))


def any_predicts_target(rephrases: Iterable[RephraseCandidate]) -> bool:
    """Whether the value gives the target at one of them."""
    return any(not one.exclusion_reason for one in rephrases)


def place_rephrases(
    workspace: EditWorkspace,
    candidate: EditCandidate,
    value_V: np.ndarray,
    changes: dict[str, EntryChange],
    rephrases: list[RephraseCandidate],
) -> RephrasePlacement:
    """Give each rephrase its key; the entries that they change are put into `changes`, by entry id."""
    placed = RephrasePlacement()
    value = Tensor.from_array(value_V)
    new_keys = {change.entry_id: change.key.array() for change in changes.values() if change.key is not UNSET}
    for one in rephrases:
        if one.exclusion_reason or one.inspection is None or one.query_D is None:
            placed.leave_out(one, one.exclusion_reason)
            continue
        own_case, slot, distance, nearest = _candidate_at(workspace, candidate, one.query_D)
        noise, label, query = own_case.policy.tolerance, one.inspection.label, Tensor.from_array(one.query_D)
        wording = workspace.entry_wording(one.inspection)
        served_by = _entry_with_key(workspace, one.query_D, new_keys, slot if distance <= noise else NO_SLOT, noise)
        if served_by is not None and find_disagreement(_wording_of_entry(workspace, served_by, changes), wording):
            placed.leave_out(one, REASON_OTHER_WORDS, nearest, wording)
            continue
        if served_by is not None and served_by not in new_keys:
            change = _change_to_serve(workspace, own_case, one.inspection, served_by, value, changes)
            changes |= {} if change is None else {served_by: change}
        if served_by is None:
            neighbour = None if slot == NO_SLOT else _conflicting_neighbour(workspace, slot, distance, label, changes)
            decision = decide_action(
                own_case.policy,
                neighbour,
                workspace.protected_distance(one.name, one.query_D, wording, own_case),
            )
            assert decision.radius is not None
            if (reason := workspace.find_proximity_conflict(decision.radius, own_case, wording)) is not None:
                placed.leave_out(one, reason, nearest, wording)
                continue
            if neighbour is not None:
                _shrink_neighbour(workspace.codebook.entry_ids[slot], neighbour, decision, changes)
            radius = float(np.float32(decision.radius))
            changes[one.name] = EntryChange(
                entry_id=one.name,
                key=query,
                value=value,
                radius=radius,
                label=label,
                wording=wording or UNSET,
            )
            new_keys[one.name] = one.query_D
            placed.keys.append(with_fields(nearest, entry_id=one.name))
        else:
            if served_by in new_keys:
                reach = float(
                    np.float32(own_case.policy.covering_radius(exact_distance(one.query_D, new_keys[served_by])))
                )
                change = changes[served_by]
                assert change.radius is not UNSET
                changes[served_by] = with_fields(change, radius=max(reach, change.radius))
            placed.keys.append(with_fields(nearest, entry_id=served_by, query=query, wording=one.inspection.wording))
        same_input = workspace.memory.edits_of_input(one.query_D, noise)
        placed.same_input_edits += same_input
        placed.supersedes += workspace.superseded_edits(same_input, label, wording)
        placed.tolerance = max(placed.tolerance, noise)
    return placed


def protect_rephrases(workspace: EditWorkspace, candidate: EditCandidate) -> RephrasePlacement:
    """Guard the rephrases that are right already, where the correction has no value to give the others."""
    placed = RephrasePlacement()
    for one in inspect_rephrases(workspace, candidate, None):
        if one.exclusion_reason or one.inspection is None or one.query_D is None:
            placed.leave_out(one, one.exclusion_reason)
            continue
        own_case, _, _, nearest = _candidate_at(workspace, candidate, one.query_D)
        hit, wording = one.inspection.hit, workspace.entry_wording(one.inspection)
        if not one.inspection.target_check.predicts_target:
            placed.leave_out(
                one, REASON_NO_VALUE if candidate.inspection.hit is None else REASON_VALUE_FAILS, nearest, wording
            )
        elif hit is not None and hit.radius < own_case.policy.covering_radius(hit.distance):
            placed.leave_out(one, REASON_AT_EDGE, nearest, wording)
        else:
            entry_id = UNSET if hit is None else hit.entry_id
            query = Tensor.from_array(one.query_D)
            placed.keys.append(with_fields(nearest, entry_id=entry_id, query=query, wording=one.inspection.wording))
            placed.supersedes += [
                other
                for other in workspace.memory.edits_of_input(one.query_D, own_case.policy.tolerance)
                if workspace.memory.serving_entry_id(other) not in (UNEDITED_MODEL, entry_id)
                and workspace.label_of_edit(other) != one.inspection.label
            ]
    return placed


def _candidate_at(
    workspace: EditWorkspace, candidate: EditCandidate, query_D: np.ndarray
) -> tuple[EditCandidate, int, float, RephraseKey]:
    """The case as it is for a rephrase of this query; slot and distance of the nearest key, and the record of both."""
    found = workspace.index.nearest(torch.from_numpy(query_D)[None])
    slot, distance = int(found.slots_B[0]), float(found.distances_B[0])
    policy = replace(candidate.policy, tolerance=workspace.tolerance(query_D))
    own_case = replace(candidate, query_D=query_D, policy=policy)
    if slot == NO_SLOT:
        return own_case, slot, distance, RephraseKey()
    return own_case, slot, distance, RephraseKey(nearest=workspace.codebook.entry_ids[slot], distance=distance)


def _shrink_neighbour(
    name: str, neighbour: Neighbour, decision: PolicyDecision, changes: dict[str, EntryChange]
) -> None:
    """Make room next to an entry that says something else, where the policy splits balls."""
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
    """What makes the entry whose key lies at a rephrase serve it; None where it does."""
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
    reach = float(np.float32(candidate.policy.covering_radius(distance)))
    if reach > radius:
        after = with_fields(after, radius=reach)
    return None if after == before else after


def _entry_with_key(
    workspace: EditWorkspace, query_D: np.ndarray, new_keys: dict[str, np.ndarray], slot: int, tolerance: float
) -> str | None:
    """The entry whose key is the query itself, within the noise: a new one, or the one in this slot."""
    known = None if slot == NO_SLOT else workspace.codebook.entry_ids[slot]
    return next((name for name, key_D in new_keys.items() if exact_distance(query_D, key_D) <= tolerance), known)


def _wording_of_entry(workspace: EditWorkspace, entry_id: str, changes: dict[str, EntryChange]) -> str:
    """With these changes; the wording of an entry that is not there yet is that of its change."""
    change = changes.get(entry_id)
    if change is not None and (change.wording is not UNSET or change.key is not UNSET):
        return change.wording or ""
    return workspace.codebook.wordings[workspace.codebook.slot(entry_id)]


def _conflicting_neighbour(
    workspace: EditWorkspace, slot: int, distance: float, label: Label, changes: dict[str, EntryChange]
) -> Neighbour | None:
    """The nearest entry as seen from a rephrase, if it says something else: of its own label there is none."""
    change = changes.get(workspace.codebook.entry_ids[slot])
    now = workspace.codebook.labels[slot] if change is None or change.label is UNSET else change.label
    if now == label:
        return None
    radius = workspace.codebook.radii_N[slot] if change is None or change.radius is UNSET else change.radius
    return Neighbour(distance, float(radius), same_label=False)
