"""The faust app of a replica: one agent over `requests`, in the consumer group of all replicas.

Guarantees:

1. A batch is done once all its replies are in Kafka. Its offsets are committed once it and every batch taken before it
   are done. So another replica answers what this one leaves unfinished.
2. While requests are being answered, up to `MAX_UNANSWERED_BATCHES` further batches are taken, to be prepared and to
   give the model a choice.
3. Requests that wait for a delta do not delay others, until `MAX_IN_FLIGHT_BATCHES` batches are unfinished.
4. Memory is bounded, however much waits in Kafka:
   - before they are taken: records of a few batches, up to `MAX_PENDING_BYTES` and one record;
   - after they are taken: up to `MAX_PENDING_BYTES` and one batch;
   - one fetch per partition, as stored by Kafka (`pipeline.kafka.lenient_records` says how it is read).

Not promised: exactly one reply. A batch that fails, or moves to another replica, is answered again.
"""

import asyncio
import logging
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import faust
import structlog
from faust.sensors.monitor import Monitor
from mode.utils.queues import ThrowableQueue

from gracestream.pipeline.kafka import REQUESTS, install_lenient_parser, kafka_tls_context, record_memory_bytes
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.replica.replies import ReplySender
from gracestream.pipeline.replica.request_handler import ReplyChunk, RequestRecord
from gracestream.pipeline.settings import KafkaSettings, ServingSettings, secret_text
from gracestream.schemas.deltas import MAX_DELTA_BYTES

log = structlog.get_logger()

BatchHandler = Callable[[list[RequestRecord]], AsyncGenerator[ReplyChunk, None]]
"""Answers a batch of records, in chunks."""

BATCH_RETRY_SECONDS = 1.0
"""Seconds before a batch whose replies could not be sent is answered again."""

PREFETCH_BATCHES = 4
"""Batches that are fetched in advance, so that the model does not wait for Kafka."""

MAX_UNANSWERED_BATCHES = 4
"""Batches' worth of requests that may be taken and unanswered, beside the last batch taken."""

MAX_IN_FLIGHT_BATCHES = 20
"""Batches that may be taken and unfinished."""


MAX_PENDING_BYTES = 16 * 2**20
"""Bytes of records that may wait to be taken, and the same again for taken and unfinished ones."""


class _BlockingQueue(ThrowableQueue):  # type: ignore[misc]
    """A queue that blocks its producer once it is full, by number or by bytes, and never pauses fetching before.

    faust's own queue pauses fetching for a second at 80 %. Its consumer would not be polled meanwhile, and a fast model
    would empty the queue.
    """

    pressure_high_ratio = 0.5  # faust pauses at size / ratio: twice the size, which is never reached
    _queued_bytes = 0

    def full(self) -> bool:
        """True if a producer must wait."""
        return bool(super().full()) or self._queued_bytes >= MAX_PENDING_BYTES

    def clear(self) -> None:
        """Drop all records."""
        super().clear()
        self._queued_bytes = 0

    def _put(self, event: Any) -> None:
        super()._put(event)
        self._queued_bytes += record_memory_bytes(event.message)

    def _get(self) -> Any:
        event = super()._get()
        self._queued_bytes -= record_memory_bytes(event.message)
        return event


class _App(faust.App):  # type: ignore[misc]
    """A faust app whose streams buffer in `_BlockingQueue`."""

    def FlowControlQueue(self, maxsize: int | None = None, *, clear_on_resume: bool = False) -> ThrowableQueue:
        return _BlockingQueue(maxsize or 0, flow_control=self.flow_control, clear_on_resume=clear_on_resume)


class _CommitMonitor(Monitor):  # type: ignore[misc]
    """faust's monitor, which it always has; this one also observes the time of each commit of offsets.

    faust calls `on_commit_completed` twice a second, also if there was no offset to commit.
    """

    _has_committed = False

    def on_tp_commit(self, tp_offsets: Any) -> None:
        """Note that offsets were committed."""
        super().on_tp_commit(tp_offsets)
        self._has_committed = True

    def on_commit_completed(self, consumer: Any, state: Any) -> None:
        """Observe the time since `on_commit_initiated`, which returned `state`."""
        super().on_commit_completed(consumer, state)
        if self._has_committed:
            self._has_committed = False
            metrics.OFFSET_COMMIT_SECONDS.observe(self.time() - state)


