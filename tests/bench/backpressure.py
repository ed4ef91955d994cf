"""Memory of each worker at three times the load that it can sustain.

A replica of a tiny model is measured first, then an editor. Each is a process, with a local Kafka and Valkey.

1. A backlog is written that would fill the worker's memory many times.
2. The worker's rate on the backlog is measured for 10 seconds.
3. Records then arrive at three times that rate, on top of the backlog. Resident memory is read once per second.

Records have some kilobytes. Requests have long texts. Every fiftieth feedback record is a correction with training, of
one of some hundred inputs, each time to another word. The other feedback records undo nothing, because new entries
would fill the codebook. The editor also reads the requests.

- `rate`: records per second of the worker on the backlog. `offered`: records per second sent afterwards.
- `waiting`: records left at the end. Other counts: feedback by outcome.
- `rss_first`, `rss_last`: mean resident memory over the first and the last tenth of the time. `rss_peak`: its maximum.
  The baseline is `rss_first`.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from kafka import KafkaProducer

from gracestream.deploy.local.backends import kafka_backend, redis_backend
from gracestream.deploy.local.processes import find_free_port, is_http_ok
from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.kafka.topics import TOPICS, create_topics
from gracestream.pipeline.settings import Settings, load_settings
from tests.bench.framework import BenchError, Options, Row
from tests.bench.workers import worker
from tests.support.running import llama, status
from tests.support.tiny_models import WORDS, tokenizer

PARTITIONS = 8
MIB = 2**20
LONG_TEXT = (" ".join(WORDS) + " ") * 50
PADDING = "x" * 2000

CORRECTION_EVERY, DISTINCT_INPUTS = 50, 499
"""One in this many feedback records is a correction; the number of distinct inputs."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A worker, the topic that floods it, and the prefix of its counters of finished records."""

    name: str
    command: Literal["infer", "edit"]
    topic: str
    record: Callable[[int], bytes]
    counters: str


