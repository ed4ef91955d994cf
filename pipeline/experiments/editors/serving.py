"""A model that a codebook corrects, as a replica serves it."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from gracestream.pipeline.codebook import Codebook, CodebookLookup, KeyIndex
from gracestream.pipeline.experiments.editors.editor import EditOutcome
from gracestream.pipeline.experiments.editors.queries import QueryCache
from gracestream.pipeline.experiments.tasks import Edit, Example
from gracestream.pipeline.model import Batch, EditableModel
from gracestream.pipeline.search import NO_SLOT


@dataclass(frozen=True, slots=True)
class ServedCounts:
    """Of one entry: how many corrections it serves, and how many of their rephrases."""

    edits: int
    rephrases: int


class CodebookEditor(ABC):
    """What GRACE is to an experiment, wherever its edits are made. `index` is the codebook's."""

    def __init__(self, model: EditableModel, codebook: Codebook, index: KeyIndex) -> None:
        self.model, self.codebook, self.index = model, codebook, index
        self._query_cache = QueryCache(model)

    @property
    def num_entries(self) -> int:
        """Keys of the codebook."""
        return len(self.codebook)

    @abstractmethod
    def edit(self, number: int, example: Example) -> EditOutcome:
        """Bring an entry about that gives the example's target, if one is needed."""

    def state_keys(self, texts: Sequence[str]) -> list[Hashable]:
        """The value that serves each text, or None where the bare model does: nothing else reaches an answer."""
        slots = self.matched_slots(texts)
        values_NV = self.codebook.values_NV
        return [None if slot == NO_SLOT else values_NV[slot].tobytes() for slot in slots]

    def with_edits(self, batch: Batch) -> AbstractContextManager[object]:
        """The adaptor's session, with a lookup for each row."""
        return self.model.adaptor.with_codebook(
            batch, CodebookLookup(self.codebook, self.index), row_wording=self.model.task.wording_getter(batch)
        )

    def matched_slots(self, texts: Sequence[str]) -> list[int]:
        """The slot of the entry that serves each text; -1: none."""
        if not texts:
            return []
        slots: list[int] = self.index.nearest_within_radius(
            torch.from_numpy(self._query_cache.get(texts))
        ).slots_B.tolist()
        return slots

    def served_counts(self, edits: Sequence[Edit]) -> list[ServedCounts]:
        """Of each entry that serves one of these corrections; those of the most rephrases first."""
        corrections = Counter(self.matched_slots([edit.example.inputs for edit in edits]))
        rephrases = Counter(self.matched_slots([text for edit in edits for text in edit.rephrases]))
        found = [ServedCounts(count, rephrases[slot]) for slot, count in corrections.items() if slot != NO_SLOT]
        return sorted(found, key=lambda use: (-use.rephrases, -use.edits))
