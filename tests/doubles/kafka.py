"""Kafka in memory, as the editor uses it: topics of one partition, transactions, isolation, fencing, groups.

`test_log_behaviour.py` and `test_writer_behaviour.py` hold this double and the real Kafka to the same behaviour.
Nothing here waits, and nothing happens by itself: a session ends when a test says so, and each operation first and last
calls its client's `step`, where a test may let another process go on, fail the operation, or end the process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kafka import TopicPartition
from kafka.errors import (
    CommitFailedError,
    IllegalStateError,
    InvalidProducerEpochError,
    KafkaError,
    ProducerFencedError,
    UnknownTopicOrPartitionError,
)
from kafka.structs import ConsumerGroupMetadata, MemberState, OffsetAndMetadata

from pipeline.settings import Settings

Headers = Sequence[tuple[str, bytes]]
Step = Callable[[str], None]
"""Called as `step("commit")` before an operation and `step("commit done")` after it."""


def straight_on(operation: str) -> None:
    """The step of a client to which nothing happens."""
    del operation


@dataclass(frozen=True, slots=True)
class Stored:
    """A record, or the control record that ends a transaction. `state`: of the transaction that it came with."""

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
    """What the broker knows of one transactional id."""

    epoch: int = -1
    written: list[tuple[str, int]] = field(default_factory=list)
    offsets: dict[tuple[str, TopicPartition], int] = field(default_factory=dict)


@dataclass(slots=True)
class Group:
    """A consumer group. `joined`: who takes part in the rebalance under way; None while there is none."""

    generation: int = 0
    members: list[str] = field(default_factory=list)
    owner: str | None = None
    joined: set[str] | None = None
    offsets: dict[TopicPartition, int] = field(default_factory=dict)


class MemoryKafka:
    """The broker."""

    def __init__(self, topics: Sequence[str]) -> None:
        self.topics: dict[str, list[Stored]] = {topic: [] for topic in topics}
        self.groups: dict[str, Group] = {}
        self.unplaced: list[str] = []
        """Members whose offset a transaction took, though the group had not given them the partition, or no more."""
        self._writers: dict[str, Writer] = {}
        self._member_ids = 0

    def consumer(self, settings: Settings, step: Step = straight_on, **options: Any) -> "MemoryConsumer":
        """A consumer that reads committed records only, as `pipeline.clients.consumer` makes them."""
        del settings
        return MemoryConsumer(self, step, options)

    def producer(self, settings: Settings, step: Step = straight_on, **options: Any) -> "MemoryProducer":
        """A producer, as `pipeline.clients.producer` makes them."""
        del settings
        return MemoryProducer(self, step, options.get("transactional_id"))

    def append(
        self, topic: str, value: bytes | None, key: bytes | None = None, headers: Headers = (), state: Any = "plain"
    ) -> int:
        """One record at the end of a topic; its offset."""
        records = self._records(topic)
        records.append(Stored(topic, len(records), key, value, headers, state))
        return len(records) - 1

    def end(self, topic: str) -> int:
        """The last stable offset: the first of a transaction that is open, else the end."""
        records = self._records(topic)
        return next((record.offset for record in records if record.state == "open"), len(records))

    def committed(self, topic: str, start: int = 0) -> Iterator[Stored]:
        """What a reader of committed records gets to see."""
        for record in self._records(topic)[start : self.end(topic)]:
            if record.state in ("plain", "committed"):
                yield record

    # Transactions.

    def fence(self, transactional_id: str) -> int:
        """Abort what the writer of this id left open, and give it its next epoch."""
        writer = self._writers.setdefault(transactional_id, Writer())
        self._end_transaction(writer, "aborted")
        writer.epoch += 1
        return writer.epoch

    def append_in_transaction(
        self, who: tuple[str, int], topic: str, value: bytes | None, key: bytes | None, headers: Headers
    ) -> int:
        """One record that nobody sees yet.

        A writer that is fenced between telling of the partition and writing there asks for another epoch, by which
        Kafka aborts what its successor has open: the successor is fenced as well, and the asker gets nothing.
        """
        writer = self._writers[who[0]]
        if who[1] != writer.epoch:
            if writer.written:
                self.fence(who[0])
            raise InvalidProducerEpochError
        offset = self.append(topic, value, key, headers, "open")
        writer.written.append((topic, offset))
        return offset

    def offsets_in_transaction(
        self, who: tuple[str, int], offsets: dict[TopicPartition, OffsetAndMetadata], member: ConsumerGroupMetadata
    ) -> None:
        """A group's offsets, to be committed with the transaction; a member that says none is not checked."""
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

    def check(self, who: tuple[str, int]) -> None:
        """Raises ProducerFencedError where the id has another writer by now."""
        self._writer(who)

    def commit(self, who: tuple[str, int]) -> None:
        """Make all of it visible."""
        self._end_transaction(self._writer(who), "committed")

    def abort(self, who: tuple[str, int]) -> None:
        """Make it never to be seen."""
        self._end_transaction(self._writer(who), "aborted")

    def _end_transaction(self, writer: Writer, state: Literal["committed", "aborted"]) -> None:
        for topic, offset in writer.written:
            self.topics[topic][offset] = replace(self.topics[topic][offset], state=state)
        for topic in dict.fromkeys(topic for topic, _ in writer.written):
            self.append(topic, None, state="control")
        if state == "committed":
            for (group, partition), offset in writer.offsets.items():
                self.group(group).offsets[partition] = offset
        writer.written, writer.offsets = [], {}

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
        """One group."""
        return self.groups.setdefault(name, Group())

    def join(self, name: str) -> str:
        """A new member, and with it a rebalance; the member's id."""
        group = self.group(name)
        self._member_ids += 1
        group.members.append(f"member-{self._member_ids}")
        group.joined = set()
        return group.members[-1]

    def rejoin(self, name: str, member_id: str) -> bool:
        """Take part in the rebalance under way, if any; whether there is none any more.

        It ends once every member takes part. Who had the partition keeps it.
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
        """A member leaves, or its session ends; the others rebalance."""
        group = self.group(name)
        if member_id in group.members:
            group.members.remove(member_id)
            group.owner = None if group.owner == member_id else group.owner
            group.joined = set()

    def forget(self, name: str) -> None:
        """All of a group is gone: its members and their offsets."""
        self.groups.pop(name, None)


class MemoryConsumer:
    """The part of KafkaConsumer that the editor uses."""

    def __init__(self, kafka: MemoryKafka, step: Step, options: dict[str, Any]) -> None:
        self._kafka, self._step = kafka, step
        self._group: str = options.get("group_id", "")
        self._max_records: int = options.get("max_poll_records", 500)
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
        """A member whose session ended learns of it by its heartbeat, at any time: here, before it is asked."""
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

    def committed(self, partition: TopicPartition, timeout_ms: float | None = None) -> int | None:
        del timeout_ms
        self._step("committed")
        return self._kafka.group(self._group).offsets.get(partition)

    def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 0)

    def end_offsets(
        self, partitions: Sequence[TopicPartition], timeout_ms: float | None = None
    ) -> dict[TopicPartition, int]:
        del timeout_ms
        self._step("end offsets")
        return {partition: self._kafka.end(partition.topic) for partition in partitions}

    def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> dict[TopicPartition, list[Stored]]:
        del timeout_ms
        self._step("poll")
        if self._topics is not None and not self._take_part():
            return {}
        found: dict[TopicPartition, list[Stored]] = {}
        room = max_records or self._max_records
        for partition, position in self._positions.items():
            records = list(self._kafka.committed(partition.topic, position))
            if records[:room]:
                found[partition] = records[:room]
            # Past the last record: control records and aborted ones are stepped over.
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

    def _take_part(self) -> bool:
        """Join, rejoin and take what was assigned; whether the group is at rest."""
        assert self._topics is not None
        if self.member_id and self.member_id not in self._kafka.group(self._group).members:
            lost, self._positions = set(self._positions), {}
            self._generation, self.member_id = -1, ""
            if lost:
                self._tell("on_partitions_lost", lost)
        group = self._kafka.group(self._group)
        if not self.member_id:
            self.member_id = self._kafka.join(self._group)
        if group.joined is not None and self.member_id not in group.joined:
            self._tell("on_partitions_revoked", set(self._positions))
        if not self._kafka.rejoin(self._group, self.member_id):
            return False
        if self._generation != group.generation:
            self._generation = group.generation
            mine = [TopicPartition(self._topics[0], 0)] if group.owner == self.member_id else []
            self._positions = {partition: group.offsets.get(partition, 0) for partition in mine}
            self._tell("on_partitions_assigned", set(mine))
        return True

    def _tell(self, event: str, partitions: set[TopicPartition]) -> None:
        try:
            getattr(self._listener, event)(partitions)
        except Exception as error:
            raise KafkaError("User rebalance callback throws an error") from error


@dataclass(frozen=True, slots=True)
class Sent:
    """The future of a record that was written, and its metadata."""

    offset: int

    def get(self, timeout: float | None = None) -> "Sent":
        del timeout
        return self


class MemoryProducer:
    """The part of KafkaProducer that the editor uses. Errors come at once, not with a later call."""

    def __init__(self, kafka: MemoryKafka, step: Step, transactional_id: str | None) -> None:
        self._kafka, self._step = kafka, step
        self._id, self._epoch = transactional_id, -1
        self._state: Literal["new", "ready", "in a transaction", "failed"] = "new"

    def init_transactions(self) -> None:
        with self._operation("fence", "new", "ready"):
            assert self._id is not None
            self._epoch = self._kafka.fence(self._id)

    def begin_transaction(self) -> None:
        with self._operation("begin", "ready", "in a transaction"):
            pass  # the broker learns of a transaction by its first record

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
            return Sent(self._kafka.append(topic, value, key, headers))
        with self._operation("send", "in a transaction", "in a transaction"):
            self._kafka.check((self._id, self._epoch))
            self._step("write")
            return Sent(self._kafka.append_in_transaction((self._id, self._epoch), topic, value, key, headers))

    def send_offsets_to_transaction(
        self, offsets: dict[TopicPartition, OffsetAndMetadata], member: ConsumerGroupMetadata
    ) -> None:
        with self._operation("send offsets", "in a transaction", "in a transaction"):
            assert self._id is not None
            self._kafka.offsets_in_transaction((self._id, self._epoch), offsets, member)

    def commit_transaction(self) -> None:
        with self._operation("commit", "in a transaction", "ready"):
            assert self._id is not None
            self._kafka.commit((self._id, self._epoch))

    def flush(self) -> None:
        """Everything is there already."""

    def close(self, timeout: float | None = None) -> None:
        del timeout
        self._step("close")
        if self._epoch >= 0 and self._id is not None:
            with suppress(ProducerFencedError):  # whoever fenced it has done that
                self._kafka.abort((self._id, self._epoch))
        self._state = "failed"

    def _operation(self, name: str, before: str, after: Any) -> "_Operation":
        if self._state == "failed":
            raise KafkaError("Cannot execute transactional method because we are in an error state")
        if self._state != before:
            raise KafkaError(f"Invalid transition attempted: {name} while {self._state}")
        return _Operation(self, name, after)


class _Operation:
    """One call of a producer: what happens before it and after it, and what an error leaves behind."""

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
