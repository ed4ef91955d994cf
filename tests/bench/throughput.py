"""Requests per second of a replica, compared with a loop over the plain model: `make bench NAME=throughput`.

The models are the demo's two. The classifier takes some milliseconds per text, so work around the model counts most.
The other is a language model. A replica works through a backlog on a local Kafka and Valkey. The loop runs in the
benchmark's process: the unedited model, the same texts in the same batches, tokenised before. Both use one thread
for the model. The replica's other threads, Kafka and Valkey share the other core. Replica and loop take turns, and
medians of requests per second are compared. The replica's rate comes from Kafka's timestamps of its answers, so that
nothing polls the replica while it works.

- `throughput/MODEL/of-bare`: the replica's rate divided by the loop's. 1 is the upper bound. The baseline is a goal.
- `throughput/MODEL/of-unsorted`: divided by the rate of a loop over batches in order of arrival, whatever their
  lengths.
- `throughput/MODEL/model-share`: the share of the replica's time in which its model runs.
- `throughput/MODEL/requests_per_second`: the replica's rate; the baseline is the loop's.

The classifier misses the goal of 0.95 although its model runs nearly all the time: its passes take longer than the
loop's. The loop has the caches and the memory of the machine to itself. Beside a process that keeps writing to an
array, the loop reaches 0.83 to 0.91 of its rate; beside a process that only counts, 0.97 to 0.99. Switching between
threads of the interpreter is not the cause: a `sys.setswitchinterval` of a twenty-fifth changes nothing.
"""

import itertools
import json
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from kafka import TopicPartition

from gracestream.deploy.demo import DEMO_FOLDER
from gracestream.deploy.local.backends import kafka_backend, redis_backend
from gracestream.deploy.local.processes import ChildProcess, find_free_port, is_http_ok
from gracestream.pipeline.kafka.clients import consumer, producer
from gracestream.pipeline.kafka.topics import create_topics
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.engines.selection import select_batch
from gracestream.pipeline.model.registry import default_layer
from gracestream.pipeline.replica.request_plane import MAX_UNANSWERED_BATCHES
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.schemas.messages import Parameters
from gracestream.workers.bootstrap import load_model
from tests.bench.framework import Options, Row
from tests.bench.workers import worker
from tests.support.running import metric

REQUESTS = {"intent": 4000, "smollm2": 160}
QUERY_TOKENS = {"intent": "first", "smollm2": "last"}
"""Queries of the layer, so that a replica runs the same passes as the loop."""

ROUNDS = 3
NEW_TOKENS = 16
MIN_RATIO = 0.95


