"""The common part of GRACE's editors: a model with a codebook, served as a replica serves it."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from gracestream.pipeline.codebook import Codebook, CodebookLookup, KeyIndex
from gracestream.pipeline.experiments.editors.editor import EditOutcome
from gracestream.pipeline.experiments.editors.queries import QueryCache
from gracestream.pipeline.experiments.tasks import Example, TaskCorrection
from gracestream.pipeline.model import Batch, EditableModel
from gracestream.pipeline.search import NO_SLOT


@dataclass(frozen=True, slots=True)
class ServedCounts:
    """Prompts that one entry serves: corrections, and rephrases of corrections."""

    edits: int
    rephrases: int


class CodebookEditor(ABC):
    """GRACE in an experiment, in this process or through a deployment. `index` holds the codebook's keys."""

    def __init__(self, model: EditableModel, codebook: Codebook, index: KeyIndex) -> None:
        self.model, self.codebook, self.index = model, codebook, index
        self._query_cache = QueryCache(model)

    @property
    def num_entries(self) -> int:
        """The number of keys in the codebook."""
        return len(self.codebook)

    @abstractmethod
    def edit(self, number: int, example: Example) -> EditOutcome:
        """Make the model predict the example's target; add or change an entry if the unedited model does not."""

    def state_keys(self, texts: Sequence[str]) -> list[Hashable]:
        """The value that each text matches, as bytes; None: the unedited model answers.

        An answer depends on no other part of the codebook.
        """
        slots = self.matched_slots(texts)
        values_NV = self.codebook.values_NV
        return [None if slot == NO_SLOT else values_NV[slot].tobytes() for slot in slots]

    def with_edits(self, batch: Batch) -> AbstractContextManager[object]:
        """A context in which the adaptor looks up each row in the codebook."""
        return self.model.adaptor.with_codebook(
            batch, CodebookLookup(self.codebook, self.index), row_wording=self.model.task.wording_getter(batch)
        )

    def matched_slots(self, texts: Sequence[str]) -> list[int]:
        """The slot of the nearest entry whose radius contains the text; `NO_SLOT` if there is none."""
        if not texts:
            return []
        slots: list[int] = self.index.nearest_within_radius(
            torch.from_numpy(self._query_cache.get(texts))
        ).slots_B.tolist()
        return slots

    def served_counts(self, edits: Sequence[TaskCorrection]) -> list[ServedCounts]:
        """The counts of each entry that serves one of these corrections, by rephrases in descending order."""
        corrections = Counter(self.matched_slots([correction.example.inputs for correction in edits]))
        rephrases = Counter(self.matched_slots([text for correction in edits for text in correction.rephrases]))
        counts = [ServedCounts(count, rephrases[slot]) for slot, count in corrections.items() if slot != NO_SLOT]
        return sorted(counts, key=lambda served: (-served.rephrases, -served.edits))
