"""A test double of Kafka, in memory: topics of one partition, transactions, isolation, fencing and groups.

`tests/contract` tests that it behaves like the real Kafka.
Nothing here waits, and nothing happens by itself: a test ends a session. Each operation calls its client's `step`
before and after. There a test may let another process run, fail the operation, or end the process.

A test also controls the network between a transactional producer and the broker (`MemoryKafka.network`). A request may
arrive twice, or after the client has given up. Such late requests wait in `MemoryKafka.late`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from kafka import TopicPartition
from kafka.errors import (
    CommitFailedError,
    IllegalStateError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
    UnknownTopicOrPartitionError,
)
from kafka.structs import ConsumerGroupMetadata, MemberState, OffsetAndMetadata

from gracestream.pipeline.settings import Settings

T = TypeVar("T")
Headers = Sequence[tuple[str, bytes]]
Step = Callable[[str], None]
"""Called as `step("commit")` before an operation and `step("commit done")` after it."""


Epochs = Literal["per end", "after a resent end", "per producer"]
"""The lifetime of a producer's epoch.

per end: EndTxn raises it, as `transaction.version` 2 does. after a resent end: the client raises it, as
`pipeline.kafka.transactions` does on older clusters. per producer: it is never raised, as with kafka-python alone.
"""

Passage = Literal["arrives", "arrives later", "arrives twice", "arrives too late"]
"""The effect of the network on a request of a transactional producer.

