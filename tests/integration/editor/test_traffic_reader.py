"""The editor's view of traffic keeps up with it, and sees all of its partitions."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from kafka.admin import NewPartitions
from structlog.testing import capture_logs
from torch import Tensor

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.traffic_sample import TrafficSample, sample_score
from gracestream.pipeline.editor import traffic_reader as request_tail
from gracestream.pipeline.editor.traffic_reader import (
    MAX_POLL_RECORDS,
    QUERY_BATCH_SIZE,
    WARM_UP_RECORDS,
    TrafficReader,
)
from gracestream.pipeline.kafka.clients import admin, producer
from gracestream.pipeline.kafka.topics import create_topics
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import ChatMessage, encode
from tests.support.running import TIMEOUT, hang, question, records, resume, wait_until
from tests.support.tiny_models import CHAT, editable, texts

CAPACITY = 24
PROMPTS = texts(3000, seed=9, shortest=6)


def send(settings: Settings, count: int, partition: int, different: int = len(PROMPTS)) -> None:
    """Requests, all in one partition, of so many different prompts."""
    sender = producer(settings.kafka)
    for number in range(count):
        value = encode(question(f"q{number}", PROMPTS[number % different]))
        sender.send(settings.kafka.topic("requests"), value=value, partition=partition)
    sender.flush()
    sender.close()


@pytest.fixture
def small(deploy: Callable[..., Settings], prefix: str) -> Settings:
    """A deployment whose traffic sample holds few queries."""
    return deploy("llama", prefix, traffic_sample_size=CAPACITY)


@pytest.fixture
def tail_of() -> Iterator[Callable[[Settings], TrafficReader]]:
    """Tails of any deployment, closed at the end of the test."""
    made: list[TrafficReader] = []

    def tail(settings: Settings) -> TrafficReader:
        engine = EditEngine(
            editable("llama"),
            settings.model.codebook,
            EditConfig(traffic_sample_size=settings.editing.traffic_sample_size, seed=settings.editing.seed),
        )
        made.append(TrafficReader(settings.kafka, engine))
        return made[-1]

    yield tail
    for one in made:
        one.close()


def traffic(tail: TrafficReader) -> TrafficSample:
    return tail._engine.traffic_sample


def counted(tail: TrafficReader, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts are run at once, each time."""
    ran: list[int] = []
    queries = tail._engine.model.queries

    def counting(prompts: list[Prompt]) -> Tensor:
        ran.append(len(prompts))
        return queries(prompts)

    monkeypatch.setattr(tail._engine.model, "queries", counting)
    return ran


