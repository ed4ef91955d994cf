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
from gracestream.pipeline.experiments.editors.editor import EditorError, EditOutcome
from gracestream.pipeline.experiments.editors.serving import CodebookEditor
from gracestream.pipeline.experiments.evaluation import ExampleScore
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import Classification, EditableModel
from gracestream.pipeline.replica import DeltaFollower
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import SCHEMA_VERSION, Feedback, Outcome, Parameters, Prediction, Request

REPLY_TIMEOUT_SECONDS = 600.0
"""Seconds within which an editor or the replicas have to answer something."""


class DeploymentEditor(CodebookEditor):
    """Used as a context. The deployment's codebook is empty, and nobody else uses it.

    Raises:
        EditorError: the replicas do not answer, or the editor does not.
        HistoryError: the deployment's codebook is one of another model.
    """

    def __init__(self, model: EditableModel, settings: Settings, traffic: Sequence[str]) -> None:
        codebook = Codebook(settings.codebook, model.fingerprint, model.layer)
        super().__init__(model, codebook, KeyIndex(codebook, model.device))
        self._settings, self._traffic = settings, traffic
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._client = Client(self._settings)
            stack.callback(self._client.close)
            self._outcomes = stack.enter_context(self._client.outcomes())
            self._follower = DeltaFollower(self._settings)
            self._follower.start()
            stack.callback(self._follower.close)
            self._catch_up(1)  # the editor leads
            self._request_predictions([Example(text, "") for text in self._traffic], "traffic", single_token=True)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def edit(self, number: int, example: Example) -> EditOutcome:
        """Flag it, and wait until its outcome and its delta are here; the seconds are those of the whole way."""
        begun = time.perf_counter()
        name = f"correction-{number}"
        self._client.send([Feedback(v=SCHEMA_VERSION, feedback_id=name, inputs=example.inputs, target=example.target)])
        found: dict[str, Outcome] = self._outcomes.wait([name], REPLY_TIMEOUT_SECONDS)
        if name not in found:
            raise EditorError(
                f"the editor has not told for {REPLY_TIMEOUT_SECONDS:.0f} s what became of a correction; does it run?"
            )
        outcome = found[name]
        if outcome.seq is not UNSET:
            self._catch_up(outcome.seq)
        return EditOutcome(outcome.status, 0 if outcome.steps is UNSET else outcome.steps, time.perf_counter() - begun)

    def agreement_rate(self, examples: Sequence[Example], scores: Sequence[ExampleScore]) -> float:
        """The share of examples of which replicas, as of the last delta, give the target where these scores say so."""
        if not examples:
            return float("nan")
        found = self._request_predictions(examples, "check", single_token=False)
        said = [{one.outputs.text, one.outputs.label} if one.outputs is not UNSET else set() for one in found]
        told = zip(said, examples, scores, strict=True)
        return fmean((example.target.strip() in answer) == score.exact for answer, example, score in told)

    def _catch_up(self, seq: int) -> None:
        deadline = time.monotonic() + REPLY_TIMEOUT_SECONDS
        while self.codebook.seq < seq:
            for _, record in self._follower.poll(seq, 1.0):
                applied = self.codebook.apply(record)
                if applied is not None:
                    self.index.refresh(applied)
            if time.monotonic() > deadline:
                raise EditorError(f"delta {seq} has not come for {REPLY_TIMEOUT_SECONDS:.0f} s; does an editor run?")

    def _request_predictions(
        self, examples: Sequence[Example], id_prefix: str, *, single_token: bool
    ) -> list[Prediction]:
        """What replicas answer, with so many tokens as the target has and one more, or only one."""
        requests = [
            Request(
                v=SCHEMA_VERSION, request_id=f"{id_prefix}-{number}", inputs=example.inputs, min_seq=self.codebook.seq,
                parameters=self._parameters(example, single_token=single_token),
            )
            for number, example in enumerate(examples)
        ]  # fmt: skip
        ids = [request.request_id for request in requests]
        with self._client.predictions() as predictions:
            self._client.send(requests)
            found = predictions.wait(ids, REPLY_TIMEOUT_SECONDS)
        if len(found) < len(ids):
            raise EditorError(f"replicas answered {len(found)} of {len(ids)} requests; do they run?")
        return [found[request_id] for request_id in ids]

    def _parameters(self, example: Example, *, single_token: bool) -> Parameters:
        if isinstance(self.model.task, Classification):
            return Parameters()
        tokens = 0 if single_token else len(self.model.task.encode_target(example.inputs, example.target))
        return Parameters(max_new_tokens=tokens + 1)
