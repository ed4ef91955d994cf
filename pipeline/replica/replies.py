"""Sends replies, and answers with an error in place of what Kafka refuses for good.

What it guarantees:

1. `send` returns once each reply, or what is sent instead of it, is in Kafka; else it raises, and is called again.
2. A reply that is too large for its topic is answered by an error prediction, or at last by a dead letter of its
   request. Kafka refuses a batch of records as a whole: its other replies are sent again, each in a batch of its own.
3. A reply topic that a request has chosen holds up nothing else: it has a producer of its own, and
   `SEND_TIMEOUT_SECONDS`. A topic that does not take a reply by then is not tried for `TOPIC_BACKOFF_SECONDS`; its
   replies go to `predictions`, as errors. `send` hands back the tasks that are at it.
4. No topic is ever created.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import aiokafka.client
import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    KafkaError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.metadata import MetadataRequest
from faust.exceptions import ProducerSendError

from gracestream.pipeline.kafka import kafka_security_options
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.replica.request_handler import Reply
from gracestream.pipeline.settings import Settings
from gracestream.schemas.deltas import MAX_DELTA_BYTES
from gracestream.schemas.messages import to_one_line

log = structlog.get_logger()

SEND_TIMEOUT_SECONDS = 5.0
"""That a reply topic has to take a reply."""

TOPIC_BACKOFF_SECONDS = 10.0
"""For which one that did not is not tried again."""

MAX_REFUSED_TOPICS = 1000
"""Names of such topics that are remembered: whoever asks may make up any number of them."""

_TOO_LARGE_ERRORS = (MessageSizeTooLargeError, RecordListTooLargeError)


class ReplySender:
    """Sends through `app`, a faust app; to reply topics through a producer that is made when one is asked for."""

    def __init__(self, settings: Settings, app: Any) -> None:
        disable_topic_creation()
        self._settings, self._app = settings, app
        self._reply_producer: AIOKafkaProducer | None = None
        self._producer_lock = asyncio.Lock()
        self._refused_topics: OrderedDict[str, tuple[float, str]] = OrderedDict()

    async def send(self, replies: Sequence[Reply]) -> list[asyncio.Task[None]]:
        """Send them all; the tasks that still send to topics that requests have chosen.

        Raises:
            Exception: Kafka did not take one of them now, and may take it later.
        """
        late = [asyncio.create_task(self._send_to_reply_topic(reply)) for reply in replies if reply.reply_to]
        ordinary = [reply for reply in replies if not reply.reply_to]
        sent = [await self._start_send(reply) for reply in ordinary]
        found = await asyncio.gather(*(one for one in sent if not isinstance(one, Exception)), return_exceptions=True)
        ends = iter(found)
        results = [one if isinstance(one, Exception) else next(ends) for one in sent]
        for reply, result in zip(ordinary, results, strict=True):
            if isinstance(result, BaseException):
                await self._retry_or_replace(reply, result)
        return late

    async def close(self) -> None:
        """Leave the reply topics."""
        if self._reply_producer is not None:
            await self._reply_producer.stop()

    async def _start_send(self, reply: Reply) -> Any:
        """The future of a reply on its way; or why there is none."""
        topic = self._settings.topic(reply.topic)
        try:
            return await self._app.producer.send(topic, reply.key, reply.value, None, None, list(reply.headers))
        except ProducerSendError as error:
            return error

    async def _retry_or_replace(self, reply: Reply, error: BaseException) -> None:
        """For one that was refused, perhaps because of others in its batch: alone, and then what is sent instead."""
        local = error.__cause__ if isinstance(error, ProducerSendError) else None
        if not isinstance(local or error, _TOO_LARGE_ERRORS):
            raise error
        trying: Reply | None = self._fallback_for(reply) if local else reply
        producer = self._app.producer._ensure_producer()  # noqa: SLF001  (faust sends no batch)
        while trying is not None:
            try:
                await _send_alone(producer, self._settings.topic(trying.topic), trying)
            except _TOO_LARGE_ERRORS:
                trying = self._fallback_for(trying)
            else:
                return
        log.error("reply_lost", key=reply.key, remedy="raise max.message.bytes of the topics")

    def _fallback_for(self, reply: Reply) -> Reply | None:
        metrics.REPLIES_REFUSED.inc()
        topic = reply.reply_to or self._settings.topic(reply.topic)
        reason = _too_large_message(topic, reply)
        log.warning("reply_refused", topic=topic, key=reply.key, reason=reason)
        return reply.fallback(reason)

    async def _send_to_reply_topic(self, reply: Reply) -> None:
        """To the topic that its request chose, else as an error to the ordinary one."""
        topic = reply.reply_to
        if not (reason := self._recent_refusal(topic)):
            try:
                async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
                    await self._try_reply_topic(topic, reply)
            except (KafkaError, OSError, TimeoutError) as error:
                reason = _refusal_reason(topic, reply, error)
                if not isinstance(error, _TOO_LARGE_ERRORS):  # the topic may take the next reply
                    self._remember_refusal(topic, reason)
                metrics.REPLIES_REFUSED.inc()
                log.warning("reply_refused", topic=topic, key=reply.key, reason=reason)
            else:
                return
        if (instead := reply.fallback(reason)) is not None:
            await self.send([replace(instead, reply_to="")])

    async def _try_reply_topic(self, topic: str, reply: Reply) -> None:
        producer = await self._get_reply_producer()
        if producer.client.cluster.partitions_for_topic(topic) is None:
            await _require_topic(producer, topic)
        try:
            await producer.send_and_wait(topic, reply.value, reply.key, headers=list(reply.headers))
        except _TOO_LARGE_ERRORS:
            try:
                await _send_alone(producer, topic, reply)
            except _TOO_LARGE_ERRORS:
                smaller = self._fallback_for(reply)
                if smaller is None or not smaller.reply_to:
                    raise
                await _send_alone(producer, topic, smaller)

    async def _get_reply_producer(self) -> AIOKafkaProducer:
        async with self._producer_lock:
            if self._reply_producer is None:
                made = AIOKafkaProducer(
                    bootstrap_servers=[address.strip() for address in self._settings.kafka.split(",")],
                    acks="all",
                    max_request_size=MAX_DELTA_BYTES,
                    request_timeout_ms=int(1000 * SEND_TIMEOUT_SECONDS),
                    **kafka_security_options(self._settings),
                )
                try:
                    await made.start()
                except BaseException:
                    await made.stop()
                    raise
                self._reply_producer = made
        return self._reply_producer

    def _recent_refusal(self, topic: str) -> str:
        until, reason = self._refused_topics.get(topic, (0.0, ""))
        return reason if time.monotonic() < until else ""

    def _remember_refusal(self, topic: str, reason: str) -> None:
        self._refused_topics[topic] = time.monotonic() + TOPIC_BACKOFF_SECONDS, reason
        self._refused_topics.move_to_end(topic)
        while len(self._refused_topics) > MAX_REFUSED_TOPICS:
            self._refused_topics.popitem(last=False)


def disable_topic_creation() -> None:
    """Let no client of aiokafka, faust's among them, create the topics that it asks about; it has no such setting."""
    aiokafka.client.MetadataRequest = partial(MetadataRequest, allow_auto_topic_creation=False)


