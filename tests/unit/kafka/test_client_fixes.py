"""A client of Kafka pauses before it connects again to an address that takes connections and ends them."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.net import KafkaConnectionManager, manager

from gracestream.pipeline.kafka.client_fixes import PausingNetClient
from tests.support.closing_listener import ClosingListener

STEP = 0.1
"""Seconds that pass between two attempts to connect, on a clock of the test's own."""


def test_an_address_that_ends_connections_is_connected_to_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = 0.0
    monkeypatch.setattr(manager, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed))
    with ClosingListener() as listener:
        client = PausingNetClient(bootstrap_servers=[listener.address], reconnect_backoff_max_ms=1000)
        (node,) = (broker.node_id for broker in client.cluster.bootstrap_brokers())
        for _ in range(100):
            client.maybe_connect(node)
            if (connection := client._manager._conns.get(node)) is not None:
                client.poll(timeout_ms=5000, future=connection.init_future)
            passed += STEP
        client.close()
    # Pauses of 0.05, 0.1, 0.2, ... 1, 1 s, each up to a fifth longer or shorter, fill 10 s.
    assert 10 <= listener.connections <= 20


@pytest.mark.parametrize(
    ("connected", "pause", "expected"),
    [(True, 0.5, "reset"), (True, 0.0, "reset"), (False, 0.0, "update"), (False, 0.5, "")],
)
def test_the_pause_ends_with_a_handshake_and_begins_without_one(
    monkeypatch: pytest.MonkeyPatch, connected: bool, pause: float, expected: str
) -> None:
    done: list[str] = []

    async def connect(*_: Any, reset_backoff_on_connect: bool, timeout_at: float | None) -> None:
        assert not reset_backoff_on_connect

    monkeypatch.setattr(KafkaConnectionManager, "_connect", connect)
    client = PausingNetClient(bootstrap_servers=["127.0.0.1:1"])
    found = client._manager
    monkeypatch.setattr(found, "reset_backoff", lambda _: done.append("reset"))
    monkeypatch.setattr(found, "update_backoff", lambda _: done.append("update"))
    monkeypatch.setattr(found, "connection_delay", lambda _: pause)
    node, connection = SimpleNamespace(node_id=1), SimpleNamespace(connected=connected)
    for first in (True, False):  # a client's first connection has pauses of its own
        with pytest.raises(StopIteration):
            found._connect(node, connection, reset_backoff_on_connect=not first).send(None)
        assert done == ([] if first or not expected else [expected])
    client.close()
