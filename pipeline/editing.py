"""The editing engine: one correction in, one outcome out, and the delta that makes it so (design, section 4).

No Kafka, no Redis, no clock, no global random state: the editor worker, replay and experiments run this same engine.
Decisions are made one at a time, in the order of feedback. `edit` changes nothing; what it decided takes effect when
the record it returned is given to `apply`, which is also how a starting editor learns what its predecessors did.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import numpy as np
import torch
from msgspec import UNSET, UnsetType

from pipeline.adaptor import Hit
from pipeline.codebook import Applied, Codebook, DeltaFault, Label
from pipeline.index import NO_SLOT, KeyIndex
from pipeline.layers import Prefix
from pipeline.maintenance import Decision, Neighbour, Policy, batch_noise, decide, without_expanding
from pipeline.memory import EditMemory
from pipeline.model import EditableModel
from pipeline.probe import TEXTS
from pipeline.tasks import InputError, Supervised
from pipeline.traffic import Traffic, median_nearest_distance
from pipeline.training import Recipe, Trained, train_value
from schemas.deltas import Cause, Delta, EntryChange, Tensor, seal
from schemas.messages import VERSION, Feedback, Inputs, Outcome, Status, one_line

MAX_RECORD_BYTES = 60 * 2**20
"""A larger delta would not fit the topic; only one that gives thousands of edits entries of their own gets there."""

STATUS: dict[str, Status] = {"add": "added", "expand": "expanded", "split": "split", "replace": "replaced"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How an editor edits: the fields that `Settings` explains under the same names."""

    policy: Literal["nearest", "paper"] = "nearest"
    radius: float = 1.0
    radius_unit: Literal["median", "absolute"] = "median"
    expand: Literal["cover", "paper"] = "cover"
    guard: bool = True
    traffic: int = 512
    seed: int = 0
    init: Literal["layer", "label", "random"] = "layer"
    recipe: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True, slots=True)
