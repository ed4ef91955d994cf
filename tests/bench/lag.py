"""Time until a correction is in force, and time to replace a lost editor: `make bench NAME=lag`.

Two editors (leader and standby) and two replicas of a tiny model run as processes, on a local Kafka and Valkey.
Corrections are sent one at a time, with no other load:

- `lag/outcome`: from sending a correction until its outcome is read. The baseline is the editor's time of decision.
- `lag/live`: from sending until every replica has applied the delta. Each is polled every few milliseconds.
- `lag/answer`: from sending until a request with `min_seq` is answered, which is sent after the outcome. The time of
  polling for `live` is subtracted.

The floor of `lag/answer` is the end of two transactions and three hops through Kafka, some milliseconds each. The model
is so small that training hardly counts: add the time of an edit of your model.

- `lag/take-over/killed`: from SIGKILL of the leader until the standby leads. Kafka notices after the session timeout,
  which is the baseline.
- `lag/take-over/stopped`: the same after SIGTERM.

`median` and `p90` are over 60 corrections. `seconds` is the median of three take-overs, `longest` the maximum.

Then eight replicas follow one leader:

- `lag/idle`: from the commit of a delta until the last of eight replicas has applied it, without requests.
- `lag/busy`: the same, while the replicas together get 40 requests a second.

Both come from the times in the workers' logs, over 200 corrections. The baseline of `p99` is the goal.
"""

import itertools
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec import UNSET

from gracestream.deploy.local.backends import kafka_backend, redis_backend
from gracestream.deploy.local.processes import ChildProcess, find_free_port, is_http_ok
from gracestream.pipeline.kafka.topics import create_topics
from gracestream.pipeline.settings import Settings, load_settings
from tests.bench.framework import BenchError, Options, Row
from tests.bench.workers import worker
from tests.support.running import TIMEOUT, Users, flag, llama, question, status, wait_until
from tests.support.tiny_models import WORDS, tokenizer

CORRECTIONS, QUICK_CORRECTIONS = 60, 10
TAKEOVERS = 3

MANY_REPLICAS = 8
MANY_CORRECTIONS, QUICK_MANY_CORRECTIONS = 200, 20
REQUESTS_PER_SECOND = 40
LIVE_GOAL_MS = 50.0


