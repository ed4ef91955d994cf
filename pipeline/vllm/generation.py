"""Corrected answers from vLLM's server: looks each request up before vLLM's engine generates its answer.

1. The codebook is looked up once for a request, in its published state. The answer keeps that state, however long it
   takes.
2. A corrected answer is held back until it is complete, and compared with the entry's target. If they differ, the
   unedited model answers instead, as soon as the difference is known.
3. Some requests are answered without the codebook: `CorrectedGeneration._can_correct` and the middleware say which.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from msgspec import UNSET
from vllm.exceptions import GracefulHTTPError
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams

from gracestream.pipeline.codebook import Label
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import CausalGeneration, EditableModel, LastTurn, Prompt
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.replica import near_miss_reason
from gracestream.pipeline.vllm.lookups import LookupQueue, LookupResult
from gracestream.pipeline.vllm.values import carry_value, edited_salt
from gracestream.schemas.messages import Parameters

Generate = Callable[..., AsyncGenerator[RequestOutput, None]]
"""`EngineClient.generate` of vLLM."""


@dataclass(slots=True)
class HttpRequest:
    """What an HTTP request says beside its prompts, and what the codebook did for them.

    Attributes:
        min_seq: The delta that the answers must include; 0: any.
        last_turn: The last message of a chat; None for texts.
        may_correct: False if the codebook does not apply, such as to a tool's message.
        failure: Why the request cannot be answered from the codebook, once that is known; empty if it can.
        lookups: For each prompt vLLM's id, the lookup, and True if the answer is the entry's.
    """

    min_seq: int = 0
    last_turn: LastTurn | None = None
    may_correct: bool = True
    failure: str = ""
    lookups: list[tuple[str, LookupResult, bool]] = field(default_factory=list)


current_request: ContextVar[HttpRequest | None] = ContextVar("current_request", default=None)
"""The HTTP request that is being answered."""


class CorrectedGeneration:
    """Takes the place of `EngineClient.generate`.

    Args:
        generate: vLLM's own.
        model: The model without its weights.
        lookups: Finds the entries that serve requests.
        check_answers: Compare a corrected answer with the entry's target.
    """

    def __init__(self, generate: Generate, model: EditableModel, lookups: LookupQueue, *, check_answers: bool) -> None:
        assert isinstance(model.task, CausalGeneration)
        self._generate, self._task, self._lookups = generate, model.task, lookups
        self._check_answers = check_answers

    async def __call__(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, as of `EngineClient.generate`.

        Raises:
            GracefulHTTPError: 503, because the history of the codebook cannot be followed, or `min_seq` is not reached.
        """
        parameters = carry_value(sampling_params, None)
        request = current_request.get() or HttpRequest(may_correct=False)
        if not self._can_correct(prompt, parameters, request, kwargs):
            async with aclosing(self._generate(prompt, parameters, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    yield output
            return
        token_ids = list(prompt["prompt_token_ids"])
        result = await self._look_up(Prompt(tuple(token_ids), last_turn=request.last_turn), request)
        held: list[RequestOutput] | None = None
        if result.value is not None:
            salt = edited_salt(len(token_ids), result.value, prompt.get("cache_salt"))
            edited = tokens_input(token_ids, cache_salt=salt)
            if "prompt" in prompt:
                edited["prompt"] = prompt["prompt"]
            edited_outputs = self._generate(edited, carry_value(parameters, result.value), request_id, **kwargs)
            held = await self._hold(edited_outputs, result.view.label, parameters)
        request.lookups.append((request_id, result, held is not None))
        _count(result, is_corrected=held is not None)
        if held is not None:
            outputs = _iterate(held)
        else:
            # The edited request may still be leaving the engine, so this one has a name of its own.
            name = request_id if result.value is None else f"{request_id}-unedited"
            outputs = self._generate(prompt, parameters, name, **kwargs)
        num_tokens = 0
        async with aclosing(outputs):
            async for output in outputs:
                new_or_all = len(output.outputs[0].token_ids)
                num_tokens = num_tokens + new_or_all if _is_delta(parameters) else new_or_all
                if output.finished:
                    output.outputs[0].weight_versions = [WeightVersionSpan(result.version, 0, num_tokens)]
                yield output

    async def _look_up(self, prompt: Prompt, request: HttpRequest) -> LookupResult:
        try:
            result = await self._lookups.find(prompt, request.min_seq)
        except HistoryError as error:
            request.failure = f"corrections cannot be served: {error}"
            raise GracefulHTTPError(request.failure, HTTPStatus.SERVICE_UNAVAILABLE) from error
        if result.view.seq < request.min_seq:
            request.failure = f"min_seq {request.min_seq} is not reached: the codebook is at {result.view.seq}"
            raise GracefulHTTPError(request.failure, HTTPStatus.SERVICE_UNAVAILABLE)
        return result

    def _can_correct(
        self, prompt: Any, parameters: SamplingParams, request: HttpRequest, kwargs: dict[str, Any]
    ) -> bool:
        """Whether the codebook applies to a request."""
        return (
            request.may_correct
            and isinstance(prompt, dict)
            and prompt.get("type") == "token"
            and 0 < len(prompt["prompt_token_ids"]) <= self._task.max_prompt_tokens
            and max(prompt["prompt_token_ids"]) < self._task.vocabulary_size
            and parameters.n == 1
            and parameters.prompt_logprobs is None
            and "kv_transfer_params" not in (parameters.extra_args or {})  # they serve one request, not a second one
            and kwargs.get("lora_request") is None
        )

    async def _hold(
        self, outputs: AsyncGenerator[RequestOutput, None], label: Label, parameters: SamplingParams
    ) -> list[RequestOutput] | None:
        """All outputs of a corrected answer; None as soon as it cannot become the target."""
        held: list[RequestOutput] = []
        answered: list[int] = []
        async with aclosing(outputs):
            async for output in outputs:
                held.append(output)
                token_ids = output.outputs[0].token_ids
                answered = [*answered, *token_ids] if _is_delta(parameters) else list(token_ids)
                if self._check_answers and not self._may_become_target(answered, label, parameters, output):
                    return None
        return held

    def _may_become_target(
        self, token_ids: list[int], label: Label, parameters: SamplingParams, output: RequestOutput
    ) -> bool:
        """False if an answer, complete or not, cannot be the target of a label."""
        answer, limits = self._task.to_answer(token_ids), _answer_limits(parameters, label)
        is_cut = not output.finished or isinstance(output.outputs[0].stop_reason, str)  # a string stopped it
        return self._task.matches_target(answer, label, limits) or (
            is_cut and self._task.begins_target(answer, label, limits)
        )


def _answer_limits(parameters: SamplingParams, label: Label) -> Parameters:
    """What decides whether an answer is the target, in the terms of a request from Kafka."""
    return Parameters(
        max_new_tokens=len(label) if parameters.max_tokens is None else parameters.max_tokens,
        min_new_tokens=parameters.min_tokens or (1 if parameters.ignore_eos else UNSET),
    )


def _count(result: LookupResult, *, is_corrected: bool) -> None:
    """Count a request, as any replica does."""
    metrics.REQUESTS_TOTAL.labels("ok").inc()
    if is_corrected:
        metrics.EDITED_ANSWERS.inc()
    elif result.view.found is not None:
        metrics.NEAR_MISSES.labels(near_miss_reason(result.view.found)).inc()


async def _iterate(outputs: list[RequestOutput]) -> AsyncGenerator[RequestOutput, None]:
    """Outputs that are complete, as a generator."""
    for output in outputs:
        yield output


def _is_delta(parameters: SamplingParams) -> bool:
    """True if each output holds the new tokens, False if it holds all of them."""
    return parameters.output_kind is RequestOutputKind.DELTA
