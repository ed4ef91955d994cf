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

from gracestream.pipeline.replica.request_handler import PreparedRequest, Reply


def select_batch(pending: Sequence[tuple[object, int]], batch_size: int) -> list[int]:
    """The places of at most `batch_size` requests that are to share a micro-batch with the first.

    They are neighbours in length; of all such choices that have the first among them, the one with the least padding.

    Args:
        pending: Group and tokens of each request, in the order in which they came.
        batch_size: Of a micro-batch.
    """
    lengths = {place: tokens for place, (group, tokens) in enumerate(pending) if group == pending[0][0]}
    by_length = sorted(lengths, key=lengths.__getitem__)

    def padding(start: int) -> int:
        window = by_length[start : start + batch_size]
        return sum(lengths[window[-1]] - lengths[place] for place in window)

    # Requests of the first one's length are interchangeable, so a window needs to hold any of them.
    equals = [index for index, place in enumerate(by_length) if lengths[place] == lengths[0]]
    latest = min(equals[-1], max(0, len(by_length) - batch_size))
    start = min(range(max(0, equals[0] - batch_size + 1), latest + 1), key=padding)
    batch = by_length[start : start + batch_size]
    if 0 not in batch:
        batch[max(index for index, place in enumerate(batch) if lengths[place] == lengths[0])] = 0
    return batch


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request, and where its reply is awaited, or what went wrong."""

    prepared: PreparedRequest
    reply_queue: asyncio.Queue[list[Reply] | Exception]
    loop: asyncio.AbstractEventLoop


class MicroBatcher:
    """Feeds a model's thread.

    Args:
        run: Answers the requests of one micro-batch, one reply each, in their order; in the model's thread.
        batch_size: Requests of one micro-batch at most.
        executor: The model's thread; it may be given other work besides.
    """

    def __init__(
        self, run: Callable[[list[PreparedRequest]], list[Reply]], batch_size: int, executor: Executor
    ) -> None:
        self._run, self._batch_size, self._executor = run, batch_size, executor
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._is_scheduled = False
        """Whether the thread has been told to take the next micro-batch, and has not yet."""

    async def answer(self, requests: Sequence[PreparedRequest]) -> AsyncGenerator[list[Reply], None]:
        """A reply for every request, as they come. What is not in a micro-batch when this is closed is dropped.

        Raises:
            Exception: what `run` raised for a micro-batch that one of them was in.
        """
        replies: asyncio.Queue[list[Reply] | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        with self._lock:
            self._pending += [_Pending(question, replies, loop) for question in requests]
            self._schedule()
        try:
            left = len(requests)
            while left:
                found = await replies.get()
                if isinstance(found, Exception):
                    raise found
                left -= len(found)
                yield found
        finally:
            with self._lock:
                self._pending = [one for one in self._pending if one.reply_queue is not replies]

    def _schedule(self) -> None:
        if self._pending and not self._is_scheduled:
            self._is_scheduled = True
            self._executor.submit(self._run_next)

    def _run_next(self) -> None:
        """In the model's thread."""
        with self._lock:
            self._is_scheduled = False
            if not self._pending:
                return
            places = select_batch(
                [(one.prepared.batch_key, len(one.prepared.prompt)) for one in self._pending], self._batch_size
            )
            batch = [self._pending[place] for place in places]
            self._pending = [one for place, one in enumerate(self._pending) if place not in places]
            self._schedule()  # behind whatever else the thread has been given
        found: list[Reply] | Exception
        try:
            found = self._run([one.prepared for one in batch])
        except Exception as error:  # noqa: BLE001  (who asked decides what it means)
            found = error
        for asker in {id(one.reply_queue): one for one in batch}.values():
            places = [place for place, one in enumerate(batch) if one.reply_queue is asker.reply_queue]
            theirs = found if isinstance(found, Exception) else [found[place] for place in places]
            asker.loop.call_soon_threadsafe(asker.reply_queue.put_nowait, theirs)
