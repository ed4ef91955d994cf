"""Corrected answers in vLLM's server: held back until they are the target, and else answered unedited."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from gracestream.pipeline.codebook.lookup import FoundEntry
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.engines.base import CodebookView
from tests.support.tiny_models import editable, texts

pytest.importorskip("vllm", reason="tests/system/test_vllm.py runs these tests in vLLM's own environment")

from vllm.exceptions import GracefulHTTPError
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from gracestream.pipeline.vllm.generation import CorrectedGeneration, HttpRequest, current_request
from gracestream.pipeline.vllm.lookups import LookupResult
from gracestream.pipeline.vllm.values import carried_value

MODEL = editable("llama")
PROMPT = texts(1, seed=3, shortest=6)[0]
TOKENS = list(MODEL.task.tokenize(PROMPT).token_ids)
LABEL = MODEL.task.encode_target(PROMPT, "violin museum")
OTHER = MODEL.task.encode_target(PROMPT, "train river museum")
VALUE = b"12345678"


@dataclass
class Engine:
    """`generate` of an engine client that gives one answer with a value, and another without.

    Attributes:
        edited: The tokens with the value.
        unedited: The tokens without it.
        started: The requests: id, value, salt.
        closed: Ids of requests that ended before their answer was complete.
        steps: Outputs that were taken, by id.
    """

    edited: Sequence[int]
    unedited: Sequence[int] = OTHER
    started: list[tuple[str, bytes | None, str | None]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        value = carried_value(sampling_params)
        self.started.append((request_id, value, prompt.get("cache_salt")))
        tokens = list(self.edited if value else self.unedited)[: sampling_params.max_tokens]
        is_complete = False
        try:
            for end in range(1, len(tokens) + 1):
                self.steps[request_id] = end
                start = end - 1 if sampling_params.output_kind is RequestOutputKind.DELTA else 0
                is_complete = end == len(tokens)
                reason = "stop" if is_complete else None
                output = CompletionOutput(0, "", tokens[start:end], None, None, finish_reason=reason)
                yield RequestOutput(request_id, None, TOKENS, None, [output], is_complete)
                await asyncio.sleep(0)
        finally:
            if not is_complete:
                self.closed.append(request_id)


@dataclass
class Lookups:
    """Finds one entry for every prompt, or none, or fails."""

    found: FoundEntry | None = field(default_factory=lambda: FoundEntry(0, "entry", 0.0, 1.0))
    error: Exception | None = None
    asked: list[Prompt] = field(default_factory=list)

    async def find(self, prompt: Prompt, _min_seq: int) -> LookupResult:
        self.asked.append(prompt)
        if self.error is not None:
            raise self.error
        view = CodebookView(self.found, LABEL if self.found else (), seq=7, term=2)
        return LookupResult(view, VALUE if self.found else None)


def answer(
    engine: Engine, lookups: Lookups, request: HttpRequest | None = None, *, check_answers: bool = True, **fields: Any
) -> tuple[list[int], list[RequestOutput]]:
    """The tokens of an answer, and its outputs."""
    generation: Any = CorrectedGeneration(engine.generate, MODEL, lookups, check_answers=check_answers)  # type: ignore[arg-type]
    parameters = SamplingParams(temperature=0.0, max_tokens=20, **fields)

    async def collect() -> list[RequestOutput]:
        current_request.set(request or HttpRequest())
        return [output async for output in generation(tokens_input(TOKENS), parameters, "r")]

    outputs = asyncio.run(collect())
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    is_delta = parameters.output_kind is RequestOutputKind.DELTA
    return [token for each in tokens for token in each] if is_delta else tokens[-1], outputs


kinds = pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])


@kinds
def test_an_answer_that_is_the_target_is_sent_whole(kind: RequestOutputKind) -> None:
    engine, request = Engine(LABEL), HttpRequest()
    tokens, outputs = answer(engine, Lookups(), request, output_kind=kind)
    assert tuple(tokens) == LABEL
    assert [name for name, *_ in engine.started] == ["r"]
    assert engine.started[0][1] == VALUE
    assert engine.started[0][2], "its cached blocks are its own"
    (spans,) = [output.outputs[0].weight_versions for output in outputs if output.finished]
    assert [(span.version, span.start, span.end) for span in spans or []] == [("2.7", 0, len(LABEL))]
    assert [is_corrected for *_, is_corrected in request.lookups] == [True]


@kinds
def test_another_answer_is_left_at_its_first_wrong_token_and_given_unedited(kind: RequestOutputKind) -> None:
    wrong = [LABEL[0], *OTHER[1:], *[OTHER[0]] * 10]
    engine, request = Engine(wrong), HttpRequest()
    tokens, outputs = answer(engine, Lookups(), request, output_kind=kind)
    assert tuple(tokens) == OTHER
    assert engine.started[1:] == [("r-unedited", None, None)]
    assert engine.closed == ["r"]
    assert engine.steps["r"] <= 3
    assert [is_corrected for *_, is_corrected in request.lookups] == [False]
    assert outputs[-1].outputs[0].weight_versions


def test_an_answer_that_ends_before_its_target_is_given_unedited() -> None:
    end = LABEL[-1]
    engine = Engine([LABEL[0], end])
    assert tuple(answer(engine, Lookups())[0]) == OTHER


def test_an_unchecked_answer_is_sent_as_it_is() -> None:
    engine = Engine(OTHER[:2])
    assert tuple(answer(engine, Lookups(), check_answers=False)[0]) == OTHER[:2]


def test_text_may_follow_the_target_if_the_request_asks_for_it() -> None:
    longer = [*LABEL[:-1], *OTHER]
    assert answer(Engine(longer), Lookups(), min_tokens=8)[0] == longer
    assert tuple(answer(Engine(longer), Lookups())[0]) == OTHER


def test_a_request_without_an_entry_goes_straight_on() -> None:
    engine, request = Engine(LABEL), HttpRequest()
    assert tuple(answer(engine, Lookups(None), request)[0]) == OTHER
    assert engine.started == [("r", None, None)]
    assert [is_corrected for *_, is_corrected in request.lookups] == [False]


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (HttpRequest(may_correct=False), {}),
        (None, {}),
        (HttpRequest(), {"n": 2, "temperature": 1.0}),
        (HttpRequest(), {"prompt_logprobs": 1}),
        (HttpRequest(), {"extra_args": {"kv_transfer_params": {}}}),
    ],
)
def test_other_requests_are_not_looked_up(request_: HttpRequest | None, fields: dict[str, Any]) -> None:
    engine, lookups = Engine(LABEL), Lookups()
    generation: Any = CorrectedGeneration(engine.generate, MODEL, lookups, check_answers=True)  # type: ignore[arg-type]
    parameters = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **fields})

    async def run() -> None:
        current_request.set(request_)
        async for _ in generation(tokens_input(TOKENS), parameters, "r"):
            pass

    asyncio.run(run())
    assert lookups.asked == []
    assert engine.started == [("r", None, None)]


def test_a_history_that_cannot_be_followed_is_503() -> None:
    with pytest.raises(GracefulHTTPError, match="corrections cannot be served: a digest differs") as raised:
        answer(Engine(LABEL), Lookups(error=HistoryError("a digest differs")))
    assert raised.value.http_status == 503


def test_a_delta_that_is_not_reached_is_503() -> None:
    with pytest.raises(GracefulHTTPError, match="min_seq 8 is not reached: the codebook is at 7"):
        answer(Engine(LABEL), Lookups(), HttpRequest(min_seq=8))