def run(options: Options) -> Iterator[Row]:
    """The rows of both models. `--quick` sends a tenth of the requests, once."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        kafka = stack.enter_context(kafka_backend(folder / "kafka", report=options.report))
        redis = stack.enter_context(redis_backend(folder / "redis"))
        for kind, count in REQUESTS.items():
            settings = load_settings(
                kafka=kafka.address, redis=redis.address, topic_prefix=f"bench-{os.getpid()}-{kind}-", model=kind,
                layer=default_layer(kind), default_max_new_tokens=NEW_TOKENS, threads=1,
                device=options.device, http_port=find_free_port(), query_source=QUERY_TOKENS[kind],
            )  # fmt: skip
            create_topics(settings.kafka, 1, 1)
            yield from _throughput_rows(settings, count // 10 if options.quick else count, folder, options)


def _throughput_rows(settings: Settings, count: int, folder: Path, options: Options) -> Iterator[Row]:
    texts = list(itertools.islice(itertools.cycle(_texts(settings.model.name)), count))
    model = load_model(settings.model, settings.editing.policy)
    prompts = [model.task.tokenize(text) for text in texts]
    batches = {
        "bare": _replica_batches(prompts, settings.serving.request_batch_size),
        "unsorted": _unsorted_batches(prompts, settings.serving.request_batch_size),
    }
    rates: dict[str, list[float]] = {"bare": [], "unsorted": [], "replica": []}
    model_shares: list[float] = []
    with ExitStack() as stack:
        replica = worker("infer", settings, folder)
        replica.start()
        stack.callback(replica.stop)
        replica.wait_for(lambda: is_http_ok(settings.http.port, "/ready"), 120)
        sender = producer(settings.kafka, linger_ms=20)
        stack.callback(sender.close, timeout=5)
        for turn in range(1 if options.quick else ROUNDS):
            options.report(f"{settings.model.name}: loops over the plain model, then a replica")
            for loop, loop_batches in batches.items():
                rates[loop].append(_loop_rate(model, loop_batches))
            model_seconds = _model_seconds(settings)
            for number, text in enumerate(texts):
                value = json.dumps({"v": 1, "request_id": f"{turn}-{number}", "inputs": text}).encode()
                sender.send(settings.kafka.topic("requests"), value=value, partition=0)
            sender.flush()
            rates["replica"].append(_replica_rate(replica, settings, count * turn, count))
            model_shares.append(rates["replica"][-1] * (_model_seconds(settings) - model_seconds) / count)
    medians = {contender: statistics.median(samples) for contender, samples in rates.items()}
    name = f"throughput/{settings.model.name}"
    yield Row(f"{name}/of-bare", medians["replica"] / medians["bare"], "x", MIN_RATIO)
    yield Row(f"{name}/of-unsorted", medians["replica"] / medians["unsorted"], "x")
    yield Row(f"{name}/model-share", statistics.median(model_shares), "share")
    yield Row(f"{name}/requests_per_second", medians["replica"], "1/s", medians["bare"])


def _loop_rate(model: EditableModel, batches: Sequence[Sequence[Prompt]]) -> float:
    """Requests per second of the loop."""
    started = time.perf_counter()
    with torch.inference_mode():
        for batch in batches:
            model.task.run(model.task.batch(batch), [Parameters()] * len(batch))
    return sum(map(len, batches)) / (time.perf_counter() - started)


def _unsorted_batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    return [list(prompts[first : first + size]) for first in range(0, len(prompts), size)]


def _replica_batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """The batches that a replica with the batch engine forms from a backlog."""
    backlog = deque(prompts)
    waiting: list[Prompt] = []
    batches = []
    while backlog or waiting:
        while backlog and len(waiting) < (1 + MAX_UNANSWERED_BATCHES) * size:
            waiting.append(backlog.popleft())
        places = select_batch([(None, len(prompt)) for prompt in waiting], size)
        batches.append([waiting[place] for place in places])
        waiting = [prompt for place, prompt in enumerate(waiting) if place not in places]
    return batches


def _replica_rate(replica: ChildProcess, settings: Settings, before: int, count: int) -> float:
    """Requests per second of the replica, without the first and the last tenth of the backlog."""
    with closing(consumer(settings.kafka)) as reader:
        partition = TopicPartition(settings.kafka.topic("predictions"), 0)
        replica.wait_for(lambda: reader.end_offsets([partition])[partition] >= before + count, 600, 0.25)
        reader.assign([partition])
        reader.seek(partition, before)
        times: list[float] = []
        while len(times) < count:
            times += [record.timestamp / 1000 for records in reader.poll(1000).values() for record in records]
    tenth = count // 10
    return (count - 2 * tenth) / (times[-tenth] - times[tenth])


def _model_seconds(settings: Settings) -> float:
    try:
        return metric(settings.http.port, "gracestream_step_seconds_sum")
    except StopIteration:  # no batch yet
        return 0.0


def _texts(kind: str) -> list[str]:
    file, field = ("intents.jsonl", "text") if kind == "intent" else ("facts.jsonl", "prompt")
    return [json.loads(line)[field] for line in (DEMO_FOLDER / file).read_text(encoding="utf-8").splitlines()]
