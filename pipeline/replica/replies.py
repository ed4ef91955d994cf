"""Sends replies, and replaces those that Kafka rejects for good by errors.

Guarantees:

1. `send` returns once every reply or its replacement is in Kafka. Otherwise it raises, and the caller sends the batch
   again.
2. A reply that is too large for its topic is replaced by an error prediction, or at last by a dead letter. Kafka
   rejects a batch of records as a whole, so its other replies are sent again, each in its own batch.
3. A reply topic that a request names delays nothing else. It has its own producer and `SEND_TIMEOUT_SECONDS`. After a
   failure its replies go to `predictions`, as errors, for `TOPIC_BACKOFF_SECONDS`. `send` returns the tasks that still
   send to such topics.
4. No topic is created.

Not promised: that a reply is sent once. A batch that is sent again repeats its replies.
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
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.deltas import MAX_DELTA_BYTES
from gracestream.schemas.messages import to_one_line

log = structlog.get_logger()

SEND_TIMEOUT_SECONDS = 5.0
"""Seconds that a topic named by a request has to accept a reply."""

TOPIC_BACKOFF_SECONDS = 10.0
"""Seconds without another attempt after such a topic has failed."""

MAX_REJECTING_TOPICS = 1000
"""Failed topics that are remembered, at most: requests may name any number of topics."""

_TOO_LARGE_ERRORS = (MessageSizeTooLargeError, RecordListTooLargeError)


class ReplySender:
    """Sends through the faust app's producer, and to topics named by requests through a producer created on demand."""

    def __init__(self, settings: KafkaSettings, app: Any) -> None:
        disable_topic_creation()
        self._settings, self._app = settings, app
        self._reply_producer: AIOKafkaProducer | None = None
        self._producer_lock = asyncio.Lock()
        self._rejecting_topics: OrderedDict[str, tuple[float, str]] = OrderedDict()
        """By topic, the monotonic time before which it is not tried again, and the reason."""

    async def send(self, replies: Sequence[Reply]) -> list[asyncio.Task[None]]:
        """Send replies; returns the tasks that still send to topics named by requests.

        Raises:
            Exception: Kafka did not accept a reply now, but may accept it later.
        """
        reply_topic_tasks = [
            asyncio.create_task(self._send_to_reply_topic(reply)) for reply in replies if reply.reply_to
        ]
        ordinary = [reply for reply in replies if not reply.reply_to]
        sends = [await self._start_send(reply) for reply in ordinary]
        acknowledgements = await asyncio.gather(
            *(item for item in sends if not isinstance(item, Exception)), return_exceptions=True
        )
        next_acknowledgement = iter(acknowledgements)
        results = [item if isinstance(item, Exception) else next(next_acknowledgement) for item in sends]
        for reply, result in zip(ordinary, results, strict=True):
            if isinstance(result, BaseException):
                await self._retry_or_replace(reply, result)
        return reply_topic_tasks

    async def close(self) -> None:
        """Close the producer of the topics named by requests."""
        if self._reply_producer is not None:
            await self._reply_producer.stop()

    async def _start_send(self, reply: Reply) -> Any:
        """The future of a reply that is being sent, or the error why it could not be."""
        topic = self._settings.topic(reply.topic)
        try:
            return await self._app.producer.send(topic, reply.key, reply.value, None, None, list(reply.headers))
        except ProducerSendError as error:
            return error

    async def _retry_or_replace(self, reply: Reply, error: BaseException) -> None:
        """Send a rejected reply in its own batch, and its fallbacks if it is rejected again.

        Kafka may have rejected it only because of other replies in its batch. A reply that the producer itself rejects
        is too large in any batch.

        Raises:
            BaseException: `error`, if the reply was not rejected for its size.
        """
        producer_error = error.__cause__ if isinstance(error, ProducerSendError) else None
        if not isinstance(producer_error or error, _TOO_LARGE_ERRORS):
            raise error
        candidate: Reply | None = self._fallback_for(reply) if producer_error else reply
        producer = self._app.producer._ensure_producer()  # noqa: SLF001  (faust has no call for sending a batch)
        while candidate is not None:
            try:
                await _send_alone(producer, self._settings.topic(candidate.topic), candidate)
            except _TOO_LARGE_ERRORS:
                candidate = self._fallback_for(candidate)
            else:
                return
        log.error(
            "reply_lost",
            key=reply.key,
            consequence="the request has neither an answer nor a dead letter",
            remedy="raise max.message.bytes of the topics",
        )

    def _fallback_for(self, reply: Reply) -> Reply | None:
        """Report a reply that is too large; returns the reply to send instead, or None."""
        topic = reply.reply_to or self._settings.topic(reply.topic)
        reason = _too_large_message(topic, reply)
        _report_rejection(topic, reply, reason)
        return reply.fallback(reason)

    async def _send_to_reply_topic(self, reply: Reply) -> None:
        """Send a reply to the topic that its request names, or else an error to `predictions`."""
        topic = reply.reply_to
        if not (reason := self._recent_rejection(topic)):
            try:
                async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
                    await self._try_reply_topic(topic, reply)
            except (KafkaError, OSError, TimeoutError) as error:
                reason = _rejection_reason(topic, reply, error)
                if not isinstance(error, _TOO_LARGE_ERRORS):  # else the topic may accept the next reply
                    self._remember_rejection(topic, reason)
                _report_rejection(topic, reply, reason)
            else:
                return
        if (fallback := reply.fallback(reason)) is not None:
            await self.send([replace(fallback, reply_to="")])

    async def _try_reply_topic(self, topic: str, reply: Reply) -> None:
        """Send a reply, or its error where it is too large, to the topic that its request names.

        Raises:
            KafkaError: the topic does not exist, is not allowed, or accepts neither.
        """
        producer = await self._get_reply_producer()
        if producer.client.cluster.partitions_for_topic(topic) is None:
            await _require_topic(producer, topic)
        try:
            await producer.send_and_wait(topic, reply.value, reply.key, headers=list(reply.headers))
        except _TOO_LARGE_ERRORS:
            try:
                await _send_alone(producer, topic, reply)
            except _TOO_LARGE_ERRORS:
                fallback = self._fallback_for(reply)
                if fallback is None or not fallback.reply_to:
                    raise
                await _send_alone(producer, topic, fallback)

    async def _get_reply_producer(self) -> AIOKafkaProducer:
        """The producer for topics named by requests, started on first use."""
        async with self._producer_lock:
            if self._reply_producer is None:
                producer = AIOKafkaProducer(
                    bootstrap_servers=[address.strip() for address in self._settings.servers.split(",")],
                    acks="all",
                    max_request_size=MAX_DELTA_BYTES,
                    request_timeout_ms=int(1000 * SEND_TIMEOUT_SECONDS),
                    **kafka_security_options(self._settings),
                )
                try:
                    await producer.start()
                except BaseException:
                    await producer.stop()
                    raise
                self._reply_producer = producer
        return self._reply_producer

    def _recent_rejection(self, topic: str) -> str:
        """Why the topic failed within `TOPIC_BACKOFF_SECONDS`; empty if it did not."""
        until, reason = self._rejecting_topics.get(topic, (0.0, ""))
        return reason if time.monotonic() < until else ""

    def _remember_rejection(self, topic: str, reason: str) -> None:
        self._rejecting_topics[topic] = time.monotonic() + TOPIC_BACKOFF_SECONDS, reason
        self._rejecting_topics.move_to_end(topic)
        while len(self._rejecting_topics) > MAX_REJECTING_TOPICS:
            self._rejecting_topics.popitem(last=False)


