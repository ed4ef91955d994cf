"""The faust app of a replica: one agent over `requests`, in the group of all replicas.

What it guarantees:

1. A batch counts as done, and its offsets are committed, once all its replies are in Kafka and every batch taken
   before it is done: what a replica leaves undone, another one does.
2. While some requests are answered, those of `MAX_UNANSWERED_BATCHES` batches are taken, so that they can be read
   meanwhile and the model can choose among them.
3. Requests that wait for something hold up no other request, but `MAX_IN_FLIGHT_BATCHES` batches that are not done hold
   up the next.
4. What waits in the process is bounded, however much waits in Kafka: the records of a few batches, of at most
   `MAX_PENDING_BYTES` and one record before they are taken, and `MAX_PENDING_BYTES` and one batch after that; and for
   each partition one fetch, as Kafka stores it (`pipeline.kafka.lenient_records` says how it is read).
"""

import asyncio
import logging
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import faust
import structlog
from mode.utils.queues import ThrowableQueue

from gracestream.pipeline.kafka import REQUESTS, install_lenient_parser, kafka_tls_context, record_memory_bytes
from gracestream.pipeline.replica.replies import ReplySender
from gracestream.pipeline.replica.request_handler import ReplyChunk, RequestRecord
from gracestream.pipeline.settings import Settings
from gracestream.schemas.deltas import MAX_DELTA_BYTES

log = structlog.get_logger()

BatchHandler = Callable[[list[RequestRecord]], AsyncGenerator[ReplyChunk, None]]
"""Answers a batch, some of its records at a time."""

BATCH_RETRY_SECONDS = 1.0
"""Pause before a batch whose answers could not be sent is tried again."""

PREFETCH_BATCHES = 4
"""Batches that are fetched ahead, so that no model waits for Kafka."""

MAX_UNANSWERED_BATCHES = 4
"""Batches' worth of requests that are taken and not answered, besides the one that is taken last."""

MAX_IN_FLIGHT_BATCHES = 20
"""Batches at most that are taken and not done."""


MAX_PENDING_BYTES = 16 * 2**20
"""Bytes of records that wait to be taken, and again of those that are taken and not done."""


class _BlockingQueue(ThrowableQueue):  # type: ignore[misc]
    """Blocks whoever fills it once it is full, by number or by bytes, and does nothing before.

    faust's own stops fetching for a second at four fifths: its consumer would not be polled for that long, and a fast
    model has emptied the rest by then.
    """

    pressure_high_ratio = 0.5  # twice the size, which is never reached
    _queued_bytes = 0

    def full(self) -> bool:
        """Whether whoever puts one more has to wait."""
        return bool(super().full()) or self._queued_bytes >= MAX_PENDING_BYTES

    def clear(self) -> None:
        """Forget all that waits."""
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
    def FlowControlQueue(self, maxsize: int | None = None, *, clear_on_resume: bool = False) -> ThrowableQueue:
        return _BlockingQueue(maxsize or 0, flow_control=self.flow_control, clear_on_resume=clear_on_resume)


class _InFlightBatch:
    """A batch that was taken and is not done."""

    def __init__(self, events: Sequence[Any]) -> None:
        self.events = events
        self.records = [_request_record(event) for event in events]
        self.size_bytes = sum(record_memory_bytes(event.message) for event in events)
        self.pending = len(events)
        """Records that hold up others."""
        self.done = False
        """All its replies are in Kafka."""


