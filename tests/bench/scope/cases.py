"""Corrections, and the cases that are asked after them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Part = Literal["held-out", "development"]
"""The rows that are reported, and those on which settings may be chosen."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction with what is known of it.

    Attributes:
        text: The corrected prompt.
        target: Its answer.
        plain: What is asked, without the frame of the prompt.
        related: Other prompts by the name of their kind.
    """

    text: str
    target: str
    plain: str = ""
    related: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt that is asked after all corrections.

    Attributes:
        kind: The name of its kind.
        text: The prompt; with `chat` the user's turn.
        target: The target of the edit that it belongs to; nothing where it belongs to none.
        applies: Whether the correction should reach it.
        edit: The number of the correction that it belongs to.
        chat: Whether it is asked in the model's chat template.
    """

    kind: str
    text: str
    target: str
    applies: bool
    edit: int | None = None
    chat: bool = False


@dataclass(frozen=True, slots=True)
class Stream:
    """Corrections in their order, the traffic that the editor has seen, and the cases."""

    name: str
    corrections: Sequence[Correction]
    cases: Sequence[Case]
    traffic: Sequence[str]
    model: str = ""
    """The model that is edited, where it is not the default one."""
