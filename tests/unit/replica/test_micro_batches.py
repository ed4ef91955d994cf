"""Micro-batches: nobody waits for ever, neighbours in length go together, and each reply goes to who asked."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.replica.micro_batches import MicroBatcher, select_batch
from gracestream.pipeline.replica.request_handler import PreparedRequest, Reply, RequestRecord
from gracestream.schemas.messages import Request
from tests.support.tiny_models import tokenizer

WAITING = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 30)), min_size=1, max_size=40)


@given(WAITING, st.integers(1, 8))
def test_the_first_goes_with_its_neighbours_in_length(waiting: list[tuple[str, int]], size: int) -> None:
    places = select_batch(waiting, size)
    alike = [place for place, (group, _) in enumerate(waiting) if group == waiting[0][0]]
    assert 0 in places
    assert len(set(places)) == len(places) == min(size, len(alike))
    assert set(places) <= set(alike)
    lengths = sorted(waiting[place][1] for place in places)
    left = [waiting[place][1] for place in alike if place not in places]
    assert not [tokens for tokens in left if lengths[0] < tokens < lengths[-1]], "one in between was left out"


@given(WAITING, st.integers(1, 8))
def test_no_neighbours_have_less_padding(waiting: list[tuple[str, int]], size: int) -> None:
    alike = sorted(tokens for group, tokens in waiting if group == waiting[0][0])
    windows = [alike[start : start + size] for start in range(max(1, len(alike) - size + 1))]
    least = min(some[-1] * len(some) - sum(some) for some in windows if waiting[0][1] in some)
    chosen = [waiting[place][1] for place in select_batch(waiting, size)]
    assert max(chosen) * len(chosen) - sum(chosen) == least


def asked(name: str, tokens: int = 3, group: object = None) -> PreparedRequest:
    record = RequestRecord(None, "requests", 0, 0, 0.0, name.encode())
    return PreparedRequest(record, Request(v=1, request_id=name, inputs="x"), Prompt((1,) * tokens), group)


def replied(questions: list[PreparedRequest]) -> list[Reply]:
    return [Reply("predictions", one.record.key, None) for one in questions]


async def collected(batches: MicroBatcher, questions: list[PreparedRequest]) -> set[str]:
    names = set()
    async for replies in batches.answer(questions):
        names |= {(reply.key or b"").decode() for reply in replies}
    return names


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
        yield thread


class Held:
    """Answers once it is let, and knows which micro-batches it was given, and where."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[str] = set()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, questions: list[PreparedRequest]) -> list[Reply]:
        self.batches.append([one.request.request_id for one in questions])
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.go_on.wait(60)
        return replied(questions)


def run(story: Callable[[], object]) -> None:
    async def told() -> None:
        async with asyncio.timeout(60):
            await story()  # type: ignore[misc]

    asyncio.run(told())


def test_requests_of_several_batches_are_answered_together_and_each_told_to_who_asked(
    thread: ThreadPoolExecutor,
) -> None:
    model = Held()
    batches = MicroBatcher(model, 3, thread)

    async def story() -> None:
        first = asyncio.create_task(collected(batches, [asked("now")]))
        await asyncio.to_thread(model.begun.wait)
        one = asyncio.create_task(collected(batches, [asked("a5", 5), asked("a9", 9), asked("a1", 1, "x")]))
        other = asyncio.create_task(collected(batches, [asked("b5", 5), asked("b6", 6), asked("b8", 8)]))
        await asyncio.sleep(0)
        model.go_on.set()
        assert [await first, await one, await other] == [{"now"}, {"a5", "a9", "a1"}, {"b5", "b6", "b8"}]

    run(story)
    assert [set(batch) for batch in model.batches] == [{"now"}, {"a5", "b5", "b6"}, {"a9", "b8"}, {"a1"}]
    assert model.threads == {"model_0"}


def test_groups_are_kept_apart(thread: ThreadPoolExecutor) -> None:
    model = Held()
    model.go_on.set()
    batches = MicroBatcher(model, 8, thread)
    mixed = [asked(f"{group}{number}", group=group) for number in range(3) for group in "xy"]
    run(lambda: collected(batches, mixed))
    assert [{name[0] for name in batch} for batch in model.batches] == [{"x"}, {"y"}]


def test_what_goes_wrong_is_told_to_those_whom_it_concerns_and_the_rest_goes_on(thread: ThreadPoolExecutor) -> None:
    def model(questions: list[PreparedRequest]) -> list[Reply]:
        if any(one.batch_key == "bad" for one in questions):
            raise ValueError("no such tensor")
        return replied(questions)

    batches = MicroBatcher(model, 4, thread)

    async def story() -> None:
        bad = asyncio.create_task(collected(batches, [asked("b", group="bad"), asked("c")]))
        good = asyncio.create_task(collected(batches, [asked("d")]))
        assert await good == {"d"}
        with pytest.raises(ValueError, match="no such tensor"):
            await bad

    run(story)


def test_what_was_given_up_is_not_run(thread: ThreadPoolExecutor) -> None:
    model = Held()
    batches = MicroBatcher(model, 1, thread)

    async def story() -> None:
        given_up = asyncio.create_task(collected(batches, [asked("one"), asked("two"), asked("three")]))
        await asyncio.to_thread(model.begun.wait)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        model.go_on.set()
        assert await collected(batches, [asked("later")]) == {"later"}

    run(story)
    assert model.batches == [["one"], ["later"]]


def test_the_thread_may_be_given_other_work_between_two_micro_batches(thread: ThreadPoolExecutor) -> None:
    model = Held()
    batches = MicroBatcher(model, 1, thread)
    before: list[int] = []

    async def story() -> None:
        asking = asyncio.create_task(collected(batches, [asked(str(number)) for number in range(5)]))
        await asyncio.to_thread(model.begun.wait)
        other = asyncio.get_running_loop().run_in_executor(thread, lambda: before.append(len(model.batches)))
        model.go_on.set()
        await asyncio.gather(asking, other)

    run(story)
    assert before[0] <= 2


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
