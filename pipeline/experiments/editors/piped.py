"""GRACE by a whole deployment: corrections go to `feedback`, and the codebook comes out of `deltas`.

The codebook is folded here as a replica folds it, and the model is scored with it, since a prediction tells no loss.
What replicas say to each correction is compared with that at the end (`agreeing`). The traffic goes to them before.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import fmean
from types import TracebackType
from typing import Self

from msgspec import UNSET

from gracestream.pipeline.client import Client
from gracestream.pipeline.codebook import Codebook, KeyIndex
from gracestream.pipeline.experiments.editors.editor import EditorError, Made
from gracestream.pipeline.experiments.editors.serving import Served
from gracestream.pipeline.experiments.evaluation import Score
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import Classification, EditableModel
from gracestream.pipeline.replica import Follower
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import VERSION, Feedback, Outcome, Parameters, Prediction, Request

PATIENCE = 600.0
"""Seconds within which an editor or the replicas have to answer something."""


class Piped(Served):
    """Used as a context. The deployment's codebook is empty, and nobody else uses it.

    Raises:
        EditorError: the replicas do not answer, or the editor does not.
        HistoryError: the deployment's codebook is one of another model.
    """

    def __init__(self, model: EditableModel, settings: Settings, traffic: Sequence[str]) -> None:
        codebook = Codebook(settings.codebook, model.fingerprint, model.layer)
        super().__init__(model, codebook, KeyIndex(codebook, model.device))
        self._settings, self._traffic = settings, traffic
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._client = Client(self._settings)
            stack.callback(self._client.close)
            self._outcomes = stack.enter_context(self._client.outcomes())
            self._follower = Follower(self._settings)
            self._follower.start()
            stack.callback(self._follower.close)
            self._fold(1)  # the editor leads
            self._ask([Example(text, "") for text in self._traffic], "traffic", short=True)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def edit(self, number: int, example: Example) -> Made:
        """Flag it, and wait until its outcome and its delta are here; the seconds are those of the whole way."""
        begun = time.perf_counter()
        name = f"correction-{number}"
        self._client.send([Feedback(v=VERSION, feedback_id=name, inputs=example.inputs, target=example.target)])
        found: dict[str, Outcome] = self._outcomes.wait([name], PATIENCE)
        if name not in found:
            raise EditorError(f"the editor has not told for {PATIENCE:.0f} s what became of a correction; does it run?")
        outcome = found[name]
        if outcome.seq is not UNSET:
            self._fold(outcome.seq)
        return Made(outcome.status, 0 if outcome.steps is UNSET else outcome.steps, time.perf_counter() - begun)

    def agreeing(self, examples: Sequence[Example], scores: Sequence[Score]) -> float:
        """The share of examples of which replicas, as of the last delta, give the target where these scores say so."""
        if not examples:
            return float("nan")
        found = self._ask(examples, "check", short=False)
        said = [{one.outputs.text, one.outputs.label} if one.outputs is not UNSET else set() for one in found]
        told = zip(said, examples, scores, strict=True)
        return fmean((example.target.strip() in answer) == score.exact for answer, example, score in told)

    def _fold(self, seq: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.codebook.seq < seq:
            for _, record in self._follower.take(seq, 1.0):
                applied = self.codebook.apply(record)
                if applied is not None:
                    self.index.refresh(applied)
            if time.monotonic() > deadline:
                raise EditorError(f"delta {seq} has not come for {PATIENCE:.0f} s; does an editor run?")

    def _ask(self, examples: Sequence[Example], name: str, *, short: bool) -> list[Prediction]:
        """What replicas answer, with so many tokens as the target has and one more, or only one."""
        requests = [
            Request(
                v=VERSION, request_id=f"{name}-{number}", inputs=example.inputs, min_seq=self.codebook.seq,
                parameters=self._parameters(example, short=short),
            )
            for number, example in enumerate(examples)
        ]  # fmt: skip
        ids = [request.request_id for request in requests]
        with self._client.predictions() as predictions:
            self._client.send(requests)
            found = predictions.wait(ids, PATIENCE)
        if len(found) < len(ids):
            raise EditorError(f"replicas answered {len(found)} of {len(ids)} requests; do they run?")
        return [found[request_id] for request_id in ids]

    def _parameters(self, example: Example, *, short: bool) -> Parameters:
        if isinstance(self.model.task, Classification):
            return Parameters()
        tokens = 0 if short else len(self.model.task.label(example.inputs, example.target))
        return Parameters(max_new_tokens=tokens + 1)