class Edited:
    """The outcome of one feedback record, and the record for `deltas` that carries it out (None: nothing changes).

    `invalid` marks feedback that cannot be taken at all, for `reason`: it belongs in the dead letter queue. Only where
    it does not even tell its id is there no outcome.
    """

    outcome: Outcome | None
    record: bytes | None = None
    invalid: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One correction under decision."""

    feedback: Feedback
    offset: int
    label: Label
    supervised: Supervised
    prefix: Prefix
    query_D: np.ndarray
    start_V: torch.Tensor
    policy: Policy
    clearance: float


class EditEngine:
    """A codebook with all that is needed to edit it."""

    def __init__(self, model: EditableModel, codebook: str, plan: Plan | None = None) -> None:
        self.model, self.plan = model, plan or Plan()
        self.codebook = Codebook(codebook, model.fingerprint, model.layer)
        self.index = KeyIndex(self.codebook, model.device)
        self.memory = EditMemory()
        self.traffic = Traffic(self.plan.traffic, self.plan.seed)
        self._probe_unit: float | None = None

    def apply(self, record: bytes) -> Applied | None:
        """Fold one record of `deltas` into codebook, index and memory; None where it is of a lower term.

        Raises:
            DeltaFault: the record does not continue this codebook's history.
        """
        applied = self.codebook.apply(record)
        if applied is not None:
            self.index.refresh(applied)
            self.memory.fold(applied.delta, self.codebook)
            cause = applied.delta.cause
            if cause is not UNSET and cause.feedback_id in self.memory:
                query_D = self.memory.query(cause.feedback_id)
                self.traffic.forget(query_D, self._noise(query_D))
        return applied

    def lead(self, environment: dict[str, str]) -> bytes:
        """The record by which this editor takes the next term. It is not applied yet."""
        return self._seal("lead", term=self.codebook.term + 1, environment=environment)

    def observe(self, rank: float, query_D: np.ndarray) -> None:
        """Hold a query of unflagged traffic (`Traffic.wants` gave its rank), unless an entry answers it already."""
        nearest = self.index.nearest(torch.from_numpy(query_D)[None])
        slot, distance = int(nearest.slots_B[0]), float(nearest.distances_B[0])
        if slot == NO_SLOT or distance >= self.codebook.radii_N[slot]:
            self.traffic.hold(rank, query_D, self._noise(query_D))

    def initial_radius(self) -> float:
        """Epsilon_init, absolute: in units of the traffic's median distance, or of probe sentences' without traffic."""
        if self.plan.radius_unit == "absolute":
            return self.plan.radius
        unit = self.traffic.unit()
        if unit is None:
            if self._probe_unit is None:
                queries_BD = self.model.queries([self.model.task.tokenize(text) for text in TEXTS])
                self._probe_unit = median_nearest_distance(queries_BD.cpu().numpy())
            unit = self._probe_unit
        return self.plan.radius * unit

    def edit(self, feedback: Feedback, offset: int) -> Edited:
        """Decide on one feedback record and train what it takes; nothing changes before `apply`."""
        if feedback.undo is not UNSET:
            return _rejected(feedback, "undo is not supported by this editor")
        assert feedback.inputs is not UNSET
        assert feedback.target is not UNSET
        try:
            label, supervised = self.model.supervised(feedback.inputs, feedback.target)
        except InputError as error:
            return _rejected(feedback, one_line(error), invalid=True)
        verdict, session, prefix = self.model.examine(supervised, self.codebook, self.index)
        if verdict.right:
            outcome = Outcome(v=VERSION, feedback_id=feedback.feedback_id, status="unchanged", loss=verdict.loss)
            return self._remembered(outcome, offset, label, session.hits[0], session.queries_BD[0].cpu().numpy())
        if (earlier := self.memory.offsets.get(feedback.feedback_id)) is not None:
            return _rejected(feedback, f"its id was used at offset {earlier}; a new correction needs a new id")
        query_D = session.queries_BD[0].cpu().numpy()
        if not np.isfinite(query_D).all():
            return _rejected(feedback, "the model's activations on this input are not finite")
        noise = self._noise(query_D)
        policy = Policy(self.plan.policy, self.initial_radius(), self.plan.expand, noise)
        case = Case(
            feedback=feedback,
            offset=offset,
            label=label,
            supervised=supervised,
            prefix=prefix,
            query_D=query_D,
            start_V=session.outputs_BV[0],
            policy=policy,
            clearance=self.traffic.clearance(query_D, noise),
        )
        return self._decide(case)

    def _remembered(self, outcome: Outcome, offset: int, label: Label, hit: Hit | None, query_D: np.ndarray) -> Edited:
        """A correction that an entry fulfils already: a delta, usually without a change, puts it under the guard.

        Else a later edit could take its query over, and what a reviewer was told to be right would turn wrong.
        """
        known = outcome.feedback_id in self.memory.offsets or outcome.feedback_id in self.codebook
        if hit is None or known or not self.plan.guard or self.codebook.labels[hit.slot] != label:
            return Edited(outcome)
        if self.memory.same_input(query_D, self._noise(query_D)):
            return Edited(outcome)
        cause = Cause(feedback_id=outcome.feedback_id, offset=offset, entry_id=hit.entry_id, query=Tensor.of(query_D))
        reach = _float32(hit.distance + 2 * self._noise(query_D))
        changes = (EntryChange(entry_id=hit.entry_id, radius=reach),) if reach > hit.radius else ()
        record = self._seal("expand", term=self.codebook.term, entries=changes, cause=cause)
        return Edited(msgspec.structs.replace(outcome, entry_id=hit.entry_id, seq=self.codebook.seq + 1), record)

    def _decide(self, case: Case) -> Edited:
        nearest = self.index.nearest(torch.from_numpy(case.query_D)[None])
        slot, distance = int(nearest.slots_B[0]), float(nearest.distances_B[0])
        neighbour = None
        if slot != NO_SLOT:
            neighbour = Neighbour(
                distance=distance,
                radius=float(self.codebook.radii_N[slot]),
                same_label=self.codebook.labels[slot] == case.label,
                clearance=self._clearance(self.codebook.keys_ND[slot], case),
            )
        decision = decide(case.policy, neighbour, case.clearance)
        if decision.kind == "expand":
            assert neighbour is not None
            value_V = torch.from_numpy(self.codebook.values_NV[slot].copy())
            found = self.model.gives(case.supervised, value_V, case.prefix)
            if found.right:
                return self._publish(case, decision, slot, None, found.loss)
            decision = without_expanding(case.policy, neighbour, case.clearance)
        trained = train_value(self.model, case.supervised, case.prefix, self._start(case), self.plan.recipe)
        if not trained.converged:
            return _rejected(
                case.feedback,
                f"no value was found in {trained.steps} steps; the loss is still {trained.verdict.loss:.3g}",
                steps=trained.steps,
                loss=trained.verdict.loss if math.isfinite(trained.verdict.loss) else UNSET,
            )
        return self._publish(case, decision, slot, trained, trained.verdict.loss)

    def _publish(self, case: Case, decision: Decision, slot: int, trained: Trained | None, loss: float) -> Edited:
        """Decision, value and guard as one delta."""
        feedback_id = case.feedback.feedback_id
        neighbour_id = self.codebook.entry_ids[slot] if slot != NO_SLOT else ""
        entry_id = feedback_id if decision.kind in ("add", "split") else neighbour_id
        if decision.kind in ("add", "split") and entry_id in self.codebook:
            return _rejected(case.feedback, f"an entry named {entry_id!r} exists; a correction needs an id of its own")
        changes: list[EntryChange] = []
        radius: float | UnsetType = UNSET
        if decision.neighbour_radius is not None and decision.neighbour_radius != self.codebook.radii_N[slot]:
            radius = _float32(decision.neighbour_radius)
        if decision.kind != "replace" and radius is not UNSET:
            changes.append(EntryChange(entry_id=neighbour_id, radius=radius))
        if trained is not None:
            value = Tensor.of(trained.value_V)
            if decision.kind == "replace":
                changes.append(EntryChange(entry_id=entry_id, value=value, radius=radius, label=case.label))
            else:
                assert decision.radius is not None
                radius = _float32(decision.radius)
                key = Tensor.of(case.query_D)
                changes.append(EntryChange(entry_id=entry_id, key=key, value=value, radius=radius, label=case.label))
        same_input = self.memory.same_input(case.query_D, case.policy.noise)
        if self.plan.guard and decision.kind != "expand":
            changes += self._guarded(case, changes, same_input)
        cause = Cause(
            feedback_id=feedback_id,
            offset=case.offset,
            entry_id=entry_id,
            query=UNSET if decision.kind in ("add", "split") else Tensor.of(case.query_D),
            supersedes=tuple(other for other in same_input if self._label_of_edit(other) != case.label),
            traffic={str(partition): end for partition, end in sorted(self.traffic.positions.items())} or UNSET,
        )
        record = self._seal(decision.kind, term=self.codebook.term, entries=tuple(changes), cause=cause)
        try:
            self.codebook.check(record)  # what is committed can never be taken back
        except DeltaFault as fault:
            return _rejected(case.feedback, f"no reader would take its delta: {fault}")
        if len(record) > MAX_RECORD_BYTES:
            return _rejected(case.feedback, f"its delta would have {len(record)} bytes; {MAX_RECORD_BYTES} are allowed")
        outcome = Outcome(
            v=VERSION,
            feedback_id=feedback_id,
            status=STATUS[decision.kind],
            entry_id=entry_id,
            seq=self.codebook.seq + 1,
            steps=UNSET if trained is None else trained.steps,
            loss=loss,
        )
        return Edited(outcome, record)

    def _guarded(self, case: Case, changes: list[EntryChange], same_input: list[str]) -> list[EntryChange]:
        """Entries of their own for the edits that these changes would take from the entries that serve them."""
        displaced = self.memory.displaced(
            new_keys={change.entry_id: case.query_D for change in changes if change.key is not UNSET},
            shrunk={change.entry_id: change.radius for change in changes if change.radius is not UNSET},
            relabelled={c.entry_id for c in changes if c.value is not UNSET and c.key is UNSET},
            noise=case.policy.noise,
            ignore=same_input,
        )
        guarded = []
        for feedback_id in displaced:
            query_D = self.memory.query(feedback_id)
            serving = self.codebook.entry(self.codebook.slot(self.memory.serving_entry(feedback_id)))
            policy = replace(case.policy, noise=self._noise(query_D))
            guarded.append(
                EntryChange(
                    entry_id=feedback_id,
                    key=Tensor.of(query_D),
                    value=Tensor.of(serving.value_V),
                    radius=_float32(policy.own_radius(self._clearance(query_D, case))),
                    label=serving.label,
                )
            )
        return guarded

    def _clearance(self, key_D: np.ndarray, case: Case) -> float:
        """From a key to the nearest unflagged traffic, which the input being corrected no longer is."""
        return self.traffic.clearance(key_D, self._noise(key_D), but_not=case.query_D)

    def _label_of_edit(self, feedback_id: str) -> Label:
        return self.codebook.labels[self.codebook.slot(self.memory.serving_entry(feedback_id))]

    def _start(self, case: Case) -> torch.Tensor:
        if self.plan.init == "random":
            generator = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + case.offset)
            return torch.rand(case.start_V.shape, generator=generator)
        if self.plan.init == "label" and case.label in self.codebook.labels:
            rows = [row for row, label in enumerate(self.codebook.labels) if label == case.label]
            nearest = np.linalg.norm(self.codebook.keys_ND[rows] - case.query_D, axis=1).argmin()
            return torch.from_numpy(self.codebook.values_NV[rows[int(nearest)]].copy())
        return case.start_V

    def _noise(self, query_D: np.ndarray) -> float:
        return batch_noise(float(np.linalg.norm(query_D)), self.model.dtype)

    def _seal(self, op: str, **fields: object) -> bytes:
        delta = Delta(
            v=VERSION,
            codebook=self.codebook.name,
            model=self.codebook.model,
            layer=self.codebook.layer,
            seq=self.codebook.seq + 1,
            op=op,  # type: ignore[arg-type]
            digest=b"",
            **fields,  # type: ignore[arg-type]
        )
        return seal(delta, self.codebook.digest)[0]


def correction(feedback_id: str, inputs: Inputs, target: str) -> Feedback:
    """A feedback record for a correction."""
    return Feedback(v=VERSION, feedback_id=feedback_id, inputs=inputs, target=target)


def _rejected(feedback: Feedback, reason: str, *, invalid: bool = False, **fields: object) -> Edited:
    outcome = Outcome(v=VERSION, feedback_id=feedback.feedback_id, status="rejected", reason=reason, **fields)  # type: ignore[arg-type]
    return Edited(outcome, invalid=invalid, reason=reason)


def _float32(radius: float) -> float:
    """The float32 that the codebook will hold, so that log and Redis say the same."""
    return float(np.float32(radius))
