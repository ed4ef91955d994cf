"""Requests for engines, and an engine run to the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.engines.base import AnswerEngine, Finished
from gracestream.schemas.messages import Parameters


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request as engines see it."""

    text: str
    prompt: Prompt
    parameters: Parameters
    batch_key: object


def asked(model: EditableModel, text: str, **fields: float) -> Asked:
    """A request to a model."""
    prompt, parameters = model.task.tokenize(text), Parameters(**fields)  # type: ignore[arg-type]
    return Asked(text, prompt, parameters, model.task.batch_key(prompt, parameters))


def answer_all(
    engine: AnswerEngine[Asked],
    requests: Sequence[Asked],
    arrivals: Sequence[int] = (),
    before_step: Callable[[int], object] = lambda _step: None,
) -> list[Finished[Asked]]:
    """Run an engine until all requests have finished; the results in the order of the requests.

    Args:
        engine: The engine.
        requests: In order of arrival.
        arrivals: The step before which each request arrives, in rising order; by default all arrive at first.
        before_step: Called before each step with its number.
    """
    arrivals = arrivals or [0] * len(requests)
    waiting: list[Asked] = []
    finished: dict[int, Finished[Asked]] = {}
    step = arrived = 0
    while len(finished) < len(requests):
        assert step < 10_000, "the engine makes no progress"
        while arrived < len(requests) and arrivals[arrived] <= step:
            waiting.append(requests[arrived])
            arrived += 1
        before_step(step)
        indexes = engine.select(waiting)
        joining = [waiting[index] for index in indexes]
        waiting = [request for index, request in enumerate(waiting) if index not in indexes]
        for one in engine.step(joining):
            assert id(one.request) not in finished, "a request was answered twice"
            finished[id(one.request)] = one
        step += 1
    assert engine.active == 0
    return [finished[id(request)] for request in requests]
