"""One correction under decision, and what may be known of it before (design, section 4)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import UnsetType

from gracestream.pipeline.codebook import Hit, Label, MaintenancePolicy
from gracestream.pipeline.editing.context import DecisionContext
from gracestream.pipeline.editing.value_training import TrainedValue
from gracestream.pipeline.model import SuffixPass, TargetCheck, TargetPass
from gracestream.schemas.deltas import Seen, Standing
from gracestream.schemas.messages import Feedback

MAX_LENGTH_RATIO = 1.25
"""Inputs are trained together where the longest has at most so many times the tokens of the shortest, or few more."""

LENGTH_SLACK_TOKENS = 8

MAX_BATCH_TOKENS = 16_384
"""Of all inputs that are trained together, with their padding."""


@dataclass(frozen=True, slots=True)
class ReplayContext:
    """A decision that is made again: what it saw, and of its query and its value those that are to be kept."""

    recorded: Seen
    query_D: np.ndarray | None = None
    value_V: np.ndarray | None = None
    rephrase_queries_RD: tuple[np.ndarray | None, ...] = ()
    """The queries of the rephrases, in their order; none where it is not known."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a pass of the edited model told about a correction.

    A codebook bears on `target_check` alone, by `hit`, the entry that served it, and by that one's value `hit_value_V`
    (empty where there was none).
    """

    label: Label
    target_pass: TargetPass
    suffix: SuffixPass
    target_check: TargetCheck
    hit: Hit | None
    hit_value_V: np.ndarray
    query_D: np.ndarray
    layer_output_V: torch.Tensor
    wording: str = ""
    """What the prompt asks for (`pipeline.wording`); empty where wordings are not compared."""

    @property
    def is_already_correct(self) -> bool:
        """Whether the target is given already, and will be: an entry with the same words alone is no key of its own."""
        return self.target_check.predicts_target and (self.hit is None or not self.hit.is_word_match)


@dataclass(frozen=True, slots=True)
class DraftValue:
    """A value that was trained before its correction is decided on, with those of the feedback at these offsets.

    `inspection` is what was seen of the correction then.
    """

    trained: TrainedValue
    trained_with: tuple[int, ...]
    inspection: Inspection


@dataclass(frozen=True, slots=True)
class EditCandidate:
    """One correction under decision; `nearest_slot` holds the key nearest to its query, at `nearest_distance`.

    `again` is what the decision saw before, where it is made again; `draft` its value, where that was trained ahead;
    `standing` what its sender is allowed.
    """

    feedback: Feedback
    offset: int
    inspection: Inspection
    query_D: np.ndarray
    policy: MaintenancePolicy
    context: DecisionContext
    nearest_slot: int
    nearest_distance: float
    given_value_V: np.ndarray | None
    draft: DraftValue | None
    standing: Standing | UnsetType
    rephrase_queries_RD: tuple[np.ndarray | None, ...] = ()


def group_by_length(candidates: Sequence[EditCandidate]) -> Iterator[list[EditCandidate]]:
    """Groups to be trained together, each in the order of feedback."""
    group: list[EditCandidate] = []
    for case in sorted(candidates, key=lambda case: (case.inspection.target_pass.num_tokens, case.offset)):
        tokens = case.inspection.target_pass.num_tokens
        longest = (
            max(
                MAX_LENGTH_RATIO * group[0].inspection.target_pass.num_tokens,
                group[0].inspection.target_pass.num_tokens + LENGTH_SLACK_TOKENS,
            )
            if group
            else 0
        )
        if group and (tokens > longest or tokens * (len(group) + 1) > MAX_BATCH_TOKENS):
            yield sorted(group, key=lambda case: case.offset)
            group = []
        group.append(case)
    if group:
        yield sorted(group, key=lambda case: case.offset)
