"""Micro-batches: which of the requests that wait the model takes next, and in which thread.

What it guarantees:

1. The request that has waited longest is in the next micro-batch, so none waits for ever.
2. With it go those of its group that are nearest to it in length: little is computed for padding.
3. The model waits for no event loop: it takes the next micro-batch, chosen at that moment, as soon as one is done.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from gracestream.pipeline.replica.request_handler import Question, Reply


def next_batch(waiting: Sequence[tuple[object, int]], size: int) -> list[int]:
    """The places of at most `size` requests that are to share a micro-batch with the first.

    They are neighbours in length; of all such choices that have the first among them, the one with the least padding.

    Args:
        waiting: Group and tokens of each request, in the order in which they came.
        size: Of a micro-batch.
    """
    lengths = {place: tokens for place, (group, tokens) in enumerate(waiting) if group == waiting[0][0]}
    by_length = sorted(lengths, key=lengths.__getitem__)
    first = by_length.index(0)

    def padding(start: int) -> int:
        some = by_length[start : start + size]
        return sum(lengths[some[-1]] - lengths[place] for place in some)

    latest = min(first, max(0, len(by_length) - size))
    start = min(range(max(0, first - size + 1), latest + 1), key=padding)
    return by_length[start : start + size]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request, and where its reply is awaited, or what went wrong."""

    question: Question
    replies: asyncio.Queue[list[Reply] | Exception]
    loop: asyncio.AbstractEventLoop


class MicroBatches:
    """Feeds a model's thread.

    Args:
        run: Answers the requests of one micro-batch, one reply each, in their order; in the model's thread.
        size: Requests of one micro-batch at most.
        thread: The model's thread; it may be given other work besides.
    """

    def __init__(self, run: Callable[[list[Question]], list[Reply]], size: int, thread: Executor) -> None:
        self._run, self._size, self._thread = run, size, thread
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._called = False
        """Whether the thread has been told to take the next micro-batch, and has not yet."""

    async def answer(self, questions: Sequence[Question]) -> AsyncGenerator[list[Reply], None]:
        """A reply for every request, as they come. What is not in a micro-batch when this is closed is dropped.

        Raises:
            Exception: what `run` raised for a micro-batch that one of them was in.
        """
        replies: asyncio.Queue[list[Reply] | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        with self._lock:
            self._waiting += [_Waiting(question, replies, loop) for question in questions]
            self._call()
        try:
            left = len(questions)
            while left:
                found = await replies.get()
                if isinstance(found, Exception):
                    raise found
                left -= len(found)
                yield found
        finally:
            with self._lock:
                self._waiting = [one for one in self._waiting if one.replies is not replies]

    def _call(self) -> None:
        if self._waiting and not self._called:
            self._called = True
            self._thread.submit(self._take)

    def _take(self) -> None:
        """In the model's thread."""
        with self._lock:
            self._called = False
            if not self._waiting:
                return
            places = next_batch([(one.question.group, len(one.question.prompt)) for one in self._waiting], self._size)
            batch = [self._waiting[place] for place in places]
            self._waiting = [one for place, one in enumerate(self._waiting) if place not in places]
            self._call()  # behind whatever else the thread has been given
        found: list[Reply] | Exception
        try:
            found = self._run([one.question for one in batch])
        except Exception as error:  # noqa: BLE001  (who asked decides what it means)
            found = error
        for asker in {id(one.replies): one for one in batch}.values():
            places = [place for place, one in enumerate(batch) if one.replies is asker.replies]
            theirs = found if isinstance(found, Exception) else [found[place] for place in places]
            asker.loop.call_soon_threadsafe(asker.replies.put_nowait, theirs)
