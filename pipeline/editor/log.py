"""The editor's end of the log: its place in the group, the history, feedback in, and each record's results out.

What it guarantees (design, section 5, points 2 and 3):

1. A feedback record's delta, its outcome, its copy in the dead letter queue and the offset after it commit together or
   not at all. Records that change nothing may share a transaction.
2. One writer. Editors share a consumer group, and only the one that is given `feedback` may take the lead. Doing so
   fences every earlier writer at the broker; and each commit names the generation of the group in which the partition
   was given, so that a writer which has lost its place is refused even where nobody has fenced it yet.
3. A busy editor keeps its place: heartbeats come from a thread of the client's own, and while an edit trains the group
   waits for it for `stuck_after` seconds, after which `/live` gives it up as well; `stay` begins that time anew. One
   that is stuck, or silent for `session_timeout`, loses its place to a standby. A standby that joins, or leaves, never
   moves the partition.
4. A new leader begins with the first feedback record after the last outcome, whatever the group's offset says. Kafka
   forgets the offset of a group that was idle for a week, and a torn transaction may have moved it alone. Each outcome
   and each dead letter carries its feedback's offset as a header.
5. After any KafkaError nobody knows what was committed. The log must then be closed, and opened anew by `deltas`, which
   goes on after the last delta that it handed out or saw committed. Taking the lead anew settles what was left open:
   Kafka has completed or aborted it before `fence` returns. Nothing is lost or done twice.
6. No delta is committed behind one that this editor has not read: each must land where the log ended, or nothing of its
   transaction is committed.
7. `is_retriable` says after which errors that is worth a try: where Kafka did not answer, where a transaction was
   aborted, where the place or the writer was lost, and where there is something to be read first. Who may not write, or
   sends what Kafka refuses, is told so and stops.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
from kafka import TopicPartition, errors
from kafka.errors import KafkaError, KafkaTimeoutError
from kafka.structs import OffsetAndMetadata

from gracestream.pipeline.editor.membership import GroupMember, PartitionLostError
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka import (
    DELTAS,
    EDITS,
    FEEDBACK,
    FEEDBACK_DLQ,
    READ_TIMEOUT_SECONDS,
    consumer,
    dead_letter_for,
    producer,
    read_bulk,
)
from gracestream.pipeline.settings import Settings
from gracestream.schemas.headers import FEEDBACK_OFFSET_HEADER, SOURCE_OFFSET_HEADER, read_offset_header
from gracestream.schemas.messages import Outcome, encode, peek_id

log = structlog.get_logger()

FETCH_MAX_WAIT_MS = 5
"""What a fetch waits for where there is nothing to read, when what there is to read is known."""


class UnexpectedWriterError(KafkaError):  # type: ignore[misc]
    """Somebody else has written to `deltas` what this editor has not read yet."""


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
    """Whether to close the log and begin again: Kafka may answer otherwise, or take a new writer."""
    if type(error) is KafkaError:  # kafka-python says in the text of such a one which error it comes of
        return "AuthorizationFailed" not in str(error)
    return isinstance(error, _RETRIABLE_ERRORS)


@dataclass(frozen=True, slots=True)
class FeedbackResult:
    """The records to write for one feedback record; `dead_letter_reason` says why it is dead-lettered.

    `headers` stand on the outcome, beside the feedback's offset.
    """

    offset: int
    outcome: Outcome | None
    delta: bytes | None = None
    dead_letter_reason: str | None = None
    key: bytes | None = None
    value: bytes | None = field(default=None, repr=False)
    headers: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes in memory and in a transaction, but for the outcome, which is short, and the delta."""
        headers = sum(len(name) + len(value) for name, value in self.headers)
        return len(self.key or b"") + len(self.value or b"") + headers


