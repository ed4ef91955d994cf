"""Reads topics: a range, one record, the last records, or everything from an offset on.

Guarantees of a `TopicReader`, which reads one partition:

1. It returns only committed records, each once, in the order of their offsets.
2. An end is the last stable offset: each transaction before it is committed or aborted. A range ends when the position
   reaches its end, so control records, aborted records and records removed by compaction may lie anywhere in it.
3. A range starts at the first record that the topic still has, if its start was deleted.
4. `find_last` and `last` read backwards, in windows that grow by `WINDOW_GROWTH` from `FIRST_WINDOW` offsets. They
   read each record at most once.
5. No call waits longer than the timeout without progress, which is a record or a moved position. It then raises
   KafkaTimeoutError with the topic, the offset and the remedy. Only `follow` waits for new records without a limit.
6. aiokafka reads most of a long range, because its parser is in C and several times as fast. Any failure there, such as
   a missing codec or a lost broker, only ends its part early. kafka-python continues from there, so all errors come
   from kafka-python.

Not promised: an order of records between partitions; two reads at once through one Kafka client; that a topic that was
deleted and created again is noticed, other than by its missing records.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from time import monotonic
from typing import Any, Self

import aiokafka
from aiokafka.errors import KafkaError as RawKafkaError
from kafka import TopicPartition
from kafka.errors import KafkaError, KafkaTimeoutError

from gracestream.pipeline.kafka.clients import aiokafka_consumer, consumer
from gracestream.pipeline.kafka.topics import missing_topic_error
from gracestream.pipeline.settings import KafkaSettings

BULK_MIN_OFFSETS = 5000
"""Number of offsets in a partition from which aiokafka saves more time than its connection costs."""

BULK_FETCH_BYTES = 16 * 2**20
"""Limit on the bytes of one fetch of aiokafka.

It is large because there is one request at a time, and none while the records of the last one are processed.
"""

BULK_TIMEOUT_SECONDS = 5.0
"""Seconds without progress after which aiokafka's part ends."""

READ_TIMEOUT_SECONDS = 30.0
"""Seconds without progress after which reading fails with KafkaTimeoutError."""

FETCH_MAX_WAIT_MS = 5
"""Milliseconds that a fetch of a reader waits for records.

Short, because Kafka answers the requests of one connection in order: a waiting fetch delays the next request. A range
whose end is known has no need to wait.
"""

READ_POLL_MS, FOLLOW_POLL_MS = 20, 200
"""Milliseconds of one poll: in a range, and in `follow`. A poll that only passes control records lasts this long."""

FIRST_WINDOW, WINDOW_GROWTH = 64, 8
"""Offsets that a search from the end reads first, and the factor of each further window.

Control records take offsets too, so the first window may hold few records.
"""

RecordsAndNext = tuple[list[Any], int]
"""Records, and the offset at which reading continues. Control records of transactions lie between."""


def open_reader_client(
    settings: KafkaSettings,
    new_consumer: Callable[..., Any] = consumer,
    timeout_seconds: float | None = None,
    **options: Any,
) -> Any:
    """A consumer for readers, which connects within the timeout of a reader.

    `new_consumer` has the signature of `consumer`, and gets `options`.

    Raises:
        KafkaError: Kafka does not answer.
    """
    timeout = READ_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
    defaults = {"fetch_max_wait_ms": FETCH_MAX_WAIT_MS, "bootstrap_timeout_ms": int(1000 * timeout)}
    return new_consumer(settings, **(defaults | options))


