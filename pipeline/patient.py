"""Clients of kafka-python that see through what they began: a transaction, or a rebalance.

Three things of kafka-python 3.0.12 are put right here. Its I/O thread drops the transactional request at hand, which is
then waited for without end, when the coordinator cannot be connected to; it keeps one whose node is merely not ready.
Of the calls that wait for the coordinator only `init_transactions` gives up after `max_block_ms`. And a member of a
group that joins again since the partitions of a topic have changed forgets that it does, should they look unchanged
before it has joined: it sends no heartbeat any more, and fetches nothing. (Kafka's own client did so until KAFKA-9815.)
"""

from typing import Any

from kafka import KafkaConsumer, KafkaProducer
from kafka.errors import KafkaConnectionError, KafkaTimeoutError
from kafka.net import KafkaNetClient


class PatientNetClient(KafkaNetClient):  # type: ignore[misc]
    """Its nodes are ready or not."""

    def await_ready(self, node_id: Any, timeout_ms: float = 30000) -> bool:
        """Whether a node can be sent to, after at most `timeout_ms`; False also where it cannot be connected to."""
        try:
            return bool(super().await_ready(node_id, timeout_ms))
        except KafkaConnectionError:
            return False


class PatientConsumer(KafkaConsumer):  # type: ignore[misc]
    """Its place in a group is decided sooner or later, whatever happens between two polls."""

    def poll(self, *args: Any, **options: Any) -> Any:
        """As KafkaConsumer's."""
        if self._coordinator.rejoining:
            self._coordinator.request_rejoin()
        return super().poll(*args, **options)


class PatientProducer(KafkaProducer):  # type: ignore[misc]
    """Its transactional calls raise KafkaTimeoutError after `max_block_ms`; the producer must then be closed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, kafka_client=PatientNetClient)

    def send_offsets_to_transaction(self, offsets: Any, group_metadata: Any) -> None:
        """As KafkaProducer's."""
        self._settle("take offsets", self._transaction_manager.send_offsets_to_transaction(offsets, group_metadata))

    def commit_transaction(self) -> None:
        """As KafkaProducer's. After a KafkaTimeoutError the transaction may have been committed, or may not."""
        self._settle("commit", self._transaction_manager.begin_commit())

    def abort_transaction(self) -> None:
        """As KafkaProducer's."""
        self._settle("abort", self._transaction_manager.begin_abort())

    def _settle(self, what: str, result: Any) -> None:
        self._sender.wakeup()
        if not result.wait(timeout_ms=self.config["max_block_ms"]):
            seconds = self.config["max_block_ms"] / 1000
            raise KafkaTimeoutError(f"the transaction's coordinator did not {what} within {seconds:g} s")
