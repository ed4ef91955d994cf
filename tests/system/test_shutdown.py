"""Shutdown: a worker finishes and commits its records exactly once, and leaves unfinished records to others."""

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from kafka import TopicPartition
from transformers import LlamaConfig, LlamaForCausalLM

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.deploy.local.processes import find_free_port
from gracestream.deploy.local.redis import LocalRedis
from gracestream.pipeline.kafka.clients import consumer
from gracestream.pipeline.kafka.topics import create_topics
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.engines.continuous import ContinuousEngine
from gracestream.pipeline.replica.live_codebook import LiveCodebook
from gracestream.pipeline.settings import VARIABLES, Settings
from gracestream.pipeline.stores.snapshot_files import SnapshotStore
from gracestream.schemas.messages import Feedback, Parameters, Prediction, Request, decode
from tests.chaos.dying import arm, train_slowly
from tests.support.forked_commands import Forked
from tests.support.running import (
    Users,
    deltas_in_log,
    flag,
    hang,
    kafka_outages,
    members,
    metric,
    outcomes_in_log,
    question,
    records,
    wait_until,
)
from tests.support.tiny_models import SIZE, texts, tokenizer
from tests.support.written_history import History

PROMPTS = texts(20, seed=11)
LATE = 15.0
"""Seconds that a busy machine may need in addition to the shutdown timeout."""

USUAL = VARIABLES["GRACESTREAM_SHUTDOWN_TIMEOUT"].info.default
"""The usual shutdown timeout in seconds; the exit status is 0 if all records are done by then."""

