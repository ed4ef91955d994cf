"""`TrafficReader`: it keeps up with traffic and reads all partitions."""

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
from gracestream.pipeline.editor import traffic_reader
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
    """Send requests to one partition, with this many different prompts."""
    sender = producer(settings.kafka)
    for number in range(count):
        value = encode(question(f"q{number}", PROMPTS[number % different]))
        sender.send(settings.kafka.topic("requests"), value=value, partition=partition)
    sender.flush()
    sender.close()


@pytest.fixture
def small(deploy: Callable[..., Settings], prefix: str) -> Settings:
    """A deployment with a small traffic sample."""
    return deploy("llama", prefix, traffic_sample_size=CAPACITY)


@pytest.fixture
def traffic_reader_of() -> Iterator[Callable[[Settings], TrafficReader]]:
    """Returns a `TrafficReader` of a deployment; closes it at the end of the test."""
    made: list[TrafficReader] = []

    def reader(settings: Settings) -> TrafficReader:
        engine = EditEngine(
            editable("llama"),
            settings.model.codebook,
            EditConfig(traffic_sample_size=settings.editing.traffic_sample_size, seed=settings.editing.seed),
        )
        made.append(TrafficReader(settings.kafka, engine))
        return made[-1]

    yield reader
    for one in made:
        one.close()


def traffic(reader: TrafficReader) -> TrafficSample:
    return reader._engine.traffic_sample


def counted(reader: TrafficReader, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes of all passes of the model."""
    ran: list[int] = []
    queries = reader._engine.model.queries

    def counting(prompts: list[Prompt]) -> Tensor:
        ran.append(len(prompts))
        return queries(prompts)

    monkeypatch.setattr(reader._engine.model, "queries", counting)
    return ran


def test_it_reads_many_requests_for_each_that_it_runs(
    small: Settings, traffic_reader_of: Callable[[Settings], TrafficReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = traffic_reader_of(small)
    reader.warm_up()
    send(small, 3000, partition=0)
    ran = counted(reader, monkeypatch)
    looks = 0
    while traffic(reader).positions.get(0, 0) < 3000 or reader._backlog:
        looks += 1
        reader.poll(0.5)
    assert max(ran) <= QUERY_BATCH_SIZE, "feedback waits for at most one pass"
    assert sum(ran) <= 3 * CAPACITY + (3000 // MAX_POLL_RECORDS) * CAPACITY
    assert looks < 3000 / QUERY_BATCH_SIZE / 2
    wanted = sorted(
        sample_score(record.partition, record.offset, record.timestamp / 1000, small.editing.seed)
        for record in records(small, "requests")
    )[-CAPACITY:]
    assert sorted(traffic(reader)._scores) == wanted


def test_chats_are_traffic_and_invalid_requests_are_skipped(small: Settings) -> None:
    model = editable("llama", chat_template=CHAT)
    reader = TrafficReader(
        small.kafka,
        EditEngine(model, small.model.codebook, EditConfig(traffic_sample_size=CAPACITY, seed=small.editing.seed)),
    )
    reader.warm_up()
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
        reader.poll(0.5)
        return traffic(reader).positions.get(0, 0) == 7 and not reader._backlog

    wait_until(all_read)
    reader.close()
    queries_ND = model.queries([model.task.tokenize(messages) for messages in chats]).numpy()
    held = traffic(reader)._queries.points_ND
    assert len(held) == 5
    assert all(np.abs(held - query_D).max(axis=1).min() < 1e-4 for query_D in queries_ND)


def test_repeated_prompts_are_run_once(
    small: Settings, traffic_reader_of: Callable[[Settings], TrafficReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = traffic_reader_of(small)
    reader.warm_up()
    send(small, 3000, partition=0, different=CAPACITY // 2)
    ran = counted(reader, monkeypatch)
    reader.catch_up_to_now(TIMEOUT)
    assert traffic(reader).positions == {0: 3000}
    assert len(traffic(reader)) == CAPACITY // 2, "so that the sample takes each of them"
    assert sum(ran) == CAPACITY // 2


def test_a_starting_editor_fills_its_traffic_sample_from_the_tail(
    small: Settings, traffic_reader_of: Callable[[Settings], TrafficReader]
) -> None:
    send(small, WARM_UP_RECORDS + 500, partition=1)
    reader = traffic_reader_of(small)
    reader.warm_up()
    assert traffic(reader).positions == {1: WARM_UP_RECORDS + 500}
    assert len(traffic(reader)) == CAPACITY


def test_added_partitions_are_read(
    small: Settings, traffic_reader_of: Callable[[Settings], TrafficReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic_reader, "PARTITION_CHECK_SECONDS", 0.2)
    send(small, 10, partition=0)
    reader = traffic_reader_of(small)
    reader.warm_up()
    send(small, 5, partition=0)
    client = admin(small.kafka)
    client.create_partitions({small.kafka.topic("requests"): NewPartitions(6)})
    client.close()

    def seen() -> bool:
        reader.poll(0.1)
        return traffic(reader).positions == {0: 15, 5: 7}

    send(small, 7, partition=5)
    wait_until(seen)


class TestCatchUp:
    """Requests before a correction."""

    def test_all_of_them_are_read(
        self, small: Settings, traffic_reader_of: Callable[[Settings], TrafficReader]
    ) -> None:
        reader = traffic_reader_of(small)
        reader.warm_up()
        for partition, count in enumerate((3 * QUERY_BATCH_SIZE, 5, 0, 70)):
            send(small, count, partition)
        reader.catch_up_to_now(TIMEOUT)
        assert traffic(reader).positions == {0: 3 * QUERY_BATCH_SIZE, 1: 5, 3: 70}
        assert not reader._backlog

    def test_a_flood_of_requests_does_not_delay_a_correction(
        self, small: Settings, traffic_reader_of: Callable[[Settings], TrafficReader], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(traffic_reader, "MAX_POLL_RECORDS", 1)
        reader = traffic_reader_of(small)
        reader.warm_up()
        send(small, 3000, partition=0)
        with capture_logs() as events:
            reader.catch_up_to_now(0.2)
        assert [event["event"] for event in events] == ["traffic_catch_up_incomplete"]
        assert traffic(reader).positions.get(0, 0) < 3000

    def test_a_kafka_that_does_not_answer_is_not_read_before_each_correction(
        self,
        deploy: Callable[..., Settings],
        own_kafka: LocalKafka,
        prefix: str,
        traffic_reader_of: Callable[[Settings], TrafficReader],
    ) -> None:
        settings = deploy("llama", prefix, traffic_sample_size=CAPACITY).replace(kafka=own_kafka.bootstrap)
        create_topics(settings.kafka, partitions=4, replication=1)
        reader = traffic_reader_of(settings)
        reader.warm_up()
        send(settings, 5, partition=0)
        hang(own_kafka)
        with capture_logs() as events:
            reader.catch_up_to_now(0.5)
            reader.catch_up_to_now(0.5)
        assert [event["event"] for event in events] == ["traffic_catch_up_incomplete"]
        resume(own_kafka)

        def read_on() -> bool:
            reader.poll(0.1)
            return traffic(reader).positions == {0: 5}

        wait_until(read_on)
