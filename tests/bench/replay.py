"""Speed of a replay, and of a replica's start: `make bench NAME=replay`.

The log on a real Kafka holds synthetic deltas. Each adds one entry in a transaction of its own, as an editor commits
them. The numbers in a setting are the widths of key and value.

- `replay/full`: `gracestream replay`, with all digests checked. The baseline is a goal in deltas per second.
- `start/log`: seconds until a replica has applied the whole log.
- `start/snapshot`: seconds until a replica has loaded a snapshot and applied the last hundredth of the log. The
  baseline is a goal. The other columns are the parts of this time.
- `snapshot/write`: the editor's cost of a snapshot. Only `copy_seconds` delays its edits.

Most numbers are the best of three runs, since other work on a machine only adds time. The start from the log and the
writing of a snapshot are measured once; CPU time is a mean. No model is loaded and Redis is not used: the benchmark
`start` measures whole workers. The index is on the device of `--device`.
"""

import asyncio
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import structlog
import torch
from aiokafka import AIOKafkaProducer

from gracestream.deploy.local.backends import kafka_backend
from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.file import parse_codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.kafka.topics import DELTAS, create_topics
from gracestream.pipeline.replay.replay import replay_with_offset
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.pipeline.stores import snapshots
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.pipeline.stores.redis_head import RedisHeadStore
from gracestream.pipeline.stores.snapshot_files import SnapshotStore
from gracestream.pipeline.stores.snapshots import Snapshot
from gracestream.schemas.deltas import GENESIS_DIGEST, MAX_DELTA_BYTES, Cause, Delta, EntryChange, Tensor, seal_delta
from tests.bench.framework import BenchError, Options, Row

ENTRIES, QUICK_ENTRIES = 100_000, 5_000
WRITERS = 8

REPEATS = 3
"""Runs of each measurement; the best counts."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HistoryShape:
    """Model, layer, key width and value width of a synthetic history."""

    model: str = "f" * 64
    layer: str = "layer.0"
    width_D: int = 576
    width_V: int = 576


def run(options: Options) -> Iterator[Row]:
    """The rows for each pair of widths."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    count = QUICK_ENTRIES if options.quick else ENTRIES
    with tempfile.TemporaryDirectory() as folder, kafka_backend(Path(folder) / "kafka", report=options.report) as kafka:
        for shape in (HistoryShape(), HistoryShape(width_D=1536))[: 1 if options.quick else None]:
            settings = load_settings(
                kafka=kafka.address,
                redis="redis://127.0.0.1:1/0",  # nothing answers there
                topic_prefix=f"bench-{os.getpid()}-{shape.width_D}-",
                snapshot_url=f"{folder}/snapshots-{shape.width_D}",
                device=options.device,
            )
            create_topics(settings.kafka, 1, 1)
            options.report(f"writing {count} deltas of {shape.width_D} and {shape.width_V} numbers")
            asyncio.run(write_history(settings, count, shape))
            yield from _measure(settings, f"{shape.width_D}+{shape.width_V}", count, options)


