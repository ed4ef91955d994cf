"""An inference replica: requests in, predictions out, from the codebook that is live (design, sections 1 and 5).

A micro-batch is tokenised in the model's thread while Redis is asked for the head, the codebook moves to that head, the
model answers, and only when every answer is in Kafka does the batch count as done: a replica killed at any point
leaves its batch to another. Requests that wait for a delta (`min_seq`) are answered when it has come, the others of
their batch at once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog

from pipeline.clients import redis_client
from pipeline.codebook import Codebook, DeltaFault
from pipeline.device import DeviceFault
from pipeline.follower import Follower
from pipeline.index import KeyIndex
from pipeline.mirror import Mirror
from pipeline.radius_store import RadiusStore
from pipeline.serving import Record, Reply, Server, Work
from pipeline.settings import Settings
from workers.boot import Worker, worker
from workers.request_plane import RequestPlane

log = structlog.get_logger()
T = TypeVar("T")

FOLLOW_SECONDS = 0.2
"""How often a replica looks for what is live, also without requests."""

HURRY_SECONDS = 0.02
"""How often it looks while requests wait for a delta."""

TICK_SECONDS = 0.1
"""How often it looks for the end."""

FINISH = 0.7
"""Share of the time to shut down that the running batch may take; the rest is for leaving the group."""


def run(settings: Settings) -> int:
    """Run one replica until it is told to stop; the exit status."""
    with worker("inference", settings) as started:
        return asyncio.run(Replica(started, settings).run())


class Replica:
    """A model, the mirror of the codebook, and the faust app that feeds them."""

    def __init__(self, started: Worker, settings: Settings) -> None:
        self._worker, self._settings = started, settings
        model = started.model
        codebook = Codebook(settings.codebook, model.fingerprint, model.layer)
        self._follower = Follower(settings)
        store = RadiusStore(redis_client(settings), settings)
        self._mirror = Mirror(codebook, KeyIndex(codebook, model.device), store, self._follower, settings)
        self._server = Server(model, self._mirror, settings, started.name)
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._waiting = 0
        self._fault: DeltaFault | DeviceFault | None = None
        started.health.state = self._mirror.state

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
        except DeltaFault as fault:
            self._note(fault)
            in_order = False
        while isinstance(self._fault, DeltaFault) and not await self._to_stop():
            pass
        self._worker.stop.set()
        self._follower.close()
        self._model_thread.shutdown(wait=in_order)
        return 0 if in_order else 1

    async def _serve(self) -> bool:
        """Whether it was told to stop, and left nothing undone."""
        plane = RequestPlane(self._settings, self._answer)
        await plane.start()
        following = asyncio.create_task(self._follow())
        self._worker.health.become_ready()
        log.info("ready", seq=self._mirror.codebook.seq, entries=len(self._mirror.codebook))
        while not (await self._to_stop() or self._fault or plane.failed or following.done()):
            self._say_whether_ready()
        if self._fault is None:
            self._worker.health.not_ready("stopping")
        time = self._settings.shutdown_timeout
        told = self._fault is None and not plane.failed and not following.done()
        finished = await plane.stop(FINISH * time if told else 0, (1 - FINISH) * time)
        following.cancel()
        return told and finished

    async def _answer(self, records: list[Record]) -> AsyncIterator[list[Reply]]:
        head = asyncio.create_task(asyncio.to_thread(self._mirror.read_head))
        work = await self._in_model_thread(lambda: self._server.read(records))
        live = await head

        def serve() -> tuple[list[Reply], Work]:
            self._mirror.advance(live)
            now, later = work.split(self._mirror.codebook.seq)
            return self._server.answer(now), later

        replies, later = await self._in_model_thread(serve)
        yield replies
        started = asyncio.get_running_loop().time()
        while later.questions:
            replies, later = await self._answer_later(later, started)
            yield replies

    async def _answer_later(self, work: Work, started: float) -> tuple[list[Reply], Work]:
        """Answer those whose delta comes first, once it is live; or all, when waiting is of no more use."""
        min_seq = min(question.min_seq for question in work.questions)
        self._waiting += 1
        try:
            while (hope := self._mirror.may_reach(min_seq, asyncio.get_running_loop().time() - started)) and (
                self._mirror.codebook.seq < min_seq
            ):
                await asyncio.sleep(HURRY_SECONDS)
        finally:
            self._waiting -= 1

        def serve() -> tuple[list[Reply], Work]:
            now, later = work.split(self._mirror.codebook.seq) if hope else (work, Work([], []))
            return self._server.answer(now), later

        return await self._in_model_thread(serve)

    async def _follow(self) -> None:
        """What each batch does first, for a replica that has none: it stays at the head all the same."""
        while True:
            live = await asyncio.to_thread(self._mirror.read_head)
            await self._in_model_thread(lambda live=live: self._mirror.advance(live))  # type: ignore[misc]
            await asyncio.sleep(HURRY_SECONDS if self._waiting else FOLLOW_SECONDS)

    async def _in_model_thread(self, call: Callable[[], T]) -> T:
        def watched() -> T:
            with self._worker.health.working("model"):
                return call()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._model_thread, watched)
        except (DeltaFault, DeviceFault) as fault:
            self._note(fault)
            await asyncio.Event().wait()  # what it was at is not done: another replica does it, or this one mended
            raise

    async def _to_stop(self) -> bool:
        self._worker.health.at_work("event loop")
        await asyncio.sleep(TICK_SECONDS)
        return self._worker.stop.is_set()

    def _say_whether_ready(self) -> None:
        health, mirror = self._worker.health, self._mirror
        if mirror.unread and health.ready:
            reason = f"delta {mirror.unread} is live, but only those up to {mirror.codebook.seq} can be read"
            health.not_ready(reason)
            log.error("deltas_behind", reason=reason)
        elif not mirror.unread and not health.ready:
            health.become_ready()
            log.info("ready", seq=mirror.codebook.seq, entries=len(mirror.codebook))

    def _note(self, fault: DeltaFault | DeviceFault) -> None:
        if self._fault is not None:
            return
        self._fault = fault
        self._worker.health.not_ready(str(fault))
        event = "history_fault" if isinstance(fault, DeltaFault) else "device_fault"
        log.error(event, reason=str(fault), seq=self._mirror.codebook.seq)
