"""A model that a codebook corrects, as a replica serves it."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from pipeline.codebook import Codebook
from pipeline.experiments.editors.editor import Made
from pipeline.experiments.editors.queries import Queries
from pipeline.experiments.tasks import Example
from pipeline.index import NO_SLOT, KeyIndex
from pipeline.model import EditableModel


class Served(ABC):
    """What GRACE is to an experiment, wherever its edits are made. `index` is the codebook's."""

    def __init__(self, model: EditableModel, codebook: Codebook, index: KeyIndex) -> None:
        self.model, self.codebook, self.index = model, codebook, index
        self._queries = Queries(model)

    @property
    def entries(self) -> int:
        """Keys of the codebook."""
        return len(self.codebook)

    @abstractmethod
    def edit(self, number: int, example: Example) -> Made:
        """Bring an entry about that gives the example's target, if one is needed."""

    def states(self, texts: Sequence[str]) -> list[Hashable]:
        """The value that serves each text, or None where the bare model does: nothing else reaches an answer."""
        slots = self.serving_slots(texts)
        values_NV = self.codebook.values_NV
        return [None if slot == NO_SLOT else values_NV[slot].tobytes() for slot in slots]

    def serving(self, mask_BT: Tensor | None) -> AbstractContextManager[object]:
        """The adaptor's session, with a lookup for each row."""
        return self.model.adaptor.serving(mask_BT, self.codebook, self.index)

    def serving_slots(self, texts: Sequence[str]) -> list[int]:
        """The slot of the entry that serves each text; -1: none."""
        if not texts:
            return []
        slots: list[int] = self.index.covering(torch.from_numpy(self._queries.of(texts))).slots_B.tolist()
        return slots
