"""Corrections, and the cases that are sent after them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Part = Literal["held-out", "development"]
"""Rows for the report, and rows on which settings may be chosen."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction and its related prompts.

    Attributes:
        text: The corrected prompt.
        target: The corrected answer.
        plain: The question or statement without the frame of the prompt.
        related: Other prompts, by the name of their kind.
    """

    text: str
    target: str
    plain: str = ""
    related: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt that is sent after all corrections.

    Attributes:
        kind: The name of the kind.
        text: The prompt; with `chat` the user's turn.
        target: The target of the edit that it belongs to; empty if it belongs to none.
        applies: Whether the correction should change the answer.
        edit: The number of the correction that it belongs to, or None.
        chat: Whether it is sent in the model's chat template.
    """

    kind: str
    text: str
    target: str
    applies: bool
    edit: int | None = None
    chat: bool = False


@dataclass(frozen=True, slots=True)
class Stream:
    """Corrections in order, the cases, and the traffic in the editor's traffic sample."""

    name: str
    corrections: Sequence[Correction]
    cases: Sequence[Case]
    traffic: Sequence[str]
    model: str = ""
    """The edited model; empty for the default."""
