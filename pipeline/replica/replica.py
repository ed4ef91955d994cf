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
from contextlib import aclosing, suppress
from functools import partial
from typing import Literal

import structlog

from gracestream.pipeline.codebook import Codebook, KeyIndex
from gracestream.pipeline.device import DeviceLostError
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import EditableModel
from gracestream.pipeline.observability import Health
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.replica.engine_runner import EngineRunner
from gracestream.pipeline.replica.request_handler import (
    PreparedBatch,
    PreparedRequest,
    Reply,
    ReplyChunk,
    RequestHandler,
    RequestRecord,
)
from gracestream.pipeline.replica.request_plane import RequestPlane
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores import Head, HeadListener, RedisHeadStore, redis_client
from gracestream.schemas.messages import to_one_line

log = structlog.get_logger()

IDLE_POLL_SECONDS = 0.2
"""Seconds until the next read of the head while no request waits for a delta. A hint ends the wait."""

FAST_POLL_SECONDS = 0.02
"""Seconds until the next read of the head while requests wait for a delta. A hint ends the wait."""

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
        *,
        name: str,
        health: Health,
        stop: threading.Event,
        idle: threading.Event,
    ) -> None:
        """`stop` ends the replica. It sets `idle` while no work is in progress."""
        self._settings, self._health, self._stop, self._idle = settings, health, stop, idle
        codebook = Codebook(settings.model.codebook, model.fingerprint, model.layer)
        self._follower = DeltaFollower(settings.kafka)
        store = RedisHeadStore(redis_client(settings.redis), settings.kafka.topic_prefix, codebook.name)
        self._codebook_replica = CodebookReplica(
            codebook, KeyIndex(codebook, model.device), store, self._follower, settings
        )
        self._channel = store.channel
        self._request_handler = RequestHandler(model, self._codebook_replica, settings.kafka, name, settings.serving)
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._prepare_thread = ThreadPoolExecutor(1, thread_name_prefix="reading")
        # Two: a probe of the idle loop that hangs must not delay the head of a step.
        self._head_thread = ThreadPoolExecutor(2, thread_name_prefix="head")
        self._engine_runner = EngineRunner(self._request_handler.engine, self._run_step, self._model_thread)
        self._waiting_count = 0
        self._fault: HistoryError | DeviceLostError | None = None
        health.state = self._codebook_replica.state

    async def run(self) -> int:
        """Catch up, join the group, and answer until `stop` is set; the exit status.

        After a fault in the history the replica leaves the group but stays alive, so that an operator can inspect it.
        After a fault of the device it exits: a new process may find the device working.
        """
        await asyncio.to_thread(self._codebook_replica.start)
        try:
            if not await asyncio.to_thread(self._codebook_replica.catch_up, self._settings.kafka.startup_timeout):
                log.error(
                    "startup_catch_up_timeout",
                    seq=self._codebook_replica.codebook.seq,
                    read=self._follower.latest_seq,
                    consequence="the replica exits with status 1 and has answered nothing",
                    remedy="check that Kafka answers, and start the replica again",
                )
                return 1
            clean = await self._serve()
        except HistoryError as fault:
            self._record_fault(fault)
            clean = False
        while isinstance(self._fault, HistoryError) and not await self._wait_for_stop():
            pass
        self._stop.set()
        self._follower.close()
        for thread in (self._prepare_thread, self._model_thread, self._head_thread):
            thread.shutdown(wait=clean)
        return 0 if clean else 1

    async def _serve(self) -> bool:
        """Join the group and answer requests; True if `stop` was set and no work is left undone."""
        self._idle.clear()
        plane = RequestPlane(self._settings.kafka, self._settings.serving, self._answer_records)
        await plane.start()
        hint = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, hint.set)
        listener = HeadListener(self._settings.redis, self._channel, wake)
        listener.start()
        head_task = asyncio.create_task(self._follow_head(hint))
        self._health.set_ready()
        log.info("worker_ready", seq=self._codebook_replica.codebook.seq, entries=len(self._codebook_replica.codebook))
        while not (await self._wait_for_stop() or self._fault or plane.failed or head_task.done()):
            self._update_readiness()
        if head_task.done():  # only a defect ends it
            log.error(
                "head_follower_failed",
                reason=_describe_error(head_task.exception()),
                seq=self._codebook_replica.codebook.seq,
                consequence="the replica exits with status 1; others answer its requests",
            )
        if plane.failed:
            log.error(
                "request_plane_failed",
                reason=_describe_error(plane.failure),
                consequence="the replica exits with status 1; others answer its requests",
            )
        if self._fault is None:
            self._health.set_not_ready("stopping")
        shutdown_timeout = self._settings.process.shutdown_timeout
        stop_requested = self._fault is None and not plane.failed and not head_task.done()
        finished = await plane.stop(
            DRAIN_FRACTION * shutdown_timeout if stop_requested else 0, (1 - DRAIN_FRACTION) * shutdown_timeout
        )
        head_task.cancel()
        await asyncio.to_thread(listener.close)
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
        if any(request.min_seq > self._codebook_replica.codebook.seq for request in prepared.requests):
            await self._sync_to_head(probe=False)
        answerable, waiting = prepared.split(self._codebook_replica.codebook.seq)
        yield ReplyChunk(prepared.replies, len(records) - len(answerable.requests))
        async with aclosing(self._answer_requests(answerable.requests)) as answers:
            async for replies in answers:
                yield ReplyChunk(replies, len(replies))
        started = loop.time()
        while waiting.requests:
            may_arrive = await self._wait_for_first_delta(waiting, started)
            answerable, waiting = waiting.split(self._codebook_replica.codebook.seq)
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
            await self._park_forever(fault)

    def _run_step(self, joining: list[PreparedRequest]) -> list[tuple[PreparedRequest, Reply]]:
        """Run a step of the engine. If requests join, move the codebook to the head first.

        It runs in the model's thread.
        """
        with self._health.busy("model"):
            if joining:
                codebook_replica = self._codebook_replica
                pending_head = (
                    None if codebook_replica.redis_unavailable else self._head_thread.submit(codebook_replica.read_head)
                )
                codebook_replica.sync_to_head(codebook_replica.wait_for_head(pending_head))
            return self._request_handler.step(joining)

    async def _wait_for_first_delta(self, batch: PreparedBatch, started_at: float) -> bool:
        """Wait until the first delta that these requests need is published; False if waiting longer is useless."""
        min_seq = min(request.min_seq for request in batch.requests)
        self._waiting_count += 1
        try:
            while may_arrive := self._codebook_replica.should_wait_for(
                min_seq, asyncio.get_running_loop().time() - started_at
            ):
                if self._codebook_replica.codebook.seq >= min_seq:
                    break
                await asyncio.sleep(FAST_POLL_SECONDS)
        finally:
            self._waiting_count -= 1
        return may_arrive

    async def _follow_head(self, hint: asyncio.Event) -> None:
        """Keep the codebook at the head while no requests join. `hint` is set when the head may have changed."""
        while True:
            hint.clear()  # before the read: a hint that comes meanwhile may be about a newer head
            await self._sync_to_head(probe=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(FAST_POLL_SECONDS if self._waiting_count else IDLE_POLL_SECONDS):
                    await hint.wait()

    async def _sync_to_head(self, *, probe: bool) -> None:
        """Read the head and move the codebook to it. While Redis is unavailable, it is asked only if `probe` is set."""
        loop = asyncio.get_running_loop()
        head: Head | Literal["lost"] | None = "lost"
        if probe or not self._codebook_replica.redis_unavailable:
            head = await loop.run_in_executor(self._head_thread, self._codebook_replica.read_head)

        def sync() -> None:
            with self._health.busy("model"):
                self._codebook_replica.sync_to_head(head)

        try:
            await loop.run_in_executor(self._model_thread, sync)
        except (HistoryError, DeviceLostError) as fault:
            await self._park_forever(fault)

    async def _park_forever(self, fault: HistoryError | DeviceLostError) -> None:
        """Record the fault, and never return.

        The interrupted work stays uncommitted. Another replica does it, or this one after a restart.
        """
        self._record_fault(fault)
        await asyncio.Event().wait()

    async def _wait_for_stop(self) -> bool:
        """Report progress to the health check, wait `STOP_CHECK_SECONDS`, and return whether `stop` is set."""
        self._health.begin("event loop")
        await asyncio.sleep(STOP_CHECK_SECONDS)
        return self._stop.is_set()

    def _update_readiness(self) -> None:
        """Report `not ready` while a published delta cannot be read from the log."""
        health, codebook_replica = self._health, self._codebook_replica
        is_behind = codebook_replica.unread_head_seq and not codebook_replica.degraded
        if is_behind and health.ready:
            reason = (
                f"delta {codebook_replica.unread_head_seq} is published, but the log can be read only up to delta"
                f" {codebook_replica.codebook.seq}"
            )
            health.set_not_ready(reason)
            log.error(
                "replica_behind_head",
                reason=reason,
                consequence="the replica is not ready, and answers from an older codebook",
            )
        elif not is_behind and not health.ready:
            health.set_ready()
            log.info("worker_ready", seq=codebook_replica.codebook.seq, entries=len(codebook_replica.codebook))

    def _record_fault(self, fault: HistoryError | DeviceLostError) -> None:
        """Keep the first fault, report it, and end readiness."""
        if self._fault is not None:
            return
        self._fault = fault
        self._idle.clear()  # a signal must now end it with status 1, not 0
        self._health.set_not_ready(str(fault))
        seq = self._codebook_replica.codebook.seq
        if isinstance(fault, HistoryError):
            log.error(
                "history_error",
                reason=str(fault),
                seq=seq,
                consequence="the replica answers no more, and stays alive for inspection; others answer its requests",
            )
        else:
            log.error(
                "device_lost",
                reason=str(fault),
                seq=seq,
                consequence="the replica exits with status 1; others answer its requests",
            )


def _describe_error(error: BaseException | None) -> str:
    return "unknown" if error is None else f"{type(error).__name__}: {to_one_line(str(error))}"
