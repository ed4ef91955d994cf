"""An inference replica: requests in, predictions out, from the codebook that is live (design, sections 1 and 5).

One faust agent reads `requests` in the replica group. A micro-batch is tokenised in the model's thread while Redis is
asked for the head, the codebook moves to that head, the model answers, and only when every answer is in Kafka does the
batch count as done: a replica killed at any point leaves its batch to another.
"""

import asyncio
from collections.abc import AsyncIterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import faust
import structlog

from pipeline.clients import redis_client
from pipeline.codebook import Codebook, DeltaFault
from pipeline.follower import Follower
from pipeline.index import KeyIndex
from pipeline.mirror import Mirror
from pipeline.radius_store import RadiusStore
from pipeline.serving import Record, Reply, Server
from pipeline.settings import Settings
from pipeline.topics import REQUESTS
from workers.boot import Worker, worker

log = structlog.get_logger()

FOLLOW_SECONDS = 0.2
"""How often a replica without requests looks for what is live."""


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
        """Catch up, join the group, serve; after a fault in the history stay, not ready, for someone to look."""
        self._follower.start()
        try:
            if not await asyncio.to_thread(self._mirror.catch_up, self._settings.startup_timeout):
                log.error("not_caught_up", seq=self._mirror.codebook.seq, read=self._follower.latest_seq)
                return 1
        except DeltaFault as fault:
            self._stop_serving(fault)
        app = self._app()
        if self._fault is None:
            await app.start()
            self._worker.health.become_ready()
            log.info("ready", seq=self._mirror.codebook.seq, entries=len(self._mirror.codebook))
        while not (self._worker.stop.is_set() or self._fault or app.should_stop):
            await asyncio.sleep(0.1)
        self._worker.health.not_ready(str(self._fault or "stopping"))
        if app.started:
            await app.stop()
        while self._fault is not None and not self._worker.stop.is_set():
            await asyncio.sleep(0.1)
        self._follower.close()
        self._model_thread.shutdown()
        return 0 if self._fault is None and self._worker.stop.is_set() else 1

    def _app(self) -> Any:
        settings = self._settings
        app = faust.App(
            settings.topic("inference"),
            broker=[f"aiokafka://{address.strip()}" for address in settings.kafka.split(",")],
            web_enabled=False,
            topic_disable_leader=True,
            topic_allow_declare=False,
            autodiscover=False,
            store="memory://",
            broker_session_timeout=settings.session_timeout,
            broker_heartbeat_interval=settings.session_timeout / 4,
            broker_commit_interval=0.5,
            consumer_auto_offset_reset="earliest",
            producer_max_request_size=4 * settings.max_record_bytes,
            loghandlers=[],
            logging_config=None,
        )
        requests = app.topic(settings.topic(REQUESTS), key_serializer="raw", value_serializer="raw")

        @app.agent(requests, name="answer")  # type: ignore[untyped-decorator]
        async def answer(stream: Any) -> None:
            batches: AsyncIterable[Sequence[Any]] = stream.take_events(settings.batch, within=settings.batch_wait)
            async for events in batches:
                await self._answer(app, [_record(event) for event in events])

        @app.timer(FOLLOW_SECONDS)  # type: ignore[untyped-decorator]
        async def follow() -> None:
            await self._move_to_head()

        return app

    async def _move_to_head(self) -> None:
        """What each batch does first, for a replica that has none: it stays at the head all the same."""
        live = await asyncio.to_thread(self._mirror.read_head)
        try:
            await asyncio.get_running_loop().run_in_executor(self._model_thread, self._mirror.advance, live)
        except DeltaFault as fault:
            self._stop_serving(fault)

    async def _answer(self, app: Any, records: list[Record]) -> None:
        in_model_thread = asyncio.get_running_loop().run_in_executor
        head = asyncio.create_task(asyncio.to_thread(self._mirror.read_head))
        work = await in_model_thread(self._model_thread, self._server.read, records)
        live = await head
        if work.min_seq > self._mirror.codebook.seq:
            live = await asyncio.to_thread(self._mirror.read_head, work.min_seq)

        def serve() -> list[Reply]:
            self._mirror.advance(live)
            return self._server.answer(work)

        try:
            replies = await in_model_thread(self._model_thread, serve)
        except DeltaFault as fault:
            self._stop_serving(fault)
            await asyncio.Event().wait()  # the batch is not done: another replica, or this one mended, answers it
        sent = [
            await app.producer.send(
                self._settings.topic(reply.topic), reply.key, reply.value, None, None, reply.headers or None
            )
            for reply in replies
        ]
        await asyncio.gather(*sent)

    def _stop_serving(self, fault: DeltaFault) -> None:
        self._fault = fault
        self._worker.health.not_ready(str(fault))
        log.error("history_fault", reason=str(fault), seq=self._mirror.codebook.seq)


def _record(event: Any) -> Record:
    message = event.message
    return Record(message.value, message.topic, message.partition, message.offset, message.timestamp)