class RequestPlane:
    """The app, without a web server, tables, or topics of faust's own: topics are `gracestream topics`' to create."""

    def __init__(self, settings: Settings, handle_batch: BatchHandler) -> None:
        logging.getLogger("mode.timers").setLevel(logging.ERROR)  # a tick that came late is no news
        install_lenient_parser()
        self._settings, self._handle_batch = settings, handle_batch
        self._in_flight: deque[_InFlightBatch] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._progress_event = asyncio.Event()
        """Since it was cleared, something that was taken came further."""
        self._stopping = False
        self._app = _App(
            settings.topic("inference"),
            broker=[f"aiokafka://{address.strip()}" for address in settings.kafka.split(",")],
            broker_credentials=_faust_credentials(settings),
            web_enabled=False,
            topic_disable_leader=True,
            topic_allow_declare=False,
            autodiscover=False,
            store="memory://",
            stream_buffer_maxsize=PREFETCH_BATCHES * settings.batch,
            datadir=str(Path(tempfile.gettempdir()) / "gracestream-faust"),  # faust makes it, and leaves it empty
            broker_session_timeout=settings.session_timeout,
            broker_heartbeat_interval=settings.session_timeout / 4,
            broker_max_poll_interval=settings.stuck_after,
            broker_max_poll_records=settings.batch,  # so there is a poll for every batch, however slow
            broker_commit_interval=0.5,
            consumer_auto_offset_reset="earliest",
            consumer_max_fetch_size=settings.max_record_bytes,
            producer_max_request_size=MAX_DELTA_BYTES,
            loghandlers=[],
            logging_config=None,
        )
        self._replies = ReplySender(settings, self._app)
        requests = self._app.topic(settings.topic(REQUESTS), key_serializer="raw", value_serializer="raw")
        self._app.agent(requests, name="answer")(self._agent)

    @property
    def failed(self) -> bool:
        """Whether it stopped by itself: something in it failed for good."""
        return bool(self._app.should_stop)

    @property
    def failure(self) -> BaseException | None:
        """Why, where it says so."""
        reason: BaseException | None = self._app.crash_reason
        return reason

    async def start(self) -> None:
        """Join the group and begin to answer."""
        await self._app.start()

    async def stop(self, drain_seconds: float, leave_seconds: float) -> bool:
        """Take nothing more, finish what was taken, commit, leave the group; whether all of that was done.

        Args:
            drain_seconds: Seconds for what was taken; what is unfinished then is left to another replica.
            leave_seconds: Seconds for the rest, which takes longer only where Kafka does not answer.
        """
        self._stopping = True
        deadline = asyncio.get_running_loop().time() + drain_seconds
        while self._in_flight and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for task in self._tasks:
            task.cancel()
        if unfinished := sum(len(taken.events) for taken in self._in_flight):
            log.warning("left_to_others", requests=unfinished, offset=self._in_flight[0].records[0].offset)
        self._app.conf.stream_wait_empty = False  # faust would wait for what is left, for ever
        left = asyncio.create_task(self._leave())
        await asyncio.wait({left}, timeout=leave_seconds)
        if not left.done():
            log.warning("group_not_left", seconds=round(leave_seconds, 1))
        return left.done() and not unfinished

    async def _leave(self) -> None:
        await self._app.stop()
        await self._replies.close()

    async def _agent(self, stream: Any) -> None:
        # `take_events` would count a batch as done even when it failed or a stop cancelled it.
        batches: AsyncIterable[Sequence[Any]] = stream.noack_take(
            self._settings.batch, within=self._settings.batch_wait
        )
        async for events in batches:
            if self._stopping:
                await asyncio.Event().wait()  # until faust cancels its agents
            taken = _InFlightBatch(events)
            self._in_flight.append(taken)
            task = asyncio.create_task(self._complete(stream, taken))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            while not self._has_capacity():
                self._progress_event.clear()
                await self._progress_event.wait()

    def _has_capacity(self) -> bool:
        unsettled = sum(taken.pending for taken in self._in_flight)
        few = (
            unsettled <= MAX_UNANSWERED_BATCHES * self._settings.batch and len(self._in_flight) < MAX_IN_FLIGHT_BATCHES
        )
        return few and sum(taken.size_bytes for taken in self._in_flight) < MAX_PENDING_BYTES

    async def _complete(self, stream: Any, batch: _InFlightBatch) -> None:
        while not await self._try_answer(batch):
            await asyncio.sleep(BATCH_RETRY_SECONDS)
        batch.done = True
        # In the order they were taken: faust commits past a record that is not acknowledged where one after it is.
        while self._in_flight and self._in_flight[0].done:
            for event in self._in_flight[0].events:
                await stream.ack(event)
            self._in_flight.popleft()
        self._progress_event.set()

    async def _try_answer(self, batch: _InFlightBatch) -> bool:
        batch.pending, elsewhere = len(batch.records), list[asyncio.Task[None]]()
        try:
            async with aclosing(self._handle_batch(batch.records)) as parts:
                async for part in parts:
                    elsewhere += await self._replies.send(part.replies)
                    batch.pending -= part.released
                    self._progress_event.set()
            await asyncio.gather(*elsewhere)
        except Exception:  # the batch is tried again, whatever it was
            log.exception("batch_failed", requests=len(batch.records), offset=batch.records[0].offset)
            return False
        return True


def _faust_credentials(settings: Settings) -> Any:
    """What `kafka_security` gives the other clients, in faust's words; None for a connection without either."""
    context = kafka_tls_context(settings) if settings.kafka_security_protocol.endswith("SSL") else None
    if settings.kafka_security_protocol.startswith("SASL"):
        return faust.SASLCredentials(
            username=settings.kafka_username,
            password=settings.kafka_password.get_secret_value(),
            mechanism=settings.kafka_sasl_mechanism,
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
