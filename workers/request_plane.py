"""The faust app of a replica: one agent over `requests`, in the group of all replicas, and one timer."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import faust
import structlog

from pipeline.clients import MAX_DELTA_BYTES
from pipeline.serving import Record, Reply
from pipeline.settings import Settings
from pipeline.topics import REQUESTS

log = structlog.get_logger()

RETRY_SECONDS = 1.0
"""Pause before a batch whose answers could not be sent is tried again."""

FOLLOW_SECONDS = 0.2
"""How often a replica without requests looks for what is live."""


def request_plane(
    settings: Settings,
    answer: Callable[[list[Record]], Awaitable[list[Reply]]],
    follow: Callable[[], Awaitable[None]],
) -> Any:
    """The app. A batch counts as done, and its offsets are committed, once all its replies are in Kafka.

    No web server, no tables, no topics of faust's own: topics are `gracestream topics`' to create.
    """
    logging.getLogger("mode.timers").setLevel(logging.ERROR)  # a tick that waits for a batch is no news
    app = faust.App(
        settings.topic("inference"),
        broker=[f"aiokafka://{address.strip()}" for address in settings.kafka.split(",")],
        web_enabled=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        autodiscover=False,
        store="memory://",
        stream_buffer_maxsize=4 * settings.batch,
        datadir=str(Path(tempfile.gettempdir()) / "gracestream-faust"),  # faust makes it, and leaves it empty
        broker_session_timeout=settings.session_timeout,
        broker_heartbeat_interval=settings.session_timeout / 4,
        broker_commit_interval=0.5,
        consumer_auto_offset_reset="earliest",
        producer_max_request_size=MAX_DELTA_BYTES,
        loghandlers=[],
        logging_config=None,
    )
    requests = app.topic(settings.topic(REQUESTS), key_serializer="raw", value_serializer="raw")

    @app.agent(requests, name="answer")  # type: ignore[untyped-decorator]
    async def agent(stream: Any) -> None:
        # `take_events` would count a batch as done even when it failed or a stop cancelled it.
        batches: AsyncIterable[Sequence[Any]] = stream.noack_take(settings.batch, within=settings.batch_wait)
        async for events in batches:
            records = [_record(event) for event in events]
            while not await _answered(records):
                await asyncio.sleep(RETRY_SECONDS)
            for event in events:
                await stream.ack(event)

    async def _answered(records: list[Record]) -> bool:
        try:
            sent = []
            for reply in await answer(records):
                topic, headers = settings.topic(reply.topic), reply.headers or None
                sent.append(await app.producer.send(topic, reply.key, reply.value, None, None, headers))
            await asyncio.gather(*sent)
        except Exception:  # the batch is tried again, whatever it was
            log.exception("batch_failed", requests=len(records), offset=records[0].offset)
            return False
        return True

    @app.timer(FOLLOW_SECONDS)  # type: ignore[untyped-decorator]
    async def timer() -> None:
        await follow()

    return app


def _record(event: Any) -> Record:
    message = event.message
    return Record(message.value, message.topic, message.partition, message.offset, message.timestamp, message.key)
