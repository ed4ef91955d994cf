"""Workarounds for three faults of kafka-python; `pipeline.kafka.transactions` has those of its transactions.

All are in kafka-python 3.0.12, the newest release in November 2026. No release ends them yet. No issue of
kafka-python is known for the first two.

1. A transactional call can wait forever. `await_ready` raises KafkaConnectionError if it cannot reach the coordinator.
   The producer's I/O thread catches the error, but drops the current request instead of repeating it.
   `RetryingNetClient` returns False instead, and the thread repeats the request.
2. A group member can stop working without an error. It starts to rejoin after a metadata change, and the metadata
   changes back before the join completes. It then neither sends heartbeats nor fetches. The Java client had the same
   fault, KAFKA-9815. `RejoiningConsumer` requests the join again.
3. A broker's address that accepts connections and closes them at once, such as a proxy without a broker behind it, is
   connected to again without a pause. A TCP connection counts as success and resets the backoff, although the
   handshake of Kafka fails. Pull request 3098 of kafka-python ended this for the first connection of a client only.
   `PausingNetClient` resets the backoff after the handshake.
"""

from typing import Any

from kafka import KafkaConsumer
from kafka.errors import KafkaConnectionError
from kafka.net import KafkaConnectionManager, KafkaNetClient, NetworkSelector


class PausingConnectionManager(KafkaConnectionManager):  # type: ignore[misc]
    """A connection manager that pauses after each failed connection, with the reconnect backoff (fault 3)."""

    async def _connect(
        self, node: Any, conn: Any, reset_backoff_on_connect: bool = True, timeout_at: float | None = None
    ) -> None:
        await super()._connect(node, conn, reset_backoff_on_connect=False, timeout_at=timeout_at)
        if not reset_backoff_on_connect:
            return  # the caller, which makes the client's first connection, keeps the backoff itself
        if conn.connected:
            self.reset_backoff(node.node_id)
        elif self.connection_delay(node.node_id) == 0:  # no TCP connection: the pause has begun already
            self.update_backoff(node.node_id)


class PausingNetClient(KafkaNetClient):  # type: ignore[misc]
    """A network client with a `PausingConnectionManager`."""

    def __init__(self, **options: Any) -> None:
        net = NetworkSelector(**options)
        super().__init__(net, PausingConnectionManager(net, **options))


class RetryingNetClient(PausingNetClient):
    """A network client for producers that reports an unreachable node as not ready (fault 1)."""

    def await_ready(self, node_id: Any, timeout_ms: float = 30000) -> bool:
        """Wait up to `timeout_ms` milliseconds for a connection; False if there is none then."""
        try:
            return bool(super().await_ready(node_id, timeout_ms))
        except KafkaConnectionError:
            return False


class RejoiningConsumer(KafkaConsumer):  # type: ignore[misc]
    """A consumer that completes every join that it started (fault 2)."""

    def poll(self, *args: Any, **options: Any) -> Any:
        """Poll as KafkaConsumer does, after requesting again a join that has not completed."""
        # kafka-python compares two snapshots of the metadata to find out if it must join, and remembers no result. Its
        # flag `rejoining` is set from the start of a join to its end, also while the snapshots are equal again.
        if self._coordinator.rejoining:
            self._coordinator.request_rejoin()
        return super().poll(*args, **options)
