"""The interface of an editor in an experiment."""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import Batch

MAX_EDIT_STEPS = 100
"""Largest number of optimisation steps for one correction (paper, appendix A)."""


class EditorError(UserError):
    """The editor cannot edit this model or layer, or a deployment does not respond; the message says why."""


@dataclass(frozen=True, slots=True)
class EditOutcome:
    """The result of one correction.

    Attributes:
        status: `unchanged`, `failed` or `rejected`, or any other status of an outcome for a successful edit.
        steps: Optimisation steps.
        seconds: Wall-clock seconds.
    """

    status: str
    steps: int
    seconds: float


class ModelEditor(Protocol):
    """Edits one model. The model is edited inside `with_edits` only."""

    def edit(self, number: int, example: Example) -> EditOutcome:
        """Make the model predict the example's target; corrections are numbered from 0 in their order."""

    def state_keys(self, texts: Sequence[str]) -> list[Hashable]:
        """A key of the editor's state for each text: if a text's key is unchanged, so is the answer to the text."""

    def with_edits(self, batch: Batch) -> AbstractContextManager[object]:
        """A context in which forward passes over this batch run the edited model."""

    @property
    def num_entries(self) -> int:
        """Number of stored entries; 0 for an editor without a codebook."""
