"""The editor's view of traffic keeps up with it, and sees all of its partitions."""

from collections.abc import Callable, Iterator

import pytest
from kafka.admin import NewPartitions
from torch import Tensor

from pipeline import request_tail
from pipeline.clients import admin, producer
from pipeline.editing import EditEngine
from pipeline.plan import Plan
from pipeline.request_tail import AT_ONCE, RANKED, TAIL, RequestTail
from pipeline.settings import Settings
from pipeline.traffic import Traffic, score
from schemas.messages import encode
from tests.integration.running import question, records, wait_until
from tests.unit.engine.tiny import editable, texts

CAPACITY = 24
PROMPTS = texts(3000, seed=9, shortest=6)


def send(settings: Settings, count: int, partition: int) -> None:
    """Requests, all in one partition."""
    sender = producer(settings)
    for number in range(count):
        value = encode(question(f"q{number}", PROMPTS[number % len(PROMPTS)]))
        sender.send(settings.topic("requests"), value=value, partition=partition)
    sender.flush()
    sender.close()


@pytest.fixture
def small(deploy: Callable[..., Settings], prefix: str) -> Settings:
    """A deployment whose reservoir holds few queries."""
    return deploy("llama", prefix, traffic=CAPACITY)


@pytest.fixture
def tail_of() -> Iterator[Callable[[Settings], RequestTail]]:
    """Tails of any deployment, closed at the end of the test."""
    made: list[RequestTail] = []

    def tail(settings: Settings) -> RequestTail:
        engine = EditEngine(editable("llama"), settings.codebook, Plan(traffic=settings.traffic, seed=settings.seed))
        made.append(RequestTail(settings, engine))
        return made[-1]

    yield tail
    for one in made:
        one.close()


def traffic(tail: RequestTail) -> Traffic:
    return tail._engine.traffic


def test_it_looks_at_many_requests_for_each_that_it_runs(
    small: Settings, tail_of: Callable[[Settings], RequestTail], monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = tail_of(small)
    tail.catch_up()
    send(small, 3000, partition=0)
    ran: list[int] = []
    queries = tail._engine.model.queries

    def counted(prompts: list[list[int]]) -> Tensor:
        ran.append(len(prompts))
        return queries(prompts)

    monkeypatch.setattr(tail._engine.model, "queries", counted)
    looks = 0
    while traffic(tail).positions.get(0, 0) < 3000 or tail._waiting:
        looks += 1
        tail.read(0.5)
    assert max(ran) <= AT_ONCE, "feedback waits for one pass at most"
    assert sum(ran) <= 3 * CAPACITY + (3000 // RANKED) * CAPACITY
    assert looks < 3000 / AT_ONCE / 2
    wanted = sorted(
        score(record.partition, record.offset, record.timestamp / 1000, small.seed)
        for record in records(small, "requests")
    )[-CAPACITY:]
    assert sorted(traffic(tail)._scores) == wanted


def test_a_starting_editor_fills_its_reservoir_from_the_tail(
    small: Settings, tail_of: Callable[[Settings], RequestTail]
) -> None:
    send(small, TAIL + 500, partition=1)
    tail = tail_of(small)
    tail.catch_up()
    assert traffic(tail).positions == {1: TAIL + 500}
    assert len(traffic(tail)) == CAPACITY


def test_partitions_that_are_added_are_seen(
    small: Settings, tail_of: Callable[[Settings], RequestTail], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_tail, "PARTITION_SECONDS", 0.2)
    send(small, 10, partition=0)
    tail = tail_of(small)
    tail.catch_up()
    send(small, 5, partition=0)
    client = admin(small)
    client.create_partitions({small.topic("requests"): NewPartitions(6)})
    client.close()

    def seen() -> bool:
        tail.read(0.1)
        return traffic(tail).positions == {0: 15, 5: 7}

    send(small, 7, partition=5)
    wait_until(seen)
