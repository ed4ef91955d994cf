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
from gracestream.pipeline.device import DeviceFault
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import EditableModel
from gracestream.pipeline.observability import Health
from gracestream.pipeline.replica.codebook_replica import Mirror
from gracestream.pipeline.replica.delta_follower import Follower
from gracestream.pipeline.replica.micro_batches import MicroBatches
from gracestream.pipeline.replica.request_handler import Part, Question, Record, Reply, Server, Work
from gracestream.pipeline.replica.request_plane import RequestPlane
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores import Head, RadiusStore, redis_client
from gracestream.schemas.messages import one_line

log = structlog.get_logger()

FOLLOW_SECONDS = 0.2
"""How often a replica looks for what is live, also without requests."""

HURRY_SECONDS = 0.02
"""How often it looks while requests wait for a delta."""

TICK_SECONDS = 0.1
"""How often it looks for the end."""

FINISH = 0.7
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
        self._follower = Follower(settings)
        store = RadiusStore(redis_client(settings), settings)
        self._mirror = Mirror(codebook, KeyIndex(codebook, model.device), store, self._follower, settings)
        self._server = Server(model, self._mirror, settings, name)
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._reading_thread = ThreadPoolExecutor(1, thread_name_prefix="reading")
        self._head_thread = ThreadPoolExecutor(2, thread_name_prefix="head")
        self._micro_batches = MicroBatches(self._run, settings.batch, self._model_thread)
        self._waiting = 0
        self._fault: HistoryError | DeviceFault | None = None
        health.state = self._mirror.state

    async def run(self) -> int:
        """Catch up, join the group, serve; after a fault in the history leave the group, but stay to be looked at.

        After a fault of the device it ends: a new process mends that.
        """
        await asyncio.to_thread(self._mirror.start)
        try:
            if not await asyncio.to_thread(self._mirror.catch_up, self._settings.startup_timeout):
                log.error("not_caught_up", seq=self._mirror.codebook.seq, read=self._follower.latest_seq)
                return 1
            in_order = await self._serve()
        except HistoryError as fault:
            self._note(fault)
            in_order = False
        while isinstance(self._fault, HistoryError) and not await self._to_stop():
            pass
        self._stop.set()
        self._follower.close()
        for thread in (self._reading_thread, self._model_thread, self._head_thread):
            thread.shutdown(wait=in_order)
        return 0 if in_order else 1

    async def _serve(self) -> bool:
        """Whether it was told to stop, and left nothing undone."""
        self._idle.clear()
        plane = RequestPlane(self._settings, self._answer)
        await plane.start()
        following = asyncio.create_task(self._follow())
        self._health.become_ready()
        log.info("ready", seq=self._mirror.codebook.seq, entries=len(self._mirror.codebook))
        while not (await self._to_stop() or self._fault or plane.failed or following.done()):
            self._say_whether_ready()
        if following.done():  # it ends by a defect alone
            log.error("follower_ended", reason=_reason(following.exception()), seq=self._mirror.codebook.seq)
        if plane.failed:
            log.error("request_plane_ended", reason=_reason(plane.failure))
        if self._fault is None:
            self._health.not_ready("stopping")
        time = self._settings.shutdown_timeout
        told = self._fault is None and not plane.failed and not following.done()
        finished = await plane.stop(FINISH * time if told else 0, (1 - FINISH) * time)
        following.cancel()
        return told and finished

    async def _answer(self, records: list[Record]) -> AsyncGenerator[Part, None]:
        loop = asyncio.get_running_loop()
        work = await loop.run_in_executor(self._reading_thread, self._server.read, records)
        if any(question.min_seq > self._mirror.codebook.seq for question in work.questions):
            await self._catch_up(probe=False)
        now, later = work.split(self._mirror.codebook.seq)
        yield Part(work.replies, len(records) - len(now.questions))
        async with aclosing(self._answers(now.questions)) as answers:
            async for replies in answers:
                yield Part(replies, len(replies))
        started = loop.time()
        while later.questions:
            hope = await self._wait_for_first(later, started)
            now, later = later.split(self._mirror.codebook.seq)
            async with aclosing(self._answers(now.questions)) as answers:
                async for replies in answers:
                    yield Part(replies, 0)
            if not hope:
                yield Part(self._server.unreached(later.questions), 0)
                return

    async def _answers(self, questions: Sequence[Question]) -> AsyncGenerator[list[Reply], None]:
        try:
            async with aclosing(self._micro_batches.answer(questions)) as answers:
                async for replies in answers:
                    yield replies
        except (HistoryError, DeviceFault) as fault:
            await self._give_up(fault)

    def _run(self, questions: list[Question]) -> list[Reply]:
        """In the model's thread."""
        with self._health.working("model"):
            mirror = self._mirror
            head = None if mirror.redis_away else self._head_thread.submit(mirror.read_head)
            mirror.advance(mirror.head_in_time(head))
            return self._server.answer(questions)

    async def _wait_for_first(self, work: Work, started: float) -> bool:
        """Wait until the first of the deltas that these need is live; whether it is of use to wait for the others."""
        min_seq = min(question.min_seq for question in work.questions)
        self._waiting += 1
        try:
            while hope := self._mirror.may_reach(min_seq, asyncio.get_running_loop().time() - started):
                if self._mirror.codebook.seq >= min_seq:
                    break
                await asyncio.sleep(HURRY_SECONDS)
        finally:
            self._waiting -= 1
        return hope

    async def _follow(self) -> None:
        """What each micro-batch does too, for a replica that has none: it stays at the head all the same."""
        while True:
            await self._catch_up(probe=True)
            await asyncio.sleep(HURRY_SECONDS if self._waiting else FOLLOW_SECONDS)

    async def _catch_up(self, *, probe: bool) -> None:
        """Ask for the head and go there; while Redis is away, only who probes asks."""
        loop = asyncio.get_running_loop()
        head: Head | Literal["lost"] | None = "lost"
        if probe or not self._mirror.redis_away:
            head = await loop.run_in_executor(self._head_thread, self._mirror.read_head)

        def advance() -> None:
            with self._health.working("model"):
                self._mirror.advance(head)

        try:
            await loop.run_in_executor(self._model_thread, advance)
        except (HistoryError, DeviceFault) as fault:
            await self._give_up(fault)

    async def _give_up(self, fault: HistoryError | DeviceFault) -> None:
        """Never returns: what it was at is not done. Another replica does it, or this one mended."""
        self._note(fault)
        await asyncio.Event().wait()

    async def _to_stop(self) -> bool:
        self._health.at_work("event loop")
        await asyncio.sleep(TICK_SECONDS)
        return self._stop.is_set()

    def _say_whether_ready(self) -> None:
        health, mirror = self._health, self._mirror
        unread = mirror.unread and not mirror.degraded
        if unread and health.ready:
            reason = f"delta {mirror.unread} is live, but only those up to {mirror.codebook.seq} can be read"
            health.not_ready(reason)
            log.error("deltas_behind", reason=reason)
        elif not unread and not health.ready:
            health.become_ready()
            log.info("ready", seq=mirror.codebook.seq, entries=len(mirror.codebook))

    def _note(self, fault: HistoryError | DeviceFault) -> None:
        if self._fault is not None:
            return
        self._fault = fault
        self._idle.clear()  # from now on it stays to be looked at, and ends with status 1
        self._health.not_ready(str(fault))
        event = "history_fault" if isinstance(fault, HistoryError) else "device_fault"
        log.error(event, reason=str(fault), seq=self._mirror.codebook.seq)


def _reason(error: BaseException | None) -> str:
    return "unknown" if error is None else f"{type(error).__name__}: {one_line(str(error))}"
