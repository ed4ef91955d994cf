"""The vLLM engine: a replica's requests, answered by vLLM in this process."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from msgspec import UNSET
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from gracestream.pipeline.codebook import CodebookLookup
from gracestream.pipeline.device import DeviceLostError, raise_if_device_lost
from gracestream.pipeline.model import (
    AnswerEngine,
    CausalGeneration,
    CodebookView,
    EditableModel,
    EngineRequest,
    Finished,
    ServedAnswer,
    describe_failure,
)
from gracestream.pipeline.vllm.lookups import look_up
from gracestream.pipeline.vllm.values import carry_value, edited_salt

R = TypeVar("R", bound=EngineRequest)


@dataclass(slots=True, eq=False)
class _Active(Generic[R]):
    """A request that vLLM answers.

    Attributes:
        request: As it joined.
        view: What the codebook did when the request joined.
        value: The value of the entry that serves it; None if it is answered unedited.
        is_retry: True if the unedited model answers, because the value did not give the entry's target.
    """

    request: R
    view: CodebookView
    value: bytes | None
    is_retry: bool = False


class VllmEngine(AnswerEngine[R]):
    """Answers requests with an engine of vLLM, which batches them continuously.

    1. The codebook is looked up as requests join, by the text of their prompts. vLLM injects the values.
    2. With `check_answers`, a request whose entry did not give its target starts again, without the value.
    3. If a step fails, its requests start again one after the other. The one at fault fails.

    Args:
        llm: An `LLMEngine` of vLLM in this process, with the layer wrapped (`injection.install`).
        model: The same model without weights (`EditableModel.drop_weights`).
        lookup: Finds the entries that serve requests.
        max_rows: Active requests, at most.
        check_answers: As for `EditableModel.answer`.
    """

    def __init__(
        self, llm: Any, model: EditableModel, lookup: CodebookLookup, *, max_rows: int, check_answers: bool
    ) -> None:
        assert isinstance(model.task, CausalGeneration)
        self._llm, self._model, self._task, self._lookup = llm, model, model.task, lookup
        self._max_rows, self._check_answers = max_rows, check_answers
        self._active: dict[str, _Active[R]] = {}
        """The requests in vLLM, by its id."""
        self._suspects: deque[_Active[R]] = deque()
        """Requests of a failed step; each starts again once no other request is active."""
        self._num_started = 0

    @property
    def active(self) -> int:
        """The number of requests that have joined and not finished."""
        return len(self._active) + len(self._suspects)

    def select(self, waiting: Sequence[R]) -> list[int]:
        """The requests that have waited longest, as many as there are free rows."""
        free = 0 if self._suspects else max(0, self._max_rows - self.active)
        return list(range(min(free, len(waiting))))

    def step(self, joining: Sequence[R]) -> list[Finished[R]]:
        """Take requests in, and run one step of vLLM."""
        finished = self._join(joining) if joining else []
        if self._suspects and not self._active:
            suspect = self._suspects.popleft()
            finished += self._start(suspect.request, suspect.view, suspect.value, is_retry=suspect.is_retry)
        if not self._active:
            return finished
        try:
            outputs = self._llm.step()
        except Exception as error:  # noqa: BLE001  (a request that breaks the model must not affect the others)
            raise_if_device_lost(error)
            failure = describe_failure(error)
        else:
            for output in outputs:
                if output.finished and output.request_id in self._active:
                    finished += self._finish(self._active.pop(output.request_id), output.outputs[0].token_ids)
            return finished
        # Outside the `except` block: its error holds the frames of the failed pass, and so tensors in device memory.
        return finished + self._fail_active(failure)

    def drop(self, requests: Sequence[R]) -> None:
        """Forget requests; their rows are free for others."""
        dropped = {id(request) for request in requests}
        names = [name for name, active in self._active.items() if id(active.request) in dropped]
        self._llm.abort_request(names)
        for name in names:
            del self._active[name]
        self._suspects = deque(active for active in self._suspects if id(active.request) not in dropped)

    def _join(self, requests: Sequence[R]) -> list[Finished[R]]:
        """Look requests up and start them; returns those that vLLM does not take."""
        results = look_up(self._model, self._lookup, [request.prompt for request in requests])
        finished: list[Finished[R]] = []
        for request, result in zip(requests, results, strict=True):
            finished += self._start(request, result.view, result.value)
        return finished

    def _start(
        self, request: R, view: CodebookView, value: bytes | None = None, *, is_retry: bool = False
    ) -> list[Finished[R]]:
        """Give a request to vLLM; returns its failure if vLLM does not take it."""
        active = _Active(request, view, value, is_retry)
        token_ids = list(request.prompt.token_ids)
        salt = None if value is None else edited_salt(len(token_ids), value)
        self._num_started += 1
        name = str(self._num_started)
        try:
            self._llm.add_request(
                name,
                tokens_input(token_ids, cache_salt=salt),
                carry_value(self._sampling_params(request), value),
            )
        except ValueError as error:
            return [Finished(request, None, None, describe_failure(error))]
        self._active[name] = active
        return []

    def _sampling_params(self, request: R) -> SamplingParams:
        """A request's parameters in vLLM's terms: greedy, with the penalties of `CausalGeneration`.

        Raises:
            ValueError: vLLM does not have such a parameter.
        """
        parameters = request.parameters
        if parameters.no_repeat_ngram_size:
            raise ValueError("no_repeat_ngram_size is not supported with GRACESTREAM_ENGINE=vllm")
        return SamplingParams(
            temperature=0.0,
            max_tokens=self._task.max_generated_tokens(parameters),
            min_tokens=0 if parameters.min_new_tokens is UNSET else parameters.min_new_tokens,
            repetition_penalty=1.0 if parameters.repetition_penalty is UNSET else parameters.repetition_penalty,
            stop_token_ids=sorted(self._task.eos_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _finish(self, active: _Active[R], token_ids: Sequence[int]) -> list[Finished[R]]:
        """The result of a complete answer; none if the unedited model must answer."""
        request, view = active.request, active.view
        answer = self._task.to_answer(list(token_ids))
        if active.is_retry:
            return [Finished(request, ServedAnswer(answer, None, near_miss=view.found), view)]
        served = ServedAnswer.of(answer, view.found)
        if (
            self._check_answers
            and served.served_by is not None
            and not self._task.matches_target(answer, view.label, request.parameters)
        ):
            return self._start(request, view, is_retry=True)
        return [Finished(request, served, view)]

    def _fail_active(self, failure: str) -> list[Finished[R]]:
        """The active requests failed together: a single one is at fault, several become suspects."""
        failed = list(self._active.values())
        self._llm.abort_request(list(self._active))
        self._active.clear()
        # vLLM has listed the blocks of the failed step as cached, before they were computed.
        if not self._llm.reset_prefix_cache():
            raise DeviceLostError(f"vLLM cannot forget the blocks of a failed step: {failure}")
        if len(failed) == 1:
            return [Finished(failed[0].request, None, None, failure)]
        self._suspects.extend(failed)
        self._count_restarts(len(failed), failure)
        return []
