"""Start-up time of a whole worker with a long history: `make bench NAME=start`.

The model is the demo's language model. The history has 100,000 synthetic entries of its widths, on a real Kafka and
Valkey, written as an editor writes them. Seconds count from the start of the process until `/ready` answers 200, and
for an editor until it leads. They include imports and the model. The baseline is the same worker without a history.

- `editor/first`: from the log, with an empty Valkey, so that all radii are written to it. Measured once.
- `editor/again`: from the log. Valkey has the radii.
- `replica/log`: from the log, without snapshots.
- `replica/snapshot`: from a snapshot, with the last hundredth of the entries from the log.

All others are medians of three starts.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import structlog
import torch

from gracestream.deploy.local.backends import kafka_backend, redis_backend
from gracestream.deploy.local.processes import find_free_port, is_http_ok
from gracestream.pipeline.kafka.topics import create_topics
from gracestream.pipeline.model.registry import default_layer
from gracestream.pipeline.replay.replay import replay_with_offset
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.pipeline.stores import snapshots
from gracestream.workers.bootstrap import load_model
from tests.bench.framework import BenchError, Options, Row
from tests.bench.replay import HistoryShape, write_history
from tests.bench.workers import worker
from tests.support.running import status

MODEL = "smollm2"
ENTRIES, QUICK_ENTRIES = 100_000, 5_000

REPEATS = 3
"""Starts of each worker; the median counts."""


def run(options: Options) -> Iterator[Row]:
    """An editor and a replica, without and with a history. `--quick` uses a short history."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    count, repeats = (QUICK_ENTRIES, 1) if options.quick else (ENTRIES, REPEATS)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        kafka = stack.enter_context(kafka_backend(folder / "kafka", report=options.report))
        redis = stack.enter_context(redis_backend(folder / "redis"))
        common: dict[str, object] = {
            "kafka": kafka.address, "redis": redis.address, "model": MODEL, "query_source": "last", "threads": 1,
            "device": options.device,
        }  # fmt: skip
        empty = load_settings(**common, topic_prefix=f"bench-{os.getpid()}-none-", layer=default_layer(MODEL))
        filled = empty.replace(topic_prefix=f"bench-{os.getpid()}-")
        shape = _history_shape(empty)
        for settings in (empty, filled):
            create_topics(settings.kafka, 1, 1)
        options.report("starting workers without a history")
        editor = _median_seconds("edit", empty, folder, repeats)
        replica = _median_seconds("infer", empty, folder, repeats)
        yield Row("start/editor/none/seconds", editor, "s")
        yield Row("start/replica/none/seconds", replica, "s")
        options.report(f"writing {count} deltas of {shape.width_D} and {shape.width_V} numbers")
        asyncio.run(write_history(filled, count, shape))
        options.report("starting an editor from the log")
        yield Row(f"start/editor/first/{count}/seconds", _median_seconds("edit", filled, folder, 1), "s", editor)
        yield Row(f"start/editor/again/{count}/seconds", _median_seconds("edit", filled, folder, repeats), "s", editor)
        options.report("starting a replica from the log, and from a snapshot")
        yield Row(f"start/replica/log/{count}/seconds", _median_seconds("infer", filled, folder, repeats), "s", replica)
        with_snapshots = filled.replace(snapshot_url=str(folder / "snapshots"))
        nearly_all = replay_with_offset(filled.kafka, count - count // 100)
        assert nearly_all is not None
        snapshots.write_snapshot(
            with_snapshots.kafka, nearly_all, str(with_snapshots.snapshots.url), with_snapshots.snapshots.keep
        )
        yield Row(
            f"start/replica/snapshot/{count}/seconds",
            _median_seconds("infer", with_snapshots, folder, repeats),
            "s",
            replica,
        )


def _history_shape(settings: Settings) -> HistoryShape:
    model = load_model(settings.model, settings.editing.policy)
    prompts = [model.task.tokenize("How soon?")]
    batch = model.task.batch(prompts)
    with torch.inference_mode(), model.adaptor.record_output(batch) as session:
        model.task.forward_prompt(batch)
    return HistoryShape(model.fingerprint, model.layer, model.queries(prompts).shape[1], session.outputs_BV.shape[1])


def _median_seconds(command: Literal["infer", "edit"], settings: Settings, folder: Path, repeats: int) -> float:
    """Median seconds of `repeats` starts."""
    return statistics.median(_start_seconds(command, settings, folder) for _ in range(repeats))


def _start_seconds(command: Literal["infer", "edit"], settings: Settings, folder: Path) -> float:
    own_settings = settings.replace(http_port=find_free_port())
    process = worker(command, own_settings, folder)

    def is_ready() -> bool:
        ready = is_http_ok(own_settings.http.port, "/ready")
        return ready and (
            command == "infer" or json.loads(status(own_settings.http.port, "/state")[1])["leadership"] == "leading"
        )

    started = time.monotonic()
    process.start()
    try:
        process.wait_for(is_ready, 300, 0.02)
        seconds = time.monotonic() - started
        state = json.loads(status(own_settings.http.port, "/state")[1])
    finally:
        process.stop()
    replayed = replay_with_offset(own_settings.kafka)
    if replayed is not None and state["state_digest"] != replayed.codebook.state_digest():
        raise BenchError(f"the codebook of `gracestream {command}` differs from that of a full replay")
    return seconds
