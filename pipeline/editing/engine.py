"""The editing engine: one correction in, one outcome out, and the delta that carries it out.

The phases of an edit, in order:

1. Inspect (`workspace.EditWorkspace.inspect`): run the edited model once on the correction.
2. Draft (`value_search`): train a value. `draft_values` does so in advance, for several corrections in one batch.
3. Decide (this module): choose to add, expand, split or replace an entry (docs/explanation/method.md).
4. Build (`delta_builder`): turn the decision into entry changes, a delta and an outcome.

A correction that waits with others is inspected and decided on twice. `draft_values` does both only to learn which
corrections need a value. `edit` repeats them, because earlier decisions of the batch may have changed the codebook. A
draft that is still valid saves it the inspection and the training.

Guarantees:

1. `edit` changes nothing. A decision takes effect when its record is given to `apply`. A starting editor replays its
   predecessors' records by the same method.
2. Decisions are made one at a time, in the order of feedback. The same state, model and feedback give the same record.
3. There is no Kafka, no Redis, no clock and no global random state. Editors, reproductions and experiments share
   this code.

Not promised: that a correction takes effect. Training may find no value, and a confirmed input may be too near.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook import (
    AppliedDelta,
    MaintenancePolicy,
    Neighbour,
    PolicyDecision,
    decide_action,
    fallback_to_own_entry,
    if_serving,
)
from gracestream.pipeline.editing.candidate import (
    DraftValue,
    EditCandidate,
    Inspection,
    RecordedInputs,
    group_by_length,
)
from gracestream.pipeline.editing.context import ContextRecorder
from gracestream.pipeline.editing.delta_builder import build_confirmation, build_correction, next_delta
from gracestream.pipeline.editing.rephrases import (
    RephraseCandidate,
    any_predicts_target,
    fit_shared_value,
    inspect_rephrases,
)
from gracestream.pipeline.editing.result import DecisionResult, rejected_result, unchanged_outcome
from gracestream.pipeline.editing.roles import explain_propose_denial
from gracestream.pipeline.editing.value_search import explain_failed_training, find_value, start_value, train_group
from gracestream.pipeline.editing.value_training import TrainedValue
from gracestream.pipeline.editing.workspace import EditWorkspace
from gracestream.pipeline.model import InputError, TargetCheck
from gracestream.pipeline.search import NO_SLOT
from gracestream.schemas.deltas import Op, Standing
from gracestream.schemas.messages import Feedback, to_one_line


class EditEngine(EditWorkspace):
    """A codebook that decides on corrections and applies deltas; the state that it reads is `EditWorkspace`'s."""

    def apply(self, record: bytes) -> AppliedDelta | None:
        """Apply one record of `deltas` to the codebook, the index, the edit memory and the traffic sample.

        Returns None, and changes nothing, if the record has a lower term: it comes from a fenced editor.

        Raises:
            HistoryError: the record does not continue this codebook's history.
        """
        applied = self.codebook.apply(record)
        if applied is not None:
            self.index.refresh(applied)
            self.memory.apply_delta(applied.delta, self.codebook)
            cause = applied.delta.cause
            if cause is not UNSET and cause.entry_id is not UNSET and cause.feedback_id in self.memory:
                # The feedback flagged these inputs, so they no longer count as unflagged traffic.
                self._remove_traffic(cause.feedback_id)
                for name in filter(self.memory.__contains__, cause.rephrases_by_name()):
                    self._remove_traffic(name)
        return applied

    def _remove_traffic(self, edit_id: str) -> None:
        query_D = self.memory.query(edit_id)
        self.traffic_sample.remove(query_D, self.tolerance(query_D))

    def lead_delta(self, environment: dict[str, str]) -> bytes:
        """The record by which this editor begins the next term (docs/explanation/consistency.md); it is not applied."""
        return self.next_delta("lead", term=self.codebook.term + 1, environment=environment)

    def next_delta(self, op: Op, **fields: object) -> bytes:
        """The record that continues the history of this codebook, with these fields of `Delta`; it is not applied."""
        return next_delta(self.codebook, op, **fields)

    def add_traffic(self, score: float, query_D: np.ndarray, wording: str = "") -> None:
        """Offer a request's query (D) to the traffic sample, unless an entry serves the request.

        `score` comes from `TrafficSample.offer`. Requests that an entry serves must not bound that entry's radius.
        """
        (found,) = self.lookup.find_entries(torch.from_numpy(query_D)[None], lambda _row: wording)
        if if_serving(found) is None:
            self.traffic_sample.add(score, query_D, self.tolerance(query_D), wording)

    def edit(
        self,
        feedback: Feedback,
        offset: int,
        recorded_inputs: RecordedInputs | None = None,
        draft: DraftValue | None = None,
        standing: Standing | UnsetType = UNSET,
    ) -> DecisionResult:
        """Decide on one correction, and train a value if it needs one; nothing changes before `apply`.

        Args:
            feedback: The correction.
            offset: The offset of `feedback` in its topic.
            recorded_inputs: For a decision that is repeated: its recorded inputs.
            draft: The result of `draft_values` for this correction, if any.
            standing: The sender's permissions (`pipeline.editing.roles`); UNSET without a list of authors.
        """
        if (denial := explain_propose_denial(feedback, standing)) is not None:
            return rejected_result(feedback, denial)
        candidate = self._make_candidate(feedback, offset, recorded_inputs, draft, standing)
        if isinstance(candidate, DecisionResult):
            return candidate
        result = self._confirm(candidate) if candidate.inspection.is_already_correct else self._correct(candidate)
        if result.delta_record is not None:
            return result
        # Without a delta nothing else records the context, so the outcome must carry the inputs of its status.
        nearest_id = [] if candidate.nearest_slot == NO_SLOT else [self.codebook.entry_ids[candidate.nearest_slot]]
        return replace(result, context=candidate.context_recorder.record_for_status(*nearest_id))

    def draft_values(
        self, corrections: Sequence[tuple[Feedback, int]], heartbeat: Callable[[], object] = lambda: None
    ) -> dict[int, DraftValue]:
        """Train the values that corrections would need if each were decided on now; returns drafts by offset.

        Corrections of similar length train in one batch. `edit` then decides on them one at a time. A value does not
        depend on the other corrections of the batch, rounding apart.

        There are no drafts with `value_init=label`: values then start from entries that earlier decisions may change.
        Nor are there any for a model that cannot train with padding.

        Args:
            corrections: Feedback with its offset, in the order of offsets.
            heartbeat: Called for each inspection and at each training step.

        Raises:
            Exception: an error of the model on one of the corrections, as it is.
        """
        if self.config.value_init == "label" or not self.model.suffix_runner.supports_padding():
            return {}
        candidates = []
        for feedback, offset in corrections:
            heartbeat()
            candidate = self._make_candidate(feedback, offset)
            if isinstance(candidate, EditCandidate) and self._needs_value(candidate):
                candidates.append(candidate)
        drafts: dict[int, DraftValue] = {}
        for group in group_by_length(candidates):
            if len(group) > 1:  # `edit` trains a single value as well by itself
                rows = [(candidate.feedback, candidate.offset, candidate.inspection) for candidate in group]
                drafts |= train_group(self, rows, heartbeat)
        return drafts

    def train_batch(self, corrections: Sequence[tuple[Feedback, int]]) -> dict[int, DraftValue]:
        """Train the values of exactly these corrections in one batch; returns drafts by offset.

        Reproduces a batch of an editor bit for bit, if the corrections come in its order
        (docs/explanation/determinism.md).

        Raises:
            Exception: an error of the model on one of the corrections, as it is.
        """
        rows = []
        for feedback, offset in corrections:
            assert feedback.inputs is not UNSET
            assert feedback.target is not UNSET
            rows.append((feedback, offset, self.inspect(feedback.inputs, feedback.target)))
        return train_group(self, rows)

    def explain_failed_training(self, inspection: Inspection, trained: TrainedValue) -> str:
        """Why training found no value, and which setting or target to change."""
        return explain_failed_training(self, inspection, trained)

    # Phase 1: inspect

    def _make_candidate(
        self,
        feedback: Feedback,
        offset: int,
        recorded_inputs: RecordedInputs | None = None,
        draft: DraftValue | None = None,
        standing: Standing | UnsetType = UNSET,
    ) -> EditCandidate | DecisionResult:
        """The correction with the facts of its inspection; a result if these alone settle the matter."""
        assert feedback.inputs is not UNSET
        assert feedback.target is not UNSET
        if draft is not None and self.is_still_valid(draft.inspection):
            inspection = draft.inspection
        else:
            try:
                inspection = self.inspect(feedback.inputs, feedback.target)
            except InputError as error:
                return rejected_result(feedback, to_one_line(error), is_dead_letter=True)
        query_D = inspection.query_D
        if recorded_inputs is not None and recorded_inputs.query_D is not None:
            query_D = recorded_inputs.query_D.copy()
        if not np.isfinite(query_D).all():
            return rejected_result(feedback, "the model's activations on this input are not finite")
        if (known_id_result := self._resolve_known_id(feedback, inspection.target_check, query_D)) is not None:
            return known_id_result
        context_recorder = ContextRecorder(
            self.traffic_sample,
            partial(self.initial_radius_for, feedback.inputs, query_D),
            None if recorded_inputs is None else recorded_inputs.context,
            self.ignored_traffic_share(feedback.inputs),
        )
        # A scope radius says how far the correction's meaning extends. So no other entry grows beyond it for this one.
        max_radius = (
            min(self.config.max_radius, context_recorder.initial_radius)
            if self.uses_scope_radius()
            else self.config.max_radius
        )
        nearest = self.index.nearest(torch.from_numpy(query_D)[None])
        return EditCandidate(
            feedback=feedback,
            offset=offset,
            inspection=inspection,
            query_D=query_D,
            policy=MaintenancePolicy(
                self.config.policy,
                context_recorder.initial_radius,
                self.config.expand,
                self.tolerance(query_D),
                max_radius,
            ),
            context_recorder=context_recorder,
            nearest_slot=int(nearest.slots_B[0]),
            nearest_distance=float(nearest.distances_B[0]),
            given_value_V=None if recorded_inputs is None else recorded_inputs.value_V,
            draft=draft,
            standing=standing,
            rephrase_queries_RD=() if recorded_inputs is None else recorded_inputs.rephrase_queries_RD,
        )

    def _resolve_known_id(
        self, feedback: Feedback, target_check: TargetCheck, query_D: np.ndarray
    ) -> DecisionResult | None:
        """The result of feedback whose id is taken; None if the id is free.

        A correction sent again that is still in force is `unchanged`. Any other use of a taken id is rejected.
        """
        earlier_offset = self.memory.offsets.get(feedback.feedback_id)
        if earlier_offset is not None:
            if target_check.predicts_target and feedback.feedback_id in self.memory.edits_of_input(
                query_D, self.tolerance(query_D)
            ):
                return DecisionResult(unchanged_outcome(feedback, target_check.loss))
            undone = " and undone" if feedback.feedback_id in self.memory.undone_ids() else ""
            return rejected_result(
                feedback, f"its id was used at offset {earlier_offset}{undone}; a new correction needs a new id"
            )
        if (id_conflict := self.find_id_conflict(feedback)) is not None:
            return rejected_result(feedback, id_conflict)
        return None

    # Phase 3: decide

    def _needs_value(self, candidate: EditCandidate) -> bool:
        """Whether a decision on this candidate, if it were made now, would train a value."""
        return not candidate.inspection.is_already_correct and self._decide(candidate)[1] is None

    def _decide(self, candidate: EditCandidate) -> tuple[PolicyDecision, TargetCheck | None]:
        """The decision, and the check of the nearest entry's value if that value serves the correction.

        Without a check the correction needs a value of its own.
        """
        neighbour = None
        if candidate.nearest_slot != NO_SLOT:
            neighbour = Neighbour(
                distance=candidate.nearest_distance,
                radius=float(self.codebook.radii_N[candidate.nearest_slot]),
                same_label=self.codebook.labels[candidate.nearest_slot] == candidate.inspection.label,
                protected_distance=self.entry_protected_distance(candidate.nearest_slot, candidate),
            )
        protected_distance = self.candidate_protected_distance(candidate)
        decision = decide_action(candidate.policy, neighbour, protected_distance)
        if decision.action == "expand":
            assert neighbour is not None
            # The lookup compares words. An entry at another key whose words disagree would not serve the prompt.
            if self.shares_nearest_key(candidate) or self.wording_agrees(candidate):
                value_V = torch.from_numpy(self.codebook.values_NV[candidate.nearest_slot].copy())
                check = self.model.suffix_runner.check_value(candidate.inspection.suffix, value_V)
                if check.predicts_target:
                    return decision, check
            decision = fallback_to_own_entry(candidate.policy, neighbour, protected_distance)
        return decision, None

    def _confirm(self, candidate: EditCandidate) -> DecisionResult:
        """The result of a correction whose target the model predicts already."""
        served_by = candidate.inspection.served_by
        if served_by is not None:
            rephrases = inspect_rephrases(self, candidate, self.codebook.values_NV[served_by.slot].copy())
            if any_predicts_target(rephrases):
                loss = candidate.inspection.target_check.loss
                return self._extend_with_rephrases(candidate, served_by.slot, rephrases, loss)
        return build_confirmation(self, candidate)

    def _correct(self, candidate: EditCandidate) -> DecisionResult:
        """The result of a correction whose target the model does not predict yet."""
        decision, check = self._decide(candidate)
        if check is not None:
            rephrases = inspect_rephrases(self, candidate, self.codebook.values_NV[candidate.nearest_slot].copy())
            if any_predicts_target(rephrases):
                return self._extend_with_rephrases(candidate, candidate.nearest_slot, rephrases, check.loss)
            return build_correction(self, candidate, decision, None, rephrases, loss=check.loss)
        if decision.radius is not None:
            wording = self.entry_wording(candidate.inspection)
            if (conflict := self.find_proximity_conflict(decision.radius, candidate, wording)) is not None:
                return rejected_result(candidate.feedback, conflict)
        # Before the reuse of a recorded value too: the delta records the entry that training would start from.
        start_V = start_value(self, candidate)
        if candidate.given_value_V is not None:
            rephrases = inspect_rephrases(self, candidate, candidate.given_value_V)
            return build_correction(self, candidate, decision, candidate.given_value_V, rephrases)
        candidate, trained = find_value(self, candidate, start_V)
        if not trained.converged:
            # JSON has no number for a loss that is not finite.
            loss = trained.target_check.loss if math.isfinite(trained.target_check.loss) else UNSET
            reason = explain_failed_training(self, candidate.inspection, trained)
            return rejected_result(candidate.feedback, reason, steps=trained.steps, loss=loss)
        trained, rephrases = fit_shared_value(self, candidate, trained)
        return build_correction(
            self,
            candidate,
            decision,
            trained.value_V,
            rephrases,
            steps=trained.steps,
            loss=trained.target_check.loss,
        )

    def _extend_with_rephrases(
        self, candidate: EditCandidate, slot: int, rephrases: list[RephraseCandidate], loss: float
    ) -> DecisionResult:
        """The result of a correction that the value of the entry in this slot serves, with keys for its rephrases.

        The correction gets a key of its own too, unless the entry's key is its query. Otherwise a rephrase's key could
        be nearer to the correction than the entry's.
        """
        if slot == candidate.nearest_slot and candidate.nearest_distance <= candidate.policy.tolerance:
            return build_correction(self, candidate, PolicyDecision("expand"), None, rephrases, loss=loss)
        value_V = self.codebook.values_NV[slot].copy()
        radius = candidate.policy.new_entry_radius(self.candidate_protected_distance(candidate))
        wording = self.entry_wording(candidate.inspection)
        if (conflict := self.find_proximity_conflict(radius, candidate, wording)) is not None:
            return rejected_result(candidate.feedback, conflict)
        return build_correction(self, candidate, PolicyDecision("expand", radius=radius), value_V, rephrases, loss=loss)
