"""An inference replica: requests in, predictions out, from the codebook that is live (design, sections 1 and 5).

While the model is at one micro-batch, the next requests are taken, decoded and tokenised in another thread, and the
answers before are sent, so that the model never waits for Kafka. Before each micro-batch the replica reads the head
from Redis, and the codebook moves to it. So one codebook answers the whole micro-batch, and a request that was sent
after a delta was published is answered with it. Only when every answer is in Kafka does a batch that was taken count
as done: a replica killed at any point leaves it to another. Requests that wait for a delta (`min_seq`) are answered
when it has come, the others of their batch at once.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Literal

import structlog

from gracestream.pipeline.codebook import Codebook, KeyIndex
from gracestream.pipeline.device import DeviceLostError
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import EditableModel
from gracestream.pipeline.observability import Health
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.replica.micro_batches import MicroBatcher
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
from gracestream.pipeline.stores import Head, RedisHeadStore, redis_client
from gracestream.schemas.messages import to_one_line

log = structlog.get_logger()

IDLE_POLL_SECONDS = 0.2
"""How often a replica looks for what is live, also without requests."""

FAST_POLL_SECONDS = 0.02
"""How often it looks while requests wait for a delta."""

STOP_CHECK_SECONDS = 0.1
"""How often it looks for the end."""

DRAIN_FRACTION = 0.7
"""Share of the time to shut down that the running batch may take; the rest is for leaving the group."""


class Replica:
    """A model, the mirror of the codebook, and the faust app that feeds them."""

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
        """`stop` ends it. It sets and clears `idle`: while that is set it has nothing in hand."""
        self._settings, self._health, self._stop, self._idle = settings, health, stop, idle
        codebook = Codebook(settings.codebook, model.fingerprint, model.layer)
        self._follower = DeltaFollower(settings)
        store = RedisHeadStore(redis_client(settings), settings)
        self._codebook_replica = CodebookReplica(
            codebook, KeyIndex(codebook, model.device), store, self._follower, settings
        )
        self._request_handler = RequestHandler(model, self._codebook_replica, settings, name)
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._prepare_thread = ThreadPoolExecutor(1, thread_name_prefix="reading")
        self._head_thread = ThreadPoolExecutor(2, thread_name_prefix="head")
        self._micro_batcher = MicroBatcher(self._run_micro_batch, settings.batch, self._model_thread)
        self._waiting_count = 0
        self._fault: HistoryError | DeviceLostError | None = None
        health.state = self._codebook_replica.state

    async def run(self) -> int:
        """Catch up, join the group, serve; after a fault in the history leave the group, but stay to be looked at.

        After a fault of the device it ends: a new process mends that.
        """
        await asyncio.to_thread(self._codebook_replica.start)
        try:
            if not await asyncio.to_thread(self._codebook_replica.catch_up, self._settings.startup_timeout):
                log.error("not_caught_up", seq=self._codebook_replica.codebook.seq, read=self._follower.latest_seq)
                return 1
            in_order = await self._serve()
        except HistoryError as fault:
            self._record_fault(fault)
            in_order = False
        while isinstance(self._fault, HistoryError) and not await self._wait_for_stop():
            pass
        self._stop.set()
        self._follower.close()
        for thread in (self._prepare_thread, self._model_thread, self._head_thread):
            thread.shutdown(wait=in_order)
        return 0 if in_order else 1

    async def _serve(self) -> bool:
        """Whether it was told to stop, and left nothing undone."""
        self._idle.clear()
        plane = RequestPlane(self._settings, self._answer_records)
        await plane.start()
        following = asyncio.create_task(self._follow_head())
        self._health.set_ready()
        log.info("ready", seq=self._codebook_replica.codebook.seq, entries=len(self._codebook_replica.codebook))
        while not (await self._wait_for_stop() or self._fault or plane.failed or following.done()):
            self._update_readiness()
        if following.done():  # it ends by a defect alone
            log.error(
                "follower_ended", reason=_describe_error(following.exception()), seq=self._codebook_replica.codebook.seq
            )
        if plane.failed:
            log.error("request_plane_ended", reason=_describe_error(plane.failure))
        if self._fault is None:
            self._health.set_not_ready("stopping")
        time = self._settings.shutdown_timeout
        told = self._fault is None and not plane.failed and not following.done()
        finished = await plane.stop(DRAIN_FRACTION * time if told else 0, (1 - DRAIN_FRACTION) * time)
        following.cancel()
        return told and finished

    async def _answer_records(self, records: list[RequestRecord]) -> AsyncGenerator[ReplyChunk, None]:
        loop = asyncio.get_running_loop()
        work = await loop.run_in_executor(self._prepare_thread, self._request_handler.prepare, records)
        if any(question.min_seq > self._codebook_replica.codebook.seq for question in work.requests):
            await self._sync_to_head(probe=False)
        now, later = work.split(self._codebook_replica.codebook.seq)
        yield ReplyChunk(work.replies, len(records) - len(now.requests))
        async with aclosing(self._answer_requests(now.requests)) as answers:
            async for replies in answers:
                yield ReplyChunk(replies, len(replies))
        started = loop.time()
        while later.requests:
            hope = await self._wait_for_first_delta(later, started)
            now, later = later.split(self._codebook_replica.codebook.seq)
            async with aclosing(self._answer_requests(now.requests)) as answers:
                async for replies in answers:
                    yield ReplyChunk(replies, 0)
            if not hope:
                yield ReplyChunk(self._request_handler.min_seq_timeouts(later.requests), 0)
                return

    async def _answer_requests(self, requests: Sequence[PreparedRequest]) -> AsyncGenerator[list[Reply], None]:
        try:
            async with aclosing(self._micro_batcher.answer(requests)) as answers:
                async for replies in answers:
                    yield replies
        except (HistoryError, DeviceLostError) as fault:
            await self._park_forever(fault)

    def _run_micro_batch(self, requests: list[PreparedRequest]) -> list[Reply]:
        """In the model's thread."""
        with self._health.busy("model"):
            mirror = self._codebook_replica
            head = None if mirror.redis_unavailable else self._head_thread.submit(mirror.read_head)
            mirror.sync_to_head(mirror.wait_for_head(head))
            return self._request_handler.answer(requests)

    async def _wait_for_first_delta(self, batch: PreparedBatch, started_at: float) -> bool:
        """Wait until the first of the deltas that these need is live; whether it is of use to wait for the others."""
        min_seq = min(question.min_seq for question in batch.requests)
        self._waiting_count += 1
        try:
            while hope := self._codebook_replica.should_wait_for(
                min_seq, asyncio.get_running_loop().time() - started_at
            ):
                if self._codebook_replica.codebook.seq >= min_seq:
                    break
                await asyncio.sleep(FAST_POLL_SECONDS)
        finally:
            self._waiting_count -= 1
        return hope

    async def _follow_head(self) -> None:
        """What each micro-batch does too, for a replica that has none: it stays at the head all the same."""
        while True:
            await self._sync_to_head(probe=True)
            await asyncio.sleep(FAST_POLL_SECONDS if self._waiting_count else IDLE_POLL_SECONDS)

    async def _sync_to_head(self, *, probe: bool) -> None:
        """Ask for the head and go there; while Redis is away, only who probes asks."""
        loop = asyncio.get_running_loop()
        head: Head | Literal["lost"] | None = "lost"
        if probe or not self._codebook_replica.redis_unavailable:
            head = await loop.run_in_executor(self._head_thread, self._codebook_replica.read_head)

        def advance() -> None:
            with self._health.busy("model"):
                self._codebook_replica.sync_to_head(head)

        try:
            await loop.run_in_executor(self._model_thread, advance)
        except (HistoryError, DeviceLostError) as fault:
            await self._park_forever(fault)

    async def _park_forever(self, fault: HistoryError | DeviceLostError) -> None:
        """Never returns: what it was at is not done. Another replica does it, or this one mended."""
        self._record_fault(fault)
        await asyncio.Event().wait()

    async def _wait_for_stop(self) -> bool:
        self._health.begin("event loop")
        await asyncio.sleep(STOP_CHECK_SECONDS)
        return self._stop.is_set()

    def _update_readiness(self) -> None:
        health, mirror = self._health, self._codebook_replica
        unread = mirror.unread_head_seq and not mirror.degraded
        if unread and health.ready:
            reason = f"delta {mirror.unread_head_seq} is live, but only those up to {mirror.codebook.seq} can be read"
            health.set_not_ready(reason)
            log.error("deltas_behind", reason=reason)
        elif not unread and not health.ready:
            health.set_ready()
            log.info("ready", seq=mirror.codebook.seq, entries=len(mirror.codebook))

    def _record_fault(self, fault: HistoryError | DeviceLostError) -> None:
        if self._fault is not None:
            return
        self._fault = fault
        self._idle.clear()  # from now on it stays to be looked at, and ends with status 1
        self._health.set_not_ready(str(fault))
        event = "history_fault" if isinstance(fault, HistoryError) else "device_fault"
        log.error(event, reason=str(fault), seq=self._codebook_replica.codebook.seq)


def _describe_error(error: BaseException | None) -> str:
    return "unknown" if error is None else f"{type(error).__name__}: {to_one_line(str(error))}"
