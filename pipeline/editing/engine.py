"""The editing engine: one correction in, one outcome out, and the delta that makes it so (design, section 4).

No Kafka, no Redis, no clock, no global random state: the editor worker, replay and experiments run this same engine.
Decisions are made one at a time, in the order of feedback. `edit` changes nothing; what it decided takes effect when
the record it returned is given to `apply`, which is also how a starting editor learns what its predecessors did.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import torch
from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook import (
    MAX_TRAFFIC_FRACTION,
    UNEDITED_MODEL,
    AppliedDelta,
    Codebook,
    CodebookLookup,
    EditMemory,
    KeyIndex,
    Label,
    MaintenancePolicy,
    Neighbour,
    PolicyDecision,
    decide_action,
    fallback_to_own_entry,
    is_same_request,
    match_tolerance,
    serving_hit,
)
from gracestream.pipeline.editing.calibration import radius_unit_from_probes
from gracestream.pipeline.editing.candidate import DraftValue, EditCandidate, Inspection, ReplayContext, group_by_length
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.context import DecisionContext
from gracestream.pipeline.editing.rephrases import (
    RephraseCandidate,
    RephrasePlacement,
    any_predicts_target,
    fit_shared_value,
    inspect_rephrases,
    make_training_texts,
    place_rephrases,
    protect_rephrases,
)
from gracestream.pipeline.editing.result import STATUS_BY_OP, EditResult, rejected_result, unchanged_outcome
from gracestream.pipeline.editing.roles import explain_propose_denial
from gracestream.pipeline.editing.scope import ScopeRadius
from gracestream.pipeline.editing.traffic_reservoir import TrafficReservoir
from gracestream.pipeline.editing.value_training import TrainedValue, train_further, train_value, train_values
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import EditableModel, InputError, Seq2SeqGeneration, TargetCheck, is_in_decoder
from gracestream.pipeline.search import NO_SLOT
from gracestream.pipeline.wording import find_disagreement, mark_as_excerpt
from gracestream.schemas.deltas import (
    Cause,
    Delta,
    EntryChange,
    ExceptionChange,
    Op,
    Standing,
    Tensor,
    rephrase_name,
    seal_delta,
)
from gracestream.schemas.messages import SCHEMA_VERSION, Feedback, Inputs, Outcome, to_one_line

MAX_RECORD_BYTES = 60 * 2**20
"""A larger delta would not fit the topic; only one that gives thousands of edits entries of their own gets there."""

FORM_BATCH_SIZE = 4
"""Corrections that are trained on for their forms in one batch, of up to `forms.MOST_TOKENS` tokens each."""

SHORT_TARGET_TOKENS = 8
"""Tokens of a target that is no longer than most."""


class EditEngine:
    """A codebook with all that is needed to edit it."""

    def __init__(
        self, model: EditableModel, codebook: str, config: EditConfig | None = None, scope: ScopeRadius | None = None
    ) -> None:
        """Start with an empty codebook; engines whose queries come from one encoder may share `scope`."""
        self.model, self.config = model, config or EditConfig()
        self.codebook = Codebook(codebook, model.fingerprint, model.layer)
        self.index = KeyIndex(self.codebook, model.device)
        self.memory = EditMemory()
        self.reservoir = TrafficReservoir(self.config.traffic, self.config.seed)
        self._probe_radius_unit: float | None = None
        self._scope = scope or ScopeRadius(model)

    def apply(self, record: bytes) -> AppliedDelta | None:
        """Fold one record of `deltas` into codebook, index and memory; None where it is of a lower term.

        Raises:
            HistoryError: the record does not continue this codebook's history.
        """
        applied = self.codebook.apply(record)
        if applied is not None:
            self.index.refresh(applied)
            self.memory.apply_delta(applied.delta, self.codebook)
            cause = applied.delta.cause
            if cause is not UNSET and cause.entry_id is not UNSET and cause.feedback_id in self.memory:
                query_D = self.memory.query(cause.feedback_id)
                self.reservoir.remove(query_D, self.tolerance(query_D))
                for name in filter(self.memory.__contains__, cause.rephrases_by_name()):
                    query_D = self.memory.query(name)
                    self.reservoir.remove(query_D, self.tolerance(query_D))
        return applied

    @property
    def lookup(self) -> CodebookLookup:
        """Looks prompts up in the codebook; an undo gives its branch another codebook and index."""
        return CodebookLookup(self.codebook, self.index)

    def lead_delta(self, environment: dict[str, str]) -> bytes:
        """The record by which this editor takes the next term. It is not applied yet."""
        return self.next_delta("lead", term=self.codebook.term + 1, environment=environment)

    def next_delta(self, op: Op, **fields: object) -> bytes:
        """The record that follows what the codebook has seen; `fields` are the delta's."""
        usual = {
            "v": SCHEMA_VERSION,
            "codebook": self.codebook.name,
            "model": self.codebook.model,
            "layer": self.codebook.layer,
        }
        place = {"term": self.codebook.term, "seq": self.codebook.seq + 1, "digest": b""}
        return seal_delta(Delta(op=op, **(usual | place | fields)), self.codebook.digest)[0]  # type: ignore[arg-type]

    def add_traffic(self, score: float, query_D: np.ndarray, wording: str = "") -> None:
        """Add a query of unflagged traffic with its `score` from `offer`, unless an entry serves it."""
        (match,) = self.lookup.find_hits(torch.from_numpy(query_D)[None], lambda _row: wording)
        if serving_hit(match) is None:
            self.reservoir.add(score, query_D, self.tolerance(query_D), wording)

    def initial_radius(self) -> float:
        """Epsilon_init, absolute: in units of the traffic's median distance, or of probe sentences' without traffic."""
        if self.config.radius_unit == "absolute":
            return self.config.radius
        unit = self.reservoir.median_distance()
        if unit is None:
            if self._probe_radius_unit is None:
                self._probe_radius_unit = radius_unit_from_probes(self.model)
            unit = self._probe_radius_unit
        return self.config.radius * unit

    def initial_radius_for(self, inputs: Inputs, query_D: np.ndarray) -> float:
        """Epsilon_init of one correction: where the plan says so and it has a subject, its own if that is smaller."""
        own = self._scope(inputs, query_D, self.config.scope_alpha) if self._uses_scope_radius() else None
        return self.initial_radius() if own is None else min(self.initial_radius(), own)

    def _uses_scope_radius(self) -> bool:
        return self.config.scope_radius and self.config.policy == "nearest" and self._scope.is_supported

    def warm_start_entry(self, label: Label, query_D: np.ndarray) -> str | UnsetType:
        """The entry whose value a new one starts from: the nearest of its label, where the plan says so."""
        if self.config.init != "label" or label not in self.codebook.labels:
            return UNSET
        rows = [row for row, other in enumerate(self.codebook.labels) if other == label]
        distances = np.linalg.norm(self.codebook.keys_ND[rows] - query_D, axis=1).tolist()
        return min(zip(distances, (self.codebook.entry_ids[row] for row in rows), strict=True))[1]

    def edit(
        self,
        feedback: Feedback,
        offset: int,
        replay_context: ReplayContext | None = None,
        draft: DraftValue | None = None,
        standing: Standing | UnsetType = UNSET,
    ) -> EditResult:
        """Decide on one correction and train what it takes; nothing changes before `apply`.

        `replay_context` says what a decision that is made another time saw and had the first time; `draft` is what
        `draft_values` found for it; `standing` what its sender is allowed (`pipeline.editing.roles`).
        """
        if (forbidden := explain_propose_denial(feedback, standing)) is not None:
            return rejected_result(feedback, forbidden)
        case = self._candidate(feedback, offset, replay_context, draft, standing)
        if isinstance(case, EditResult):
            return case
        edited = self._protect(case) if case.inspection.is_already_correct else self._carry_out(case)
        if edited.delta_record is not None:
            return edited
        nearest_id = [] if case.nearest_slot == NO_SLOT else [self.codebook.entry_ids[case.nearest_slot]]
        return replace(edited, context=case.context.record_for_status(*nearest_id))

    def draft_values(
        self, corrections: Sequence[tuple[Feedback, int]], heartbeat: Callable[[], object] = lambda: None
    ) -> dict[int, DraftValue]:
        """Train the values that corrections would take if each were decided on now, those of similar length together.

        By offset, of those that need one. A value depends on nothing that another correction changes, unless it starts
        from an entry's (`init=label`): then there are none, nor of a model that cannot be trained with padding. The
        decisions are made by `edit`, one after the other. `heartbeat` is called at each step of training.

        Raises:
            Whatever the model does on one of them.
        """
        if self.config.init == "label" or not self.model.suffix_runner.supports_padding():
            return {}
        wanting = []
        for feedback, offset in corrections:
            heartbeat()
            case = self._candidate(feedback, offset)
            if isinstance(case, EditCandidate) and self._needs_value(case):
                wanting.append(case)
        found: dict[int, DraftValue] = {}
        for group in group_by_length(wanting):
            if len(group) > 1:
                found |= self._train_group([(case.feedback, case.offset, case.inspection) for case in group], heartbeat)
        return found

    def train_batch(self, corrections: Sequence[tuple[Feedback, int]]) -> dict[int, DraftValue]:
        """Train the values of just these corrections together, as an editor did, in the same order.

        Raises:
            Whatever the model does on one of them.
        """
        rows = []
        for feedback, offset in corrections:
            assert feedback.inputs is not UNSET
            assert feedback.target is not UNSET
            rows.append((feedback, offset, self.inspect(feedback.inputs, feedback.target)))
        return self._train_group(rows)

    def _train_group(
        self, rows: Sequence[tuple[Feedback, int, Inspection]], heartbeat: Callable[[], object] = lambda: None
    ) -> dict[int, DraftValue]:
        """By offset, of corrections that were examined; values are trained on for their forms too."""
        offsets = tuple(offset for _, offset, _ in rows)
        passes, recipe = self.model.suffix_runner, self.config.recipe
        rest = passes.suffix_of([examined.target_pass for *_, examined in rows])
        starts = [self._initial_value(offset, examined.layer_output_V) for _, offset, examined in rows]
        trained = train_values(passes, rest, starts, recipe, heartbeat)
        texts_N = [
            make_training_texts(self, feedback, examined, one)
            for (feedback, _, examined), one in zip(rows, trained, strict=True)
        ]
        wanting = [number for number, texts in enumerate(texts_N) if texts.form_passes and texts.trained.converged]
        for start in range(0, len(wanting), FORM_BATCH_SIZE):
            group = wanting[start : start + FORM_BATCH_SIZE]
            more = train_further(passes, [texts_N[number] for number in group], recipe, heartbeat)
            for number, one in zip(group, more, strict=True):
                trained[number] = one
        return {
            offset: DraftValue(one, offsets, examined) for (_, offset, examined), one in zip(rows, trained, strict=True)
        }

    def _needs_value(self, candidate: EditCandidate) -> bool:
        """Whether a value would have to be trained, were this decided on now."""
        return not candidate.inspection.is_already_correct and self._plan_edit(candidate)[1] is None

    def _candidate(
        self,
        feedback: Feedback,
        offset: int,
        replay_context: ReplayContext | None = None,
        draft: DraftValue | None = None,
        standing: Standing | UnsetType = UNSET,
    ) -> EditCandidate | EditResult:
        """What there is to be decided on; or what comes of feedback on which there is nothing to be decided."""
        assert feedback.inputs is not UNSET
        assert feedback.target is not UNSET
        if draft is not None and self._still_valid(draft.inspection):
            examined = draft.inspection
        else:
            try:
                examined = self.inspect(feedback.inputs, feedback.target)
            except InputError as error:
                return rejected_result(feedback, to_one_line(error), is_dead_letter=True)
        verdict, query_D = examined.target_check, examined.query_D
        if replay_context is not None and replay_context.query_D is not None:
            query_D = replay_context.query_D.copy()
        if not np.isfinite(query_D).all():
            return rejected_result(feedback, "the model's activations on this input are not finite")
        earlier = self.memory.offsets.get(feedback.feedback_id)
        if earlier is not None:
            if verdict.predicts_target and feedback.feedback_id in self.memory.edits_of_input(
                query_D, self.tolerance(query_D)
            ):
                return EditResult(unchanged_outcome(feedback, verdict.loss))
            undone = " and undone" if feedback.feedback_id in self.memory.undone_ids() else ""
            return rejected_result(
                feedback, f"its id was used at offset {earlier}{undone}; a new correction needs a new id"
            )
        if (taken := self.find_id_conflict(feedback)) is not None:
            return rejected_result(feedback, taken)
        # Of requests within a radius that keeps clear of others about the subject, most ask the same: a few may.
        share = (
            self.config.scope_alpha if self._uses_scope_radius() and self._scope.has_subject(feedback.inputs) else 0.0
        )
        initial_radius = partial(self.initial_radius_for, feedback.inputs, query_D)
        sight = DecisionContext(
            self.reservoir, initial_radius, None if replay_context is None else replay_context.recorded, share
        )
        # For this correction no other entry's radius grows beyond its own.
        largest = (
            min(self.config.max_radius, sight.initial_radius) if self._uses_scope_radius() else self.config.max_radius
        )
        nearest = self.index.nearest(torch.from_numpy(query_D)[None])
        return EditCandidate(
            feedback=feedback,
            offset=offset,
            inspection=examined,
            query_D=query_D,
            policy=MaintenancePolicy(
                self.config.policy, sight.initial_radius, self.config.expand, self.tolerance(query_D), largest
            ),
            context=sight,
            nearest_slot=int(nearest.slots_B[0]),
            nearest_distance=float(nearest.distances_B[0]),
            given_value_V=None if replay_context is None else replay_context.value_V,
            draft=draft,
            standing=standing,
            rephrase_queries_RD=() if replay_context is None else replay_context.rephrase_queries_RD,
        )

    def find_id_conflict(self, feedback: Feedback) -> str | None:
        """Why feedback cannot have its id: keys of rephrases are named by numbers after the id of their correction."""
        if (owner := self.memory.rephrase_owners.get(feedback.feedback_id)) is not None:
            return f"its id is the name of a key of feedback {owner!r}; choose another id"
        for number in range(1, len(feedback.rephrases) + 1):
            name = rephrase_name(feedback.feedback_id, number)
            if (offset := self.memory.offsets.get(name)) is not None:
                return (
                    f"the key of its rephrase {number} would be named {name!r}, the id of feedback at offset {offset}"
                )
        return None

    def inspect(self, inputs: Inputs, target: str) -> Inspection:
        """What a pass of the edited model tells of an input and its target.

        Raises:
            InputError: the model cannot take them.
        """
        label, supervised = self.model.prepare_correction(inputs, target)
        verdict, session, rest = self.model.suffix_runner.inspect(supervised, self.lookup)
        hit = session.hits[0]
        return Inspection(
            label=label,
            target_pass=supervised,
            suffix=rest,
            target_check=verdict,
            hit=hit,
            hit_value_V=self.codebook.values_NV[[] if hit is None else hit.slot].copy(),
            query_D=session.queries_BD[0].cpu().numpy(),
            layer_output_V=session.outputs_BV[0],
            wording=self.model.task.wording_getter(supervised.batch)(0),
        )

    def _still_valid(self, inspection: Inspection) -> bool:
        """Whether the codebook as it now is would tell the same."""
        query_1D = torch.from_numpy(inspection.query_D)[None]
        (match,) = self.lookup.find_hits(query_1D, lambda _row: inspection.wording)
        hit = serving_hit(match)
        if hit is None or inspection.hit is None:
            return hit is None and inspection.hit is None
        same_hit = replace(hit, slot=inspection.hit.slot) == inspection.hit  # its place is no matter
        return same_hit and np.array_equal(self.codebook.values_NV[hit.slot], inspection.hit_value_V)

    def _protect(self, candidate: EditCandidate) -> EditResult:
        """A correction that the model fulfils already: a delta, usually without a change, puts it under the guard.

        Else a later edit could take its query over, and what a reviewer was told to be right would turn wrong.
        """
        hit, changes = candidate.inspection.hit, []
        if hit is not None:
            rephrases = inspect_rephrases(self, candidate, self.codebook.values_NV[hit.slot].copy())
            if any_predicts_target(rephrases):
                return self._extend_with_rephrases(
                    candidate, hit.slot, rephrases, candidate.inspection.target_check.loss
                )
        outcome = unchanged_outcome(candidate.feedback, candidate.inspection.target_check.loss)
        if hit is not None:
            outcome = msgspec.structs.replace(outcome, entry_id=hit.entry_id)
            reach = _round_to_float32(candidate.policy.covering_radius(hit.distance))
            clearance = self.entry_protected_distance(hit.slot, candidate)
            if hit.radius < reach <= candidate.policy.max_allowed_radius(clearance):
                changes = [EntryChange(entry_id=hit.entry_id, radius=reach)]
        said_otherwise = [
            other
            for other in self.memory.edits_of_input(candidate.query_D, candidate.policy.tolerance)
            if (entry_id := self.memory.serving_entry_id(other)) not in (UNEDITED_MODEL, outcome.entry_id)
            and self.codebook.labels[self.codebook.slot(entry_id)] != candidate.inspection.label
        ]
        kept = protect_rephrases(self, candidate)
        ended = self._ended_exceptions(candidate, outcome.entry_id, kept)
        if self.config.guard:
            same_input = self.memory.edits_of_input(candidate.query_D, candidate.policy.tolerance)
            changes += self._retention_entries(candidate, changes, same_input, 0.0, ended)
        return self._seal(
            candidate,
            outcome,
            "expand",
            changes,
            UNSET if hit is None else hit.entry_id,
            [*said_otherwise, *ended],
            kept,
        )

    def _extend_with_rephrases(
        self, candidate: EditCandidate, slot: int, rephrases: list[RephraseCandidate], loss: float
    ) -> EditResult:
        """A correction that the value of the entry in this slot serves, with keys for its rephrases.

        The correction gets a key of its own too. Else a rephrase's key could be nearer to it than the entry's.
        """
        if slot == candidate.nearest_slot and candidate.nearest_distance <= candidate.policy.tolerance:
            return self._build_delta(candidate, PolicyDecision("expand"), None, rephrases, loss=loss)
        value_V = self.codebook.values_NV[slot].copy()
        radius = candidate.policy.new_entry_radius(self.candidate_protected_distance(candidate))
        if (
            reason := self.find_proximity_conflict(radius, candidate, self.entry_wording(candidate.inspection))
        ) is not None:
            return rejected_result(candidate.feedback, reason)
        return self._build_delta(candidate, PolicyDecision("expand", radius=radius), value_V, rephrases, loss=loss)

    def _plan_edit(self, candidate: EditCandidate) -> tuple[PolicyDecision, TargetCheck | None]:
        """What to do; where an entry is to serve this too, with the verdict on its value, which is right."""
        neighbour = None
        if candidate.nearest_slot != NO_SLOT:
            neighbour = Neighbour(
                distance=candidate.nearest_distance,
                radius=float(self.codebook.radii_N[candidate.nearest_slot]),
                same_label=self.codebook.labels[candidate.nearest_slot] == candidate.inspection.label,
                protected_distance=self.entry_protected_distance(candidate.nearest_slot, candidate),
            )
        clearance = self.candidate_protected_distance(candidate)
        decision = decide_action(candidate.policy, neighbour, clearance)
        if decision.action == "expand":
            assert neighbour is not None
            if self._shares_nearest_key(candidate) or self._wording_agrees(candidate):
                value_V = torch.from_numpy(self.codebook.values_NV[candidate.nearest_slot].copy())
                found = self.model.suffix_runner.check_value(candidate.inspection.suffix, value_V)
                if found.predicts_target:
                    return decision, found
            decision = fallback_to_own_entry(candidate.policy, neighbour, clearance)
        return decision, None

    def _carry_out(self, candidate: EditCandidate) -> EditResult:
        decision, found = self._plan_edit(candidate)
        if found is not None:
            rephrases = inspect_rephrases(self, candidate, self.codebook.values_NV[candidate.nearest_slot].copy())
            if any_predicts_target(rephrases):
                return self._extend_with_rephrases(candidate, candidate.nearest_slot, rephrases, found.loss)
            return self._build_delta(candidate, decision, None, rephrases, loss=found.loss)
        if (
            decision.radius is not None
            and (
                reason := self.find_proximity_conflict(
                    decision.radius, candidate, self.entry_wording(candidate.inspection)
                )
            )
            is not None
        ):
            return rejected_result(candidate.feedback, reason)
        start_V = self._start_value(candidate)
        if candidate.given_value_V is not None:
            return self._build_delta(
                candidate,
                decision,
                candidate.given_value_V,
                inspect_rephrases(self, candidate, candidate.given_value_V),
            )
        trained = None if candidate.draft is None else self._verified(candidate, candidate.draft.trained)
        if trained is None:
            candidate = replace(candidate, draft=None)
            trained = train_value(self.model.suffix_runner, candidate.inspection.suffix, start_V, self.config.recipe)
        loss = trained.target_check.loss if math.isfinite(trained.target_check.loss) else UNSET
        if not trained.converged:
            return rejected_result(
                candidate.feedback,
                self.explain_failed_training(candidate.inspection, trained),
                steps=trained.steps,
                loss=loss,
            )
        trained, rephrases = fit_shared_value(self, candidate, trained)
        loss = trained.target_check.loss
        return self._build_delta(candidate, decision, trained.value_V, rephrases, steps=trained.steps, loss=loss)

    def find_proximity_conflict(self, radius: float, candidate: EditCandidate, wording: str) -> str | None:
        """Why a key with this radius would take an input that is to stay right; None where it does not."""
        if self.config.guard:
            kept = self.memory.nearest_confirmed_distance(
                candidate.query_D, candidate.policy.tolerance, candidate.query_D, wording
            )
            if radius > MAX_TRAFFIC_FRACTION * kept:  # which only the floor under radii brings about
                return (
                    f"an input that is to stay right lies {kept:.3g} away, and in {self.model.query_dtype} inputs that"
                    " near are not told apart"
                )
        return None

    def explain_failed_training(self, inspection: Inspection, trained: TrainedValue) -> str:
        """Why training found no value, and what to try."""
        recipe = self.config.recipe
        if not math.isfinite(trained.target_check.loss):
            return (
                f"no value was found: training diverged after {trained.steps} steps; lower GRACESTREAM_LEARNING_RATE,"
                f" which is {recipe.learning_rate:g}"
            )
        reason = f"no value was found in {trained.steps} steps; the loss is still {trained.target_check.loss:.3g}"
        tokens = len(inspection.label)
        reached = self.model.suffix_runner.tokens_influenced(inspection.suffix, torch.from_numpy(trained.value_V))
        if reached == tokens:
            wider = isinstance(self.model.task, Seq2SeqGeneration) and not is_in_decoder(self.model.layer)
            replaced = ", set GRACESTREAM_REPLACE=all" if wider and self.model.adaptor.replace == "last" else ""
            shorter = " or give a shorter target" if tokens > SHORT_TARGET_TOKENS else ""
            return (
                f"{reason}; raise GRACESTREAM_MAX_STEPS, which is {recipe.max_steps}{replaced}, edit another layer"
                f" (`gracestream layers`){shorter}"
            )
        return f"{reason}; at this layer a value reaches {reached} of the target's {tokens} tokens: edit an earlier one"

    def _verified(self, candidate: EditCandidate, trained: TrainedValue) -> TrainedValue | None:
        """A value that was trained with others, if it is right on its own as well; else it is to be trained alone."""
        if not trained.converged:
            return None
        found = self.model.suffix_runner.check_value(candidate.inspection.suffix, torch.from_numpy(trained.value_V))
        return replace(trained, target_check=found) if found.predicts_target else None

    def _build_delta(
        self,
        candidate: EditCandidate,
        decision: PolicyDecision,
        value_V: np.ndarray | None,
        rephrases: list[RephraseCandidate],
        **outcome_fields: object,
    ) -> EditResult:
        """Decision, value, keys of rephrases and guard as one delta; without a value the nearest entry's serves."""
        feedback_id, label = candidate.feedback.feedback_id, candidate.inspection.label
        own_key = decision.radius is not None
        neighbour_id = self.codebook.entry_ids[candidate.nearest_slot] if candidate.nearest_slot != NO_SLOT else ""
        entry_id = feedback_id if own_key else neighbour_id
        if own_key and entry_id in self.codebook:
            return rejected_result(
                candidate.feedback, f"an entry named {entry_id!r} exists; a correction needs an id of its own"
            )
        changes: list[EntryChange] = []
        radius: float | UnsetType = UNSET
        if (
            decision.neighbour_radius is not None
            and decision.neighbour_radius != self.codebook.radii_N[candidate.nearest_slot]
        ):
            radius = _round_to_float32(decision.neighbour_radius)
        wording: str | UnsetType = UNSET
        if not own_key and self._shares_nearest_key(candidate):
            # The entry serves both wordings from now on. So it must keep clear of what only one of them left out.
            wording = ""
            held = self.codebook.radii_N[candidate.nearest_slot] if radius is UNSET else radius
            limit = candidate.policy.max_allowed_radius(
                self.entry_protected_distance(candidate.nearest_slot, candidate)
            )
            radius = _round_to_float32(
                max(min(held, limit), candidate.policy.covering_radius(candidate.nearest_distance))
            )
        if decision.action != "replace" and not (radius is UNSET and wording is UNSET):
            changes.append(EntryChange(entry_id=neighbour_id, radius=radius, wording=wording))
        if value_V is not None:
            value = Tensor.from_array(value_V)
            if decision.action == "replace":
                changes.append(EntryChange(entry_id=entry_id, value=value, radius=radius, label=label, wording=wording))
            else:
                assert decision.radius is not None
                radius = _round_to_float32(decision.radius)
                key = Tensor.from_array(candidate.query_D)
                changes.append(
                    EntryChange(
                        entry_id=entry_id,
                        key=key,
                        value=value,
                        radius=radius,
                        label=candidate.inspection.label,
                        wording=self.entry_wording(candidate.inspection) or UNSET,
                    )
                )
        given_V = self.codebook.values_NV[candidate.nearest_slot].copy() if value_V is None else value_V
        by_entry = {change.entry_id: change for change in changes}
        placed = place_rephrases(self, candidate, given_V, by_entry, rephrases)
        changes = list(by_entry.values())
        same_input = self.memory.edits_of_input(candidate.query_D, candidate.policy.tolerance)
        superseded = [
            *self.superseded_edits(same_input, label, self.entry_wording(candidate.inspection)),
            *self._ended_exceptions(candidate, entry_id, placed),
        ]
        ended = [name for name in (*superseded, *placed.supersedes) if name in self.codebook.exceptions]
        if self.config.guard:
            changes += self._retention_entries(
                candidate, changes, [*same_input, *placed.same_input_edits], placed.tolerance, ended
            )
        unchanged_now = decision.action == "expand" and not changes and not ended
        outcome = Outcome(
            v=SCHEMA_VERSION,
            feedback_id=feedback_id,
            status="unchanged" if unchanged_now else STATUS_BY_OP[decision.action],
            entry_id=entry_id,
            **outcome_fields,  # type: ignore[arg-type]
        )
        return self._seal(candidate, outcome, decision.action, changes, entry_id, superseded, placed)

    def _seal(
        self,
        candidate: EditCandidate,
        outcome: Outcome,
        op: Op,
        changes: list[EntryChange],
        entry_id: str | UnsetType,
        supersedes: list[str],
        placement: RephrasePlacement,
    ) -> EditResult:
        """The outcome with the record that carries it out."""
        nearest = None if candidate.nearest_slot == NO_SLOT else self.codebook.entry_ids[candidate.nearest_slot]
        own_key = any(change.entry_id == entry_id and change.key is not UNSET for change in changes)
        cause = Cause(
            feedback_id=candidate.feedback.feedback_id,
            offset=candidate.offset,
            author=candidate.feedback.author,
            entry_id=entry_id,
            query=UNSET if own_key else Tensor.from_array(candidate.query_D),
            wording="" if own_key else candidate.inspection.wording,
            supersedes=tuple(dict.fromkeys([*supersedes, *placement.supersedes])),
            together=() if candidate.draft is None or op == "expand" else candidate.draft.trained_with,
            seen=candidate.context.record(nearest, candidate.nearest_distance),
            traffic={str(partition): end for partition, end in sorted(self.reservoir.positions.items())} or UNSET,
            standing=candidate.standing,
            rephrases=tuple(placement.keys),
        )
        if placement.left_out:
            outcome = msgspec.structs.replace(outcome, left_out=tuple(placement.left_out))
        ended = tuple(
            ExceptionChange(feedback_id=name, removed=True)
            for name in cause.supersedes
            if name in self.codebook.exceptions
        )
        return self.build_result(candidate.feedback, outcome, op, entries=tuple(changes), exceptions=ended, cause=cause)

    def _ended_exceptions(
        self, candidate: EditCandidate, entry_id: str | UnsetType, placement: RephrasePlacement
    ) -> list[str]:
        """The exceptions that keep the entries which are to serve these prompts from now on from one of them."""
        prompts = [(candidate.query_D, self.entry_wording(candidate.inspection), entry_id)]
        prompts += [
            (one.query.array(), one.wording, one.entry_id)
            for one in placement.keys
            if one.query is not UNSET and not one.left_out
        ]
        return [
            exception.feedback_id
            for query_D, wording, serving_entry in prompts
            for exception in self.codebook.exceptions.find_matching(query_D, wording, self.tolerance(query_D))
            if serving_entry in exception.entry_ids
        ]

    def build_result(self, feedback: Feedback, outcome: Outcome, op: Op, **fields: object) -> EditResult:
        """The outcome, and the next record with these fields; a rejection where no reader would take that record."""
        record = self.next_delta(op, **fields)
        try:
            self.codebook.check(record)  # what is committed can never be taken back
        except HistoryError as fault:
            return rejected_result(feedback, f"no reader would take its delta: {fault}")
        if len(record) > MAX_RECORD_BYTES:
            return rejected_result(
                feedback, f"its delta would have {len(record)} bytes; {MAX_RECORD_BYTES} are allowed"
            )
        return EditResult(msgspec.structs.replace(outcome, seq=self.codebook.seq + 1), record)

    def _retention_entries(
        self,
        candidate: EditCandidate,
        changes: list[EntryChange],
        same_input: list[str],
        tolerance: float,
        ended_exceptions: list[str],
    ) -> list[EntryChange]:
        """Entries of their own for the edits that these changes would take from the entries that serve them.

        An entry may take an edit, too, of whose prompt it is no longer an exception (`ended_exceptions`).
        """
        keys = {change.entry_id: self._entry_key(change) for change in changes if _changes_coverage(change)}
        for exception in (one for one in self.codebook.exceptions if one.feedback_id in ended_exceptions):
            for entry_id in exception.entry_ids:
                keys.setdefault(entry_id, self._entry_key(EntryChange(entry_id=entry_id)))
        displaced = self.memory.edits_needing_entry(
            keys=keys,
            shrunk={change.entry_id: change.radius for change in changes if change.radius is not UNSET},
            relabelled={c.entry_id for c in changes if c.value is not UNSET and c.key is UNSET},
            tolerance=max(candidate.policy.tolerance, tolerance),
            ignore=same_input,
        )
        guarded = []
        for feedback_id in displaced:
            query_D = self.memory.query(feedback_id)
            wording = self._retention_wording(self.memory.wording(feedback_id)) if self.config.wording else ""
            server = self.codebook.entry(self.codebook.slot(self.memory.serving_entry_id(feedback_id)))
            policy = replace(candidate.policy, tolerance=self.tolerance(query_D))
            guarded.append(
                EntryChange(
                    entry_id=feedback_id,
                    key=Tensor.from_array(query_D),
                    value=Tensor.from_array(server.value_V),
                    radius=_round_to_float32(
                        policy.new_entry_radius(self.protected_distance(feedback_id, query_D, wording, candidate))
                    ),
                    label=server.label,
                    wording=wording or UNSET,
                )
            )
        return guarded

    def _retention_wording(self, wording: str) -> str:
        """The wording of an entry that an earlier edit is given: no prompt of the unedited model has the same words."""
        return mark_as_excerpt(wording) if self.memory.confirmed_with_same_words(wording) else wording

    def _entry_key(self, change: EntryChange) -> np.ndarray:
        """The key of an entry that changes, or that is new."""
        if change.key is not UNSET:
            return change.key.array()
        return self.codebook.entry(self.codebook.slot(change.entry_id)).key_D

    def _shares_nearest_key(self, candidate: EditCandidate) -> bool:
        """Whether the nearest key is the correction's too, within the noise, though its wording disagrees."""
        return (
            candidate.nearest_slot != NO_SLOT
            and candidate.nearest_distance <= candidate.policy.tolerance
            and not self._wording_agrees(candidate)
        )

    def _wording_agrees(self, candidate: EditCandidate) -> bool:
        """Whether the wording of the nearest entry agrees with the correction's."""
        return not find_disagreement(
            self.codebook.wordings[candidate.nearest_slot], self.entry_wording(candidate.inspection)
        )

    def entry_wording(self, inspection: Inspection) -> str:
        """The wording that an entry at this prompt is given: without one it serves all prompts within its radius.

        The log keeps every prompt's wording, so that a later plan which compares words knows those of earlier edits.
        """
        return inspection.wording if self.config.wording else ""

    def protected_distance(self, name: str, key_D: np.ndarray, wording: str, candidate: EditCandidate) -> float:
        """From a key to the nearest input that must stay as it is, which the one being corrected no longer is.

        What an entry with this wording would not serve does not count.
        """
        noise = self.tolerance(key_D)
        traffic = candidate.context.traffic_distance(name, key_D, noise, candidate.query_D, wording)
        return (
            min(traffic, self.memory.nearest_confirmed_distance(key_D, noise, candidate.query_D, wording))
            if self.config.guard
            else traffic
        )

    def candidate_protected_distance(self, candidate: EditCandidate) -> float:
        """The same, of the correction's own key."""
        return self.protected_distance(
            candidate.feedback.feedback_id, candidate.query_D, self.entry_wording(candidate.inspection), candidate
        )

    def entry_protected_distance(self, slot: int, candidate: EditCandidate) -> float:
        """The same, of an entry's key."""
        codebook = self.codebook
        wording = (
            "" if slot == candidate.nearest_slot and self._shares_nearest_key(candidate) else codebook.wordings[slot]
        )
        return self.protected_distance(codebook.entry_ids[slot], codebook.keys_ND[slot], wording, candidate)

    def label_of_edit(self, feedback_id: str) -> Label | None:
        """The label of the entry that serves an edit; None where the bare model does."""
        entry_id = self.memory.serving_entry_id(feedback_id)
        return None if entry_id == UNEDITED_MODEL else self.codebook.labels[self.codebook.slot(entry_id)]

    def superseded_edits(self, same_input: Sequence[str], label: Label, wording: str) -> list[str]:
        """The edits that a correction supersedes: of those of its input, and of those in its words.

        An exception of its input is superseded only where it is the same request.
        """
        return [
            name
            for name in same_input
            if self.label_of_edit(name) != label
            and (name not in self.codebook.exceptions or is_same_request(self.memory.wording(name), wording))
        ] + self.memory.confirmed_with_same_words(wording)

    def _start_value(self, candidate: EditCandidate) -> torch.Tensor:
        candidate.context.start_entry = self.warm_start_entry(candidate.inspection.label, candidate.query_D)
        if candidate.context.start_entry is UNSET:
            return self._initial_value(candidate.offset, candidate.inspection.layer_output_V)
        return torch.from_numpy(self.codebook.values_NV[self.codebook.slot(candidate.context.start_entry)].copy())

    def _initial_value(self, offset: int, layer_output_V: torch.Tensor) -> torch.Tensor:
        """Where a value starts that starts from no entry's: the module's own output, or at random."""
        if self.config.init != "random":
            return layer_output_V
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + offset)
        return torch.rand(layer_output_V.shape, generator=generator)

    def tolerance(self, query_D: np.ndarray) -> float:
        """Distances from this query up to this are the same input, seen in another batch."""
        return match_tolerance(float(np.linalg.norm(query_D)), self.model.query_dtype)


def _changes_coverage(change: EntryChange) -> bool:
    """Whether an entry serves other prompts after a change than before, or lets a farther entry serve them."""
    return any(field is not UNSET for field in (change.key, change.radius, change.wording))


def _round_to_float32(radius: float) -> float:
    """The float32 that the codebook will hold, so that log and Redis say the same."""
    return float(np.float32(radius))
