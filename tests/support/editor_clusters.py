"""`EditorLog`s on one cluster, the real Kafka or its test double, for tests of both."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kafka.admin import MemberToRemove
from kafka.structs import OffsetAndMetadata

from gracestream.pipeline.editing.result import DecisionResult
from gracestream.pipeline.editor.feedback import DecidedFeedback, FeedbackRecord
from gracestream.pipeline.editor.log import EditorLog
from gracestream.pipeline.kafka.clients import admin, consumer, producer
from gracestream.pipeline.kafka.reader import TopicReader
from gracestream.pipeline.kafka.topics import DELTAS, EDITS, FEEDBACK_DLQ
from gracestream.pipeline.settings import Settings
from gracestream.schemas.headers import SOURCE_OFFSET_HEADER
from gracestream.schemas.messages import Outcome, decode
from tests.support.doubles.kafka import MemoryKafka
from tests.support.running import records, wait_until


def outcome_of(feedback_id: str) -> Outcome:
    return Outcome(v=1, feedback_id=feedback_id, status="rejected", reason="a test")


def decided(
    offset: int,
    outcome: Outcome | None,
    delta: bytes | None = None,
    dead_letter_reason: str | None = None,
    key: bytes | None = None,
    value: bytes | None = None,
) -> DecidedFeedback:
    """The decision on a feedback record."""
    return DecidedFeedback(FeedbackRecord(offset, 0, key, value), DecisionResult(outcome, delta, dead_letter_reason))


class Cluster:
    """The topics of one deployment, and the `EditorLog`s opened on it."""

    def __init__(self, settings: Settings, double: MemoryKafka | None) -> None:
        self.settings, self.double = settings, double
        self._logs: list[EditorLog] = []

    def editor(self) -> EditorLog:
        """A new `EditorLog` without any connection."""
        if self.double is None:
            made = EditorLog(self.settings.kafka)
        else:
            made = EditorLog(self.settings.kafka, self.double.consumer, self.double.producer)
        self._logs.append(made)
        return made

    def member(self) -> EditorLog:
        """An `EditorLog` that has joined the group, as the elected member or as a standby."""
        made = self.editor()
        list(made.read_new_deltas())
        made.join()
        self.wait_for_membership(made, "elected", "standby")
        return made

    def leader(self, lead: bytes = b"lead") -> EditorLog:
        """An `EditorLog` that leads."""
        return self.take_over(self.member(), lead)

    def take_over(self, log: EditorLog, lead: bytes = b"lead") -> EditorLog:
        """Let a standby lead once it is elected."""
        self.wait_for_membership(log, "elected")
        log.fence()
        list(log.read_new_deltas())
        log.write_lead(lead)
        return log

    def wait_for_membership(self, log: EditorLog, *states: str) -> None:
        """Wait until an editor's membership has one of these states; the other editors poll meanwhile."""
        with self.others_polling(log):
            wait_until(lambda: log.membership(0.05) in states, what=f"a membership of {states}")

    @contextmanager
    def others_polling(self, log: EditorLog) -> Iterator[None]:
        """Inside this context all other editors of the group poll, each in its own thread.

        If members take turns in one thread, a rebalance may never end: a join that ends between two polls restarts.
        """
        done = threading.Event()

        def poll(other: EditorLog) -> None:
            while not done.is_set():
                other._poll(0.05)

        others = [other for other in self._logs if other is not log and other._member is not None]
        threads = [threading.Thread(target=poll, args=[other]) for other in others]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            done.set()
            for thread in threads:
                thread.join()

    def producer(self, **options: Any) -> Any:
        """A producer of another program."""
        return (
            producer(self.settings.kafka, **options)
            if self.double is None
            else self.double.producer(self.settings, **options)
        )

    def reader(self, topic: str) -> TopicReader:
        """A reader of a topic; close it."""
        new_consumer = consumer if self.double is None else self.double.consumer
        return TopicReader(self.settings.kafka, topic, new_consumer=new_consumer)

    def send(self, topic: str, *values: bytes) -> None:
        """Send records as users do."""
        writer = self.producer()
        for value in values:
            writer.send(self.settings.kafka.topic(topic), value=value, partition=0)
        writer.flush()
        writer.close(timeout=5)

    def send_dead_letter(self, source_offset: bytes | None) -> None:
        """Send a dead letter of feedback with this header of its source offset."""
        writer = self.producer()
        headers = [] if source_offset is None else [(SOURCE_OFFSET_HEADER, source_offset)]
        writer.send(self.settings.kafka.topic(FEEDBACK_DLQ), value=b"?", headers=headers, partition=0)
        writer.flush()
        writer.close(timeout=5)

    def records(self, topic: str) -> list[Any]:
        """The committed records of a topic."""
        if self.double is not None:
            return list(self.double.committed(self.settings.kafka.topic(topic)))
        return records(self.settings, topic)

    def values(self, topic: str) -> list[bytes]:
        return [record.value for record in self.records(topic)]

    def forget_group(self) -> None:
        """Delete the group with its offsets, as Kafka does after a week without members."""
        if self.double is not None:
            self.double.forget(self.settings.kafka.topic("editor"))
            return
        client = admin(self.settings.kafka)
        client.delete_groups([self.settings.kafka.topic("editor")])
        client.close()

    def close(self) -> None:
        for log in self._logs:
            log.close()


def values_of(log: EditorLog) -> list[bytes]:
    """The deltas that an editor reads now."""
    return [record for _, record in log.read_new_deltas()]


def outcomes(cluster: Cluster) -> list[Outcome]:
    return [decode(record.value, Outcome) for record in cluster.records(EDITS)]


def write_half_a_transaction(cluster: Cluster, log: EditorLog) -> None:
    """Write a whole transaction except its end."""
    log._writer.begin_transaction()
    for topic in (DELTAS, EDITS):
        log._writer.send(cluster.settings.kafka.topic(topic), value=b"half", partition=0)
    log._writer.flush()
    log._writer.send_offsets_to_transaction({log._feedback: OffsetAndMetadata(7, "", -1)}, log._group_metadata)


def end_session(cluster: Cluster, log: EditorLog) -> None:
    """End an editor's session, as missing heartbeats do."""
    name, member_id = cluster.settings.kafka.topic("editor"), log._group_metadata.member_id
    if cluster.double is not None:
        cluster.double.remove(name, member_id)
        return
    client = admin(cluster.settings.kafka)
    client.remove_group_members(name, [MemberToRemove(member_id)])
    client.close()


def next_offset(log: EditorLog) -> int:
    """The offset of the next feedback record."""
    record = wait_until(lambda: log.poll(0.5))
    assert record is not None
    return record[0]