arrives later: a record waits until its future is asked for, or a later record of its topic arrives.
arrives twice: a copy stays in transit.
arrives too late: the client gives up with a KafkaTimeoutError, and the request stays in transit.
"""


def undisturbed(operation: str) -> Passage:
    """A network that delivers each request once and in order."""
    del operation
    return "arrives"


def no_step(operation: str) -> None:
    """A step without any effect."""
    del operation


@dataclass(frozen=True, slots=True)
class Stored:
    """A record, or the control record that ends a transaction. `state`: the state of its transaction."""

    topic: str
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    state: Literal["plain", "open", "committed", "aborted", "control"]
    partition: int = 0
    timestamp: int = 0


@dataclass(slots=True)
class Writer:
    """The broker's state of one transactional id.

    `partitions`, `written` and `offsets` belong to the open transaction, `appended` to the epoch: the offsets of its
    records of each topic, by sequence number. `ended`: epoch and state of the last end, unless another epoch began.
    """

    epoch: int = -1
    partitions: set[str] = field(default_factory=set)
    written: list[tuple[str, int]] = field(default_factory=list)
    offsets: dict[tuple[str, TopicPartition], int] = field(default_factory=dict)
    appended: dict[str, list[int]] = field(default_factory=dict)
    ended: tuple[int, str] | None = None

    @property
    def is_open(self) -> bool:
        """True while a transaction is open."""
        return bool(self.partitions or self.offsets)

    def begin_epoch(self) -> None:
        """Begin the next epoch. Its sequence numbers start at 0."""
        self.epoch += 1
        self.appended, self.ended = {}, None


@dataclass(slots=True)
class Group:
    """A consumer group. `joined`: the members in the present rebalance; None while there is none."""

    generation: int = 0
    members: list[str] = field(default_factory=list)
    owner: str | None = None
    joined: set[str] | None = None
    offsets: dict[TopicPartition, int] = field(default_factory=dict)


class MemoryKafka:
    """The broker, and the network in front of it."""

    def __init__(self, topics: Sequence[str], epochs: Epochs = "per end") -> None:
        self.epochs = epochs
        self.network: Callable[[str], Passage] = undisturbed
        """Returns the network's effect on the request of an operation."""
        self.late: list[tuple[int, Callable[[], object]]] = []
        """Requests in transit, with the number of transactions that had ended when each was sent."""
        self.torn = 0
        """The number of transactions that the late EndTxn of an earlier one ended."""
        self.skips_markers = False
        """True if ends of transactions write no control records, as on a broker that has just restarted."""
        self.ended = 0
        """The number of transactions that have ended."""
        self.topics: dict[str, list[Stored]] = {topic: [] for topic in topics}
        self.groups: dict[str, Group] = {}
        self.unplaced: list[str] = []
        """Members whose offset a transaction committed although they had no partition, or had lost it."""
        self._writers: dict[str, Writer] = {}
        self._member_ids = 0

    def consumer(self, settings: Settings, step: Step = no_step, **options: Any) -> "MemoryConsumer":
        """A consumer that reads committed records only, as `pipeline.kafka.clients.consumer` makes them."""
        del settings
        return MemoryConsumer(self, step, options)

    def producer(self, settings: Settings, step: Step = no_step, **options: Any) -> "MemoryProducer":
        """A producer, as `pipeline.kafka.clients.producer` makes them."""
        del settings
        return MemoryProducer(self, step, options.get("transactional_id"))

    def append(
        self, topic: str, value: bytes | None, key: bytes | None = None, headers: Headers = (), state: Any = "plain"
    ) -> int:
        """Append one record to a topic; returns its offset."""
        records = self._records(topic)
        records.append(Stored(topic, len(records), key, value, headers, state))
        return len(records) - 1

    def end(self, topic: str) -> int:
        """The last stable offset: the first offset of an open transaction, else the end."""
        records = self._records(topic)
        return next((record.offset for record in records if record.state == "open"), len(records))

    def committed(self, topic: str, start: int = 0) -> Iterator[Stored]:
        """The committed records of a topic."""
        for record in self._records(topic)[start : self.end(topic)]:
            if record.state in ("plain", "committed"):
                yield record

    def deliver(self, number: int) -> None:
        """Deliver a late request. No client waits for the response."""
        ended_before, request = self.late.pop(number)
        ended = self.ended
        with suppress(KafkaError):
            request()
        is_end = getattr(request, "func", None) == self.end_transaction
        self.torn += is_end and self.ended > ended > ended_before

    # Transactions: each method is one request, with the producer's id and epoch as `who`.

    def fence(self, transactional_id: str) -> int:
        """InitProducerId: abort the open transaction of this id, and begin its next epoch."""
        writer = self._writers.setdefault(transactional_id, Writer())
        self._end_transaction(writer, "aborted")
        writer.begin_epoch()
        return writer.epoch

    def raise_epoch(self, who: tuple[str, int]) -> int:
        """InitProducerId with an epoch: begin the next. A copy changes nothing, but fences a producer since then."""
        writer = self._writers[who[0]]
        if who[1] == writer.epoch:
            return self.fence(who[0])
        if who[1] != writer.epoch - 1:
            raise ProducerFencedError
        if writer.is_open:
            self.fence(who[0])
            raise ProducerFencedError
        return writer.epoch

    def add_partition(self, who: tuple[str, int], topic: str) -> None:
        """AddPartitionsToTxn."""
        self._writer(who).partitions.add(topic)

    def append_in_transaction(
        self,
        who: tuple[str, int],
        topic: str,
        sequence: int,
        value: bytes | None,
        key: bytes | None,
        headers: Headers,
    ) -> int:
        """Produce: append one uncommitted record; returns its offset. A copy of an existing record changes nothing."""
        writer = self._writers[who[0]]
        if who[1] != writer.epoch:
            raise InvalidProducerEpochError
        appended = writer.appended.setdefault(topic, [])
        if sequence < len(appended):
            return appended[sequence]
        if topic not in writer.partitions:
            raise InvalidTxnStateError
        offset = self.append(topic, value, key, headers, "open")
        writer.written.append((topic, offset))
        appended.append(offset)
        return offset

    def offsets_in_transaction(
        self, who: tuple[str, int], offsets: dict[TopicPartition, OffsetAndMetadata], member: ConsumerGroupMetadata
    ) -> None:
        """TxnOffsetCommit: store a group's offsets. A member without a generation is not checked."""
        writer = self._writer(who)
        group = self.group(member.group_id)
        if member.generation_id >= 0 or member.member_id:
            if member.member_id not in group.members:
                raise CommitFailedError("UnknownMemberIdError")
            if member.generation_id != group.generation:
                raise CommitFailedError("IllegalGenerationError")
        if member.member_id != group.owner:
            self.unplaced.append(member.member_id)
        for partition, offset in offsets.items():
            writer.offsets[member.group_id, partition] = offset.offset

    def end_transaction(self, who: tuple[str, int], state: Literal["committed", "aborted"]) -> int:
        """EndTxn: returns the epoch of the next transaction. A copy of the last end changes nothing."""
        if (who[1], state) == self._writers[who[0]].ended and not self._writers[who[0]].is_open:
            return self._writers[who[0]].epoch
        writer = self._writer(who)
        self._end_transaction(writer, state)
        if self.epochs == "per end":
            writer.begin_epoch()
        writer.ended = who[1], state
        return writer.epoch

    def _end_transaction(self, writer: Writer, state: Literal["committed", "aborted"]) -> None:
        if not writer.is_open:
            return  # a broker writes no control records then, either
        self.ended += 1
        if not self.skips_markers:
            self._write_markers(writer, state)
        if state == "committed":
            for (group, partition), offset in writer.offsets.items():
                self.group(group).offsets[partition] = offset
        writer.partitions, writer.offsets = set(), {}

    def _write_markers(self, writer: Writer, state: Literal["committed", "aborted"]) -> None:
        """Write the control records. They also end a transaction whose end had written none."""
        for topic, offset in writer.written:
            self.topics[topic][offset] = replace(self.topics[topic][offset], state=state)
        for topic in dict.fromkeys(topic for topic, _ in writer.written):
            self.append(topic, None, state="control")
        writer.written = []

    def _writer(self, who: tuple[str, int]) -> Writer:
        transactional_id, epoch = who
        writer = self._writers[transactional_id]
        if epoch != writer.epoch:
            raise ProducerFencedError
        return writer

    def _records(self, topic: str) -> list[Stored]:
        if topic not in self.topics:
            raise UnknownTopicOrPartitionError(topic)
        return self.topics[topic]

    # Groups.

    def group(self, name: str) -> Group:
        """The state of a group."""
        return self.groups.setdefault(name, Group())

    def join(self, name: str) -> str:
        """Add a member, which starts a rebalance; returns its id."""
        group = self.group(name)
        self._member_ids += 1
        group.members.append(f"member-{self._member_ids}")
        group.joined = set()
        return group.members[-1]

    def rejoin(self, name: str, member_id: str) -> bool:
        """Join the present rebalance, if any; True if there is none afterwards.

        A rebalance ends once every member has joined. The member with the partition keeps it.
        """
        group = self.group(name)
        if group.joined is not None:
            group.joined.add(member_id)
            if group.joined == set(group.members):
                group.generation += 1
                group.owner = group.owner or group.members[0]
                group.joined = None
        return group.joined is None

    def remove(self, name: str, member_id: str) -> None:
        """Remove a member, as if it left or its session ended; the others rebalance."""
        group = self.group(name)
        if member_id in group.members:
            group.members.remove(member_id)
            group.owner = None if group.owner == member_id else group.owner
            group.joined = set()

    def forget(self, name: str) -> None:
        """Delete a group with its members and offsets."""
        self.groups.pop(name, None)


