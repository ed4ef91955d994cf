"""Contenders of the benchmarks of engines: a replica's engines, and the simplest code that answers the same requests.

The clock is CPU time of the process on a CPU, so other processes of the machine do not count. On a GPU it is wall time.
This module needs only the packages of the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel, Prefill
from gracestream.pipeline.model.engines.base import Finished
from gracestream.schemas.messages import Parameters
from tests.bench.device import clock


@dataclass(frozen=True, slots=True, eq=False)
class BenchRequest:
    """A request, the clock at which it arrives, and the target if it is corrected."""

    prompt: Prompt
    parameters: Parameters
    batch_key: object
    arrival: float = 0.0
    target: str = ""


@dataclass(slots=True)
class Answered:
    """What a contender did.

    Attributes:
        seconds: Seconds by the clock.
        decode_seconds: Seconds of the steps that no request joined.
        latencies: Seconds from arrival to answer, by the identity of the request.
        texts: Answers, by the identity of the request; of engines with a codebook only.
    """

    seconds: float = 0.0
    decode_seconds: float = 0.0
    latencies: dict[int, float] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)


CPU = torch.device("cpu")

Contender = Callable[[Sequence[BenchRequest]], Answered]
"""Answers all requests."""


def make_request(model: EditableModel, inputs: Any, target: str = "", **fields: int) -> BenchRequest:
    prompt, parameters = model.task.tokenize(inputs), Parameters(**fields)
    return BenchRequest(prompt, parameters, model.task.batch_key(prompt, parameters), target=target)


class WithoutCodebook:
    """A model whose prompts are not looked up."""

    def __init__(self, model: EditableModel) -> None:
        self.task, self.device, self._model = model.task, model.device, model

    def prefill(self, prompts: Sequence[Prompt], _lookup: CodebookLookup | None) -> Prefill:
        prefill = self._model.prefill(prompts, None)
        return Prefill(prefill.logits_BC, prefill.cache, [None] * len(prompts))


class Generate:
    """`generate` as an engine: a batch in order of arrival, up to its longest answer."""

    active = 0

    def __init__(self, model: EditableModel, max_rows: int) -> None:
        self._model, self._max_rows = model, max_rows

    def select(self, waiting: Sequence[BenchRequest]) -> list[int]:
        return list(range(min(len(waiting), self._max_rows)))

    def step(self, joining: Sequence[BenchRequest]) -> list[Finished[BenchRequest]]:
        task: Any = self._model.task
        longest = max((request.parameters for request in joining), key=task.max_generated_tokens)
        with torch.inference_mode():
            task.run(task.batch([request.prompt for request in joining]), [longest])
        return [Finished(request, None, None) for request in joining]


def run_engine(engine: Any, requests: Sequence[BenchRequest], device: torch.device = CPU) -> Answered:
    """Answer requests that arrive by the clock. While an engine has nothing to do, the clock jumps to the next one."""
    now, answered = 0.0, Answered()
    arriving = sorted(requests, key=lambda request: request.arrival)
    waiting: list[BenchRequest] = []
    while len(answered.latencies) < len(requests):
        if not waiting and not engine.active:
            now = max(now, arriving[0].arrival)
        while arriving and arriving[0].arrival <= now:
            waiting.append(arriving.pop(0))
        started = clock(device)
        chosen = set(engine.select(waiting)) if waiting else set()
        finished = engine.step([waiting[index] for index in sorted(chosen)])
        seconds = clock(device) - started
        now, answered.seconds = now + seconds, answered.seconds + seconds
        answered.decode_seconds += 0.0 if chosen else seconds
        waiting = [request for index, request in enumerate(waiting) if index not in chosen]
        for one in finished:
            answered.latencies[id(one.request)] = now - one.request.arrival
            if one.served is not None:
                answered.texts[id(one.request)] = one.served.answer.outputs.text
    return answered


def run_manager(model: EditableModel, requests: Sequence[BenchRequest]) -> Answered:
    """Answer requests with transformers' manager, which runs in a thread of its own."""
    from transformers.generation import ContinuousBatchingConfig  # noqa: PLC0415 - only this contender needs it

    config = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    manager = model.module.init_continuous_batching(
        generation_config=model.module.generation_config, continuous_batching_config=config
    )
    manager.start()
    started = clock(model.device)
    try:
        for number, request in enumerate(requests):
            manager.add_request(
                list(request.prompt.token_ids), request_id=str(number), max_new_tokens=request.parameters.max_new_tokens
            )
        answered = Answered()
        while len(answered.latencies) < len(requests):
            result = manager.get_result(timeout=300)
            if result is None:
                raise TimeoutError("transformers' manager gave no result for 300 s")
            if result.is_finished():
                answered.latencies[id(requests[int(result.request_id)])] = clock(model.device) - started
        answered.seconds = clock(model.device) - started
        return answered
    finally:
        manager.stop(block=True)
