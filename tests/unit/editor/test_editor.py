"""The editor worker goes on while Kafka is away."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.errors import KafkaTimeoutError

from gracestream.pipeline.editor import editor
from gracestream.pipeline.editor.editor import Editor
from gracestream.pipeline.observability.health import Health


class AwayLog:
    """A log that cannot be read."""

    def __init__(self) -> None:
        self.asked = 0

    def read_new_deltas(self) -> Iterator[Any]:
        self.asked += 1
        yield from ()
        raise KafkaTimeoutError("Kafka is away")

    def close(self) -> None:
        pass


def test_an_editor_without_kafka_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editor, "KAFKA_RETRY_SECONDS", 0.2)
    log, health, stop = AwayLog(), Health(stall_timeout=0.6), threading.Event()
    health.begin("editor")  # it led, and waited for feedback, when Kafka went away
    rest = SimpleNamespace(close=lambda: None)
    parts: Any = SimpleNamespace(log=log, traffic_reader=rest, snapshot_writer=rest)
    working = threading.Thread(target=Editor(parts, health, batch_size=16).run, args=[stop])
    working.start()
    while log.asked < 8:
        stop.wait(0.05)
        assert log.asked == 0 or health.stalled_part() is None
    stop.set()
    working.join()
    assert health.reason == "Kafka failed: KafkaTimeoutError: Kafka is away"