class MemoryConsumer:
    """The part of KafkaConsumer that the editor uses."""

    def __init__(self, kafka: MemoryKafka, step: Step, options: dict[str, Any]) -> None:
        self._kafka, self._step = kafka, step
        self._group: str = options.get("group_id", "")
        self._max_records: int = options.get("max_poll_records", 500)
        self._sees_all = options.get("isolation_level") == "read_uncommitted"
        self._topics: list[str] | None = None
        self._listener: Any = None
        self._generation, self.member_id = -1, ""
        self._positions: dict[TopicPartition, int] = {}
        self._closed = False

    def partitions_for_topic(self, topic: str) -> set[int]:
        return {0} if topic in self._kafka.topics else set()

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        self._positions = dict.fromkeys(partitions, 0)

    def subscribe(self, topics: Sequence[str], listener: Any = None) -> None:
        self._topics, self._listener = list(topics), listener

    def assignment(self) -> set[TopicPartition]:
        return set(self._positions)

    def group_metadata(self) -> ConsumerGroupMetadata:
        """The member's generation. A member learns the end of its session by a heartbeat, here before each call."""
        if self.member_id not in self._kafka.group(self._group).members:
            return ConsumerGroupMetadata(self._group)
        return ConsumerGroupMetadata(self._group, self._generation, self.member_id, None, MemberState.STABLE)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        if partition not in self._positions:
            raise IllegalStateError("Partition is not assigned")
        self._positions[partition] = offset

    def position(self, partition: TopicPartition, timeout_ms: float | None = None) -> int:
        del timeout_ms
        return self._positions[partition]

    def highwater(self, partition: TopicPartition) -> int:
        return len(self._kafka.topics[partition.topic])

    def committed(self, partition: TopicPartition, timeout_ms: float | None = None) -> int | None:
        del timeout_ms
        self._step("committed")
        return self._kafka.group(self._group).offsets.get(partition)

    def beginning_offsets(
        self, partitions: Sequence[TopicPartition], timeout_ms: float | None = None
    ) -> dict[TopicPartition, int]:
        del timeout_ms
        return dict.fromkeys(partitions, 0)

    def end_offsets(
        self, partitions: Sequence[TopicPartition], timeout_ms: float | None = None
    ) -> dict[TopicPartition, int]:
        del timeout_ms
        self._step("end offsets")
        if self._sees_all:
            return {partition: self.highwater(partition) for partition in partitions}
        return {partition: self._kafka.end(partition.topic) for partition in partitions}

    def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> dict[TopicPartition, list[Stored]]:
        del timeout_ms
        self._step("poll")
        if self._topics is not None and not self._update_assignment():
            return {}
        found: dict[TopicPartition, list[Stored]] = {}
        room = max_records or self._max_records
        for partition, position in self._positions.items():
            records = list(self._kafka.committed(partition.topic, position))
            if records[:room]:
                found[partition] = records[:room]
            # Past the last record: control records and aborted records are skipped.
            end = self._kafka.end(partition.topic)
            self._positions[partition] = end if len(records) <= room else records[room].offset
            room -= len(records[:room])
        return found

    def close(self, timeout_ms: float | None = None) -> None:
        del timeout_ms
        if not self._closed and self._group:
            self._step("leave")
            self._kafka.remove(self._group, self.member_id)
        self._closed = True

    def _update_assignment(self) -> bool:
        """Join, rejoin and take the assignment; True if there is no rebalance."""
        assert self._topics is not None
        if self.member_id and self.member_id not in self._kafka.group(self._group).members:
            lost, self._positions = set(self._positions), {}
            self._generation, self.member_id = -1, ""
            if lost:
                self._notify("on_partitions_lost", lost)
        group = self._kafka.group(self._group)
        if not self.member_id:
            self.member_id = self._kafka.join(self._group)
        if group.joined is not None and self.member_id not in group.joined:
            self._notify("on_partitions_revoked", set(self._positions))
        if not self._kafka.rejoin(self._group, self.member_id):
            return False
        if self._generation != group.generation:
            self._generation = group.generation
            mine = [TopicPartition(self._topics[0], 0)] if group.owner == self.member_id else []
            self._positions = {partition: group.offsets.get(partition, 0) for partition in mine}
            self._notify("on_partitions_assigned", set(mine))
        return True

    def _notify(self, event: str, partitions: set[TopicPartition]) -> None:
        try:
            getattr(self._listener, event)(partitions)
        except Exception as error:
            raise KafkaError("User rebalance callback throws an error") from error


