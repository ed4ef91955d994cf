"""The data of an edit on its way through the phases: the inspection, the draft and the candidate.

The phases are listed in `pipeline.editing.engine`, their rules in docs/explanation/method.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import UnsetType

from gracestream.pipeline.codebook import FoundEntry, Label, MaintenancePolicy
from gracestream.pipeline.editing.context import ContextRecorder
from gracestream.pipeline.editing.value_training import TrainedValue
from gracestream.pipeline.model import SuffixPass, TargetCheck, TargetPass
from gracestream.schemas.deltas import DecisionContext, Standing
from gracestream.schemas.messages import Feedback

MAX_LENGTH_RATIO = 1.25
"""Greatest ratio of the longest to the shortest input, in tokens, of one training batch.

A pass computes padding like any token, so this bounds the additional work to a fourth.
"""

LENGTH_SLACK_TOKENS = 8
"""Tokens by which inputs may differ regardless of `MAX_LENGTH_RATIO`; short inputs would hardly share a batch."""

MAX_BATCH_TOKENS = 16_384
"""Tokens of one training batch with padding: rows times the length of the longest. It bounds the memory."""


@dataclass(frozen=True, slots=True)
class RecordedInputs:
    """The recorded inputs of a decision that is repeated.

    Attributes:
        context: The decision context that the delta records.
        query_D: The recorded query; None: use the query that the model computes now.
        value_V: The recorded value; None: train a value if one is needed.
    """

    context: DecisionContext
    query_D: np.ndarray | None = None
    value_V: np.ndarray | None = None
    rephrase_queries_RD: tuple[np.ndarray | None, ...] = ()
    """The recorded queries of the rephrases, in order; None for a rephrase without one."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """The facts about one input and its target, from one pass of the edited model.

    Only `target_check`, `served_by` and `serving_value_V` depend on the codebook. So while the same entry with the same
    value serves the input, an inspection stays valid (`EditWorkspace.is_still_valid`).

    Attributes:
        label: The target as tokens or a class.
        target_pass: The input with the target, as the model takes it.
        suffix: The part of the pass that depends on the value, for repeated passes with other values.
        target_check: Whether the edited model predicts the target.
        served_by: The entry that served the input; None if the unedited model did.
        serving_value_V: The value of that entry; empty without one.
        query_D: The query.
        layer_output_V: The layer's own output at the position where a value is injected.
    """

    label: Label
    target_pass: TargetPass
    suffix: SuffixPass
    target_check: TargetCheck
    served_by: FoundEntry | None
    serving_value_V: np.ndarray
    query_D: np.ndarray
    layer_output_V: torch.Tensor
    wording: str = ""
    """The wording of the prompt (`pipeline.wording`); empty for a prompt whose wording is not comparable."""

    @property
    def is_already_correct(self) -> bool:
        """Whether the edited model predicts the target and will go on to do so.

        An entry that serves the input only by the same words does not count: its radius does not cover the query, so
        the correction still needs a key of its own.
        """
        return self.target_check.predicts_target and (self.served_by is None or not self.served_by.is_outside_radius)


@dataclass(frozen=True, slots=True)
class DraftValue:
    """A value that was trained before the decision on its correction.

    Attributes:
        trained: The value.
        trained_with: Offsets of the feedback of its training batch, in order; its own is among them.
        inspection: The inspection of the correction at that time.
    """

    trained: TrainedValue
    trained_with: tuple[int, ...]
    inspection: Inspection


@dataclass(frozen=True, slots=True)
class EditCandidate:
    """One correction under decision, with all facts that the decision and its delta need.

    Attributes:
        feedback: The correction.
        offset: The offset of the correction on `feedback`.
        inspection: The facts from the model.
        query_D: The query; in a repeated decision the recorded one.
        policy: The maintenance policy, with the radii and the tolerance of this correction.
        context_recorder: Computes the traffic distances of the decision, and records them.
        nearest_slot: The slot of the nearest key; NO_SLOT if the codebook is empty.
        nearest_distance: The distance from the query to that key.
        given_value_V: In a repeated decision, the recorded value to reuse.
        draft: The value that was trained in advance, if any.
        standing: The sender's permissions; UNSET without a list of authors.
        rephrase_queries_RD: In a repeated decision, the recorded queries of the rephrases.
    """

    feedback: Feedback
    offset: int
    inspection: Inspection
    query_D: np.ndarray
    policy: MaintenancePolicy
    context_recorder: ContextRecorder
    nearest_slot: int
    nearest_distance: float
    given_value_V: np.ndarray | None
    draft: DraftValue | None
    standing: Standing | UnsetType
    rephrase_queries_RD: tuple[np.ndarray | None, ...] = ()


def group_by_length(candidates: Sequence[EditCandidate]) -> Iterator[list[EditCandidate]]:
    """Split candidates into training batches of similar length; each batch is in the order of feedback."""
    group: list[EditCandidate] = []
    for candidate in sorted(candidates, key=lambda one: (one.inspection.target_pass.num_tokens, one.offset)):
        tokens = candidate.inspection.target_pass.num_tokens
        max_tokens = (
            max(
                MAX_LENGTH_RATIO * group[0].inspection.target_pass.num_tokens,
                group[0].inspection.target_pass.num_tokens + LENGTH_SLACK_TOKENS,
            )
            if group
            else 0
        )
        # Candidates come in ascending order of length, so this one is the longest and sets the padded length.
        if group and (tokens > max_tokens or tokens * (len(group) + 1) > MAX_BATCH_TOKENS):
            yield sorted(group, key=lambda one: one.offset)
            group = []
        group.append(candidate)
    if group:
        yield sorted(group, key=lambda one: one.offset)
