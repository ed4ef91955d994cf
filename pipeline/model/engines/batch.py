"""The batch engine: requests of one group go through the model together, from the prompt to the last token."""

from collections.abc import Sequence

from gracestream.pipeline.codebook import CodebookLookup
from gracestream.pipeline.device import raise_if_device_lost
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.engines.base import AnswerEngine, CodebookView, Finished, R, describe_failure
from gracestream.pipeline.model.engines.selection import select_batch


class BatchEngine(AnswerEngine[R]):
    """Answers the requests that join a step in this step.

    Args:
        model: The model.
        lookup: Finds the entries that serve requests.
        max_rows: Requests of one step, at most.
        check_answers: As for `EditableModel.answer`.
    """

    def __init__(self, model: EditableModel, lookup: CodebookLookup, *, max_rows: int, check_answers: bool) -> None:
        self._model, self._lookup, self._max_rows, self._check_answers = model, lookup, max_rows, check_answers

    @property
    def active(self) -> int:
        """Zero: each request finishes in the step that it joins."""
        return 0

    def select(self, waiting: Sequence[R]) -> list[int]:
        """The first request, with neighbours in length of the same group."""
        return select_batch([(request.batch_key, len(request.prompt)) for request in waiting], self._max_rows)

    def step(self, joining: Sequence[R]) -> list[Finished[R]]:
        """Answer the requests. If the model fails, each is answered alone, so that only the one at fault fails."""
        if not joining:
            return []
        try:
            served = self._model.answer(
                [request.prompt for request in joining],
                [request.parameters for request in joining],
                self._lookup,
                check_answers=self._check_answers,
            )
        except Exception as error:  # noqa: BLE001  (a request that breaks the model must not affect the others)
            raise_if_device_lost(error)
            failure = describe_failure(error)
        else:
            return [
                Finished(request, answer, CodebookView.of(self._lookup, answer.served_by or answer.near_miss))
                for request, answer in zip(joining, served, strict=True)
            ]
        # Outside the `except` block: its error holds the frames of the failed pass, and so tensors in device memory.
        if len(joining) == 1:
            return [Finished(joining[0], None, None, failure)]
        self._count_restarts(len(joining), failure)
        return [finished for request in joining for finished in self.step([request])]

    def drop(self, requests: Sequence[R]) -> None:
        """Nothing: no request is active between two steps."""