class _BatchTimer:
    """Measures how long the first request of a batch waited for more."""

    def __init__(self) -> None:
        self._asked_at = 0.0
        """When the next batch was asked for; earlier, a request waits for the agent and not for more requests."""
        self._first_at: float | None = None

    def ask(self) -> None:
        """Note that the next batch is asked for."""
        self._asked_at = time.perf_counter()

    def add(self, value: Any) -> Any:
        """Note that a request has come, and return it: a processor of the stream."""
        if self._first_at is None:
            self._first_at = time.perf_counter()
        return value

    def take(self) -> None:
        """Observe the wait of a batch that is complete."""
        now = time.perf_counter()
        metrics.BATCH_WAIT_SECONDS.observe(now - max(self._asked_at, now if self._first_at is None else self._first_at))
        self._first_at = None


class _InFlightBatch:
    """A batch that was taken and is unfinished."""

    def __init__(self, events: Sequence[Any]) -> None:
        self.events = events
        self.records = [_request_record(event) for event in events]
        self.size_bytes = sum(record_memory_bytes(event.message) for event in events)
        self.pending = len(events)
        """Records that still delay other batches."""
        self.done = False
        """True once all its replies are in Kafka."""


class RequestPlane:
    """The faust app, without web server, tables or topics of its own.

    `gracestream topics` creates the topics.
    """

    def __init__(self, kafka: KafkaSettings, serving: ServingSettings, handle_batch: BatchHandler) -> None:
        logging.getLogger("mode.timers").setLevel(logging.ERROR)  # a late tick needs no warning
        install_lenient_parser()
        self._serving, self._handle_batch = serving, handle_batch
        self._in_flight: deque[_InFlightBatch] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._progress_event = asyncio.Event()
        """Set when a batch in flight has progressed since the event was cleared."""
        self._stopping = False
        self._app = _App(
            kafka.topic("inference"),
            broker=[f"aiokafka://{address.strip()}" for address in kafka.servers.split(",")],
            broker_credentials=_faust_credentials(kafka),
            web_enabled=False,
            topic_disable_leader=True,
            topic_allow_declare=False,
            autodiscover=False,
            store="memory://",
            stream_buffer_maxsize=PREFETCH_BATCHES * serving.request_batch_size,
            datadir=str(Path(tempfile.gettempdir()) / "gracestream-faust"),  # faust creates it and leaves it empty
            broker_session_timeout=kafka.session_timeout,
            broker_heartbeat_interval=kafka.session_timeout / 4,
            broker_max_poll_interval=kafka.stall_timeout,
            broker_max_poll_records=serving.request_batch_size,  # one poll per batch, however slow the batches are
            broker_commit_interval=0.5,
            consumer_auto_offset_reset="earliest",
            consumer_max_fetch_size=kafka.max_record_bytes,
            producer_max_request_size=MAX_DELTA_BYTES,
            Monitor=_CommitMonitor,
            loghandlers=[],
            logging_config=None,
        )
        self._replies = ReplySender(kafka, self._app)
        requests = self._app.topic(kafka.topic(REQUESTS), key_serializer="raw", value_serializer="raw")
        self._app.agent(requests, name="answer")(self._agent)

    @property
    def failed(self) -> bool:
        """True if faust stopped by itself after an unrecoverable failure."""
        return bool(self._app.should_stop)

    @property
    def failure(self) -> BaseException | None:
        """The failure that stopped faust, if it is known."""
        reason: BaseException | None = self._app.crash_reason
        return reason

    async def start(self) -> None:
        """Join the group and begin to answer."""
        await self._app.start()

    async def stop(self, drain_seconds: float, leave_seconds: float) -> bool:
        """Stop taking batches, finish those in flight, commit, and leave the group; True if all of it was done.

        Args:
            drain_seconds: Seconds for the batches in flight. Unfinished ones are left to another replica.
            leave_seconds: Seconds for committing and leaving. They take longer only if Kafka does not answer.
        """
        self._stopping = True
        deadline = asyncio.get_running_loop().time() + drain_seconds
        while self._in_flight and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for task in self._tasks:
            task.cancel()
        if unfinished := sum(len(batch.events) for batch in self._in_flight):
            log.warning(
                "unfinished_requests_released",
                requests=unfinished,
                offset=self._in_flight[0].records[0].offset,
                consequence="another replica answers them, some for the second time",
            )
        self._app.conf.stream_wait_empty = False  # faust would wait for the unfinished batches, for ever
        leave_task = asyncio.create_task(self._leave())
        await asyncio.wait({leave_task}, timeout=leave_seconds)
        if not leave_task.done():
            log.warning(
                "group_leave_timeout",
                seconds=round(leave_seconds, 1),
                consequence="requests on its partitions wait until Kafka ends its session in the group",
            )
        return leave_task.done() and not unfinished

    async def _leave(self) -> None:
        await self._app.stop()
        await self._replies.close()

    async def _agent(self, stream: Any) -> None:
        """Take batches while there is capacity, and answer each in a task of its own."""
        timer = _BatchTimer()
        timer.ask()
        stream.add_processor(timer.add)
        # `noack_take` leaves acknowledging to `_complete`. `take_events` would acknowledge a batch even if it failed
        # or was cancelled.
        batches: AsyncIterable[Sequence[Any]] = stream.noack_take(
            self._serving.request_batch_size, within=self._serving.batch_max_wait
        )
        async for events in batches:
            timer.take()
            if self._stopping:
                await asyncio.Event().wait()  # until faust cancels its agents
            batch = _InFlightBatch(events)
            self._in_flight.append(batch)
            task = asyncio.create_task(self._complete(stream, batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            while not self._has_capacity():
                self._progress_event.clear()
                await self._progress_event.wait()
            timer.ask()

    def _has_capacity(self) -> bool:
        """True if another batch may be taken."""
        pending = sum(batch.pending for batch in self._in_flight)
        below_count_limits = (
            pending <= MAX_UNANSWERED_BATCHES * self._serving.request_batch_size
            and len(self._in_flight) < MAX_IN_FLIGHT_BATCHES
        )
        return below_count_limits and sum(batch.size_bytes for batch in self._in_flight) < MAX_PENDING_BYTES

    async def _complete(self, stream: Any, batch: _InFlightBatch) -> None:
        """Answer a batch, retrying for as long as it takes, then acknowledge it in order."""
        while not await self._try_answer(batch):
            await asyncio.sleep(BATCH_RETRY_SECONDS)
        batch.done = True
        # Acknowledge in the order of taking: once a later record is acknowledged, faust commits past the unacknowledged
        # records before it.
        while self._in_flight and self._in_flight[0].done:
            for event in self._in_flight[0].events:
                await stream.ack(event)
            self._in_flight.popleft()
        self._progress_event.set()

    async def _try_answer(self, batch: _InFlightBatch) -> bool:
        """Answer a batch and send its replies; False if that failed, so that it must be tried again."""
        batch.pending, reply_topic_tasks = len(batch.records), list[asyncio.Task[None]]()
        try:
            async with aclosing(self._handle_batch(batch.records)) as chunks:
                async for chunk in chunks:
                    reply_topic_tasks += await self._replies.send(chunk.replies)
                    batch.pending -= chunk.released
                    self._progress_event.set()
            await asyncio.gather(*reply_topic_tasks)
        except Exception:  # whatever failed, the batch is tried again
            log.exception(
                "batch_failed",
                requests=len(batch.records),
                offset=batch.records[0].offset,
                consequence="its requests wait, and are answered again in a second",
            )
            return False
        return True


def _faust_credentials(settings: KafkaSettings) -> Any:
    """The TLS and SASL settings of the other clients as faust's credentials; None for a plain connection."""
    context = kafka_tls_context(settings) if settings.uses_tls else None
    if settings.uses_sasl:
        return faust.SASLCredentials(
            username=settings.username,
            password=secret_text(settings.password),
            mechanism=settings.sasl_mechanism,
            ssl_context=context,
        )
    return None if context is None else faust.SSLCredentials(context)


def _request_record(event: Any) -> RequestRecord:
    message = event.message
    return RequestRecord(
        message.value,
        message.topic,
        message.partition,
        message.offset,
        message.timestamp,
        message.key,
        message.headers or (),
    )