def disable_topic_creation() -> None:
    """Stop aiokafka's clients, and so faust's, from creating the topics that they ask about.

    aiokafka has no setting for it, so this replaces its metadata request, for the whole process.
    """
    aiokafka.client.MetadataRequest = partial(MetadataRequest, allow_auto_topic_creation=False)


async def _require_topic(producer: AIOKafkaProducer, topic: str) -> None:
    """Check that a topic exists and may be described.

    Raises:
        KafkaError: it does not exist, or access is denied.
    """
    client = producer.client
    request = MetadataRequest([topic], allow_auto_topic_creation=False)
    for code, *_ in (await client.send(client.get_random_node(), request)).topics:
        if (error := for_code(code)).errno:
            raise error(topic)


async def _send_alone(producer: AIOKafkaProducer, topic: str, reply: Reply) -> None:
    """Send a reply in its own batch, and wait until Kafka has it."""
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


def _report_rejection(topic: str, reply: Reply, reason: str) -> None:
    """Count and log a reply that its topic does not accept."""
    metrics.REPLIES_REJECTED.inc()
    log.warning(
        "reply_rejected",
        topic=topic,
        key=reply.key,
        reason=reason,
        consequence="an error or a dead letter replaces the reply",
    )


def _rejection_reason(topic: str, reply: Reply, error: BaseException) -> str:
    """Why a reply topic did not accept a reply, as a sentence for the sender of the request."""
    if isinstance(error, _TOO_LARGE_ERRORS):
        return _too_large_message(topic, reply)
    subject = f"the topic {topic}, which the header reply_to names,"
    match error:
        case UnknownTopicOrPartitionError():
            return f"{subject} does not exist; create it, or send no such header"
        case TopicAuthorizationFailedError():
            return f"{subject} is not one that this replica may write to; deploy/acls.sh allows it REPLY_TOPICS"
        case TimeoutError():
            return f"{subject} did not take the answer within {SEND_TIMEOUT_SECONDS:g} s"
        case _:
            description = str(getattr(error, "description", None) or error) or type(error).__name__
            return f"{subject} did not take the answer: {to_one_line(description)}"
