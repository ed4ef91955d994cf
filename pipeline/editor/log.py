"""The editor's access to the log: reads deltas, finds undecided feedback, and commits each decision in one transaction.

Guarantees (docs/explanation/consistency.md):

1. A feedback record's delta, outcome, dead letter and the offset after it commit together or not at all. Records that
   change nothing may share a transaction.
2. One writer. Only the elected editor may lead (`pipeline.editor.membership`), and `fence` makes the broker reject
   every earlier writer. Each commit names a generation of the group, so a former leader is rejected even before anyone
   fences it.
3. A new leader begins with the first feedback record after the last outcome, whatever the group's offset says. Kafka
   forgets the offset of a group after a week without members, and a torn transaction may have moved it alone. Each
   outcome and each dead letter names the offset of its feedback in a header.
4. No delta is committed behind a delta that this editor has not read. Each delta must land at the known end of the log;
   otherwise its transaction is not committed.
5. After a KafkaError nothing is lost or done twice, provided that the caller closes the log and begins again (see
   `EditorLog`). It is unknown then whether the last transaction committed. Kafka completes or aborts it before `fence`
   returns. `read_new_deltas` continues after the last delta that it returned, or that is known to be committed.

`is_retriable` tells after which errors point 5 is worthwhile. Missing permissions, and records that Kafka rejects for
good, end the editor.

Not promised: that all topics show a transaction at the same moment. The brokers end it topic by topic. Nothing is
promised on a cluster that loses acknowledged records.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import structlog
from kafka import TopicPartition, errors
from kafka.errors import KafkaError, KafkaTimeoutError
from kafka.structs import OffsetAndMetadata

from gracestream.pipeline.editor.feedback import DecidedFeedback
from gracestream.pipeline.editor.membership import GroupMember, PartitionLostError
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka import (
    DELTAS,
    EDITS,
    FEEDBACK,
    FEEDBACK_DLQ,
    READ_TIMEOUT_SECONDS,
    TopicReader,
    consumer,
    dead_letter_for,
    open_reader_client,
    producer,
)
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.headers import FEEDBACK_OFFSET_HEADER, SOURCE_OFFSET_HEADER, read_offset_header
from gracestream.schemas.messages import encode, peek_id

log = structlog.get_logger()


class UnexpectedWriterError(KafkaError):  # type: ignore[misc]
    """Another writer has appended a record to `deltas` that this editor has not read."""


_RETRIABLE_ERRORS = (
    errors.RetriableError,
    PartitionLostError,
    UnexpectedWriterError,
    errors.CommitFailedError,
    errors.IllegalGenerationError,
    errors.UnknownMemberIdError,
    errors.RebalanceInProgressError,
    errors.ProducerFencedError,
    errors.InvalidProducerEpochError,
    errors.InvalidProducerIdMappingError,
    errors.InvalidTxnStateError,
    errors.OutOfOrderSequenceNumberError,
    errors.UnknownProducerIdError,
    errors.TransactionAbortedError,
    errors.TransactionAbortableError,
    errors.BrokerNotAvailableError,
    errors.UnknownError,
)


def is_retriable(error: KafkaError) -> bool:
    """True if the editor should close the log and begin again: the error may pass, or a new producer avoids it.

    True for timeouts, aborted transactions, a lost partition or producer, and records that must be read first. False
    for missing permissions and records that Kafka rejects.
    """
    if type(error) is KafkaError:  # kafka-python names the cause of a failed producer only in the text
        return "AuthorizationFailed" not in str(error)
    return isinstance(error, _RETRIABLE_ERRORS)


class EditorLog(GroupMember):
    """Everything that an editor reads from Kafka and writes there, except the traffic that it samples.

    Call in this order; each call may raise kafka-python's KafkaError, then call `close` and begin with step 1:

    1. `read_new_deltas`: learn the history.
    2. `join`, then `membership` until it returns `elected`.
    3. `fence`: exclude earlier writers.
    4. `read_new_deltas`: learn the predecessor's last deltas.
    5. `write_lead`: begin a term.
    6. `poll` and `commit`, for each feedback record.

    Args:
        settings: The cluster, the prefix of names, and the timeouts of the group.
        new_consumer: Creates a consumer, with the signature of `pipeline.kafka.consumer`.
        new_producer: Creates a producer, with the signature of `pipeline.kafka.producer`.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        new_consumer: Callable[..., Any] = consumer,
        new_producer: Callable[..., Any] = producer,
    ) -> None:
        super().__init__(settings, new_consumer)
        self._new_producer = new_producer
        self._next_delta = 0
        """The next offset of `deltas` to read."""
        self._delta_end = 0
        """The offset at which the next record of `deltas` lands, unless another writer appends one."""
        self._written_ends: dict[str, int] = {}
        """By topic, the offset after the last record that this editor has committed there."""
        self._committed_offset = 0
        """The offset after the last feedback record with a committed outcome."""
        self._client: Any = None
        """The consumer of all readers. The member's fetches wait 500 ms for records, and would delay their requests."""
        self._writer: Any = None

    def read_new_deltas(self) -> Iterator[tuple[int, bytes]]:
        """Offsets and bytes of the new records of `deltas`, without those that this editor has committed itself.

        Raises:
            KafkaTimeoutError: no record came for `READ_TIMEOUT_SECONDS`.
        """
        reader = self._reader(DELTAS)
        end = reader.end_offset()
        for record in reader.read(self._next_delta, end):
            self._next_delta = record.offset + 1
            yield record.offset, record.value
        self._next_delta, self._delta_end = max(self._next_delta, end), max(self._delta_end, end)

    def fence(self) -> None:
        """Exclude earlier writers.

        On return, all that they have committed is readable, and they can commit nothing more.

        Raises:
            KafkaTimeoutError: a topic that only editors write still holds records of an open transaction.
        """
        # When a transaction begins, the broker may still be closing the previous one and ask for a retry. With the
        # default pause of kafka-python, each edit takes 100 ms longer.
        self._writer = self._new_producer(
            self._settings,
            transactional_id=self._settings.topic("editor"),
            retry_backoff_ms=5,
            max_block_ms=int(1000 * READ_TIMEOUT_SECONDS),
        )
        self._writer.init_transactions()
        self._wait_for_transactions()

    def write_lead(self, delta: bytes) -> int:
        """Commit the `lead` delta, which begins a term; returns the offset of the first undecided feedback record."""
        position = self._first_undecided_offset()
        self._transact(position, [(DELTAS, delta, None, [])])
        self._next_feedback = position
        self._member.seek(self._feedback, position)
        return position

    def lag(self) -> int:
        """The number of feedback records without an outcome, including those behind an open transaction."""
        return max(0, self._reader(FEEDBACK).end_offset() + self.blocked_records() - self._committed_offset)

    def blocked_records(self) -> int:
        """The number of records on `feedback` behind an open transaction, which no consumer may read.

        Records that have just arrived may be counted. Only a number that stays above 0 means that a producer has left a
        transaction open.
        """
        if self._feedback not in self._member.assignment():  # during a rebalance
            return 0
        written = self._member.highwater(self._feedback)
        return max(0, (written or 0) - self._reader(FEEDBACK).end_offset())

    def commit(self, *decided: DecidedFeedback) -> None:
        """Commit the decisions on consecutive records that `poll` returned, in their order, all or none.

        Later records that `poll` has returned may wait for a later commit.

        Raises:
            PartitionLostError: the work on these records took longer than `stall_timeout`.
            UnexpectedWriterError: `read_new_deltas` has records to read first.
            HistoryError: `deltas` has lost records.
        """
        if (elapsed := time.monotonic() - self._last_poll_at) > self._settings.stall_timeout:
            raise PartitionLostError(
                f"feedback at offset {decided[-1].record.offset} took {elapsed:.0f} s, and the group waits for at most"
                f" {self._settings.stall_timeout:g} s; set GRACESTREAM_STALL_TIMEOUT higher where edits take that long"
            )
        records: list[tuple[str, bytes | None, bytes | None, list[tuple[str, bytes]]]] = []
        for one in decided:
            record, result = one.record, one.result
            if result.delta_record is not None:
                records.append((DELTAS, result.delta_record, None, []))
            if result.outcome is not None:
                headers = [(FEEDBACK_OFFSET_HEADER, str(record.offset).encode()), *one.headers]
                records.append((EDITS, encode(result.outcome), result.outcome.feedback_id.encode(), headers))
            if result.dead_letter_reason is not None:
                dead_letter = dead_letter_for(
                    result.dead_letter_reason, record.key, record.value, self._feedback.topic, 0, record.offset
                )
                records.append((FEEDBACK_DLQ, dead_letter.value, dead_letter.key, dead_letter.headers))
        self._transact(decided[-1].record.offset + 1, records)

    def close(self) -> None:
        """Leave the group, so that a standby is elected at once, and abort an open transaction.

        The log can be used again, from `read_new_deltas` on.
        """
        # The producer first, so that nothing is being sent any more when a standby is elected.
        clients, self._writer, self._member, self._client = (self._writer, self._member, self._client), None, None, None
        for client, timeout_option in zip(
            clients, ({"timeout": 5}, {"timeout_ms": 5000}, {"timeout_ms": 5000}), strict=True
        ):
            if client is not None:
                with suppress(KafkaError):
                    client.close(**timeout_option)

    def _first_undecided_offset(self) -> int:
        """The offset of the first undecided feedback record.

        An outcome decides a record. A dead letter decides a record without an id.

        1. Outcomes are committed in the order of feedback. So every record before the last outcome is decided.
        2. The group's offset and the last dead letter may lie further on: records without an id get no outcome.
        3. Neither proves that the readable records in between are decided. A writer without the guarantees of
           `pipeline.kafka.transactions` may have committed an offset alone. So these records are decided now.
        """
        feedback = self._reader(FEEDBACK)
        end = feedback.end_offset()
        decided_end = min(self._offset_after_last(EDITS, FEEDBACK_OFFSET_HEADER), end)
        committed = self._member.committed(self._feedback, timeout_ms=int(1000 * READ_TIMEOUT_SECONDS)) or 0
        passed_end = max(decided_end, committed, min(self._offset_after_last(FEEDBACK_DLQ, SOURCE_OFFSET_HEADER), end))
        for record in feedback.read(decided_end, min(passed_end, end)):
            if peek_id(record.value, "feedback_id") is not None:
                log.warning(
                    "undecided_feedback_found",
                    offset=record.offset,
                    group_offset=committed,
                    consequence="the editor goes back and decides on it now",
                )
                return int(record.offset)
        return passed_end

    def _wait_for_transactions(self) -> None:
        """Wait until no record of a predecessor can still appear behind those of this editor.

        Fencing ends each earlier transaction, but a broker that has just restarted may skip the control record: Kafka's
        TransactionMarkerChannelManager does so while it knows no leader of the partition. The records stay hidden until
        the same producer ends another transaction there. If they are known to be committed by this editor, its next
        commit shows them. Otherwise it is unknown whether they were committed, so appending could produce two
        histories.

        Raises:
            KafkaTimeoutError: hidden records of another writer have stayed for `READ_TIMEOUT_SECONDS`.
        """
        deadline = time.monotonic() + READ_TIMEOUT_SECONDS
        topics = {TopicPartition(self._settings.topic(topic), 0): topic for topic in (DELTAS, EDITS, FEEDBACK_DLQ)}
        readers = {partition: self._reader(topic) for partition, topic in topics.items()}
        uncommitted_client = self._new_consumer(self._settings, isolation_level="read_uncommitted")
        try:
            while hidden := [
                partition.topic
                for partition, end in uncommitted_client.end_offsets(list(topics)).items()
                if end not in (readers[partition].end_offset(), self._written_ends.get(topics[partition]))
            ]:
                if time.monotonic() > deadline:
                    raise KafkaTimeoutError(
                        f"{hidden[0]} holds records of a transaction that has not ended; find it with"
                        " `kafka-transactions.sh find-hanging` and end it with `kafka-transactions.sh abort`; an editor"
                        " decides again on feedback whose outcome is aborted"
                    )
                time.sleep(0.05)
        finally:
            uncommitted_client.close()

    def _transact(
        self, position: int, records: list[tuple[str, bytes | None, bytes | None, list[tuple[str, bytes]]]]
    ) -> None:
        """Commit the records, and `position` as the group's offset in `feedback`, in one transaction.

        Args:
            position: The offset after the last decided feedback record.
            records: Topic (without the prefix), value, key and headers of each record.
        """
        started = time.perf_counter()
        # 1. Send the records and the group's offset.
        self._writer.begin_transaction()
        futures = []
        for topic, value, key, headers in records:
            name = self._settings.topic(topic)
            futures.append((topic, self._writer.send(name, value=value, key=key, headers=headers, partition=0)))
        group_offsets = {self._feedback: OffsetAndMetadata(position, "", -1)}
        # The remembered generation, not the consumer's present one: a consumer that has left the group reports
        # "no generation", which the broker accepts unchecked.
        self._writer.send_offsets_to_transaction(group_offsets, self._group_metadata)
        # 2. Wait for the records' offsets, and check that no other writer has appended a delta.
        offsets = [(topic, future.get(timeout=READ_TIMEOUT_SECONDS).offset) for topic, future in futures]
        deltas = [offset for topic, offset in offsets if topic == DELTAS]
        end = self._check_offsets(deltas)
        # 3. Commit, and only then remember the new ends.
        self._writer.commit_transaction()
        metrics.TRANSACTION_SECONDS.observe(time.perf_counter() - started)
        if deltas:
            self._next_delta, self._delta_end = end, end + 1  # the transaction's control record takes one offset
        self._written_ends |= {topic: offset + 1 for topic, offset in offsets}
        # A successful commit proves that the group still accepts this generation.
        self._committed_offset, self._last_stable_at = position, time.monotonic()

    def _check_offsets(self, offsets: list[int]) -> int:
        """Check that the deltas landed at the end of the log; returns the offset after them.

        Raises:
            HistoryError: the log ends before a record that was read, so it has lost records.
            UnexpectedWriterError: another writer has appended a record.
        """
        end, name = self._delta_end, self._settings.topic(DELTAS)
        if offsets and offsets[0] == self._written_ends.get(DELTAS) == end - 1:
            end -= 1  # the expected control record was not written: see `_wait_for_transactions`
        for offset in offsets:
            if offset < end:
                raise HistoryError(f"{name} ends at offset {offset}, and was read up to {end}: it has lost records")
            if offset > end:
                raise UnexpectedWriterError(f"somebody else has written to {name} at offset {end}")
            end += 1
        return end

    def _reader(self, topic: str) -> TopicReader:
        """A reader of the one partition of a topic; all readers share one client."""
        self._client = self._client or open_reader_client(self._settings, self._new_consumer)
        return TopicReader(self._settings, topic, client=self._client)

    def _offset_after_last(self, topic: str, header: str) -> int:
        """The offset in `feedback` after that of the topic's last record with this header; 0 if no record has it."""
        last = self._reader(topic).find_last(lambda record: read_offset_header(header, record) >= 0)
        return 0 if last is None else read_offset_header(header, last) + 1
