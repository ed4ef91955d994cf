"""The request plane: its memory is bounded, and it commits no offset past an unfinished request."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kafka import TopicPartition

from gracestream.pipeline.kafka.clients import consumer, producer
from gracestream.pipeline.observability.metrics import REPLICA_REGISTRY
from gracestream.pipeline.replica.request_handler import Reply, ReplyChunk, RequestRecord
from gracestream.pipeline.replica.request_plane import (
    MAX_IN_FLIGHT_BATCHES,
    MAX_UNANSWERED_BATCHES,
    PREFETCH_BATCHES,
    RequestPlane,
)
from gracestream.pipeline.settings import Settings
from tests.support.running import TIMEOUT, records

BATCH = 8
PARTITIONS = 4
RECORD = 4096


@pytest.fixture
def flooded(deploy: Callable[..., Settings], prefix: str) -> Settings:
    """A deployment with far more waiting requests than a replica may hold."""
    settings = deploy("llama", prefix, request_batch_size=BATCH, max_record_bytes=RECORD)
    with sending(settings) as send:
        for number in range(4000):
            send(number, b"x" * 1000)
    return settings


@contextmanager
def sending(settings: Settings) -> Iterator[Callable[[int, bytes], Any]]:
    """Sends numbered records, spread over the partitions."""
    sender = producer(settings.kafka)
    yield lambda number, value: sender.send(
        settings.kafka.topic("requests"), key=str(number).encode(), value=value, partition=number % PARTITIONS
    )
    sender.flush()
    sender.close()


async def until(found: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(2 * TIMEOUT):
        while not found():
            await asyncio.sleep(0.02)


def echo(batch: list[RequestRecord]) -> ReplyChunk:
    """A reply with the key of each record."""
    return ReplyChunk([Reply("predictions", record.key, record.key) for record in batch], len(batch))


def waits() -> tuple[float, float]:
    """The batches that waited for more requests for up to a second, and all batches."""
    bucket, labels = "gracestream_batch_wait_seconds_bucket", ({"le": "1.0"}, {"le": "+Inf"})
    short, number = (REPLICA_REGISTRY.get_sample_value(bucket, label) or 0.0 for label in labels)
    return short, number


def committed(settings: Settings) -> dict[int, int]:
    """The group's offsets by partition."""
    reader = consumer(settings.kafka, group_id=settings.kafka.topic("inference"))
    try:
        partitions = [TopicPartition(settings.kafka.topic("requests"), number) for number in range(PARTITIONS)]
        return {partition.partition: reader.committed(partition) or 0 for partition in partitions}
    finally:
        reader.close()


def test_the_memory_of_a_replica_does_not_grow_with_the_backlog(flooded: Settings) -> None:
    taken: list[int] = []
    resume = asyncio.Event()
    before = waits()

    async def answer(batch: list[RequestRecord]) -> AsyncGenerator[ReplyChunk, None]:
        taken.append(len(batch))
        await resume.wait()
        yield echo(batch)

    async def run() -> None:
        plane = RequestPlane(flooded.kafka, flooded.serving, answer)
        app: Any = plane._app
        await plane.start()
        try:
            (channel,) = app.topics
            await until(lambda: taken and channel.queue.full())
            for _ in range(50):
                await asyncio.sleep(0.02)
                assert channel.queue.qsize() <= PREFETCH_BATCHES * BATCH
                assert len(app.consumer.unacked) <= (MAX_UNANSWERED_BATCHES + 2) * BATCH
                read = sum(offset or 0 for offset in app.consumer._read_offset.values())
                assert read <= (PREFETCH_BATCHES + MAX_UNANSWERED_BATCHES + 4) * BATCH
            assert MAX_UNANSWERED_BATCHES * BATCH < sum(taken) <= (MAX_UNANSWERED_BATCHES + 1) * BATCH, (
                "the first batch may be short"
            )
            resume.set()
            await until(lambda: sum(taken) == 4000)
        finally:
            assert await plane.stop(10, 10)

    asyncio.run(run())
    assert len(records(flooded, "predictions")) == 4000
    assert sum(committed(flooded).values()) == 4000
    short, number = (now - then for now, then in zip(waits(), before, strict=True))
    assert short == number == len(taken), "waiting for the model does not count as waiting for requests"


def test_waiting_requests_delay_no_other_and_are_committed_once_they_are_done(flooded: Settings) -> None:
    release = asyncio.Event()
    late: list[bytes | None] = []

    async def answer(batch: list[RequestRecord]) -> AsyncGenerator[ReplyChunk, None]:
        waiting = [record for record in batch if record.offset == 10 and record.partition == 0]
        yield ReplyChunk(echo([record for record in batch if record not in waiting]).replies, len(batch))
        if waiting:
            late.extend(record.key for record in waiting)
            await release.wait()
            yield ReplyChunk(echo(waiting).replies, 0)

    async def crash() -> int:
        plane = RequestPlane(flooded.kafka, flooded.serving, answer)
        await plane.start()
        await until(lambda: late and len(plane._in_flight) == MAX_IN_FLIGHT_BATCHES)
        assert not await plane.stop(0, 10), "some requests are unfinished"
        return len(plane._in_flight)

    assert asyncio.run(crash()) == MAX_IN_FLIGHT_BATCHES
    assert committed(flooded)[0] <= 10
    first = [record.key for record in records(flooded, "predictions")]
    assert len(first) >= (MAX_IN_FLIGHT_BATCHES - 1) * BATCH, "later requests were answered"
    assert not set(late) & set(first)

    release = asyncio.Event()
    release.set()

    async def resume() -> None:
        plane = RequestPlane(flooded.kafka, flooded.serving, answer)
        await plane.start()
        while len({record.key for record in await asyncio.to_thread(records, flooded, "predictions")}) < 4000:
            await asyncio.sleep(0.2)
        assert await plane.stop(10, 10)

    asyncio.run(resume())
    assert sum(committed(flooded).values()) == 4000


def test_a_batch_whose_answer_fails_is_retried_while_others_are_answered(flooded: Settings) -> None:
    tried: list[tuple[int, int]] = []

    async def answer(batch: list[RequestRecord]) -> AsyncGenerator[ReplyChunk, None]:
        tried.append((batch[0].partition, batch[0].offset))
        if len(tried) == 1:
            raise RuntimeError("Kafka was away")
        yield echo(batch)

    async def run() -> None:
        plane = RequestPlane(flooded.kafka, flooded.serving, answer)
        await plane.start()
        await until(lambda: len(tried) > 2)
        assert await plane.stop(10, 10)

    asyncio.run(run())
    assert tried.count(tried[0]) == 2
    found = [record.key for record in records(flooded, "predictions")]
    assert len(found) == len(set(found)) == sum(committed(flooded).values())
