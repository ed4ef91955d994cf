"""GRACE, run by the editor worker's engine in this process."""

import time
from collections.abc import Sequence

from msgspec import UNSET

from gracestream.pipeline.editing import EditConfig, EditEngine, make_correction
from gracestream.pipeline.experiments.editors.editor import EditOutcome
from gracestream.pipeline.experiments.editors.serving import CodebookEditor
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import EditableModel


class Grace(CodebookEditor):
    """GRACE with a codebook at one layer. The engine samples the traffic as an editor worker does."""

    def __init__(self, model: EditableModel, plan: EditConfig, traffic: Sequence[str]) -> None:
        self.engine = EditEngine(model, "experiment", plan)
        self.engine.apply(self.engine.lead_delta({}))
        super().__init__(model, self.engine.codebook, self.engine.index)
        if plan.traffic_sample_size and traffic:
            for offset, (text, query_D) in enumerate(zip(traffic, self._query_cache.get(traffic), strict=True)):
                score = self.engine.traffic_sample.offer(0, offset, 0.0)
                if score is not None:
                    self.engine.add_traffic(score, query_D, model.task.wording(model.task.tokenize(text)))

    def edit(self, number: int, example: Example) -> EditOutcome:
        """Decide as the editor worker does, and apply the delta without a log."""
        started = time.perf_counter()
        result = self.engine.edit(make_correction(str(number), example.inputs, example.target), number)
        if result.delta_record is not None:
            self.engine.apply(result.delta_record)
        outcome = result.outcome
        if outcome is None:
            raise RuntimeError(result.rejection_reason)
        steps = 0 if outcome.steps is UNSET else outcome.steps
        return EditOutcome(outcome.status, steps, time.perf_counter() - started)