TOKENS = 2000
"""The token limit of requests to the slow model."""


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context for long answers."""
    folder = tmp_path_factory.mktemp("patient")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=TOKENS + 100, pad_token_id=0, bos_token_id=2, eos_token_id=4,
        )
    ).save_pretrained(folder)  # fmt: skip
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def slow(deploy: Callable[..., Settings], prefix: str, patient: Path) -> Settings:
    """A deployment with this model, whose answers take long."""
    return deploy("llama", prefix, model=str(patient), max_new_tokens=TOKENS)


def long_answers(count: int) -> list[Request]:
    """Requests for long answers that share no forward pass, so that their batch takes the sum of their times."""
    return [
        question(
            f"long-{number}",
            PROMPTS[number],
            parameters=Parameters(max_new_tokens=TOKENS, min_new_tokens=TOKENS - number),
        )
        for number in range(count)
    ]


def answered(settings: Settings) -> Counter[str]:
    """The number of predictions by request."""
    return Counter(decode(record.value, Prediction).request_id for record in records(settings, "predictions"))


def uncommitted(settings: Settings) -> int:
    """The requests that the group has not committed."""
    reader = consumer(settings.kafka, group_id=settings.kafka.topic("inference"))
    try:
        topic = settings.kafka.topic("requests")
        partitions = [TopicPartition(topic, number) for number in reader.partitions_for_topic(topic)]
        ends = reader.end_offsets(partitions)
        return sum(ends[partition] - (reader.committed(partition) or 0) for partition in partitions)
    finally:
        reader.close()


@pytest.mark.slow
def test_a_replica_that_gets_sigterm_answers_its_requests_and_its_successor_the_others(
    deployment: Settings, users: Users, folder: Path
) -> None:
    asked = [question(f"q{number}", PROMPTS[number % 20]) for number in range(2000)]
    ids = [request.request_id for request in asked]
    with (
        users.client.predictions() as replies,
        Forked("first", "infer", deployment, folder, shutdown_timeout=USUAL) as first,
    ):
        first.wait_ready(90)
        users.client.send(asked)
        replies.wait(ids[:100], 30)
        assert first.stop() == 0
        left = uncommitted(deployment)
        assert left == len(asked) - len(answered(deployment)), "exactly the answered requests are committed"
        assert 0 < left < len(asked)
        assert not members(deployment)
        with Forked("second", "infer", deployment, folder):
            assert len(replies.wait(ids, 240)) == len(asked)
    assert answered(deployment) == Counter(ids)


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_left_to_another_replica(
    slow: Settings, users_of: Callable[[Settings], Users], folder: Path
) -> None:
    users = users_of(slow)
    asked = long_answers(1)
    with Forked("hasty", "infer", slow, folder, shutdown_timeout=1.5) as hasty:
        hasty.wait_ready(90)
        with users.client.predictions() as replies:
            users.client.send(asked, partition=0)
            wait_until(lambda: metric(hasty.port, "gracestream_step_requests_count") > 0)
            hasty.process.terminate()
            wait_until(lambda: not members(slow), what="an empty group")
            assert hasty.wait(10) == 1
            assert "unfinished_requests_released" in hasty.stderr()
            assert uncommitted(slow) == len(asked)
            with Forked("second", "infer", slow, folder):
                assert len(replies.wait([request.request_id for request in asked], 90)) == len(asked)
    assert answered(slow) == Counter(request.request_id for request in asked)


@pytest.mark.slow
def test_a_batch_longer_than_the_session_keeps_its_replica_in_the_group_and_is_answered_once(
    slow: Settings, users_of: Callable[[Settings], Users], folder: Path
) -> None:
    users = users_of(slow)
    with Forked("replica", "infer", slow, folder) as replica:
        replica.wait_ready(90)
        users.ask(question("short", PROMPTS[0], parameters=Parameters(max_new_tokens=200, min_new_tokens=200)))
        speed = metric(replica.port, "gracestream_step_seconds_sum") / 200
        asked = long_answers(1 + int(2 * slow.kafka.session_timeout / (TOKENS * speed)))
        (member,) = members(slow)
        with users.client.predictions() as replies:
            users.client.send(asked, partition=0)
            met = set()

            def all_there() -> bool:
                met.update(members(slow))
                assert replica.live() == (200, "ok\n")
                return len(replies.wait([request.request_id for request in asked], 0.2)) == len(asked)

            wait_until(all_there, 120)
        assert metric(replica.port, "gracestream_step_seconds_sum") > slow.kafka.session_timeout
        assert met == {member}
    assert answered(slow) == Counter(["short", *(request.request_id for request in asked)])


def test_a_decision_that_takes_too_long_is_left_to_the_next_editor(
    deployment: Settings, users: Users, folder: Path
) -> None:
    seconds = 3.0
    with Forked(
        "slow", "edit", deployment, folder, shutdown_timeout=seconds, sabotage=partial(train_slowly, 60.0)
    ) as slow:
        slow.wait_ready(90)
        users.client.send([flag("f", PROMPTS[0], "river")])
        wait_until(lambda: "training_slowly" in slow.stderr())
        slow.process.terminate()
        assert slow.wait(seconds + LATE) == 1
        assert "shutdown_timeout" in slow.stderr()
    assert [delta.op for delta in deltas_in_log(deployment)] == ["lead"]
    assert outcomes_in_log(deployment) == []
    with Forked("next", "edit", deployment, folder) as following:
        following.wait_ready(90)
        wait_until(lambda: outcomes_in_log(deployment))
        assert following.stop() == 0
    assert [outcome.feedback_id for outcome in outcomes_in_log(deployment)] == ["f"]
    assert [(delta.term, delta.op) for delta in deltas_in_log(deployment)] == [(1, "lead"), (2, "lead"), (2, "add")]


@pytest.mark.slow
def test_an_editor_that_gets_sigterm_decides_on_no_feedback_twice(
    deployment: Settings, users: Users, folder: Path
) -> None:
    given: list[Feedback] = []
    for number, prompt in enumerate(PROMPTS):
        given.append(flag(f"f{number}", prompt, "river"))
        given += [Feedback(v=1, feedback_id=f"u{number}-{more}", undo="nothing") for more in range(40)]
    ids = [one.feedback_id for one in given]
    users.client.send(given)
    with Forked("first", "edit", deployment, folder, shutdown_timeout=USUAL) as first:
        first.wait_ready(90)
        wait_until(lambda: len(outcomes_in_log(deployment)) > 60)
        assert first.stop() == 0
    decided = [outcome.feedback_id for outcome in outcomes_in_log(deployment)]
    assert decided == ids[: len(decided)]
    assert len(decided) < len(ids)
    with Forked("next", "edit", deployment, folder):
        wait_until(lambda: len(outcomes_in_log(deployment)) >= len(ids), 120, "every outcome")
    assert [outcome.feedback_id for outcome in outcomes_in_log(deployment)] == ids


def test_a_second_signal_ends_a_worker_at_once(
    slow: Settings, users_of: Callable[[Settings], Users], folder: Path
) -> None:
    users = users_of(slow)
    with Forked("replica", "infer", slow, folder, shutdown_timeout=600) as replica:
        replica.wait_ready(90)
        users.client.send(long_answers(10), partition=0)
        wait_until(lambda: metric(replica.port, "gracestream_step_requests_count") > 0)
        replica.process.terminate()
        wait_until(lambda: "stopping" in replica.stderr())
        assert replica.running
        replica.process.terminate()
        assert replica.wait(5) == 128 + signal.SIGTERM


@pytest.mark.slow
@kafka_outages
def test_workers_end_in_time_without_kafka_and_others_finish_their_records(
    own_kafka: LocalKafka,
    deployment: Settings,
    users_of: Callable[[Settings], Users],
    folder: Path,
    leave: Callable[[LocalKafka], None],
    come_back: Callable[[LocalKafka], None],
) -> None:
    busy = deployment.replace(kafka=own_kafka.bootstrap, shutdown_timeout=9.0)
    idle = busy.replace(topic_prefix=f"idle-{busy.kafka.topic_prefix}")
    for settings in (busy, idle):
        create_topics(settings.kafka, partitions=2, replication=1)
    users = users_of(busy)
    asked = [question(f"q{number}", PROMPTS[number % 20]) for number in range(1500)]
    flagged = [flag(f"f{number}", prompt, "river") for number, prompt in enumerate(PROMPTS[:6])]
    committing = Forked("committing", "edit", busy, folder, sabotage=partial(arm, "committing", signal.SIGSTOP))
    replica = Forked("replica", "infer", busy, folder)
    others = [
        Forked(f"idle-{number}-{command}", command, idle, folder)
        for number, command in enumerate(("infer", "edit", "edit"))
    ]
    workers = [committing, replica, *others]  # one of the last two leads, the other is the standby
    with ExitStack() as running:
        for worker in workers:
            running.enter_context(worker).wait_ready(90)
        users.client.send(asked)
        users.client.send(flagged)
        wait_until(lambda: metric(replica.port, "gracestream_step_requests_count") > 0)
        wait_until(lambda: psutil.Process(committing.process.pid).status() == psutil.STATUS_STOPPED)
        leave(own_kafka)
        committing.resume()
        time.sleep(2.0)  # until each waits for Kafka
        for worker in workers:
            worker.process.terminate()
        deadline = time.monotonic() + busy.process.shutdown_timeout + LATE
        for worker in workers:
            status = worker.wait(deadline - time.monotonic())
            errors = worker.stderr()
            assert '"worker_stopping"' in errors
            reasons = ("shutdown_timeout", "unfinished_requests_released", "group_leave_timeout")
            assert status == int(any(reason in errors for reason in reasons)), errors
        come_back(own_kafka)
        assert len(outcomes_in_log(busy)) < len(flagged)
        replica.start()
        with Forked("editor", "edit", busy, folder):
            wait_until(lambda: not uncommitted(busy), 60, "a successor that answers the rest")
            wait_until(lambda: len(outcomes_in_log(busy)) == len(flagged), 60, "an editor that decides on the rest")
    assert len(answered(busy)) == len(asked)
    assert [outcome.feedback_id for outcome in outcomes_in_log(busy)] == [one.feedback_id for one in flagged]


def test_workers_start_and_work_without_redis(deployment: Settings, users: Users, folder: Path) -> None:
    nowhere = {"redis": "redis://127.0.0.1:1/0", "redis_outage_grace": 0.5}
    with (
        Forked("replica", "infer", deployment, folder, **nowhere) as replica,
        Forked("editor", "edit", deployment, folder, **nowhere) as editor,
    ):
        replica.wait_ready(90)
        editor.wait_ready(90)
        outcome = users.correct(flag("f", PROMPTS[0], "river"))["f"]
        answer = users.ask(question("q", PROMPTS[0], min_seq=outcome.seq))["q"]
        assert answer.edit.entry_id == "f"  # type: ignore[union-attr]
        for worker in (replica, editor):
            assert "redis_wait_timeout" in worker.stderr()
            assert metric(worker.port, "gracestream_degraded") == 1


def cut_off(settings: Settings, *_: object) -> Settings:
    """Kafka does not answer."""
    return settings.replace(kafka=f"127.0.0.1:{find_free_port()}")


def hung(settings: Settings, kafka: LocalKafka) -> Settings:
    """Kafka accepts connections and never answers."""
    hang(kafka)
    return settings.replace(kafka=kafka.bootstrap)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["infer", "edit"])
@pytest.mark.parametrize("away", [cut_off, hung])
def test_a_worker_that_waits_for_kafka_ends_at_once_with_status_0(
    deployment: Settings,
    own_kafka: LocalKafka,
    folder: Path,
    command: str,
    away: Callable[[Settings, LocalKafka], Settings],
) -> None:
    settings = away(deployment, own_kafka)
    with Forked("waiting", command, settings, folder, shutdown_timeout=600.0) as worker:
        wait_until(lambda: '"worker_starting"' in worker.stderr(), 90)
        assert worker.stop() == 0
        assert "no work was in progress" in worker.stderr()


def test_a_replica_that_catches_up_ends_at_once_with_status_0(deployment: Settings, folder: Path) -> None:
    assert deployment.model.layer is not None
    model = EditableModel.load(deployment.model.name, deployment.model.layer)
    history = History(deployment, model.fingerprint, model.layer)
    history.lead()
    history.publish()
    head = history.redis_key("head")
    history.redis.hset(head, "seq", "1000")  # it waits for a delta that is not in the log
    chosen = {"shutdown_timeout": 600.0, "redis_outage_grace": 600.0}
    with Forked("waiting", "infer", deployment, folder, **chosen) as replica:
        wait_until(lambda: "redis_ahead" in replica.stderr(), 90)
        assert replica.ready()[0] == 503
        assert replica.stop() == 0
        assert "no work was in progress" in replica.stderr()
    history.empty_redis()
    history.close()


def never_put() -> None:
    """Every upload of a snapshot hangs."""

    def put(*_: object) -> None:
        print('{"event": "uploading"}', file=sys.stderr, flush=True)
        threading.Event().wait()

    SnapshotStore.put = put  # type: ignore[assignment,method-assign]


def test_an_editor_whose_upload_of_a_snapshot_hangs_ends_with_status_0(
    deployment: Settings, users: Users, folder: Path
) -> None:
    chosen = {"snapshot_url": str(folder / "snapshots"), "snapshot_interval": 1, "shutdown_timeout": USUAL}
    with Forked("editor", "edit", deployment, folder, sabotage=never_put, **chosen) as editor:
        editor.wait_ready(90)
        users.correct(flag("f", PROMPTS[0], "river"))
        wait_until(lambda: '"uploading"' in editor.stderr())
        assert editor.stop() == 0


def never_answer() -> None:
    """Every step of the engine logs an event and hangs."""

    def step(*_: object) -> None:
        print('{"event": "hanging"}', file=sys.stderr, flush=True)
        threading.Event().wait()

    ContinuousEngine.step = step  # type: ignore[assignment,method-assign]


def test_a_replica_whose_model_never_answers_ends_in_time(deployment: Settings, users: Users, folder: Path) -> None:
    with Forked("replica", "infer", deployment, folder, sabotage=never_answer, shutdown_timeout=3.0) as replica:
        replica.wait_ready(90)
        users.client.send([question("q", PROMPTS[0])])
        wait_until(lambda: '"hanging"' in replica.stderr())
        replica.process.terminate()
        assert replica.wait(3.0 + LATE) == 1
        assert "unfinished_requests_released" in replica.stderr()
    assert uncommitted(deployment) == 1
    assert not answered(deployment)


@pytest.mark.parametrize("command", ["infer", "edit"])
def test_a_worker_whose_redis_hangs_ends_with_status_0(
    deployment: Settings, users: Users, folder: Path, command: str
) -> None:
    with LocalRedis(folder / "redis") as redis:
        chosen = {"redis": redis.url, "shutdown_timeout": USUAL}
        with Forked("worker", command, deployment, folder, **chosen) as worker:
            worker.wait_ready(90)
            redis.child.send_signal(signal.SIGSTOP)
            users.client.send([question("q", PROMPTS[0]), flag("f", PROMPTS[0], "river")])
            wait_until(lambda: metric(worker.port, "gracestream_degraded") == 1)
            assert worker.stop() == 0
        redis.child.send_signal(signal.SIGCONT)


def silent_log() -> None:
    """The pipe of the worker's standard error is full, and no process reads it."""
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    os.dup2(writing, 2)
    os.set_blocking(2, False)
    with suppress(BlockingIOError):
        while True:
            os.write(2, bytes(4096))
    os.set_blocking(2, True)


def test_a_worker_whose_log_output_is_not_read_ends_as_usual(deployment: Settings, folder: Path) -> None:
    with Forked("deaf", "infer", deployment, folder, sabotage=silent_log, shutdown_timeout=2.0) as worker:
        wait_until(lambda: psutil.Process(worker.process.pid).num_threads() > 2)  # it handles signals
        worker.process.terminate()
        worker.wait(2.0 + LATE)


def fail_to_follow() -> None:
    """The task that follows the head fails."""

    async def catch_up(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    LiveCodebook.sync_to_head = catch_up  # type: ignore[method-assign]


def test_a_replica_reports_why_it_no_longer_follows_the_head(deployment: Settings, folder: Path) -> None:
    with Forked("replica", "infer", deployment, folder, sabotage=fail_to_follow) as replica:
        assert replica.wait(90) == 1
        (ended,) = (event for event in replica.events() if event["event"] == "head_follower_failed")
        assert ended["reason"] == "ZeroDivisionError: a defect"
