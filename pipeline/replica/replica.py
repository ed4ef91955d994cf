"""An inference replica: answers requests from the published codebook.

How it works (docs/explanation/architecture.md):

1. While the model runs a step, another thread decodes and tokenises the next requests, and earlier replies are
   sent. So the model does not wait for Kafka.
2. Before requests join a step, the replica reads the head from Redis, and the codebook moves to it. The requests are
   answered from that codebook.
3. Offsets are committed once all replies are in Kafka. A replica that is killed leaves its requests to another replica.

Guarantees:

1. A request sent after the publication of a delta is answered from that delta or a later one. This needs a Redis and a
   log that answer in time.
2. Requests that wait for a delta (`min_seq`) delay no other request of their batch.

Not promised: one reply per request. After a failure, a request may be answered again.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import structlog

from gracestream.pipeline.device import DeviceLostError
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import EditableModel, describe_failure
from gracestream.pipeline.observability import Health
from gracestream.pipeline.replica.engine_runner import EngineRunner
from gracestream.pipeline.replica.live_codebook import LiveCodebook
from gracestream.pipeline.replica.request_handler import (
    EngineFactory,
    PreparedRequest,
    Reply,
    ReplyChunk,
    RequestHandler,
    RequestRecord,
)
from gracestream.pipeline.replica.request_plane import RequestPlane
from gracestream.pipeline.settings import Settings

log = structlog.get_logger()

STOP_CHECK_SECONDS = 0.1
"""Seconds between two checks of the stop event."""

DRAIN_FRACTION = 0.7
"""The share of the shutdown timeout for unfinished batches; the rest is for leaving the group."""


class Replica:
    """The model, the codebook replica, and the faust app that feeds them with requests."""

    def __init__(
        self,
        model: EditableModel,
        settings: Settings,
        make_engine: EngineFactory,
        *,
        name: str,
        health: Health,
        stop: threading.Event,
        idle: threading.Event,
    ) -> None:
        """`stop` ends the replica. It sets `idle` while no work is in progress."""
        self._settings, self._health, self._stop, self._idle = settings, health, stop, idle
        self._live = LiveCodebook(model.fingerprint, model.layer, model.device, settings, health)
        self._request_handler = RequestHandler(model, self._live.replica, settings.kafka, name, make_engine)
        self._prepare_thread = ThreadPoolExecutor(1, thread_name_prefix="reading")
        self._engine_runner = EngineRunner(self._request_handler.engine, self._run_step, self._live.thread)

    async def run(self) -> int:
        """Catch up, join the group, and answer until `stop` is set; the exit status.

        After a fault in the history the replica leaves the group but stays alive, so that an operator can inspect it.
        After a fault of the device it exits: a new process may find the device working.
        """
        live = self._live
        try:
            if not await live.start():
                return 1
            clean = await self._serve()
        except HistoryError as fault:
            live.record_fault(fault)
            self._idle.clear()  # a signal must now end it with status 1, not 0
            clean = False
        while isinstance(live.fault, HistoryError) and not await self._wait_for_stop():
            pass
        self._stop.set()
        live.close(wait=clean)
        self._prepare_thread.shutdown(wait=clean)
        return 0 if clean else 1

    async def _serve(self) -> bool:
        """Join the group and answer requests; True if `stop` was set and no work is left undone."""
        self._idle.clear()
        plane = RequestPlane(self._settings.kafka, self._settings.serving, self._answer_records)
        await plane.start()
        async with self._live.following() as head_task:
            self._live.set_ready()
            while not (await self._wait_for_stop() or self._live.fault or plane.failed or head_task.done()):
                self._live.update_readiness()
            if head_task.done():  # only a defect ends it
                self._live.report_follower(head_task)
            if plane.failed:
                log.error(
                    "request_plane_failed",
                    reason="unknown" if plane.failure is None else describe_failure(plane.failure),
                    consequence="the replica exits with status 1; others answer its requests",
                )
            if self._live.fault is None:
                self._health.set_not_ready("stopping")
            shutdown_timeout = self._settings.process.shutdown_timeout
            stop_requested = self._live.fault is None and not plane.failed and not head_task.done()
            finished = await plane.stop(
                DRAIN_FRACTION * shutdown_timeout if stop_requested else 0, (1 - DRAIN_FRACTION) * shutdown_timeout
            )
        return stop_requested and finished

    async def _answer_records(self, records: list[RequestRecord]) -> AsyncGenerator[ReplyChunk, None]:
        """Answer a batch of records in chunks.

        1. Decode and tokenise in the prepare thread. Move to the head if a request needs a later delta.
        2. Answer the requests that the codebook can answer now. Release the others at once, so that they delay no
           further batch.
        3. Wait for the deltas that the others need, and answer each as soon as possible. Requests that have waited
           too long get an error.
        """
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._prepare_thread, self._request_handler.prepare, records)
        if any(request.min_seq > self._live.codebook.seq for request in prepared.requests):
            await self._live.sync_to_head()
        answerable, waiting = prepared.split(self._live.codebook.seq)
        yield ReplyChunk(prepared.replies, len(records) - len(answerable.requests))
        async with aclosing(self._answer_requests(answerable.requests)) as answers:
            async for replies in answers:
                yield ReplyChunk(replies, len(replies))
        started = loop.time()
        while waiting.requests:
            first_delta = min(request.min_seq for request in waiting.requests)
            may_arrive = await self._live.wait_for_delta(first_delta, started)
            answerable, waiting = waiting.split(self._live.codebook.seq)
            async with aclosing(self._answer_requests(answerable.requests)) as answers:
                async for replies in answers:
                    yield ReplyChunk(replies, 0)
            if not may_arrive:
                yield ReplyChunk(self._request_handler.min_seq_timeouts(waiting.requests), 0)
                return

    async def _answer_requests(self, requests: Sequence[PreparedRequest]) -> AsyncGenerator[list[Reply], None]:
        """Answer requests as the engine finishes them. After a fault it never returns: they stay uncommitted."""
        try:
            async with aclosing(self._engine_runner.answer(requests)) as answers:
                async for replies in answers:
                    yield replies
        except (HistoryError, DeviceLostError) as fault:
            await self._live.park_forever(fault)

    def _run_step(self, joining: list[PreparedRequest]) -> list[tuple[PreparedRequest, Reply]]:
        """Run a step of the engine. If requests join, move the codebook to the head first.

        It runs in the model's thread.
        """
        with self._health.busy("model"):
            if joining:
                self._live.move_to_head()
            return self._request_handler.step(joining)

    async def _wait_for_stop(self) -> bool:
        """Report progress to the health check, wait `STOP_CHECK_SECONDS`, and return whether `stop` is set."""
        self._health.begin("event loop")
        await asyncio.sleep(STOP_CHECK_SECONDS)
        return self._stop.is_set()