class TopicReader:
    """Reads one partition of a topic. Close it, or use it in a `with` statement.

    Args:
        settings: The cluster and the prefix of names.
        name: The topic, without the prefix.
        partition: The number of the partition.
        client: A consumer from `open_reader_client`, which the caller closes and may share between readers; by default,
            a consumer of its own.
        new_consumer: Creates its own consumer, with the signature of `consumer`.
        timeout_seconds: The timeout; by default `READ_TIMEOUT_SECONDS`.
        options: Options of the reader's own consumer.

    Raises:
        KafkaError: Kafka does not answer. Each method may raise it, too.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        name: str,
        partition: int = 0,
        *,
        client: Any = None,
        new_consumer: Callable[..., Any] = consumer,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> None:
        self._settings, self._options = settings, options
        self._partition = TopicPartition(settings.topic(name), partition)
        self._timeout = READ_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        self._owns_client = client is None
        self._client = (
            open_reader_client(settings, new_consumer, self._timeout, **options) if client is None else client
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the reader's own client; a client of the caller stays open."""
        if self._owns_client:
            self._client.close()

    def first_offset(self) -> int:
        """The offset from which on the topic has records, or could have."""
        return self._ask_offset(self._client.beginning_offsets, self._timeout)

    def end_offset(self, timeout_seconds: float | None = None) -> int:
        """The offset after the last committed record, or after a control record behind it.

        `timeout_seconds` replaces the timeout of the reader.
        """
        return self._ask_offset(self._client.end_offsets, self._timeout if timeout_seconds is None else timeout_seconds)

    def offset_at(self, time_ms: int) -> int | None:
        """The offset of the first record of this time or later, in milliseconds; None if there is none."""
        try:
            found = self._client.offsets_for_times({self._partition: time_ms}, timeout_ms=1000 * self._timeout)
        except KafkaTimeoutError as error:
            raise self._timeout_error(f"at time {time_ms}", self._timeout) from error
        return None if found[self._partition] is None else int(found[self._partition].offset)

    def read(self, start: int = 0, end: int | None = None) -> Generator[Any, None, None]:
        """Iterate over the records from offset `start` to before offset `end`.

        `end` is an end offset that was read before, or less; by default, the present end offset.
        """
        end = self.end_offset() if end is None else end
        position, progress_at = start, monotonic()
        with closing(self._read_bulk(start, end)) as batches:
            for records, next_offset in batches:
                yield from records
                if next_offset > position:
                    position, progress_at = next_offset, monotonic()
        if position >= end:
            return
        for polled, next_offset in self._poll_from(position, READ_POLL_MS):
            # Records that arrived after `end` was read come along. Lower offsets come if the topic was created again.
            yield from (record for record in polled if position <= record.offset < end)
            if next_offset > position:
                position, progress_at = next_offset, monotonic()
            if position >= end:
                return
            if monotonic() > progress_at + self._timeout:
                raise self._timeout_error(f"on from offset {position}", self._timeout)

    def at(self, offset: int) -> Any | None:
        """The record at an offset; None if there is none, or none that is committed."""
        if not 0 <= offset < self.end_offset():
            return None
        return next((record for record in self.read(offset, offset + 1) if record.offset == offset), None)

    def last(self, count: int) -> list[Any]:
        """The last `count` records, or all if there are fewer."""
        found: list[Any] = []
        with closing(self._windows_backwards()) as windows:
            while len(found) < count and (window := next(windows, None)) is not None:
                found = [*deque(window, maxlen=count - len(found)), *found]
        return found

    def find_last(self, matches: Callable[[Any], object]) -> Any | None:
        """The last record for which `matches` is true; None if there is none."""
        for window in self._windows_backwards():
            found = deque(filter(matches, window), maxlen=1)
            if found:
                return found[0]
        return None

    def follow(self, start: int = 0) -> Generator[RecordsAndNext, None, None]:
        """Batches of the records from offset `start` on, without end.

        A batch comes at least every half second, and is empty if no record came. An unreachable Kafka looks like a
        quiet topic here; `end_offset` tells them apart. If the topic was cut or created again, so that its end is
        before the next offset, the batches begin again with its first record.
        """
        position = start
        with closing(self._read_bulk(start, self.end_offset())) as batches:
            for records, position in batches:
                yield records, position
        yield from self._poll_from(position, FOLLOW_POLL_MS)

    def _windows_backwards(self) -> Generator[Iterator[Any], None, None]:
        """The records of consecutive windows, the last window first. Each must be read before the next one."""
        first, end, size = self.first_offset(), self.end_offset(), FIRST_WINDOW
        while end > first:
            start = max(first, end - size)
            yield self.read(start, end)
            end, size = start, size * WINDOW_GROWTH

    def _read_bulk(self, start: int, end: int) -> Generator[RecordsAndNext, None, None]:
        return read_bulk(self._settings, self._partition, start, end, **self._options)

    def _poll_from(self, position: int, poll_ms: int) -> Generator[RecordsAndNext, None, None]:
        """Batches from an offset on, without end. An offset that the topic does not have becomes its first one.

        The last is the option `auto_offset_reset` of our consumers.
        """
        if self._client.assignment() != {self._partition}:
            self._client.assign([self._partition])
        self._client.seek(self._partition, position)
        while True:
            records = self._client.poll(timeout_ms=poll_ms).get(self._partition, [])
            next_offset = self._client.position(self._partition, timeout_ms=poll_ms)
            # kafka-python knows no position while it looks up the first record.
            position = position if next_offset is None else next_offset
            yield records, position

    def _ask_offset(self, ask: Callable[..., dict[TopicPartition, int]], timeout_seconds: float) -> int:
        try:
            return int(ask([self._partition], timeout_ms=1000 * timeout_seconds)[self._partition])
        except KafkaTimeoutError as error:
            raise self._timeout_error("to its end", timeout_seconds) from error

    def _timeout_error(self, what: str, timeout_seconds: float) -> KafkaTimeoutError:
        return KafkaTimeoutError(
            f"{self._partition.topic} could not be read {what}: Kafka sent nothing for {timeout_seconds:g} s; do all"
            f" brokers of {self._settings.servers} answer?"
        )


