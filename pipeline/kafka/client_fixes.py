"""Workarounds for two faults of kafka-python; `pipeline.kafka.transactions` has those of its transactions.

Both are in kafka-python 3.0.12, the newest release in November 2026. No release ends them yet. No issue of
kafka-python is known for either.

1. A transactional call can wait forever. `await_ready` raises KafkaConnectionError if it cannot reach the coordinator.
   The producer's I/O thread catches the error, but drops the current request instead of repeating it.
   `RetryingNetClient` returns False instead, and the thread repeats the request.
2. A group member can stop working without an error. It starts to rejoin after a metadata change, and the metadata
   changes back before the join completes. It then neither sends heartbeats nor fetches. The Java client had the same
   fault, KAFKA-9815. `RejoiningConsumer` requests the join again.
"""

from typing import Any

from kafka import KafkaConsumer
from kafka.errors import KafkaConnectionError
from kafka.net import KafkaNetClient


class RetryingNetClient(KafkaNetClient):  # type: ignore[misc]
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
