"""A transactional producer: each transaction has its own epoch, and each call returns within a time limit.

Why kafka-python alone is not enough: after a lost connection it sends EndTxn again. The first copy may reach the broker
later, within the next transaction. It then ends that transaction when only a part of it has arrived. Kafka cannot tell
the two ends apart while both transactions have the same producer epoch (KIP-890, KAFKA-14402).

Guarantees:

1. No copy of a request takes effect in a later transaction, on clusters whose `transaction.version` is 2 or more
   (Kafka 4 by default). EndTxn v5 raises the epoch, and the next transaction uses the epoch of its response.
2. On older clusters (Kafka 2.5 or newer), no copy of EndTxn takes effect in a later transaction. After an EndTxn that
   may have been sent more than once, the producer raises its epoch (KIP-360) before the next transaction begins.
3. A fenced producer stays fenced. kafka-python would request a fresh epoch instead, and so fence its successor.
4. Calls that wait for a coordinator raise KafkaTimeoutError after `max_block_ms`. In kafka-python only
   `init_transactions` does so.

The faults are in kafka-python 3.0.12, the newest release in November 2026; no release ends them yet. For the first,
look for EndTxn v5 there: kafka-python sends version 3 at most. No issue of kafka-python is known for them.

Not promised: on older clusters, a late copy of TxnOffsetCommit may set the offset of the group back. The editor
therefore also uses the outcomes on `edits` to find its position (docs/explanation/consistency.md).
"""

from typing import Any

from kafka import KafkaProducer
from kafka.errors import KafkaTimeoutError, NoError, ProducerFencedError, for_code
from kafka.producer.transaction_manager import (
    EndTxnHandler,
    InitProducerIdHandler,
    ProducerIdAndEpoch,
    TransactionalRequestResult,
    TransactionManager,
    TransactionState,
    TxnRequestHandler,
)
from kafka.protocol.producer import EndTxnRequest

END_TXN_WITH_EPOCH = 5
"""The first version of EndTxn whose response carries the epoch of the next transaction."""


class TransactionalProducer(KafkaProducer):  # type: ignore[misc]
    """A KafkaProducer with the guarantees of this module.

    Its transactional calls raise KafkaTimeoutError after `max_block_ms`. The producer must then be closed.

    Args:
        end_raises_epoch: Whether the finalised `transaction.version` of the cluster is at least 2.
        options: Options of KafkaProducer, with a `transactional_id`.
    """

    def __init__(self, *, end_raises_epoch: bool, **options: Any) -> None:
        super().__init__(**options)
        # KafkaProducer has no option for this class. Its I/O thread already refers to the object, so the object stays
        # and its class changes. No transaction has begun yet.
        self._transaction_manager.__class__ = EpochTransactionManager
        self._transaction_manager.end_raises_epoch = end_raises_epoch

    def send_offsets_to_transaction(self, offsets: Any, group_metadata: Any) -> None:
        """Add the offsets of a group to the transaction.

        Raises:
            KafkaTimeoutError: no answer within `max_block_ms`.
        """
        self._wait(self._transaction_manager.send_offsets_to_transaction(offsets, group_metadata), "take offsets")

    def commit_transaction(self) -> None:
        """Commit the transaction, then raise the epoch if this is necessary.

        Raises:
            KafkaTimeoutError: no answer within `max_block_ms`; the transaction may or may not have been committed.
        """
        self._wait(self._transaction_manager.begin_commit(), "commit")
        self._raise_epoch_if_needed()

    def abort_transaction(self) -> None:
        """Abort the transaction, then raise the epoch if this is necessary.

        Raises:
            KafkaTimeoutError: no answer within `max_block_ms`.
        """
        self._wait(self._transaction_manager.begin_abort(), "abort")
        self._raise_epoch_if_needed()

    def _raise_epoch_if_needed(self) -> None:
        if self._transaction_manager.must_raise_epoch:
            self._wait(self._transaction_manager.begin_epoch_raise(), "raise the epoch")

    def _wait(self, result: TransactionalRequestResult, action: str) -> None:
        self._sender.wakeup()
        if not result.wait(timeout_ms=self.config["max_block_ms"]):
            seconds = self.config["max_block_ms"] / 1000
            raise KafkaTimeoutError(f"the transaction's coordinator did not {action} within {seconds:g} s")


