"""What every phase of an edit reads: the model, the codebook and its index, past edits, and unflagged traffic.

It also holds the first phase, the inspection of one input with the edited model.

1. No method here changes the codebook, the memory or the traffic sample.
2. There is no Kafka, no Redis, no clock and no global random state.

The measures in use are those of docs/explanation/method.md. A *confirmed input* is a corrected input whose unedited
answer was right already. A *protected distance* runs from a key to the nearest input whose answer must not change.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gracestream.pipeline.codebook import (
    MAX_TRAFFIC_FRACTION,
    UNEDITED_MODEL,
    Codebook,
    CodebookLookup,
    EditMemory,
    KeyIndex,
    Label,
    if_serving,
    is_same_request,
    match_tolerance,
)
from gracestream.pipeline.editing.calibration import radius_unit_from_probes
from gracestream.pipeline.editing.candidate import EditCandidate, Inspection
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.scope import ScopeRadius
from gracestream.pipeline.editing.traffic_sample import TrafficSample
from gracestream.pipeline.model import EditableModel
from gracestream.pipeline.search import NO_SLOT
from gracestream.pipeline.wording import find_disagreement
from gracestream.schemas.deltas import rephrase_name
from gracestream.schemas.messages import Feedback, Inputs


class EditWorkspace:
    """A codebook with the model that it edits and the state that decisions on it read.

    Attributes:
        model: The model, wrapped at the edited layer.
        config: The rules of decisions; an editor keeps them for a whole term.
        codebook: The entries and exceptions.
        index: Nearest-key search over `codebook`.
        memory: The edits in force: their queries and the entries that serve them.
        traffic_sample: The sample of unflagged traffic.
    """

    def __init__(
        self, model: EditableModel, codebook: str, config: EditConfig | None = None, scope: ScopeRadius | None = None
    ) -> None:
        """Start with an empty codebook; workspaces whose queries come from one encoder may share `scope`."""
        self.model, self.config = model, config or EditConfig()
        self.codebook = Codebook(codebook, model.fingerprint, model.layer)
        self.index = KeyIndex(self.codebook, model.device)
        self.memory = EditMemory()
        self.traffic_sample = TrafficSample(self.config.traffic_sample_size, self.config.seed)
        self._probe_radius_unit: float | None = None
        self._scope = scope or ScopeRadius(model)

    @property
    def lookup(self) -> CodebookLookup:
        """The lookup of prompts in the current codebook.

        It is not cached, because the counterfactual replay of an undo puts another codebook and index in place.
        """
        return CodebookLookup(self.codebook, self.index)

    def tolerance(self, query_D: np.ndarray) -> float:
        """The numerical tolerance of a query: nearer queries count as the same input, computed in another batch."""
        return match_tolerance(float(np.linalg.norm(query_D)), self.model.query_dtype)

    # Radii

    def initial_radius(self) -> float:
        """The initial radius (epsilon_init of the paper), as an absolute distance.

        Its unit is the median nearest-neighbour distance of the traffic sample. While the sample is too small, the unit
        comes from probe sentences; `radius_unit=absolute` needs no unit.

        Raises:
            InputError: the unit has to come from probe sentences, and the model accepts fewer than two of them.
        """
        if self.config.radius_unit == "absolute":
            return self.config.radius
        unit = self.traffic_sample.median_distance()
        if unit is None:
            if self._probe_radius_unit is None:
                self._probe_radius_unit = radius_unit_from_probes(self.model)
            unit = self._probe_radius_unit
        return self.config.radius * unit

    def initial_radius_for(self, inputs: Inputs, query_D: np.ndarray) -> float:
        """The initial radius of one correction: its scope radius, if it has one and that is smaller.

        A scope radius keeps clear of other requests about the subject of `inputs` (`pipeline.editing.negatives`).
        """
        own_radius = self._scope(inputs, query_D, self.config.scope_error_rate) if self.uses_scope_radius() else None
        return self.initial_radius() if own_radius is None else min(self.initial_radius(), own_radius)

    def uses_scope_radius(self) -> bool:
        """Whether corrections with a subject get a radius of their own."""
        return self.config.use_scope_radius and self.config.policy == "nearest" and self._scope.is_supported

    def ignored_traffic_share(self, inputs: Inputs) -> float:
        """The share of the traffic sample that may lie within a radius of this correction, between 0 and 1.

        A scope radius already keeps clear of other requests about the subject. So most traffic within it asks for the
        same as the correction, and a few requests do not shrink it.
        """
        return self.config.scope_error_rate if self.uses_scope_radius() and self._scope.has_subject(inputs) else 0.0

    # Inspection

    def inspect(self, inputs: Inputs, target: str) -> Inspection:
        """Run the edited model once on an input and its target, and return the facts that a decision needs.

        Raises:
            InputError: the model cannot take the input or the target.
        """
        label, target_pass = self.model.prepare_correction(inputs, target)
        target_check, session, suffix = self.model.suffix_runner.inspect(target_pass, self.lookup)
        served_by = session.serving_entries[0]
        return Inspection(
            label=label,
            target_pass=target_pass,
            suffix=suffix,
            target_check=target_check,
            served_by=served_by,
            serving_value_V=self.codebook.values_NV[[] if served_by is None else served_by.slot].copy(),
            query_D=session.queries_BD[0].cpu().numpy(),
            layer_output_V=session.outputs_BV[0],
            wording=self.model.task.wording_getter(target_pass.batch)(0),
        )

    def is_still_valid(self, inspection: Inspection) -> bool:
        """Whether an inspection would come out the same with the codebook as it is now.

        The codebook enters an inspection only through the entry that served the input and the value of that entry.
        """
        query_1D = torch.from_numpy(inspection.query_D)[None]
        (found,) = self.lookup.find_entries(query_1D, lambda _row: inspection.wording)
        served_by = if_serving(found)
        if served_by is None or inspection.served_by is None:
            return served_by is None and inspection.served_by is None
        # Removals move entries to other slots.
        same_entry = replace(served_by, slot=inspection.served_by.slot) == inspection.served_by
        return same_entry and np.array_equal(self.codebook.values_NV[served_by.slot], inspection.serving_value_V)

    # Conflicts

    def find_id_conflict(self, feedback: Feedback) -> str | None:
        """Why this feedback cannot have its id, or None.

        Keys of rephrases have names of the form `<id of the correction>#<number>`, so these must not be in use.
        """
        if (owner := self.memory.rephrase_owners.get(feedback.feedback_id)) is not None:
            return f"its id is the name of a key of feedback {owner!r}; choose another id"
        for number in range(1, len(feedback.rephrases) + 1):
            name = rephrase_name(feedback.feedback_id, number)
            if (offset := self.memory.offsets.get(name)) is not None:
                return (
                    f"the key of its rephrase {number} would be named {name!r}, the id of feedback at offset {offset}"
                )
        return None

    def find_proximity_conflict(self, radius: float, candidate: EditCandidate, wording: str) -> str | None:
        """Why a key at the candidate's query with this radius would change the answer of a confirmed input, or None."""
        if self.config.retention_guard:
            confirmed_distance = self.memory.nearest_confirmed_distance(
                candidate.query_D, candidate.policy.tolerance, candidate.query_D, wording
            )
            # `new_entry_radius` limits a radius to this bound, except that it never goes below twice the tolerance.
            # So only that floor can exceed the bound, where the confirmed input is almost as near as rounding errors.
            if radius > MAX_TRAFFIC_FRACTION * confirmed_distance:
                return (
                    f"an input with a confirmed answer lies {confirmed_distance:.3g} away, and in"
                    f" {self.model.query_dtype} inputs that near are not distinguished"
                )
        return None

    # Protected distances

    def protected_distance(self, name: str, key_D: np.ndarray, wording: str, candidate: EditCandidate) -> float:
        """The distance from a key to the nearest input whose answer must not change; infinite without such inputs.

        These inputs are unflagged traffic and, with the retention guard, confirmed inputs. The candidate's own input is
        left out, as its answer is about to change. So are inputs that an entry with this wording would not serve.

        Args:
            name: The entry id of the key, under which the decision context records the distance to traffic.
            key_D: The key.
            wording: The wording of the entry.
            candidate: The correction under decision.
        """
        tolerance = self.tolerance(key_D)
        traffic_distance = candidate.context_recorder.traffic_distance(
            name, key_D, tolerance, candidate.query_D, wording
        )
        return (
            min(
                traffic_distance,
                self.memory.nearest_confirmed_distance(key_D, tolerance, candidate.query_D, wording),
            )
            if self.config.retention_guard
            else traffic_distance
        )

    def candidate_protected_distance(self, candidate: EditCandidate) -> float:
        """The protected distance of a key at the candidate's own query."""
        return self.protected_distance(
            candidate.feedback.feedback_id, candidate.query_D, self.entry_wording(candidate.inspection), candidate
        )

    def entry_protected_distance(self, slot: int, candidate: EditCandidate) -> float:
        """The protected distance of the key in this slot of the codebook."""
        codebook = self.codebook
        # An entry that comes to serve two wordings loses its own, and then serves all wordings.
        loses_wording = slot == candidate.nearest_slot and self.shares_nearest_key(candidate)
        wording = "" if loses_wording else codebook.wordings[slot]
        return self.protected_distance(codebook.entry_ids[slot], codebook.keys_ND[slot], wording, candidate)

    # Wordings and labels

    def entry_wording(self, inspection: Inspection) -> str:
        """The wording of an entry at this prompt; empty if the configuration compares none.

        An entry without a wording serves all prompts within its radius. The log keeps the wording of every prompt in
        any case, so that a later configuration with wordings knows those of earlier edits.
        """
        return inspection.wording if self.config.check_wording else ""

    def wording_agrees(self, candidate: EditCandidate) -> bool:
        """Whether the wording of the nearest entry agrees with that of the correction."""
        return not find_disagreement(
            self.codebook.wordings[candidate.nearest_slot], self.entry_wording(candidate.inspection)
        )

    def shares_nearest_key(self, candidate: EditCandidate) -> bool:
        """Whether the nearest key equals the candidate's query within the tolerance, but the wordings disagree."""
        return (
            candidate.nearest_slot != NO_SLOT
            and candidate.nearest_distance <= candidate.policy.tolerance
            and not self.wording_agrees(candidate)
        )

    def label_of_edit(self, feedback_id: str) -> Label | None:
        """The label of the entry that serves an edit; None if the unedited model does."""
        entry_id = self.memory.serving_entry_id(feedback_id)
        return None if entry_id == UNEDITED_MODEL else self.codebook.labels[self.codebook.slot(entry_id)]

    def superseded_edits(self, same_input: Sequence[str], label: Label, wording: str) -> list[str]:
        """The edits that a correction supersedes.

        These are the edits of the same input with another label or without one, and the confirmed inputs with the same
        words. An exception at the same input is superseded only if it is the same request.

        Args:
            same_input: The edits whose query equals the correction's within the tolerance.
            label: The label of the correction.
            wording: The wording of the correction.
        """
        return [
            name
            for name in same_input
            if self.label_of_edit(name) != label
            and (name not in self.codebook.exceptions or is_same_request(self.memory.wording(name), wording))
        ] + self.memory.confirmed_with_same_words(wording)