@contextmanager
def open_readers(settings: KafkaSettings, name: str, **options: Any) -> Iterator[list[TopicReader]]:
    """Readers of all partitions of a topic, which share one client. `options` are options of that consumer.

    Raises:
        TopicError: the topic does not exist.
        KafkaError: Kafka does not answer.
    """
    with closing(open_reader_client(settings, **options)) as client:
        numbers = sorted(client.partitions_for_topic(settings.topic(name)) or ())
        if not numbers:
            raise missing_topic_error(settings.topic(name))
        yield [TopicReader(settings, name, number, client=client, **options) for number in numbers]


def read_topic(
    settings: KafkaSettings, name: str, start_offset: int = 0, start_time_ms: int | None = None, **options: Any
) -> Generator[Any, None, None]:
    """Iterate over the committed records of a topic, in each partition from `start_offset` to its current end.

    With `start_time_ms`, it skips the records before the first one of this time or later, in milliseconds.
    `options` are options of the consumer.

    Raises:
        TopicError: the topic does not exist.
        KafkaTimeoutError: no progress for `READ_TIMEOUT_SECONDS`.
    """
    with open_readers(settings, name, **options) as readers:
        ends = [reader.end_offset() for reader in readers]  # all before the first record is read
        for reader, end in zip(readers, ends, strict=True):
            start = start_offset if start_time_ms is None else reader.offset_at(start_time_ms)
            if start is not None:
                yield from reader.read(start, end)


def read_bulk(
    settings: KafkaSettings, partition: TopicPartition, start: int, end: int, **options: Any
) -> Generator[RecordsAndNext, None, None]:
    """Read the committed records between two offsets of a partition with aiokafka, in batches.

    It may stop before `end`, and reads nothing if the range is short or the thread runs an event loop. The caller
    continues with kafka-python at the offset of the last batch. A batch, possibly empty, comes every half second.
    `options` are options of the kafka-python consumer.
    """
    if end - start < BULK_MIN_OFFSETS or _is_loop_running():
        return
    batches = _read_batches(settings, aiokafka.TopicPartition(*partition), start, end, options)

    async def next_batch() -> RecordsAndNext | None:
        return await anext(batches, None)

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # it cancels open tasks at the end
        # Not `runner.run`: it turns Ctrl-C into a cancellation, and the reader may swallow that.
        loop = runner.get_loop()
        while (batch := loop.run_until_complete(next_batch())) is not None:
            yield batch


async def _read_batches(
    settings: KafkaSettings, partition: aiokafka.TopicPartition, start: int, end: int, options: dict[str, Any]
) -> AsyncGenerator[RecordsAndNext, None]:
    reader = aiokafka_consumer(
        settings,
        check_crcs=options.get("check_crcs", True),
        max_partition_fetch_bytes=BULK_FETCH_BYTES,
        fetch_max_bytes=BULK_FETCH_BYTES,
    )
    count = options.get("max_poll_records", 500)
    clock = asyncio.get_running_loop().time
    try:
        await asyncio.wait_for(reader.start(), BULK_TIMEOUT_SECONDS)
        reader.assign([partition])
        reader.seek(partition, start)
        position, deadline = start, clock() + BULK_TIMEOUT_SECONDS
        while position < end and clock() < deadline:
            records = await reader.getmany(partition, timeout_ms=500, max_records=count)
            before, position = position, await asyncio.wait_for(reader.position(partition), BULK_TIMEOUT_SECONDS)
            yield [record for record in records.get(partition, ()) if record.offset < end], min(position, end)
            if position > before:
                deadline = clock() + BULK_TIMEOUT_SECONDS
    except (RawKafkaError, KafkaError, OSError):
        return  # a timeout is an OSError; KafkaError comes from our parser, which uses kafka-python's
    finally:
        with suppress(RawKafkaError, OSError, asyncio.CancelledError):  # `stop` cancels a waiting fetch
            await reader.stop()
        await reader._client.close()  # noqa: SLF001  (`stop` leaves it open if it raises)


def _is_loop_running() -> bool:
    """Whether this thread runs an event loop. It could not run another one inside."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
