"""GRACE, by the engine that the editor worker runs."""

import time
from collections.abc import Sequence

from msgspec import UNSET

from gracestream.pipeline.editing import EditEngine, Plan, correction
from gracestream.pipeline.experiments.editors.editor import Made
from gracestream.pipeline.experiments.editors.serving import Served
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import EditableModel


class Grace(Served):
    """A codebook at one layer, which has seen the traffic as an editor worker sees it."""

    def __init__(self, model: EditableModel, plan: Plan, traffic: Sequence[str]) -> None:
        self.engine = EditEngine(model, "experiment", plan)
        self.engine.apply(self.engine.lead({}))
        super().__init__(model, self.engine.codebook, self.engine.index)
        if plan.traffic and traffic:
            for offset, (text, query_D) in enumerate(zip(traffic, self._queries.of(traffic), strict=True)):
                rank = self.engine.traffic.wants(0, offset, 0.0)
                if rank is not None:
                    self.engine.observe(rank, query_D, model.task.wording(model.task.tokenize(text)))

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