class EpochTransactionManager(TransactionManager):  # type: ignore[misc]
    """A TransactionManager that gives each transaction an epoch that no earlier request carries."""

    end_raises_epoch = False
    """Whether EndTxn raises the epoch (EndTxn v5)."""
    end_was_resent = False
    """Whether EndTxn of the current transaction may have been sent more than once."""

    @property
    def must_raise_epoch(self) -> bool:
        """Whether a late copy of the last EndTxn could end the next transaction, so that the epoch must change."""
        return self.end_was_resent and not self.end_raises_epoch

    def begin_transaction(self) -> None:
        """Begin a transaction, whose EndTxn was not sent yet."""
        self.end_was_resent = False
        super().begin_transaction()

    def use_epoch(self, producer_id: int, epoch: int) -> None:
        """Continue with this epoch. The sequence numbers of each partition start again at 0, as in every epoch."""
        self.set_producer_id_and_epoch(ProducerIdAndEpoch(producer_id, epoch))
        self._sequence_numbers.clear()
        self._last_acked_offset.clear()

    def begin_epoch_raise(self) -> TransactionalRequestResult:
        """Request the next epoch from the coordinator (KIP-360). No transaction may be open."""
        with self._lock:
            self._transition_to(TransactionState.BUMPING_PRODUCER_EPOCH)
            self._sequence_numbers.clear()
            self._last_acked_offset.clear()
            handler = InitProducerIdHandler(self, self.transaction_timeout_ms, is_epoch_bump=True)
            self._enqueue_request(handler)
            return handler.result

    def _begin_completing_transaction(self, committed: bool) -> TransactionalRequestResult:
        if self._new_partitions_in_transaction:
            self._enqueue_request(self._add_partitions_to_transaction_handler())
        handler = EpochEndTxnHandler(self, committed)
        self._enqueue_request(handler)
        return handler.result

    def _enqueue_request(self, request_handler: TxnRequestHandler) -> None:
        # A retry shows only that the first attempt had no usable answer; the first copy may still be on its way.
        if isinstance(request_handler, EndTxnHandler) and request_handler.is_retry:
            self.end_was_resent = True
        super()._enqueue_request(request_handler)

    def _restart_epoch_bump_without_producer_id(
        self, transaction_timeout_ms: int, result: TransactionalRequestResult
    ) -> None:
        """Fail as fenced: another producer has taken over. TransactionManager would fence it with a fresh epoch."""
        del transaction_timeout_ms
        error = ProducerFencedError()
        self.transition_to_fatal_error(error)
        result.done(error=error)


class EpochEndTxnHandler(EndTxnHandler):  # type: ignore[misc]
    """Ends a transaction and takes the next epoch from the response, if the cluster sends one."""

    def __init__(self, manager: EpochTransactionManager, committed: bool) -> None:
        super().__init__(manager, committed)
        if manager.end_raises_epoch:
            self.request = EndTxnRequest(
                transactional_id=self.transactional_id,
                producer_id=self.producer_id,
                producer_epoch=self.producer_epoch,
                committed=committed,
                min_version=END_TXN_WITH_EPOCH,
                max_version=END_TXN_WITH_EPOCH,
            )

    def handle_response(self, response: Any) -> None:
        """Take the epoch of the response, then complete the transaction."""
        # 1. Take the epoch. EndTxn is sent only after every batch was acknowledged, so no record is on its way with the
        #    old epoch.
        # 2. Complete the transaction. The caller wakes up here and may begin the next transaction, so step 1 is first.
        if self.transaction_manager.end_raises_epoch and for_code(response.error_code) is NoError:
            self.transaction_manager.use_epoch(response.producer_id, response.producer_epoch)
        super().handle_response(response)