async def _require_topic(producer: AIOKafkaProducer, topic: str) -> None:
    """Raises KafkaError where there is no such topic, or none for us."""
    client = producer.client
    request = MetadataRequest([topic], allow_auto_topic_creation=False)
    for code, *_ in (await client.send(client.get_random_node(), request)).topics:
        if (error := for_code(code)).errno:
            raise error(topic)


async def _send_alone(producer: AIOKafkaProducer, topic: str, reply: Reply) -> None:
    """In a batch of its own."""
    await producer.partitions_for(topic)
    batch = producer.create_batch()
    batch.append(timestamp=None, key=reply.key, value=reply.value, headers=list(reply.headers))
    batch.close()
    partition = producer._partition(topic, None, None, None, reply.key, None)  # noqa: SLF001  (no public name)
    await (await producer.send_batch(batch, topic, partition=partition))


def _too_large_message(topic: str, reply: Reply) -> str:
    return (
        f"the answer of {len(reply.value or b'')} bytes is larger than a record of topic {topic} may be; ask for less,"
        " or have its max.message.bytes raised"
    )


def _refusal_reason(topic: str, reply: Reply, error: BaseException) -> str:
    """Why a reply topic did not take a reply, as a sentence for the sender of the request."""
    if isinstance(error, _TOO_LARGE_ERRORS):
        return _too_large_message(topic, reply)
    what = f"the topic {topic}, which the header reply_to names,"
    match error:
        case UnknownTopicOrPartitionError():
            return f"{what} does not exist; create it, or send no such header"
        case TopicAuthorizationFailedError():
            return f"{what} is not one that this replica may write to; deploy/acls.sh allows it REPLY_TOPICS"
        case TimeoutError():
            return f"{what} did not take the answer within {SEND_TIMEOUT_SECONDS:g} s"
        case _:
            told = str(getattr(error, "description", None) or error) or type(error).__name__
            return f"{what} did not take the answer: {to_one_line(told)}"
