"""Groups waiting requests into micro-batches for the model's thread.

Guarantees:

1. The request that has waited longest is in the next micro-batch, so no request waits for ever.
2. A micro-batch holds requests of one group that are neighbours of the oldest one in length, so little is padded.
3. The model never waits for an event loop. It selects the next micro-batch as soon as the previous one is done.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from gracestream.pipeline.replica.request_handler import PreparedRequest, Reply


def select_batch(pending: Sequence[tuple[object, int]], batch_size: int) -> list[int]:
    """The indexes of at most `batch_size` requests that share a micro-batch with the first one.

    They are neighbours in length. Among all such windows that contain the first request, the one with the least
    padding is chosen.

    Args:
        pending: Group and number of tokens of each request, in the order of arrival.
        batch_size: Requests per micro-batch, at most.
    """
    lengths = {index: tokens for index, (group, tokens) in enumerate(pending) if group == pending[0][0]}
    by_length = sorted(lengths, key=lengths.__getitem__)

    def padding(start: int) -> int:
        window = by_length[start : start + batch_size]
        return sum(lengths[window[-1]] - lengths[index] for index in window)

    # Requests of the first one's length are interchangeable, so a window needs to contain any of them.
    equal_positions = [position for position, index in enumerate(by_length) if lengths[index] == lengths[0]]
    latest_start = min(equal_positions[-1], max(0, len(by_length) - batch_size))
    start = min(range(max(0, equal_positions[0] - batch_size + 1), latest_start + 1), key=padding)
    batch = by_length[start : start + batch_size]
    if 0 not in batch:
        batch[max(position for position, index in enumerate(batch) if lengths[index] == lengths[0])] = 0
    return batch


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request, and the queue and event loop that receive its reply or the error of its micro-batch."""

    prepared: PreparedRequest
    reply_queue: asyncio.Queue[list[Reply] | Exception]
    loop: asyncio.AbstractEventLoop


class MicroBatcher:
    """Feeds the model's thread with micro-batches.

    Args:
        run: Answers the requests of one micro-batch in the model's thread: one reply each, in their order.
        batch_size: Requests per micro-batch, at most.
        executor: The model's thread. It may run other work between two micro-batches.
    """

    def __init__(
        self, run: Callable[[list[PreparedRequest]], list[Reply]], batch_size: int, executor: Executor
    ) -> None:
        self._run, self._batch_size, self._executor = run, batch_size, executor
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._is_scheduled = False
        """True while a call of `_run_next` is queued in the executor."""

    async def answer(self, requests: Sequence[PreparedRequest]) -> AsyncGenerator[list[Reply], None]:
        """One reply per request, in the order in which they are ready.

        Closing the generator drops the requests that are in no micro-batch yet.

        Raises:
            Exception: raised by `run` for a micro-batch with one of these requests.
        """
        replies: asyncio.Queue[list[Reply] | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        with self._lock:
            self._pending += [_Pending(request, replies, loop) for request in requests]
            self._schedule()
        try:
            unanswered = len(requests)
            while unanswered:
                batch_replies = await replies.get()
                if isinstance(batch_replies, Exception):
                    raise batch_replies
                unanswered -= len(batch_replies)
                yield batch_replies
        finally:
            with self._lock:
                self._pending = [pending for pending in self._pending if pending.reply_queue is not replies]

    def _schedule(self) -> None:
        """Queue the next micro-batch, unless one is queued. The caller holds the lock."""
        if self._pending and not self._is_scheduled:
            self._is_scheduled = True
            self._executor.submit(self._run_next)

    def _run_next(self) -> None:
        """Select a micro-batch, answer it, and hand out the replies; runs in the model's thread."""
        with self._lock:
            self._is_scheduled = False
            if not self._pending:
                return
            indexes = select_batch(
                [(pending.prepared.batch_key, len(pending.prepared.prompt)) for pending in self._pending],
                self._batch_size,
            )
            batch = [self._pending[index] for index in indexes]
            self._pending = [pending for index, pending in enumerate(self._pending) if index not in indexes]
            self._schedule()  # behind other work queued in the executor, such as applying deltas
        replies: list[Reply] | Exception
        try:
            replies = self._run([pending.prepared for pending in batch])
        except Exception as error:  # noqa: BLE001  (`answer` raises it to its caller)
            replies = error
        for receiver in {id(pending.reply_queue): pending for pending in batch}.values():
            indexes = [index for index, pending in enumerate(batch) if pending.reply_queue is receiver.reply_queue]
            own_replies = replies if isinstance(replies, Exception) else [replies[index] for index in indexes]
            receiver.loop.call_soon_threadsafe(receiver.reply_queue.put_nowait, own_replies)
