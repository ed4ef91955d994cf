"""GRACE, by the engine that the editor worker runs."""

import time
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager

import torch
from msgspec import UNSET
from torch import Tensor

from pipeline.edited import correction
from pipeline.editing import EditEngine
from pipeline.experiments.editors.editor import Made
from pipeline.experiments.editors.queries import Queries
from pipeline.experiments.tasks import Example
from pipeline.index import NO_SLOT
from pipeline.model import EditableModel
from pipeline.plan import Plan


class Grace:
    """A codebook at one layer, which has seen the traffic as an editor worker sees it."""

    def __init__(self, model: EditableModel, plan: Plan, traffic: Sequence[str]) -> None:
        self.model = model
        self.engine = EditEngine(model, "experiment", plan)
        self.engine.apply(self.engine.lead({}))
        self._queries = Queries(model)
        if plan.traffic and traffic:
            for offset, query_D in enumerate(self._queries.of(traffic)):
                rank = self.engine.traffic.wants(0, offset, 0.0)
                if rank is not None:
                    self.engine.observe(rank, query_D)

    @property
    def entries(self) -> int:
        """Keys of the codebook."""
        return len(self.engine.codebook)

    def edit(self, number: int, example: Example) -> Made:
        """As the editor worker edits, without the log."""
        begun = time.perf_counter()
        edited = self.engine.edit(correction(str(number), example.inputs, example.target), number)
        if edited.record is not None:
            self.engine.apply(edited.record)
        outcome = edited.outcome
        if outcome is None:
            raise RuntimeError(edited.reason)
        steps = 0 if outcome.steps is UNSET else outcome.steps
        return Made(outcome.status, steps, time.perf_counter() - begun)

    def states(self, texts: Sequence[str]) -> list[Hashable]:
        """The value that serves each text, or None where the bare model does: nothing else reaches an answer."""
        slots = self.serving_slots(texts)
        values_NV = self.engine.codebook.values_NV
        return [None if slot == NO_SLOT else values_NV[slot].tobytes() for slot in slots]

    def serving(self, mask_BT: Tensor | None) -> AbstractContextManager[object]:
        """The adaptor's session, with a lookup for each row."""
        return self.model.adaptor.serving(mask_BT, self.engine.codebook, self.engine.index)

    def serving_slots(self, texts: Sequence[str]) -> list[int]:
        """The slot of the entry that serves each text; -1: none."""
        if not texts:
            return []
        slots: list[int] = self.engine.index.covering(torch.from_numpy(self._queries.of(texts))).slots_B.tolist()
        return slots