def run(options: Options) -> Iterator[Row]:
    """The rows of the replica and of the editor. `--quick` writes a tenth of the backlog."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        _save_model(folder / "model")
        kafka = stack.enter_context(kafka_backend(folder / "kafka"))
        redis = stack.enter_context(redis_backend(folder / "redis"))
        settings = load_settings(
            kafka=kafka.address, redis=redis.address, topic_prefix=f"bench-{os.getpid()}-", model=str(folder / "model"),
            layer="model.layers[0].mlp.down_proj", cache_dir=folder / "cache", default_max_new_tokens=2,
            http_port=find_free_port(), threads=1, device=options.device, query_source="last",
        )  # fmt: skip
        create_topics(settings.kafka, PARTITIONS, 1)
        for kind in WORKER_KINDS:
            yield from _flood_rows(kind, settings, folder, options)


def _flood_rows(kind: WorkerKind, settings: Settings, folder: Path, options: Options) -> Iterator[Row]:
    backlog, seconds = (20_000, 20) if options.quick else (200_000, 120)
    with ExitStack() as stack:
        sender = producer(settings.kafka, linger_ms=20)
        stack.callback(sender.close, timeout=5)
        options.report(f"{kind.name}: writing a backlog of {backlog} records of {kind.topic}")
        sent_count = _send(sender, settings, kind, backlog)
        process = worker(kind.command, settings, folder)
        process.start()
        stack.callback(process.stop)
        process.wait_for(lambda: is_http_ok(settings.http.port, "/ready"), 120)
        process.wait_for(lambda: _records_done(kind, settings) > 500, 60)
        memory = psutil.Process(process.pid).memory_info
        before, started = _records_done(kind, settings), time.monotonic()
        time.sleep(10)
        rate = (_records_done(kind, settings) - before) / (time.monotonic() - started)
        options.report(f"it handles {rate:.0f} records/s; sending three times as many for {seconds} s")
        stop = threading.Event()
        flood = threading.Thread(target=_flood, args=[sender, settings, kind, 3 * rate, stop, sent_count], daemon=True)
        flood.start()
        resident: list[int] = []
        for second in range(seconds):
            time.sleep(1)
            resident.append(memory().rss)
            if second % 10 == 9:
                backlog_left = sent_count[0] - _records_done(kind, settings)
                options.report(f"{second + 1} s: {resident[-1] / MIB:.0f} MiB, {backlog_left:.0f} records waiting")
        stop.set()
        flood.join()
        if not process.running:
            raise BenchError(f"the {kind.name} exited with status {process.returncode}")
        tenth = max(1, seconds // 10)
        first, last = sum(resident[:tenth]) / tenth, sum(resident[-tenth:]) / tenth
        yield Row(f"{kind.name}/rate", rate, "records/s")
        yield Row(f"{kind.name}/offered", 3 * rate, "records/s")
        yield Row(f"{kind.name}/waiting", sent_count[0] - _records_done(kind, settings), "count")
        for name, count in _counter_values(kind, settings) if kind.command == "edit" else ():
            yield Row(f"{kind.name}/{name.split(chr(34))[1]}", count, "count")
        yield Row(f"{kind.name}/rss_first", first / MIB, "MiB")
        yield Row(f"{kind.name}/rss_last", last / MIB, "MiB", first / MIB)
        yield Row(f"{kind.name}/rss_peak", max(resident) / MIB, "MiB", first / MIB)


def _save_model(folder: Path) -> None:
    llama(positions=1024).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def _request(number: int) -> bytes:
    length = 200 + 53 * (number % 37)  # up to 2,000 characters, so that the padding differs between batches
    return f'{{"v":1,"request_id":"{number}","inputs":"{LONG_TEXT[:length]}","note":"{PADDING}"}}'.encode()


def _feedback(number: int) -> bytes:
    turn, remainder = divmod(number, CORRECTION_EVERY)
    content = '"undo":"nothing"'
    if not remainder:
        words = (WORDS[turn % DISTINCT_INPUTS // step % len(WORDS)] for step in (1, 2, 3, 5))
        content = f'"inputs":"{" ".join(words)}","target":"{WORDS[turn % len(WORDS)]}"'
    return f'{{"v":1,"feedback_id":"f{number}",{content},"note":"{PADDING}"}}'.encode()


WORKER_KINDS = (
    WorkerKind("replica", "infer", "requests", _request, "gracestream_step_requests_sum"),
    WorkerKind("editor", "edit", "feedback", _feedback, "gracestream_feedback_total{"),
)


def _records_done(kind: WorkerKind, settings: Settings) -> float:
    return sum(value for _name, value in _counter_values(kind, settings))


def _counter_values(kind: WorkerKind, settings: Settings) -> list[tuple[str, float]]:
    """The worker's counters of finished records: names with labels, and values."""
    lines = (line.rpartition(" ") for line in status(settings.http.port, "/metrics")[1].splitlines())
    return [(name, float(value)) for name, _space, value in lines if name.startswith(kind.counters)]


def _send(sender: KafkaProducer, settings: Settings, kind: WorkerKind, count: int, first: int = 0) -> list[int]:
    partitions = next(topic.partitions or PARTITIONS for topic in TOPICS if topic.name == kind.topic)
    for number in range(first, first + count):
        sender.send(settings.kafka.topic(kind.topic), value=kind.record(number), partition=number % partitions)
    sender.flush()
    return [first + count]


def _flood(
    sender: KafkaProducer,
    settings: Settings,
    kind: WorkerKind,
    rate: float,
    stop: threading.Event,
    sent_count: list[int],
) -> None:
    while not stop.is_set():
        started = time.monotonic()
        sent_count[0] = _send(sender, settings, kind, int(rate / 4), sent_count[0])[0]
        stop.wait(max(0.0, 0.25 - (time.monotonic() - started)))