class Sent:
    """The future of a record, and its metadata. `earlier`: the previous record of its topic, which arrives first."""

    def __init__(self, write: Callable[[], int], earlier: "Sent | None" = None) -> None:
        self._write, self._earlier = write, earlier
        self._offset: int | None = None

    @property
    def offset(self) -> int:
        """The offset of the record; writes the record if it is still in transit."""
        if self._offset is None:
            if self._earlier is not None:
                self._earlier.get()
            self._offset = self._write()
        return self._offset

    def get(self, timeout: float | None = None) -> "Sent":
        """Write the record if needed; returns its metadata."""
        del timeout
        self.offset  # noqa: B018  (which writes it)
        return self


class MemoryProducer:
    """The part of KafkaProducer that the editor uses. Errors are raised by the call or by a record's future."""

    def __init__(self, kafka: MemoryKafka, step: Step, transactional_id: str | None) -> None:
        self._kafka, self._step = kafka, step
        self._id, self._epoch = transactional_id, -1
        self._state: Literal["new", "ready", "in a transaction", "failed"] = "new"
        self._sent: dict[str, Sent] = {}
        """The last record of each topic in this transaction."""
        self._sequences: dict[str, int] = {}
        """The next sequence number of each topic in this epoch."""
        self._end_was_resent = False

    @property
    def _who(self) -> tuple[str, int]:
        assert self._id is not None
        return self._id, self._epoch

    def init_transactions(self) -> None:
        with self._operation("fence", "new", "ready"):
            assert self._id is not None
            self._use_epoch(self._request("fence", partial(self._kafka.fence, self._id)))

    def begin_transaction(self) -> None:
        with self._operation("begin", "ready", "in a transaction"):
            # The broker knows a transaction from its first partition on.
            self._sent, self._end_was_resent = {}, False

    def send(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> Sent:
        del partition
        if self._id is None:
            return Sent(partial(self._kafka.append, topic, value, key, headers)).get()
        with self._operation("send", "in a transaction", "in a transaction"):
            if topic not in self._sent:
                self._request("add partition", partial(self._kafka.add_partition, self._who, topic))
            sequence = self._sequences.get(topic, 0)
            self._sequences[topic] = sequence + 1
            append = self._kafka.append_in_transaction
            request = partial(append, self._who, topic, sequence, value, key, headers)
            sent = self._sent[topic] = Sent(partial(self._write, request), self._sent.get(topic))
            if self._kafka.network("send") != "arrives later":
                sent.get()
            return sent

    def send_offsets_to_transaction(
        self, offsets: dict[TopicPartition, OffsetAndMetadata], member: ConsumerGroupMetadata
    ) -> None:
        with self._operation("send offsets", "in a transaction", "in a transaction"):
            self._request("send offsets", partial(self._kafka.offsets_in_transaction, self._who, offsets, member))

    def commit_transaction(self) -> None:
        with self._operation("commit", "in a transaction", "ready"):
            self.flush()
            epoch = self._request("commit", partial(self._kafka.end_transaction, self._who, "committed"))
            if self._end_was_resent and self._kafka.epochs == "after a resent end":
                epoch = self._request("raise epoch", partial(self._kafka.raise_epoch, self._who))
            if epoch != self._epoch:
                self._use_epoch(epoch)

    def abort_transaction(self) -> None:
        with self._operation("abort", "in a transaction", "ready"):
            self._use_epoch(self._request("abort", partial(self._kafka.end_transaction, self._who, "aborted")))

    def flush(self) -> None:
        """Write the records in transit."""
        for sent in self._sent.values():
            sent.get()

    def close(self, timeout: float | None = None) -> None:
        del timeout
        self._step("close")
        if self._epoch >= 0 and self._id is not None:
            with suppress(KafkaError):  # the producer that fenced this one has aborted the transaction
                self._request("abort", partial(self._kafka.end_transaction, self._who, "aborted"))
        self._state = "failed"

    def _use_epoch(self, epoch: int) -> None:
        self._epoch, self._sequences = epoch, {}

    def _write(self, append: Callable[[], int]) -> int:
        """Write one record to the broker. A failure fails the producer."""
        try:
            self._step("write")
            return self._request("write", append)
        except KafkaError:
            self._state = "failed"
            raise

    def _request(self, operation: str, request: Callable[[], T]) -> T:
        """The broker's answer to a request over the network."""
        passage = self._kafka.network(operation)
        if passage in ("arrives twice", "arrives too late"):
            self._kafka.late.append((self._kafka.ended, request))
        if passage == "arrives too late":
            raise KafkaTimeoutError(f"{operation} was not answered in time")
        self._end_was_resent |= operation == "commit" and passage == "arrives twice"
        return request()

    def _operation(self, name: str, before: str, after: Any) -> "_Operation":
        if self._state == "failed":
            raise KafkaError("Cannot execute transactional method because we are in an error state")
        if self._state != before:
            raise KafkaError(f"Invalid transition attempted: {name} while {self._state}")
        return _Operation(self, name, after)


class _Operation:
    """One call of a producer: calls the step before and after, and records an error's effect."""

    def __init__(self, producer: MemoryProducer, name: str, after: Any) -> None:
        self._producer, self._name, self._after = producer, name, after

    def __enter__(self) -> None:
        try:
            self._producer._step(self._name)
        except KafkaError:
            self._producer._state = "failed"
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        self._producer._state = "failed"
        if kind is None:
            self._producer._step(f"{self._name} done")
            self._producer._state = self._after
