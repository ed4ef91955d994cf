"""What every editor is to an experiment."""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import Batch

MAX_EDIT_STEPS = 100
"""Optimisation steps for one correction, at most (paper, appendix A)."""


class EditorError(UserError):
    """A model or a layer that an editor cannot edit; the text says why."""


@dataclass(frozen=True, slots=True)
class EditOutcome:
    """What became of one correction: its status (as of an outcome), optimisation steps and seconds."""

    status: str
    steps: int
    seconds: float


class ModelEditor(Protocol):
    """Corrects one model, which answers as corrected inside `with_edits`."""

    def edit(self, number: int, example: Example) -> EditOutcome:
        """Make the model give the example's target; corrections are numbered from 0 as they come."""

    def state_keys(self, texts: Sequence[str]) -> list[Hashable]:
        """Of each text that of the editor's state on which an answer to it depends: equal states, equal answers."""

    def with_edits(self, batch: Batch) -> AbstractContextManager[object]:
        """Forward passes inside, over this batch, are the corrected model's."""

    @property
    def num_entries(self) -> int:
        """What the editor has stored: keys of a codebook, 0 where it stores none."""
