"""An inference replica: requests in, predictions out, from the codebook that is live (design, sections 1 and 5).

A micro-batch is tokenised in the model's thread while Redis is asked for the head, the codebook moves to that head, the
model answers, and only when every answer is in Kafka does the batch count as done: a replica killed at any point
leaves its batch to another.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog

from pipeline.clients import redis_client
from pipeline.codebook import Codebook, DeltaFault
from pipeline.follower import Follower
from pipeline.index import KeyIndex
from pipeline.mirror import Mirror
from pipeline.radius_store import RadiusStore
from pipeline.serving import Record, Reply, Server
from pipeline.settings import Settings
from workers.boot import Worker, worker
from workers.request_plane import request_plane

log = structlog.get_logger()
T = TypeVar("T")


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
        self._fault: DeltaFault | None = None
        started.health.state = self._mirror.state

    async def run(self) -> int:
        """Catch up, join the group, serve; after a fault in the history leave the group, but stay to be looked at."""
        self._follower.start()
        try:
            if not await asyncio.to_thread(self._mirror.catch_up, self._settings.startup_timeout):
                log.error("not_caught_up", seq=self._mirror.codebook.seq, read=self._follower.latest_seq)
                return 1
            await self._serve()
        except DeltaFault as fault:
            self._note(fault)
        while self._fault is not None and not self._worker.stop.is_set():
            await asyncio.sleep(0.1)
        self._follower.close()
        self._model_thread.shutdown()
        return 0 if self._fault is None and self._worker.stop.is_set() else 1

    async def _serve(self) -> None:
        app = request_plane(self._settings, self._answer, self._move_to_head)
        await app.start()
        self._worker.health.become_ready()
        log.info("ready", seq=self._mirror.codebook.seq, entries=len(self._mirror.codebook))
        while not (self._worker.stop.is_set() or self._fault or app.should_stop):
            await asyncio.sleep(0.1)
        if self._fault is None:
            self._worker.health.not_ready("stopping")
        app.conf.stream_wait_empty = self._fault is None  # after a fault nothing that was taken will be done here
        await app.stop()

    async def _answer(self, records: list[Record]) -> list[Reply]:
        head = asyncio.create_task(asyncio.to_thread(self._mirror.read_head))
        work = await self._in_model_thread(lambda: self._server.read(records))
        live = await head
        if work.min_seq > self._mirror.codebook.seq:
            live = await asyncio.to_thread(self._mirror.read_head, work.min_seq)

        def serve() -> list[Reply]:
            self._mirror.advance(live)
            return self._server.answer(work)

        try:
            return await self._in_model_thread(serve)
        except DeltaFault as fault:
            self._note(fault)
            await asyncio.Event().wait()  # the batch is not done: another replica, or this one mended, answers it
            raise

    async def _move_to_head(self) -> None:
        """What each batch does first, for a replica that has none: it stays at the head all the same."""
        live = await asyncio.to_thread(self._mirror.read_head)
        try:
            await self._in_model_thread(lambda: self._mirror.advance(live))
        except DeltaFault as fault:
            self._note(fault)

    async def _in_model_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._model_thread, call)

    def _note(self, fault: DeltaFault) -> None:
        self._fault = fault
        self._worker.health.not_ready(str(fault))
        log.error("history_fault", reason=str(fault), seq=self._mirror.codebook.seq)
