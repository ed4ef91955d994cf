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
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import UNSET
from msgspec.structs import replace as with_fields

from gracestream.pipeline.codebook import BARE_MODEL, Decision, Label, Neighbour, decide
from gracestream.pipeline.editing.candidate import Case, Examined
from gracestream.pipeline.editing.forms import supervised_forms
from gracestream.pipeline.editing.value_training import Texts, Trained, train_on
from gracestream.pipeline.model import InputError
from gracestream.pipeline.search import NO_SLOT, exact_distance
from gracestream.pipeline.wording import disagreement
from gracestream.schemas.deltas import EntryChange, RephraseKey, Tensor, rephrase_name
from gracestream.schemas.messages import Feedback, LeftOut, one_line

if TYPE_CHECKING:
    from gracestream.pipeline.editing.engine import EditEngine

NO_VALUE = (
    "the model answers the inputs of the correction by itself, so there is no value; correct this text on its own"
)
FAILS = "the value of the correction does not give the target here; correct this text on its own"
OTHER_WORDS = "the model does not tell it apart from a text with other words; correct this text on its own"
EDGE = "it lies at the edge of the entry that answers it; correct this text on its own"


@dataclass(frozen=True, slots=True)
class Rephrase:
    """One rephrase of a correction under decision: what a pass told of it, and why it is left out where it is."""

    number: int
    name: str
    examined: Examined | None
    query_D: np.ndarray | None
    why_not: str = ""


@dataclass(slots=True)
class Placed:
    """What becomes of the rephrases of a correction, beside the changes of entries."""

    keys: list[RephraseKey] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    same_input: list[str] = field(default_factory=list)
    """Edits of the same inputs."""
    supersedes: list[str] = field(default_factory=list)
    """Those of them that said something else."""
    noise: float = 0.0

    def leave_out(self, one: Rephrase, reason: str, nearest: RephraseKey | None = None, wording: str = "") -> None:
        """Name it in the outcome; `nearest` and its wording stand where the reason is what lies around its query."""
        query = UNSET if nearest is None or one.query_D is None else Tensor.of(one.query_D)
        self.keys.append(with_fields(nearest or RephraseKey(), query=query, wording=wording, left_out=True))
        self.left_out.append(LeftOut(rephrase=one.number, reason=reason))


def examined_rephrases(engine: "EditEngine", case: Case, value_V: np.ndarray | None) -> list[Rephrase]:
    """What passes of the model tell of the rephrases; `value_V` is the edit's, which must give the target there."""
    found = []
    known = (*case.rephrases_RD, *[None] * len(case.feedback.rephrases))
    for number, (inputs, known_D) in enumerate(zip(case.feedback.rephrases, known, strict=False), 1):
        name = rephrase_name(case.feedback.feedback_id, number)
        assert case.feedback.target is not UNSET
        try:
            examined = engine.examine(inputs, case.feedback.target)
        except InputError as error:
            found.append(Rephrase(number, name, None, None, one_line(error)))
            continue
        query_D = examined.query_D if known_D is None else known_D.copy()
        if not np.isfinite(query_D).all():
            why = "the model's activations on this input are not finite"
            found.append(Rephrase(number, name, None, None, why))
            continue
        one = Rephrase(number, name, examined, query_D)
        found.append(one if value_V is None else _judged(engine, one, value_V))
    return found


def _judged(engine: "EditEngine", one: Rephrase, value_V: np.ndarray) -> Rephrase:
    """A rephrase with what a value does there."""
    if one.examined is None:
        return one
    right = engine.model.passes.gives(one.examined.rest, torch.tensor(value_V)).right
    return replace(one, why_not="" if right else FAILS)


def shared(engine: "EditEngine", case: Case, trained: Trained) -> tuple[Trained, list[Rephrase]]:
    """The value that serves the most texts: the correction's own, or the same trained on for rephrases and forms."""
    rephrases = examined_rephrases(engine, case, trained.value_V)
    failing = sum(one.why_not == FAILS for one in rephrases)
    if not failing and case.ahead is not None:
        return trained, rephrases  # `train_ahead` has trained it on for the forms
    asked = tuple(one.examined.supervised for one in rephrases if one.examined is not None)
    texts = with_forms(engine, case.feedback, case.examined, trained)
    if not (failing or texts.forms) or not engine.model.passes.pads():
        return trained, rephrases
    (more,) = train_on(engine.model.passes, [replace(texts, asked=asked, longer=bool(failing))], engine.plan.recipe)
    again = [_judged(engine, one, more.value_V) for one in rephrases]
    if sum(one.why_not == FAILS for one in again) > failing:
        return trained, rephrases
    return more, again


