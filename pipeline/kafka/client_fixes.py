"""Workarounds for two faults of kafka-python 3.0.12; `pipeline.kafka.transactions` has those of its transactions.

1. While the coordinator cannot be connected to, the producer's I/O thread drops the current transactional request.
   The caller then waits forever. A node that is merely not ready keeps the request.
2. A member that starts to rejoin after a metadata change forgets to, if the metadata changes back before the join
   completes. It then neither sends heartbeats nor fetches (KAFKA-9815 in the Java client).
"""

from typing import Any

from kafka import KafkaConsumer
from kafka.errors import KafkaConnectionError
from kafka.net import KafkaNetClient


class RetryingNetClient(KafkaNetClient):  # type: ignore[misc]
    """Its nodes are ready or not."""

    def await_ready(self, node_id: Any, timeout_ms: float = 30000) -> bool:
        """Whether a node can be sent to, after at most `timeout_ms`; False also where it cannot be connected to."""
        try:
            return bool(super().await_ready(node_id, timeout_ms))
        except KafkaConnectionError:
            return False


class RejoiningConsumer(KafkaConsumer):  # type: ignore[misc]
    """Its place in a group is decided sooner or later, whatever happens between two polls."""

    def poll(self, *args: Any, **options: Any) -> Any:
        """As KafkaConsumer's."""
        if self._coordinator.rejoining:
            self._coordinator.request_rejoin()
        return super().poll(*args, **options)
