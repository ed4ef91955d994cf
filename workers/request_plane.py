"""The faust app of a replica: one agent over `requests`, in the group of all replicas, and one timer."""

import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from typing import Any

import faust

from pipeline.serving import Record, Reply
from pipeline.settings import Settings
from pipeline.topics import REQUESTS

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
    async def agent(stream: Any) -> None:
        batches: AsyncIterable[Sequence[Any]] = stream.take_events(settings.batch, within=settings.batch_wait)
        async for events in batches:
            sent = []
            for reply in await answer([_record(event) for event in events]):
                topic, headers = settings.topic(reply.topic), reply.headers or None
                sent.append(await app.producer.send(topic, reply.key, reply.value, None, None, headers))
            for delivery in sent:
                await delivery

    @app.timer(FOLLOW_SECONDS)  # type: ignore[untyped-decorator]
    async def timer() -> None:
        await follow()

    return app


def _record(event: Any) -> Record:
    message = event.message
    return Record(message.value, message.topic, message.partition, message.offset, message.timestamp)