def with_forms(engine: "EditEngine", feedback: Feedback, examined: Examined, trained: Trained) -> Texts:
    """A value with the forms of its correction, where the plan has any."""
    assert feedback.inputs is not UNSET
    assert feedback.target is not UNSET
    forms = supervised_forms(engine.model, feedback.inputs, feedback.target) if engine.plan.forms else []
    return Texts(trained, examined.supervised, examined.rest, forms=tuple(forms))


def any_proved(rephrases: Iterable[Rephrase]) -> bool:
    """Whether the value gives the target at one of them."""
    return any(not one.why_not for one in rephrases)


def place(
    engine: "EditEngine", case: Case, value_V: np.ndarray, changes: dict[str, EntryChange], rephrases: list[Rephrase]
) -> Placed:
    """Give each rephrase its key; the entries that they change are put into `changes`, by entry id."""
    placed = Placed()
    value = Tensor.of(value_V)
    new_keys = {change.entry_id: change.key.array() for change in changes.values() if change.key is not UNSET}
    for one in rephrases:
        if one.why_not or one.examined is None or one.query_D is None:
            placed.leave_out(one, one.why_not)
            continue
        own_case, slot, distance, nearest = _at(engine, case, one.query_D)
        noise, label, query = own_case.policy.noise, one.examined.label, Tensor.of(one.query_D)
        wording = engine.wording(one.examined)
        served_by = _entry_at(engine, one.query_D, new_keys, slot if distance <= noise else NO_SLOT, noise)
        if served_by is not None and disagreement(_wording_of_entry(engine, served_by, changes), wording):
            placed.leave_out(one, OTHER_WORDS, nearest, wording)
            continue
        if served_by is not None and served_by not in new_keys:
            change = _taught(engine, own_case, one.examined, served_by, value, changes)
            changes |= {} if change is None else {served_by: change}
        if served_by is None:
            neighbour = None if slot == NO_SLOT else _other(engine, slot, distance, label, changes)
            decision = decide(
                own_case.policy,
                neighbour,
                engine.clearance(one.name, one.query_D, wording, own_case),
            )
            assert decision.radius is not None
            if (reason := engine.too_near(decision.radius, own_case, wording)) is not None:
                placed.leave_out(one, reason, nearest, wording)
                continue
            if neighbour is not None:
                _shrink(engine.codebook.entry_ids[slot], neighbour, decision, changes)
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
                reach = float(np.float32(own_case.policy.cover(exact_distance(one.query_D, new_keys[served_by]))))
                change = changes[served_by]
                assert change.radius is not UNSET
                changes[served_by] = with_fields(change, radius=max(reach, change.radius))
            placed.keys.append(with_fields(nearest, entry_id=served_by, query=query, wording=one.examined.wording))
        same_input = engine.memory.same_input(one.query_D, noise)
        placed.same_input += same_input
        placed.supersedes += engine.said_otherwise(same_input, label, wording)
        placed.noise = max(placed.noise, noise)
    return placed


def keep(engine: "EditEngine", case: Case) -> Placed:
    """Guard the rephrases that are right already, where the correction has no value to give the others."""
    placed = Placed()
    for one in examined_rephrases(engine, case, None):
        if one.why_not or one.examined is None or one.query_D is None:
            placed.leave_out(one, one.why_not)
            continue
        own_case, _, _, nearest = _at(engine, case, one.query_D)
        hit, wording = one.examined.hit, engine.wording(one.examined)
        if not one.examined.verdict.right:
            placed.leave_out(one, NO_VALUE if case.examined.hit is None else FAILS, nearest, wording)
        elif hit is not None and hit.radius < own_case.policy.cover(hit.distance):
            placed.leave_out(one, EDGE, nearest, wording)
        else:
            entry_id = UNSET if hit is None else hit.entry_id
            query = Tensor.of(one.query_D)
            placed.keys.append(with_fields(nearest, entry_id=entry_id, query=query, wording=one.examined.wording))
            placed.supersedes += [
                other
                for other in engine.memory.same_input(one.query_D, own_case.policy.noise)
                if engine.memory.serving_entry(other) not in (BARE_MODEL, entry_id)
                and engine.label_of_edit(other) != one.examined.label
            ]
    return placed


