"""The editor worker goes on while Kafka is away, and reports what only a leading editor knows while it leads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.errors import KafkaTimeoutError
from redis.exceptions import TimeoutError as RedisTimeout

from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editor import editor
from gracestream.pipeline.editor.editor import Editor
from gracestream.pipeline.editor.redis_publisher import RedisPublisher
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.observability.health import Health
from gracestream.pipeline.stores.redis_head import RedisHeadStore
from tests.support.chosen_queries import PointModel
from tests.support.doubles.redis import MemoryRedis
from tests.support.running import wait_until
from tests.support.tiny_models import CODEBOOK


class Log:
    """The log of an editor that is elected at once. While Kafka is `away`, the deltas cannot be read."""

    def __init__(self, *, away: bool = False) -> None:
        self.away = away
        self.asked = 0

    def read_new_deltas(self) -> Iterator[Any]:
        self.asked += 1
        yield from ()
        if self.away:
            raise KafkaTimeoutError("Kafka is away")

    def membership(self, timeout: float) -> str:
        del timeout
        return "elected"

    def write_lead(self, record: bytes) -> int:
        del record
        return 0

    def poll(self, timeout: float) -> None:
        del timeout

    def lag(self) -> int:
        return 7

    def blocked_records(self) -> int:
        return 3

    def join(self) -> None:
        pass

    def fence(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def running(log: Log, health: Health, **parts: Any) -> Iterator[None]:
    """An editor on this log, in a thread of its own; a part that is not given does nothing."""
    idle = dict.fromkeys(("catch_up", "reset", "warm_up", "poll", "maybe_write", "stand_by", "close"), lambda *_: None)
    services = {name: SimpleNamespace(**idle) for name in ("feedback_processor", "traffic_reader", "snapshot_writer")}
    given: Any = SimpleNamespace(log=log, environment={}, redis_publisher=SimpleNamespace(**idle), **services)
    vars(given).update(parts)
    stop = threading.Event()
    working = threading.Thread(target=Editor(given, health, batch_size=16).run, args=[stop])
    working.start()
    try:
        yield
    finally:
        stop.set()
        working.join()


def test_an_editor_without_kafka_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editor, "KAFKA_RETRY_SECONDS", 0.2)
    log, health = Log(away=True), Health(stall_timeout=0.6)
    health.begin("editor")  # it led, and waited for feedback, when Kafka went away
    pause = threading.Event()
    with running(log, health):
        while log.asked < 8:
            pause.wait(0.05)
            assert log.asked == 0 or health.stalled_part() is None
    assert health.reason == "Kafka failed: KafkaTimeoutError: Kafka is away"


def test_an_editor_that_lost_the_lead_reports_nothing_that_a_leader_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editor, "KAFKA_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(editor, "LAG_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(editor, "BLOCKED_AFTER_SECONDS", 0.0)
    leaders = (metrics.DEGRADED, metrics.FEEDBACK_LAG, metrics.FEEDBACK_BLOCKED)
    log, health, engine = Log(), Health(), EditEngine(PointModel(2), CODEBOOK)

    def redis_is_away(operation: str) -> None:
        raise RedisTimeout(operation)

    store = RedisHeadStore(MemoryRedis().client(redis_is_away), "", CODEBOOK)
    publisher = RedisPublisher(store, engine.codebook, 60.0, retry_seconds=0.0)

    def reported() -> list[float]:
        return [gauge._value.get() for gauge in leaders]

    with running(log, health, engine=engine, redis_publisher=publisher):
        wait_until(lambda: reported() == [1, 7, 3])
        assert health.state()["degraded"] is True
        log.away = True
        wait_until(lambda: health.reason.startswith("Kafka failed"))
        wait_until(lambda: reported() == [0, 0, 0])
        assert (health.state()["degraded"], health.state()["feedback_blocked"]) == (False, 0)
        log.away = False
        wait_until(lambda: reported() == [1, 7, 3])
