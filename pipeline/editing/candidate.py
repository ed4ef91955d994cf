"""One correction under decision, and what may be known of it before (design, section 4)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import UnsetType

from gracestream.pipeline.codebook import Hit, Label, Policy
from gracestream.pipeline.editing.context import Sight
from gracestream.pipeline.editing.value_training import Trained
from gracestream.pipeline.model import Rest, Supervised, Verdict
from gracestream.schemas.deltas import Seen, Standing
from gracestream.schemas.messages import Feedback

PADDING = 1.25
"""Inputs are trained together where the longest has at most so many times the tokens of the shortest, or few more."""

FEW_TOKENS = 8

MOST_TOKENS = 16_384
"""Of all inputs that are trained together, with their padding."""


@dataclass(frozen=True, slots=True)
class Again:
    """A decision that is made again: what it saw, and of its query and its value those that are to be kept."""

    seen: Seen
    query_D: np.ndarray | None = None
    value_V: np.ndarray | None = None
    rephrases_RD: tuple[np.ndarray | None, ...] = ()
    """The queries of the rephrases, in their order; none where it is not known."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What a pass of the edited model told about a correction.

    A codebook bears on `verdict` alone, by `hit`, the entry that served it, and by that one's value `value_V` (empty
    where there was none).
    """

    label: Label
    supervised: Supervised
    rest: Rest
    verdict: Verdict
    hit: Hit | None
    value_V: np.ndarray
    query_D: np.ndarray
    start_V: torch.Tensor
    wording: str = ""
    """What the prompt asks for (`pipeline.wording`); empty where wordings are not compared."""

    @property
    def fulfilled(self) -> bool:
        """Whether the target is given already, and will be: an entry with the same words alone is no key of its own."""
        return self.verdict.right and (self.hit is None or not self.hit.by_words)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A value that was trained before its correction is decided on, with those of the feedback at these offsets.

    `examined` is what was seen of the correction then.
    """

    trained: Trained
    together: tuple[int, ...]
    examined: Examined


@dataclass(frozen=True, slots=True)
class Case:
    """One correction under decision; `slot` holds the key nearest to its query, at `distance`.

    `again` is what the decision saw before, where it is made again; `ahead` its value, where that was trained ahead;
    `standing` what its sender is allowed.
    """

    feedback: Feedback
    offset: int
    examined: Examined
    query_D: np.ndarray
    policy: Policy
    sight: Sight
    slot: int
    distance: float
    known_V: np.ndarray | None
    ahead: Ahead | None
    standing: Standing | UnsetType
    rephrases_RD: tuple[np.ndarray | None, ...] = ()


def of_similar_length(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Groups to be trained together, each in the order of feedback."""
    group: list[Case] = []
    for case in sorted(cases, key=lambda case: (case.examined.supervised.tokens, case.offset)):
        tokens = case.examined.supervised.tokens
        longest = (
            max(PADDING * group[0].examined.supervised.tokens, group[0].examined.supervised.tokens + FEW_TOKENS)
            if group
            else 0
        )
        if group and (tokens > longest or tokens * (len(group) + 1) > MOST_TOKENS):
            yield sorted(group, key=lambda case: case.offset)
            group = []
        group.append(case)
    if group:
        yield sorted(group, key=lambda case: case.offset)