def test_it_looks_at_many_requests_for_each_that_it_runs(
    small: Settings, tail_of: Callable[[Settings], TrafficReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = tail_of(small)
    tail.warm_up()
    send(small, 3000, partition=0)
    ran = counted(tail, monkeypatch)
    looks = 0
    while traffic(tail).positions.get(0, 0) < 3000 or tail._backlog:
        looks += 1
        tail.poll(0.5)
    assert max(ran) <= QUERY_BATCH_SIZE, "feedback waits for one pass at most"
    assert sum(ran) <= 3 * CAPACITY + (3000 // MAX_POLL_RECORDS) * CAPACITY
    assert looks < 3000 / QUERY_BATCH_SIZE / 2
    wanted = sorted(
        sample_score(record.partition, record.offset, record.timestamp / 1000, small.editing.seed)
        for record in records(small, "requests")
    )[-CAPACITY:]
    assert sorted(traffic(tail)._scores) == wanted


def test_chats_are_traffic_and_bad_ones_are_left_out(small: Settings) -> None:
    model = editable("llama", chat_template=CHAT)
    tail = TrafficReader(
        small.kafka,
        EditEngine(model, small.model.codebook, EditConfig(traffic_sample_size=CAPACITY, seed=small.editing.seed)),
    )
    tail.warm_up()
    chats = [(ChatMessage("user", text),) for text in PROMPTS[:5]]
    sender = producer(small.kafka)
    for number, messages in enumerate([*chats, (ChatMessage("user", " ".join(PROMPTS[:9])),)]):
        sender.send(small.kafka.topic("requests"), value=encode(question(f"q{number}", messages)), partition=0)
    sender.send(
        small.kafka.topic("requests"), value=b'{"v":1,"request_id":"q9","inputs":[{"role":"bot"}]}', partition=0
    )
    sender.flush()
    sender.close()

    def all_read() -> bool:
        tail.poll(0.5)
        return traffic(tail).positions.get(0, 0) == 7 and not tail._backlog

    wait_until(all_read)
    tail.close()
    queries_ND = model.queries([model.task.tokenize(messages) for messages in chats]).numpy()
    held = traffic(tail)._queries.points_ND
    assert len(held) == 5
    assert all(np.abs(held - query_D).max(axis=1).min() < 1e-4 for query_D in queries_ND)


def test_a_few_prompts_that_come_again_and_again_are_run_once(
    small: Settings, tail_of: Callable[[Settings], TrafficReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = tail_of(small)
    tail.warm_up()
    send(small, 3000, partition=0, different=CAPACITY // 2)
    ran = counted(tail, monkeypatch)
    tail.catch_up_to_now(TIMEOUT)
    assert traffic(tail).positions == {0: 3000}
    assert len(traffic(tail)) == CAPACITY // 2, "so that every one is wanted"
    assert sum(ran) == CAPACITY // 2


def test_a_starting_editor_fills_its_traffic_sample_from_the_tail(
    small: Settings, tail_of: Callable[[Settings], TrafficReader]
) -> None:
    send(small, WARM_UP_RECORDS + 500, partition=1)
    tail = tail_of(small)
    tail.warm_up()
    assert traffic(tail).positions == {1: WARM_UP_RECORDS + 500}
    assert len(traffic(tail)) == CAPACITY


def test_partitions_that_are_added_are_seen(
    small: Settings, tail_of: Callable[[Settings], TrafficReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_tail, "PARTITION_CHECK_SECONDS", 0.2)
    send(small, 10, partition=0)
    tail = tail_of(small)
    tail.warm_up()
    send(small, 5, partition=0)
    client = admin(small.kafka)
    client.create_partitions({small.kafka.topic("requests"): NewPartitions(6)})
    client.close()

    def seen() -> bool:
        tail.poll(0.1)
        return traffic(tail).positions == {0: 15, 5: 7}

    send(small, 7, partition=5)
    wait_until(seen)


class TestSee:
    """What was asked before a correction."""

    def test_all_of_it_is_held(self, small: Settings, tail_of: Callable[[Settings], TrafficReader]) -> None:
        tail = tail_of(small)
        tail.warm_up()
        for partition, count in enumerate((3 * QUERY_BATCH_SIZE, 5, 0, 70)):
            send(small, count, partition)
        tail.catch_up_to_now(TIMEOUT)
        assert traffic(tail).positions == {0: 3 * QUERY_BATCH_SIZE, 1: 5, 3: 70}
        assert not tail._backlog

    def test_a_flood_does_not_hold_a_correction_up(
        self, small: Settings, tail_of: Callable[[Settings], TrafficReader], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(request_tail, "MAX_POLL_RECORDS", 1)
        tail = tail_of(small)
        tail.warm_up()
        send(small, 3000, partition=0)
        with capture_logs() as events:
            tail.catch_up_to_now(0.2)
        assert [event["event"] for event in events] == ["traffic_catch_up_incomplete"]
        assert traffic(tail).positions.get(0, 0) < 3000

    def test_a_kafka_that_does_not_answer_is_not_asked_each_time(
        self,
        deploy: Callable[..., Settings],
        own_kafka: LocalKafka,
        prefix: str,
        tail_of: Callable[[Settings], TrafficReader],
    ) -> None:
        settings = deploy("llama", prefix, traffic_sample_size=CAPACITY).replace(kafka=own_kafka.bootstrap)
        create_topics(settings.kafka, partitions=4, replication=1)
        tail = tail_of(settings)
        tail.warm_up()
        send(settings, 5, partition=0)
        hang(own_kafka)
        with capture_logs() as events:
            tail.catch_up_to_now(0.5)
            tail.catch_up_to_now(0.5)
        assert [event["event"] for event in events] == ["traffic_catch_up_incomplete"]
        resume(own_kafka)

        def read_on() -> bool:
            tail.poll(0.1)
            return traffic(tail).positions == {0: 5}

        wait_until(read_on)