def run(options: Options) -> Iterator[Row]:
    """The rows of corrections, then of take-overs. `--quick` measures few of both."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        llama().save_pretrained(folder / "model")
        tokenizer().save_pretrained(folder / "model")
        kafka = stack.enter_context(kafka_backend(folder / "kafka", report=options.report))
        redis = stack.enter_context(redis_backend(folder / "redis"))
        settings = load_settings(
            kafka=kafka.address, redis=redis.address, topic_prefix=f"bench-{os.getpid()}-", model=str(folder / "model"),
            layer="model.layers[0].mlp.down_proj", cache_dir=folder / "cache", max_input_tokens=32, max_target_tokens=4,
            default_max_new_tokens=4, threads=1, device=options.device, query_source="last",
        )  # fmt: skip
        create_topics(settings.kafka, MANY_REPLICAS, 1)
        options.report("starting two replicas and two editors")
        replicas = [_start_worker(stack, "infer", settings, folder / f"replica-{number}") for number in (1, 2)]
        editors = [_start_worker(stack, "edit", settings, folder / f"editor-{number}") for number in (1, 2)]
        users = Users(settings)
        stack.callback(users.close)
        yield from _corrections(
            users, [port for _, port in replicas], QUICK_CORRECTIONS if options.quick else CORRECTIONS
        )
        options.report("stopping editors")
        for ending, signum in (("killed", signal.SIGKILL), ("stopped", signal.SIGTERM)):
            durations = [_takeover_seconds(editors, signum) for _ in range(1 if options.quick else TAKEOVERS)]
            yield Row(
                f"lag/take-over/{ending}/seconds", statistics.median(durations), "s", settings.kafka.session_timeout
            )
            yield Row(f"lag/take-over/{ending}/longest", max(durations), "s", settings.kafka.session_timeout)
        options.report(f"starting {MANY_REPLICAS - 2} more replicas")
        for number in range(3, MANY_REPLICAS + 1):
            _start_worker(stack, "infer", settings, folder / f"replica-{number}")
        count = QUICK_MANY_CORRECTIONS if options.quick else MANY_CORRECTIONS
        yield from _publications(users, folder, "idle", count)
        with _load(settings):
            yield from _publications(users, folder, "busy", count)


def _publications(users: Users, folder: Path, load: str, count: int) -> Iterator[Row]:
    """Milliseconds from the commit of a delta until all replicas have applied it, as their logs say."""
    seqs = []
    with users.client.outcomes() as outcomes:
        for number in range(count):
            feedback_id = f"{load}-{number}"
            prompt = " ".join(WORDS[(number // step + step) % len(WORDS)] for step in (1, 7, 11, 13, 17))
            users.client.send([flag(feedback_id, f"{load} {prompt}", WORDS[number % 7])])
            seq = outcomes.wait([feedback_id], TIMEOUT)[feedback_id].seq
            if seq is UNSET:
                raise BenchError(f"correction {feedback_id} has made no delta")
            seqs.append(seq)
    logs = sorted(folder.glob("replica-*/infer.log"))
    wait_until(lambda: all(seqs[-1] in _times(log, "delta_applied") for log in logs))
    committed_at: dict[int, float] = {}
    for log in folder.glob("editor-*/edit.log"):
        committed_at |= _times(log, "feedback_decided")
    applied_at = [_times(log, "delta_applied") for log in logs]
    durations = [1000 * (max(times[seq] for times in applied_at) - committed_at[seq]) for seq in seqs]
    yield Row(f"lag/{load}/median", statistics.median(durations), "ms")
    yield Row(f"lag/{load}/p90", statistics.quantiles(durations, n=10)[-1], "ms")
    yield Row(f"lag/{load}/p99", statistics.quantiles(durations, n=100, method="inclusive")[-1], "ms", LIVE_GOAL_MS)


def _times(log: Path, event: str) -> dict[int, float]:
    """The time of each event of this name in a worker's log, by the delta's seq."""
    events = [json.loads(line) for line in log.read_text("utf-8").splitlines() if f'"{event}"' in line]
    return {event["seq"]: datetime.fromisoformat(event["timestamp"]).timestamp() for event in events if "seq" in event}


@contextmanager
def _load(settings: Settings) -> Iterator[None]:
    """Requests at a constant rate, from a thread. Nobody reads the answers."""
    stop = threading.Event()

    def send() -> None:
        with closing(Users(settings)) as users:
            for number in itertools.count():
                if stop.wait(1 / REQUESTS_PER_SECOND):
                    return
                users.client.send([question(f"load-{number}", WORDS[number % len(WORDS)])])

    thread = threading.Thread(target=send, name="load")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _corrections(users: Users, ports: list[int], count: int) -> Iterator[Row]:
    seconds_by_step: dict[str, list[float]] = {"outcome": [], "live": [], "answer": []}
    decision_seconds = []
    for number in range(count + 1):
        prompt = " ".join(WORDS[number // step % len(WORDS)] for step in (1, 2, 3, 5))
        with users.client.outcomes() as outcomes, users.client.predictions() as answers:
            started = time.monotonic()
            users.client.send([flag(f"f{number}", prompt, WORDS[number % 7])])
            outcome = outcomes.wait([f"f{number}"], TIMEOUT)[f"f{number}"]
            elapsed = {"outcome": time.monotonic() - started}
            seq, decided_in = outcome.seq, outcome.seconds
            if seq is UNSET or decided_in is UNSET:
                raise BenchError(f"a correction has an unexpected outcome: {outcome}")
            polling_since = time.monotonic()
            while any(_state(port)["seq"] < seq for port in ports):
                time.sleep(0.002)
            elapsed["live"] = time.monotonic() - started
            poll_seconds = time.monotonic() - polling_since
            users.client.send([question(f"q{number}", prompt, min_seq=seq)])
            answers.wait([f"q{number}"], TIMEOUT)
            elapsed["answer"] = time.monotonic() - started - poll_seconds
        if number:  # the first correction warms up
            decision_seconds.append(decided_in)
            for name, seconds in elapsed.items():
                seconds_by_step[name].append(seconds)
    for name, durations in seconds_by_step.items():
        baseline = 1000 * statistics.median(decision_seconds) if name == "outcome" else None
        yield Row(f"lag/{name}/median", 1000 * statistics.median(durations), "ms", baseline)
        yield Row(f"lag/{name}/p90", 1000 * statistics.quantiles(durations, n=10)[-1], "ms")


def _takeover_seconds(editors: list[tuple[ChildProcess, int]], signum: signal.Signals) -> float:
    """Seconds until the standby leads. The old leader is restarted as the new standby."""
    leads = [_state(port)["leadership"] == "leading" for _, port in editors]
    (leader, port), (_, standby) = editors if leads[0] else editors[::-1]
    started = time.monotonic()
    leader.send_signal(signum)
    wait_until(lambda: _state(standby)["leadership"] == "leading", 120)
    seconds = time.monotonic() - started
    leader.stop()
    leader.start()
    leader.wait_for(lambda: is_http_ok(port, "/ready"), 120)
    return seconds


def _start_worker(stack: ExitStack, command: str, settings: Settings, folder: Path) -> tuple[ChildProcess, int]:
    own_settings = settings.replace(http_port=find_free_port())
    process = worker("infer" if command == "infer" else "edit", own_settings, folder)
    process.start()
    stack.callback(process.stop)
    process.wait_for(lambda: is_http_ok(own_settings.http.port, "/ready"), 120)
    return process, own_settings.http.port


def _state(port: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(status(port, "/state")[1])
    return found
