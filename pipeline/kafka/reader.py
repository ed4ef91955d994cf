"""Reading a topic once, from some offset to where it ends now.

kafka-python finds out what there is to be read, and reads it, all but the bulk of a long partition: that comes by
aiokafka, whose parser is in C, several times as fast. Whatever keeps aiokafka from going on only ends the bulk early,
and kafka-python reads on from there: a codec that is not installed, a broker that went away. So there is one reader
that says what is wrong, in its own errors.
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
"""Offsets in a partition from which on aiokafka is worth a connection of its own."""

BULK_FETCH_BYTES = 16 * 2**20
"""That a broker sends at once of them: there is one request under way, and none while the last answer is worked at."""

BULK_TIMEOUT_SECONDS = 5.0
"""Seconds in which aiokafka must bring something."""

READ_TIMEOUT_SECONDS = 30.0
"""After so long without an answer Kafka counts as away."""

RecordsAndNext = tuple[list[Any], int]
"""Records, and the offset that follows them and what is between them and the next ones."""


def read_topic(
    settings: Settings, name: str, start_offset: int = 0, start_time_ms: int | None = None, **options: Any
) -> Generator[Any, None, None]:
    """Every committed record of a topic's partitions, from `start_offset` to their present ends, in order.

    Or, where `start_time_ms` is given, from the first record of that time in ms on. `options` are the consumer's.
    Control records of transactions lie between offsets, so the end is where the position reaches it, not a count.

    Raises:
        TopicError: there is no such topic.
        KafkaTimeoutError: for so long nothing of it could be read.
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
            found = reader.offsets_for_times(dict.fromkeys(partitions, start_time_ms))
            starts = {part: ends[part] if first is None else first.offset for part, first in found.items()}
        for partition in partitions:
            position = max(start_offset, starts[partition])
            for records, following in read_bulk(settings, partition, position, ends[partition], **options):
                yield from records
                position = following
            reader.seek(partition, position)
        reached, heard = None, monotonic()
        while (found := {part: reader.position(part) for part in partitions}) and _has_unread(found, ends):
            if found != reached:
                reached, heard = found, monotonic()
            elif monotonic() > heard + READ_TIMEOUT_SECONDS:
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
    """The committed records between two offsets of a partition, or the first of them; none where they are few.

    There is a batch, be it empty, every half second. What is left, from the offset that follows the last batch on, is
    for kafka-python to read, whose `options` these are.
    """
    if end - start < BULK_MIN_OFFSETS or _is_loop_running():
        return
    batches = _read_batches(settings, aiokafka.TopicPartition(*partition), start, end, options)

    async def next_batch() -> RecordsAndNext | None:
        return await anext(batches, None)

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # which ends what is still open
        loop = runner.get_loop()  # not by `run`, which turns Ctrl-C into a cancellation, and that may be lost
        while (batch := loop.run_until_complete(next_batch())) is not None:
            yield batch


def _has_unread(positions: dict[TopicPartition, int], ends: dict[TopicPartition, int]) -> bool:
    """Whether one of these is."""
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
            found = await reader.getmany(partition, timeout_ms=500, max_records=count)
            before, position = position, await asyncio.wait_for(reader.position(partition), BULK_TIMEOUT_SECONDS)
            yield [record for record in found.get(partition, ()) if record.offset < end], min(position, end)
            if position > before:
                deadline = clock() + BULK_TIMEOUT_SECONDS
    except (RawKafkaError, KafkaError, OSError):  # a time-out is an OSError; our records are kafka-python's
        return
    finally:
        with suppress(RawKafkaError, OSError, asyncio.CancelledError):  # of a fetch that it cancels while that waits
            await reader.stop()
        await reader._client.close()  # noqa: SLF001  (in which case it is left open)


def _is_loop_running() -> bool:
    """Whether this thread runs an event loop already: it cannot run another one within."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