def _measure(settings: Settings, widths: str, count: int, options: Options) -> Iterator[Row]:
    options.report("replaying")
    cpu_seconds = time.process_time()
    seconds, replayed = _best(lambda: replay_with_offset(settings.kafka))
    cpu_seconds = (time.process_time() - cpu_seconds) / REPEATS
    if replayed is None or len(replayed.codebook) != count:
        raise BenchError(f"the log does not have {count} entries")
    yield Row(f"replay/full/{widths}/deltas_per_second", (count + 1) / seconds, "1/s", 20_000)
    yield Row(f"replay/full/{widths}/cpu_microseconds_each", 1e6 * cpu_seconds / (count + 1), "us")
    seconds, digest = _best(replayed.codebook.state_digest)
    yield Row(f"replay/full/{widths}/state_digest_seconds", seconds, "s")
    options.report("starting from the log")
    without_snapshots = settings.replace(snapshot_url=None)
    yield Row(f"start/log/{widths}/seconds", _start_seconds(without_snapshots, digest), "s")
    tail = replay_with_offset(settings.kafka, count + 1 - count // 100)
    assert tail is not None
    options.report("writing a snapshot")
    seconds, _ = _best(tail.codebook.copy)
    yield Row(f"snapshot/write/{widths}/copy_seconds", seconds, "s")
    started = time.perf_counter()
    manifest = snapshots.write_snapshot(settings.kafka, tail, str(settings.snapshots.url), settings.snapshots.keep)
    yield Row(f"snapshot/write/{widths}/write_seconds", time.perf_counter() - started, "s")
    yield Row(f"snapshot/write/{widths}/megabytes", manifest.bytes / 1e6, "MB")
    options.report("starting from the snapshot")
    yield Row(
        f"start/snapshot/{widths}/seconds", min(_start_seconds(settings, digest) for _ in range(REPEATS)), "s", 10
    )
    yield from _parts(settings, widths, manifest.uri, manifest.bytes, tail)


def _parts(settings: Settings, widths: str, uri: str, size: int, snapshot: Snapshot) -> Iterator[Row]:
    """The parts of a start. `check` reads the manifests and one record of the log."""
    seconds, data = _best(lambda: SnapshotStore(str(settings.snapshots.url)).read(uri, size))
    yield Row(f"start/snapshot/{widths}/read_seconds", seconds, "s")
    yield Row(f"start/snapshot/{widths}/sha256_seconds", _best(lambda: hashlib.sha256(data).digest())[0], "s")
    yield Row(f"start/snapshot/{widths}/parse_seconds", _best(lambda: parse_codebook(data))[0], "s")
    index = KeyIndex(snapshot.codebook, torch.device(settings.model.device))
    yield Row(f"start/snapshot/{widths}/index_seconds", _best(index.refresh)[0], "s")
    known = snapshots.list_manifests(settings.kafka, settings.model.codebook).values()
    manifest = next(iter(known))

    def check() -> None:
        snapshots.list_manifests(settings.kafka, settings.model.codebook)
        snapshots._check_log_holds(settings.kafka, manifest, snapshot.offset)

    yield Row(f"start/snapshot/{widths}/check_seconds", _best(check)[0], "s")


def _start_seconds(settings: Settings, state_digest: str) -> float:
    """Seconds until a replica's codebook and index have reached the end of the log."""
    with _open_replica(settings) as replica:
        started = time.perf_counter()
        replica.start()
        if not replica.catch_up(60):
            raise BenchError("the log could not be read to its end")
        seconds = time.perf_counter() - started
        if replica.codebook.state_digest() != state_digest:
            raise BenchError("the replica's codebook differs from that of a full replay")
        return seconds


@contextmanager
def _open_replica(settings: Settings) -> Iterator[CodebookReplica]:
    shape, follower = HistoryShape(), DeltaFollower(settings.kafka)
    codebook = Codebook(settings.model.codebook, shape.model, shape.layer)
    store = RedisHeadStore(redis_client(settings.redis), settings.kafka.topic_prefix, settings.model.codebook)
    try:
        yield CodebookReplica(
            codebook, KeyIndex(codebook, torch.device(settings.model.device)), store, follower, settings
        )
    finally:
        follower.close()


def _best(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds of the fastest of `REPEATS` calls, and the result of the last one."""
    durations = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        result = call()
        durations.append(time.perf_counter() - started)
    return min(durations), result


async def write_history(settings: Settings, count: int, shape: HistoryShape) -> None:
    """Write a log: a lead delta, then deltas with one new entry each. Each has a transaction of its own.

    Several producers take turns, so that one writes while Kafka ends the transaction of another. They are aiokafka's,
    because it computes checksums in C.
    """
    writers = [
        AIOKafkaProducer(
            bootstrap_servers=settings.kafka.servers,
            transactional_id=settings.kafka.topic(f"bench-{number}"),
            max_request_size=MAX_DELTA_BYTES,
        )
        for number in range(WRITERS)
    ]
    await asyncio.gather(*(writer.start() for writer in writers))
    try:
        generator = np.random.default_rng(0)
        digest = GENESIS_DIGEST
        commits: dict[int, asyncio.Task[None]] = {}
        for seq in range(1, count + 2):
            turn = seq % WRITERS
            if turn in commits:
                await commits[turn]
            record, delta = seal_delta(_delta(seq, generator, shape), digest)
            digest = delta.digest
            await writers[turn].begin_transaction()
            await writers[turn].send_and_wait(settings.kafka.topic(DELTAS), value=record, partition=0)
            commits[turn] = asyncio.create_task(writers[turn].commit_transaction())
        await asyncio.gather(*commits.values())
    finally:
        await asyncio.gather(*(writer.stop() for writer in writers))


def _delta(seq: int, generator: np.random.Generator, shape: HistoryShape) -> Delta:
    name = f"feedback-{seq:08d}"
    lead = Delta(
        v=1,
        codebook="default",
        model=shape.model,
        layer=shape.layer,
        term=1,
        seq=seq,
        op="lead",
        environment={"device": "none"},
        digest=b"",
    )
    if seq == 1:
        return lead
    entry = EntryChange(
        entry_id=name,
        key=Tensor.from_array(generator.standard_normal(shape.width_D, np.float32)),
        value=Tensor.from_array(generator.standard_normal(shape.width_V, np.float32)),
        radius=float(generator.random()),
        label=(seq % 1000, 17, 2),
    )
    cause = Cause(feedback_id=name, offset=seq, entry_id=name, traffic={"0": seq})
    return msgspec.structs.replace(lead, op="add", entries=(entry,), cause=cause, environment=msgspec.UNSET)
