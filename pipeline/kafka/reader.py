"""Reads a topic once, from an offset to its current end.

1. Every committed record of this range is returned once, in the order of its partition.
2. aiokafka reads most of a long partition, because its parser is in C and several times as fast. kafka-python finds the
   range and reads the remainder.
3. Any failure of aiokafka, such as a missing codec or a lost broker, only ends its part early. kafka-python continues
   from there. So all errors come from kafka-python.

Not promised: an order of records between partitions.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from time import monotonic
from typing import Any

import aiokafka
from aiokafka.errors import KafkaError as RawKafkaError
from kafka import TopicPartition
from kafka.errors import KafkaError, KafkaTimeoutError

from gracestream.pipeline.kafka.clients import aiokafka_consumer, consumer
from gracestream.pipeline.kafka.topics import missing_topic_error
from gracestream.pipeline.settings import Settings

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

RecordsAndNext = tuple[list[Any], int]
"""Records, and the offset at which reading continues. Control records of transactions lie between."""


def read_topic(
    settings: Settings, name: str, start_offset: int = 0, start_time_ms: int | None = None, **options: Any
) -> Generator[Any, None, None]:
    """Iterate over the committed records of a topic, in each partition from `start_offset` to its current end.

    With `start_time_ms`, it skips the records before the first one of this time or later, in milliseconds.
    `options` are options of the consumer.

    Raises:
        TopicError: the topic does not exist.
        KafkaTimeoutError: no progress for `READ_TIMEOUT_SECONDS`.
    """
    topic = settings.topic(name)
    reader = consumer(settings, **options)
    try:
        partitions = [TopicPartition(topic, number) for number in sorted(reader.partitions_for_topic(topic) or ())]
        if not partitions:
            raise missing_topic_error(topic)
        reader.assign(partitions)
        starts, ends = reader.beginning_offsets(partitions), reader.end_offsets(partitions)
        if start_time_ms is not None:
            first_records = reader.offsets_for_times(dict.fromkeys(partitions, start_time_ms))
            starts = {part: ends[part] if first is None else first.offset for part, first in first_records.items()}
        for partition in partitions:
            position = max(start_offset, starts[partition])
            for records, following in read_bulk(settings, partition, position, ends[partition], **options):
                yield from records
                position = following
            reader.seek(partition, position)
        # Control records of transactions take offsets too, and may be last. So the end is reached when the positions
        # reach it; neither the number of records nor the last offset shows it.
        last_positions, progress_at = None, monotonic()
        while (positions := {part: reader.position(part) for part in partitions}) and _has_unread(positions, ends):
            if positions != last_positions:
                last_positions, progress_at = positions, monotonic()
            elif monotonic() > progress_at + READ_TIMEOUT_SECONDS:
                raise KafkaTimeoutError(
                    f"{topic} could not be read to its end: for {READ_TIMEOUT_SECONDS:g} s nothing came"
                )
            for partition, records in reader.poll(timeout_ms=500).items():
                yield from (record for record in records if record.offset < ends[partition])
    finally:
        reader.close()


def read_bulk(
    settings: Settings, partition: TopicPartition, start: int, end: int, **options: Any
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


def _has_unread(positions: dict[TopicPartition, int], ends: dict[TopicPartition, int]) -> bool:
    """Whether the position of a partition is before its end."""
    return any(positions[partition] < end for partition, end in ends.items())


async def _read_batches(
    settings: Settings, partition: aiokafka.TopicPartition, start: int, end: int, options: dict[str, Any]
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
