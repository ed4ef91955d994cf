"""The runner of an engine: nobody waits for ever, and each reply goes to who asked."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.replica.engine_runner import EngineRunner
from gracestream.pipeline.replica.request_handler import PreparedRequest, Reply, RequestRecord
from gracestream.schemas.messages import Request
from tests.support.tiny_models import tokenizer


def asked(name: str, steps: int = 1) -> PreparedRequest:
    """A request that takes a number of steps."""
    record = RequestRecord(None, "requests", 0, 0, 0.0, name.encode())
    return PreparedRequest(record, Request(v=1, request_id=name, inputs="x"), Prompt((1,) * steps), None)


class Counting:
    """An engine whose requests take a step for each of their tokens; and what the runner did with it.

    Attributes:
        steps: The names of the active requests in each step.
        threads: The names of the threads that ran a step.
        begun: Set once a step has begun.
        go_on: Steps wait for it.
    """

    def __init__(self, max_rows: int = 8, *, held: bool = False) -> None:
        self.steps: list[list[str]] = []
        self.threads: set[str] = set()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._rows: list[tuple[PreparedRequest, int]] = []
        self._max_rows = max_rows
        if not held:
            self.go_on.set()

    @property
    def active(self) -> int:
        return len(self._rows)

    def select(self, waiting: Sequence[PreparedRequest]) -> list[int]:
        return list(range(min(len(waiting), self._max_rows - len(self._rows))))

    def drop(self, requests: Sequence[PreparedRequest]) -> None:
        self._rows = [row for row in self._rows if all(row[0] is not request for request in requests)]

    def step(self, joining: list[PreparedRequest]) -> list[tuple[PreparedRequest, Reply]]:
        self._rows += [(request, len(request.prompt)) for request in joining]
        self.steps.append([request.request.request_id for request, _ in self._rows])
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.go_on.wait(60)
        if any("fails" in name for name in self.steps[-1]):
            raise ValueError("no such tensor")
        self._rows = [(request, left - 1) for request, left in self._rows]
        finished = [request for request, left in self._rows if not left]
        self._rows = [row for row in self._rows if row[1]]
        return [(request, Reply("predictions", request.record.key, None)) for request in finished]


async def collected(runner: EngineRunner, requests: list[PreparedRequest]) -> list[str]:
    """The names of the requests in the order of their replies."""
    names = []
    async for replies in runner.answer(requests):
        names += [(reply.key or b"").decode() for reply in replies]
    return names


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
        yield thread


def runner_of(engine: Any, thread: ThreadPoolExecutor) -> EngineRunner:
    return EngineRunner(engine, engine.step, thread)


def run(story: Callable[[], Awaitable[object]]) -> None:
    async def within_a_minute() -> None:
        async with asyncio.timeout(60):
            await story()

    asyncio.run(within_a_minute())


def test_requests_join_and_leave_between_steps_and_each_reply_goes_to_who_asked(thread: ThreadPoolExecutor) -> None:
    engine = Counting(2, held=True)
    runner = runner_of(engine, thread)

    async def story() -> None:
        first = asyncio.create_task(collected(runner, [asked("long", 5)]))
        await asyncio.to_thread(engine.begun.wait)
        one = asyncio.create_task(collected(runner, [asked("a"), asked("b", 2)]))
        other = asyncio.create_task(collected(runner, [asked("c"), asked("d")]))
        await asyncio.sleep(0)
        engine.go_on.set()
        assert [await first, await one, await other] == [["long"], ["a", "b"], ["c", "d"]]

    run(story)
    assert engine.steps == [["long"], ["long", "a"], ["long", "b"], ["long", "b"], ["long", "c"], ["d"]]
    assert engine.threads == {"model_0"}


def test_an_error_goes_to_the_active_requests_and_the_rest_goes_on(thread: ThreadPoolExecutor) -> None:
    engine = Counting(2, held=True)
    runner = runner_of(engine, thread)

    async def story() -> None:
        bad = asyncio.create_task(collected(runner, [asked("fails"), asked("beside it", 3), asked("waiting")]))
        await asyncio.to_thread(engine.begun.wait)
        good = asyncio.create_task(collected(runner, [asked("good")]))
        await asyncio.sleep(0)
        engine.go_on.set()
        assert await good == ["good"]
        with pytest.raises(ValueError, match="no such tensor"):
            await bad

    run(story)
    assert engine.active == 0


def test_requests_that_were_given_up_leave_the_engine_and_the_queue(thread: ThreadPoolExecutor) -> None:
    engine = Counting(1, held=True)
    runner = runner_of(engine, thread)

    async def story() -> None:
        given_up = asyncio.create_task(collected(runner, [asked("one", 9), asked("two"), asked("three")]))
        await asyncio.to_thread(engine.begun.wait)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        engine.go_on.set()
        assert await collected(runner, [asked("later")]) == ["later"]

    run(story)
    assert engine.steps == [["one"], ["later"]]


def test_other_work_in_the_thread_runs_between_two_steps(thread: ThreadPoolExecutor) -> None:
    engine = Counting(1, held=True)
    runner = runner_of(engine, thread)
    before: list[int] = []

    async def story() -> None:
        asking = asyncio.create_task(collected(runner, [asked(str(number), 3) for number in range(5)]))
        await asyncio.to_thread(engine.begun.wait)
        other = asyncio.get_running_loop().run_in_executor(thread, lambda: before.append(len(engine.steps)))
        engine.go_on.set()
        await asyncio.gather(asking, other)

    run(story)
    assert before == [1]
    assert len(engine.steps) == 15


def test_one_thread_may_tokenise_while_another_decodes() -> None:
    shared = tokenizer("bert")
    shared.backend_tokenizer.enable_truncation(16)  # as some checkpoints' files ask for
    shared.backend_tokenizer.enable_padding(length=16)
    text = "the river runs past the old mill and the church"
    expected = shared(text)["input_ids"]
    words = shared.decode(expected)

    def tokenised() -> bool:
        return all(shared(text, add_special_tokens=True)["input_ids"] == expected for _ in range(2000))

    def decoded() -> bool:
        return all(shared.decode(expected) == words for _ in range(2000))

    with ThreadPoolExecutor(2) as threads:
        assert all(done.result() for done in [threads.submit(tokenised), threads.submit(decoded)])
