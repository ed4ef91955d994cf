"""Feeds an engine with waiting requests, step by step, in the model's thread.

Guarantees:

1. The request that has waited longest joins as soon as the engine has room, so no request waits for ever.
2. The engine never waits for an event loop. Requests join, and the next step begins, as soon as the previous one is
   done.
3. Other work in the model's thread, such as applying deltas, runs between two steps.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from gracestream.pipeline.model import AnswerEngine
from gracestream.pipeline.replica.request_handler import PreparedRequest, Reply

Step = Callable[[list[PreparedRequest]], list[tuple[PreparedRequest, Reply]]]
"""Takes the joining requests in, runs one step of the engine, and returns the finished requests with their replies."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request, and the queue and event loop that receive its reply or the error of its step."""

    prepared: PreparedRequest
    reply_queue: asyncio.Queue[list[Reply] | Exception]
    loop: asyncio.AbstractEventLoop


class EngineRunner:
    """Runs an engine's steps while requests are waiting or active.

    Args:
        engine: Answers the requests.
        step: Runs a step of the engine; called in the model's thread.
        executor: The model's thread. It may run other work between two steps.
    """

    def __init__(self, engine: AnswerEngine[PreparedRequest], step: Step, executor: Executor) -> None:
        self._engine, self._step, self._executor = engine, step, executor
        self._lock = threading.Lock()
        self._waiting: list[_Pending] = []
        self._active: dict[int, _Pending] = {}
        """The requests in the engine, by the identity of the prepared request."""
        self._dropped: list[PreparedRequest] = []
        """Active requests whose replies nobody needs."""
        self._is_scheduled = False
        """True while a call of `_run_step` is queued in the executor, or runs."""

    async def answer(self, requests: Sequence[PreparedRequest]) -> AsyncGenerator[list[Reply], None]:
        """One reply per request, in the order in which they are ready.

        Closing the generator drops the unanswered requests.

        Raises:
            Exception: raised by a step with one of these requests.
        """
        replies: asyncio.Queue[list[Reply] | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        with self._lock:
            self._waiting += [_Pending(request, replies, loop) for request in requests]
            self._schedule()
        try:
            unanswered = len(requests)
            while unanswered:
                ready = await replies.get()
                if isinstance(ready, Exception):
                    raise ready
                unanswered -= len(ready)
                yield ready
        finally:
            with self._lock:
                self._waiting = [pending for pending in self._waiting if pending.reply_queue is not replies]
                self._dropped += [
                    pending.prepared for pending in self._active.values() if pending.reply_queue is replies
                ]

    def _schedule(self) -> None:
        """Queue the next step, unless one is queued or there is nothing to do. The caller holds the lock."""
        if (self._waiting or self._active) and not self._is_scheduled:
            self._is_scheduled = True
            self._executor.submit(self._run_step)

    def _run_step(self) -> None:
        """Let requests join, run a step, and hand out the replies; runs in the model's thread."""
        finished: list[tuple[PreparedRequest, Reply]] = []
        try:
            with self._lock:
                joining = self._select()
            if self._active:
                finished = self._step(joining)
        except Exception as error:  # noqa: BLE001  (`answer` raises it to its caller)
            with self._lock:
                self._fail_active(error)
        with self._lock:
            self._hand_out(finished)
            self._is_scheduled = False
            self._schedule()  # behind other work queued in the executor

    def _select(self) -> list[PreparedRequest]:
        """Drop the requests that nobody needs, and move those that join from waiting to active."""
        self._engine.drop(self._dropped)
        for request in self._dropped:
            self._active.pop(id(request), None)
        self._dropped.clear()
        indexes = self._engine.select([pending.prepared for pending in self._waiting])
        joining = [self._waiting[index] for index in indexes]
        chosen = set(indexes)
        self._waiting = [pending for index, pending in enumerate(self._waiting) if index not in chosen]
        self._active |= {id(pending.prepared): pending for pending in joining}
        return [pending.prepared for pending in joining]

    def _fail_active(self, error: Exception) -> None:
        """Give an error to those who wait for active requests, which leave the engine."""
        self._engine.drop([pending.prepared for pending in self._active.values()])
        receivers = {id(pending.reply_queue): pending for pending in self._active.values()}
        self._active.clear()
        for pending in receivers.values():
            pending.loop.call_soon_threadsafe(pending.reply_queue.put_nowait, error)

    def _hand_out(self, finished: Sequence[tuple[PreparedRequest, Reply]]) -> None:
        """Give the replies to those who wait for them, in one piece each."""
        replies: dict[int, tuple[_Pending, list[Reply]]] = {}
        for request, reply in finished:
            pending = self._active.pop(id(request))
            replies.setdefault(id(pending.reply_queue), (pending, []))[1].append(reply)
        for pending, own in replies.values():
            pending.loop.call_soon_threadsafe(pending.reply_queue.put_nowait, own)
