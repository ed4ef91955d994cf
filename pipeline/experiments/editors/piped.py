"""GRACE through a whole deployment: corrections go to `feedback`, and deltas come back from `deltas`.

1. The traffic is sent as requests before the first correction, so that the editor samples it.
2. This process applies the deltas to a codebook of its own, as a replica does. It scores the model with this codebook,
   because a prediction on `predictions` has no loss.
3. At the end `agreement_rate` compares the replicas' answers with these scores.
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
"""Seconds to wait for the next reply of the editor or of the replicas."""


class DeploymentEditor(CodebookEditor):
    """Edits through a deployment. Use it as a context manager.

    The deployment must start with an empty codebook and serve this experiment alone.

    Raises:
        EditorError: the replicas or the editor do not answer in time.
        HistoryError: the deployment's codebook belongs to another model.
    """

    def __init__(self, model: EditableModel, settings: Settings, traffic: Sequence[str]) -> None:
        codebook = Codebook(settings.model.codebook, model.fingerprint, model.layer)
        super().__init__(model, codebook, KeyIndex(codebook, model.device))
        self._settings, self._traffic = settings, traffic
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._client = Client(self._settings)
            stack.callback(self._client.close)
            self._outcomes = stack.enter_context(self._client.outcomes())
            self._follower = DeltaFollower(self._settings.kafka)
            self._follower.start()
            stack.callback(self._follower.close)
            self._catch_up(1)  # delta 1 is the editor's lead delta: an editor runs
            self._request_predictions([Example(text, "") for text in self._traffic], "traffic", single_token=True)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def edit(self, number: int, example: Example) -> EditOutcome:
        """Send the correction and wait for its outcome and its delta; the seconds include the way through Kafka."""
        started = time.perf_counter()
        name = f"correction-{number}"
        self._client.send([Feedback(v=SCHEMA_VERSION, feedback_id=name, inputs=example.inputs, target=example.target)])
        outcomes: dict[str, Outcome] = self._outcomes.wait([name], REPLY_TIMEOUT_SECONDS)
        if name not in outcomes:
            raise EditorError(
                f"the editor has sent no outcome of a correction for {REPLY_TIMEOUT_SECONDS:.0f} s; does it run?"
            )
        outcome = outcomes[name]
        if outcome.seq is not UNSET:
            self._catch_up(outcome.seq)
        return EditOutcome(
            outcome.status, 0 if outcome.steps is UNSET else outcome.steps, time.perf_counter() - started
        )

    def agreement_rate(self, examples: Sequence[Example], scores: Sequence[ExampleScore]) -> float:
        """The share of examples for which the replicas' answers and these scores agree on the exact target.

        The replicas answer with the codebook as of the last delta; NaN if there are no examples.
        """
        if not examples:
            return float("nan")
        predictions = self._request_predictions(examples, "check", single_token=False)
        answers = [
            {prediction.outputs.text, prediction.outputs.label} if prediction.outputs is not UNSET else set()
            for prediction in predictions
        ]
        compared = zip(answers, examples, scores, strict=True)
        return fmean((example.target.strip() in answer) == score.exact for answer, example, score in compared)

    def _catch_up(self, seq: int) -> None:
        """Apply deltas until `seq` is applied.

        Raises:
            EditorError: the delta did not come in time.
        """
        deadline = time.monotonic() + REPLY_TIMEOUT_SECONDS
        while self.codebook.seq < seq:
            for _, record in self._follower.poll(seq, 1.0):
                applied = self.codebook.apply(record)
                if applied is not None:
                    self.index.refresh(applied)
            if time.monotonic() > deadline:
                raise EditorError(
                    f"delta {seq} has not arrived within {REPLY_TIMEOUT_SECONDS:.0f} s; does an editor run?"
                )

    def _request_predictions(
        self, examples: Sequence[Example], id_prefix: str, *, single_token: bool
    ) -> list[Prediction]:
        """The replicas' predictions, in the order of the examples.

        An answer may be one token longer than the target, so that a longer answer shows; with `single_token` it has one
        token only.
        """
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
            replies = predictions.wait(ids, REPLY_TIMEOUT_SECONDS)
        if len(replies) < len(ids):
            raise EditorError(f"replicas answered {len(replies)} of {len(ids)} requests; do they run?")
        return [replies[request_id] for request_id in ids]

    def _parameters(self, example: Example, *, single_token: bool) -> Parameters:
        if isinstance(self.model.task, Classification):
            return Parameters()
        tokens = 0 if single_token else len(self.model.task.encode_target(example.inputs, example.target))
        return Parameters(max_new_tokens=tokens + 1)
