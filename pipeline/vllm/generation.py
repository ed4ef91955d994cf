"""Corrected answers from vLLM's server: looks each request up before vLLM's engine generates its answer.

1. The codebook is looked up once for a request, in its published state. The answer keeps that state, however long it
   takes.
2. A corrected answer is held back until it is complete, and compared with the entry's target. If they differ, the
   unedited model answers instead, as soon as the difference is known.
3. Requests for several answers (`n`), for log probabilities of the prompt, for a LoRA adapter, or with images are
   answered without the codebook.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.outputs import RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams

from gracestream.pipeline.codebook import Label
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import CausalGeneration, EditableModel, LastTurn, Prompt
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.vllm.lookups import LookupQueue, LookupResult
from gracestream.pipeline.vllm.values import carry_value, edited_prompt

Generate = Callable[..., AsyncGenerator[RequestOutput, None]]
"""`EngineClient.generate` of vLLM."""


@dataclass(slots=True)
class HttpRequest:
    """What an HTTP request says beside its prompts, and what the codebook did for them.

    Attributes:
        last_turn: The last message of a chat; None for texts.
        may_correct: False if the last message of a chat is not a text of the user.
        lookups: For each prompt vLLM's id, the lookup, and True if the answer is the entry's.
    """

    last_turn: LastTurn | None = None
    may_correct: bool = True
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
            GracefulHTTPError: 503, because the history of the codebook cannot be followed.
        """
        parameters = carry_value(sampling_params, None)
        request = current_request.get() or HttpRequest()
        if not self._can_correct(prompt, parameters, request, kwargs):
            async with aclosing(self._generate(prompt, parameters, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    yield output
            return
        token_ids = list(prompt["prompt_token_ids"])
        try:
            result = await self._lookups.find(Prompt(tuple(token_ids), last_turn=request.last_turn))
        except HistoryError as error:
            raise GracefulHTTPError(f"corrections cannot be served: {error}", HTTPStatus.SERVICE_UNAVAILABLE) from error
        held: list[RequestOutput] | None = None
        if result.value is not None:
            edited = edited_prompt(token_ids, result.value, prompt.get("cache_salt"))
            if "prompt" in prompt:
                edited["prompt"] = prompt["prompt"]
            edited_outputs = self._generate(edited, carry_value(parameters, result.value), request_id, **kwargs)
            held = await self._hold(edited_outputs, result.view.label, parameters)
        request.lookups.append((request_id, result, held is not None))
        if held is not None:
            metrics.EDITED_ANSWERS.inc()
            outputs = _iterate(held)
        else:
            # The edited request may still be leaving the engine, so this one has a name of its own.
            name = request_id if result.value is None else f"{request_id}-unedited"
            outputs = self._generate(prompt, parameters, name, **kwargs)
        answered: list[int] = []
        async with aclosing(outputs):
            async for output in outputs:
                answered = _answered(answered, output, parameters)
                if output.finished:
                    output.outputs[0].weight_versions = [WeightVersionSpan(result.version, 0, len(answered))]
                yield output

    def _can_correct(
        self, prompt: Any, parameters: SamplingParams, request: HttpRequest, kwargs: dict[str, Any]
    ) -> bool:
        """Whether the codebook applies to a request."""
        return (
            request.may_correct
            and isinstance(prompt, dict)
            and prompt.get("type") == "token"
            and len(prompt["prompt_token_ids"]) <= self._task.max_prompt_tokens
            and parameters.n == 1
            and parameters.prompt_logprobs is None
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
                answered = _answered(answered, output, parameters)
                if self._check_answers and not self._may_become_target(answered, label, parameters, output):
                    return None
        return held

    def _may_become_target(
        self, token_ids: list[int], label: Label, parameters: SamplingParams, output: RequestOutput
    ) -> bool:
        """False if an answer, complete or not, cannot be the target of a label."""
        target = self._task.decode_label(label if parameters.max_tokens is None else label[: parameters.max_tokens])
        text = (self._task.to_answer(token_ids).outputs.text or "").rstrip("\N{REPLACEMENT CHARACTER}")
        if not output.finished or isinstance(output.outputs[0].stop_reason, str):  # a string stopped it
            return target.startswith(text) or (text.startswith(target) and self._may_continue(label, parameters))
        return text == target or (text.startswith(target) and self._may_continue(label, parameters))

    def _may_continue(self, label: Label, parameters: SamplingParams) -> bool:
        """Whether text may follow a target."""
        return bool(parameters.min_tokens or parameters.ignore_eos or label[-1] not in self._task.eos_token_ids)


async def _iterate(outputs: list[RequestOutput]) -> AsyncGenerator[RequestOutput, None]:
    """Outputs that are complete, as a generator."""
    for output in outputs:
        yield output


def _answered(before: list[int], output: RequestOutput, parameters: SamplingParams) -> list[int]:
    """The tokens of an answer so far. An output holds either the new ones or all of them."""
    token_ids = output.outputs[0].token_ids
    return [*before, *token_ids] if parameters.output_kind is RequestOutputKind.DELTA else list(token_ids)