def _at(engine: "EditEngine", case: Case, query_D: np.ndarray) -> tuple[Case, int, float, RephraseKey]:
    """The case as it is for a rephrase of this query; slot and distance of the nearest key, and the record of both."""
    found = engine.index.nearest(torch.from_numpy(query_D)[None])
    slot, distance = int(found.slots_B[0]), float(found.distances_B[0])
    own_case = replace(case, query_D=query_D, policy=replace(case.policy, noise=engine.noise(query_D)))
    if slot == NO_SLOT:
        return own_case, slot, distance, RephraseKey()
    return own_case, slot, distance, RephraseKey(nearest=engine.codebook.entry_ids[slot], distance=distance)


def _shrink(name: str, neighbour: Neighbour, decision: Decision, changes: dict[str, EntryChange]) -> None:
    """Make room next to an entry that says something else, where the policy splits balls."""
    if decision.neighbour_radius is not None:
        radius = float(np.float32(decision.neighbour_radius))
        if radius < neighbour.radius:
            changes[name] = with_fields(changes.get(name, EntryChange(entry_id=name)), radius=radius)


def _taught(
    engine: "EditEngine",
    case: Case,
    examined: Examined,
    entry_id: str,
    value: Tensor,
    changes: dict[str, EntryChange],
) -> EntryChange | None:
    """What makes the entry whose key lies at a rephrase serve it; None where it does."""
    slot = engine.codebook.slot(entry_id)
    before = changes.get(entry_id, EntryChange(entry_id=entry_id))
    label = engine.codebook.labels[slot] if before.label is UNSET else before.label
    value_V = engine.codebook.values_NV[slot].copy() if before.value is UNSET else before.value.array().copy()
    radius = float(engine.codebook.radii_N[slot]) if before.radius is UNSET else before.radius
    after = before
    if label != examined.label or not engine.model.passes.gives(examined.rest, torch.from_numpy(value_V)).right:
        after = with_fields(after, value=value, label=examined.label)
    distance = exact_distance(case.query_D, engine.codebook.keys_ND[slot])
    reach = float(np.float32(case.policy.cover(distance)))
    if reach > radius:
        after = with_fields(after, radius=reach)
    return None if after == before else after


def _entry_at(
    engine: "EditEngine", query_D: np.ndarray, new_keys: dict[str, np.ndarray], slot: int, noise: float
) -> str | None:
    """The entry whose key is the query itself, within the noise: a new one, or the one in this slot."""
    known = None if slot == NO_SLOT else engine.codebook.entry_ids[slot]
    return next((name for name, key_D in new_keys.items() if exact_distance(query_D, key_D) <= noise), known)


def _wording_of_entry(engine: "EditEngine", entry_id: str, changes: dict[str, EntryChange]) -> str:
    """With these changes; the wording of an entry that is not there yet is that of its change."""
    change = changes.get(entry_id)
    if change is not None and (change.wording is not UNSET or change.key is not UNSET):
        return change.wording or ""
    return engine.codebook.wordings[engine.codebook.slot(entry_id)]


def _other(
    engine: "EditEngine", slot: int, distance: float, label: Label, changes: dict[str, EntryChange]
) -> Neighbour | None:
    """The nearest entry as seen from a rephrase, if it says something else: of its own label there is none."""
    change = changes.get(engine.codebook.entry_ids[slot])
    now = engine.codebook.labels[slot] if change is None or change.label is UNSET else change.label
    if now == label:
        return None
    radius = engine.codebook.radii_N[slot] if change is None or change.radius is UNSET else change.radius
    return Neighbour(distance, float(radius), same_label=False)