class EditorLog(GroupMember):
    """Everything that an editor reads from Kafka and writes there, but for the traffic that it watches.

    In this order: `read_new_deltas` to learn the history, `join`, `membership` until it is chosen, `fence`,
    `read_new_deltas` for what the predecessor wrote last, `write_lead`; then `poll` and `commit`. Each may raise
    kafka-python's KafkaError; then `close`, and begin again.

    Args:
        settings: Which cluster, and the prefix of names.
        new_consumer: Makes a consumer, as `pipeline.kafka.clients.consumer` does.
        new_producer: Makes a producer, likewise.
    """

    def __init__(
        self,
        settings: Settings,
        new_consumer: Callable[..., Any] = consumer,
        new_producer: Callable[..., Any] = producer,
    ) -> None:
        super().__init__(settings, new_consumer)
        self._new_producer = new_producer
        self._deltas = TopicPartition(settings.topic(DELTAS), 0)
        self._next_delta = 0
        self._delta_end = 0
        """Where the next record of `deltas` lands, unless somebody else writes one."""
        self._written_ends: dict[str, int] = {}
        """By topic: after the last record that this editor has committed there."""
        self._committed_offset = 0
        """After the last one whose outcome is committed."""
        self._reader: Any = None
        self._writer: Any = None

    def read_new_deltas(self) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of the new records of `deltas`, except those that this editor committed itself."""
        end = self._end_offset(DELTAS)
        for records, following in read_bulk(self._settings, self._deltas, self._next_delta, end):
            for record in records:
                self._next_delta = record.offset + 1
                yield record.offset, record.value
            self._next_delta = following
        for record in self._read(DELTAS, self._next_delta, end):
            self._next_delta = record.offset + 1
            yield record.offset, record.value
        self._next_delta, self._delta_end = max(self._next_delta, end), max(self._delta_end, end)

    def fence(self) -> None:
        """Shut earlier writers out: when this returns, all that they ever committed can be read, and no more comes.

        Raises:
            KafkaTimeoutError: a topic that only editors write still holds records of an open transaction.
        """
        # Between two transactions the broker may still be closing the last; the default pause costs 100 ms an edit.
        self._writer = self._new_producer(
            self._settings,
            transactional_id=self._settings.topic("editor"),
            retry_backoff_ms=5,
            max_block_ms=int(1000 * READ_TIMEOUT_SECONDS),
        )
        self._writer.init_transactions()
        self._wait_for_transactions()

    def write_lead(self, delta: bytes) -> int:
        """Write the record that takes a term; the offset of the first feedback record that is not decided yet."""
        position = self._first_undecided_offset()
        self._transact(position, [(DELTAS, delta, None, [])])
        self._next_feedback = position
        self._member.seek(self._feedback, position)
        return position

    def lag(self) -> int:
        """Feedback records that have no outcome yet, those behind an open transaction included."""
        return max(0, self._end_offset(FEEDBACK) + self.blocked_records() - self._committed_offset)

    def blocked_records(self) -> int:
        """Records that lie behind a transaction on `feedback` which is open, so that nobody may read them.

        Records that came a moment ago may count: only what stays is a transaction that somebody has left open.
        """
        if self._feedback not in self._member.assignment():  # amid a rebalance
            return 0
        written = self._member.highwater(self._feedback)
        return max(0, (written or 0) - self._end_offset(FEEDBACK))

    def commit(self, *results: FeedbackResult) -> None:
        """Write it all, or nothing; the results of records that `poll` handed out, in order and none left out.

        Records that it has handed out after them may wait for a later commit.

        Raises:
            PartitionLostError: the work on them took too long.
            UnexpectedWriterError: there is something on `read_new_deltas` to be read first.
            HistoryError: `read_new_deltas` has lost records.
        """
        if (taken := time.monotonic() - self._last_poll_at) > self._settings.stuck_after:
            raise PartitionLostError(
                f"feedback at offset {results[-1].offset} took {taken:.0f} s, and the group does not wait for more than"
                f" {self._settings.stuck_after:g}; set GRACESTREAM_STUCK_AFTER higher where edits take that long"
            )
        records: list[tuple[str, bytes | None, bytes | None, list[tuple[str, bytes]]]] = []
        for result in results:
            if result.delta is not None:
                records.append((DELTAS, result.delta, None, []))
            if result.outcome is not None:
                headers = [(FEEDBACK_OFFSET_HEADER, str(result.offset).encode()), *result.headers]
                records.append((EDITS, encode(result.outcome), result.outcome.feedback_id.encode(), headers))
            if result.dead_letter_reason is not None:
                letter = dead_letter_for(
                    result.dead_letter_reason, result.key, result.value, self._feedback.topic, 0, result.offset
                )
                records.append((FEEDBACK_DLQ, letter.value, letter.key, letter.headers))
        self._transact(results[-1].offset + 1, records)

    def close(self) -> None:
        """Leave the group, so that a standby need not wait; a transaction that is open is aborted."""
        clients, self._writer, self._member, self._reader = (self._writer, self._member, self._reader), None, None, None
        for client, limit in zip(clients, ({"timeout": 5}, {"timeout_ms": 5000}, {"timeout_ms": 5000}), strict=True):
            if client is not None:
                with suppress(KafkaError):
                    client.close(**limit)

    def _first_undecided_offset(self) -> int:
        """The offset of the first feedback record without an outcome; for records without an id, a dead letter counts.

        1. Outcomes are committed in the order of feedback. So every record before the last outcome is decided.
        2. The group's offset and the last dead letter may lie further on: records without an id get no outcome.
        3. Neither proves that the readable records in between are decided. A writer without the guarantees of
           `pipeline.kafka.transactions` may have committed an offset alone. So these records are decided now.
        """
        end = self._end_offset(FEEDBACK)
        decided = min(self._offset_after_last(EDITS, FEEDBACK_OFFSET_HEADER), end)
        committed = self._member.committed(self._feedback, timeout_ms=int(1000 * READ_TIMEOUT_SECONDS)) or 0
        passed = max(decided, committed, min(self._offset_after_last(FEEDBACK_DLQ, SOURCE_OFFSET_HEADER), end))
        for record in self._read(FEEDBACK, decided, min(passed, end)):
            if peek_id(record.value, "feedback_id") is not None:
                log.warning(
                    "undecided_feedback_found",
                    offset=record.offset,
                    group_offset=committed,
                    consequence="the editor goes back and decides on it now",
                )
                return int(record.offset)
        return passed

    def _wait_for_transactions(self) -> None:
        """Wait until no record of a predecessor can still appear behind those of this editor.

        Fencing ends each earlier transaction, but a broker that has just restarted may skip the control record: Kafka's
        TransactionMarkerChannelManager does so while it knows no leader of the partition. The records stay hidden until
        a transaction of the same producer ends there. If they are known to be committed by this editor, its next commit
        shows them. Otherwise nobody knows what they were to become, so writing on would risk two histories.
        """
        topics, deadline = (DELTAS, EDITS, FEEDBACK_DLQ), time.monotonic() + READ_TIMEOUT_SECONDS
        partitions = {TopicPartition(self._settings.topic(topic), 0): topic for topic in topics}
        probe = self._new_consumer(self._settings, isolation_level="read_uncommitted")
        try:
            while hidden := [
                partition.topic
                for partition, end in probe.end_offsets(list(partitions)).items()
                if end not in (self._end_offset(partitions[partition]), self._written_ends.get(partitions[partition]))
            ]:
                if time.monotonic() > deadline:
                    raise KafkaTimeoutError(
                        f"{hidden[0]} holds records of a transaction that has not ended; find it with"
                        " `kafka-transactions.sh find-hanging` and end it with `kafka-transactions.sh abort`; an editor"
                        " decides again on feedback that loses its outcome so"
                    )
                time.sleep(0.05)
        finally:
            probe.close()

    def _transact(
        self, position: int, records: list[tuple[str, bytes | None, bytes | None, list[tuple[str, bytes]]]]
    ) -> None:
        """One transaction: the records, and `position` as the group's offset in `feedback`."""
        self._writer.begin_transaction()
        sent = []
        for topic, value, key, headers in records:
            name = self._settings.topic(topic)
            sent.append((topic, self._writer.send(name, value=value, key=key, headers=headers, partition=0)))
        done = {self._feedback: OffsetAndMetadata(position, "", -1)}
        # Not what the consumer says now: one that fell out of the group says "no generation", which passes unchecked.
        self._writer.send_offsets_to_transaction(done, self._group_metadata)
        offsets = [(topic, future.get(timeout=READ_TIMEOUT_SECONDS).offset) for topic, future in sent]
        deltas = [offset for topic, offset in offsets if topic == DELTAS]
        end = self._check_offsets(deltas)
        self._writer.commit_transaction()
        if deltas:
            self._next_delta, self._delta_end = end, end + 1  # a control record ends the transaction
        self._written_ends |= {topic: offset + 1 for topic, offset in offsets}
        self._committed_offset, self._last_stable_at = (
            position,
            time.monotonic(),
        )  # the group has taken it of this generation

    def _check_offsets(self, offsets: list[int]) -> int:
        """See that deltas landed where the log ended; the offset after them."""
        end, name = self._delta_end, self._settings.topic(DELTAS)
        if offsets and offsets[0] == self._written_ends.get(DELTAS) == end - 1:
            end -= 1  # the control record that was expected there did not come: see `_await_decided`
        for offset in offsets:
            if offset < end:
                raise HistoryError(f"{name} ends at offset {offset}, and was read up to {end}: it has lost records")
            if offset > end:
                raise UnexpectedWriterError(f"somebody else has written to {name} at offset {end}")
            end += 1
        return end

    def _read(self, topic: str, start: int, end: int) -> Iterator[Any]:
        """Every committed record of a topic of one partition, from `start` to `end`, where it ended.

        Control records of transactions lie between offsets, so the end is where the reader's position reaches it.
        """
        partition = TopicPartition(self._settings.topic(topic), 0)
        if self._reader.assignment() != {partition}:
            self._reader.assign([partition])
        self._reader.seek(partition, start)
        position, heard = start, time.monotonic()
        while position < end:
            for records in self._reader.poll(timeout_ms=20).values():
                yield from (record for record in records if record.offset < end)  # more may have come meanwhile
            if (reached := self._reader.position(partition)) > position:
                position, heard = reached, time.monotonic()
            elif time.monotonic() > heard + READ_TIMEOUT_SECONDS:
                raise KafkaTimeoutError(f"{partition.topic} could not be read on from offset {position}")

    def _end_offset(self, topic: str) -> int:
        """The offset before which everything is decided: committed, or aborted and never seen.

        Kafka answers one request of a connection after the other, so a fetch that waits holds up this question: the
        member's does so for half a second, the reader's only for a moment.
        """
        self._reader = self._reader or self._new_consumer(self._settings, fetch_max_wait_ms=FETCH_MAX_WAIT_MS)
        partition = TopicPartition(self._settings.topic(topic), 0)
        end: int = self._reader.end_offsets([partition])[partition]
        return end

    def _offset_after_last(self, topic: str, header: str) -> int:
        """The offset in `feedback` after the last one that a header of this topic names; 0 where none does.

        Walks back from the end, since transactions leave control records between the others.
        """
        end = self._end_offset(topic)
        start, window = end, 16
        while start > 0:
            start = max(0, start - window)
            last = max((read_offset_header(header, record) for record in self._read(topic, start, end)), default=-1)
            if last >= 0:
                return last + 1
            window *= 8
        return 0
