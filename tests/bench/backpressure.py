"""The memory of a replica under three times the load that it sustains, with a backlog that would fill it many times.

One replica of a tiny model, as a process of its own, on a local Kafka and Valkey. Its own rate on a backlog is
measured first; then requests come at three times that rate, on top of a backlog. Prompts are long texts in records of
some kilobytes. Resident memory is read once a second.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
from kafka import KafkaProducer
from transformers import LlamaConfig, LlamaForCausalLM

from deploy.local.backends import kafka_backend, redis_backend
from deploy.local.processes import Child, answers_ok, free_port
from pipeline.clients import producer
from pipeline.settings import Settings, load_settings
from pipeline.topics import create_topics
from tests.bench.framework import ROOT, BenchError, Options, Row
from tests.integration.running import metric
from tests.unit.engine.tiny import SIZE, WORDS, tokenizer

PARTITIONS = 8
MIB = 2**20


def run(options: Options) -> Iterator[Row]:
    """One replica; `--quick` with a tenth of the backlog."""
    backlog, seconds = (20_000, 20) if options.quick else (200_000, 120)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        _save_model(folder / "model")
        kafka = stack.enter_context(kafka_backend(folder / "kafka"))
        redis = stack.enter_context(redis_backend(folder / "redis"))
        settings = load_settings(
            kafka=kafka.address, redis=redis.address, prefix=f"bench-{os.getpid()}-", model=str(folder / "model"),
            layer="model.layers.0.mlp.down_proj", cache=folder / "cache", max_new_tokens=1, port=free_port(), threads=1,
            device=options.device,
        )  # fmt: skip
        create_topics(settings, PARTITIONS, 1)
        sender = producer(settings, linger_ms=20)
        stack.callback(sender.close, timeout=5)
        options.tell(f"writing a backlog of {backlog} requests")
        sent = _send(sender, settings, backlog)
        replica = _replica(settings, folder)
        replica.start()
        stack.callback(replica.stop)
        replica.wait_for(lambda: answers_ok(settings.port, "/ready"), 120)
        replica.wait_for(lambda: _answered(settings) > 500, 60)
        process = psutil.Process(replica.pid)
        before, started = _answered(settings), time.monotonic()
        time.sleep(10)
        rate = (_answered(settings) - before) / (time.monotonic() - started)
        options.tell(f"the replica answers {rate:.0f} requests a second; now three times that, for {seconds} s")
        stop = threading.Event()
        flood = threading.Thread(target=_flood, args=[sender, settings, 3 * rate, stop, sent], daemon=True)
        flood.start()
        resident: list[int] = []
        for second in range(seconds):
            time.sleep(1)
            resident.append(process.memory_info().rss)
            if second % 10 == 9:
                waiting = sent[0] - _answered(settings)
                options.tell(f"{second + 1} s: {resident[-1] / MIB:.0f} MiB, {waiting:.0f} requests wait")
        stop.set()
        flood.join()
        if not replica.running:
            raise BenchError(f"the replica ended with status {replica.returncode}")
        tenth = max(1, seconds // 10)
        first, last = sum(resident[:tenth]) / tenth, sum(resident[-tenth:]) / tenth
        yield Row("replica/rate", rate, "requests/s")
        yield Row("replica/offered", 3 * rate, "requests/s")
        yield Row("replica/waiting", sent[0] - _answered(settings), "count")
        yield Row("replica/rss_first", first / MIB, "MiB")
        yield Row("replica/rss_last", last / MIB, "MiB", first / MIB)
        yield Row("replica/rss_peak", max(resident) / MIB, "MiB", first / MIB)


def _save_model(folder: Path) -> None:
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=1024, pad_token_id=0, bos_token_id=2, eos_token_id=4,
        )
    ).save_pretrained(folder)  # fmt: skip
    tokenizer().save_pretrained(folder)


def _replica(settings: Settings, folder: Path) -> Child:
    given = {f"GRACESTREAM_{name.upper()}": str(getattr(settings, name)) for name in settings.model_fields_set}
    argv = [sys.executable, "-m", "workers.cli", "infer"]
    return Child("replica", argv, log=folder / "replica.log", env=given, cwd=ROOT)


def _answered(settings: Settings) -> float:
    return metric(settings.port, "gracestream_batch_size_sum")


def _send(sender: KafkaProducer, settings: Settings, count: int, first: int = 0) -> list[int]:
    words = (" ".join(WORDS) + " ") * 50
    for number in range(first, first + count):
        length = 200 + 53 * (number % 37)  # up to some 2,000 characters: padding differs from batch to batch
        note = "x" * 2000
        value = f'{{"v":1,"request_id":"{number}","inputs":"{words[:length]}","note":"{note}"}}'
        sender.send(settings.topic("requests"), value=value.encode(), partition=number % PARTITIONS)
    sender.flush()
    return [first + count]


def _flood(sender: KafkaProducer, settings: Settings, rate: float, stop: threading.Event, sent: list[int]) -> None:
    while not stop.is_set():
        started = time.monotonic()
        sent[0] = _send(sender, settings, int(rate / 4), sent[0])[0]
        stop.wait(max(0.0, 0.25 - (time.monotonic() - started)))
