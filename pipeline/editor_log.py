"""The editor's end of the log: feedback in, and each record's delta, outcome and offset out in one transaction.

What it guarantees (design, section 5, points 2 and 3):

1. A feedback record's delta, its outcome, its copy in the dead letter queue and the offset after it commit together or
   not at all.
2. One writer: opening the producer fences an earlier editor at the broker, whose next write fails.
3. Feedback is taken up after the last record that has an outcome, also where Kafka has forgotten the group's offset
   (it forgets those of a group that was idle for a week): each outcome carries its feedback's offset as a header.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kafka import TopicPartition
from kafka.structs import OffsetAndMetadata

from pipeline.clients import consumer, producer
from pipeline.settings import Settings
from pipeline.topics import DELTAS, EDITS, FEEDBACK, FEEDBACK_DLQ, rejected_headers, rejected_key
from schemas.messages import Outcome, encode

OFFSET_HEADER = "feedback_offset"


@dataclass(frozen=True, slots=True)
class Result:
    """What is to be written for one feedback record. `rejected`: why it goes to the dead letter queue as well."""

    offset: int
    outcome: Outcome | None
    delta: bytes | None = None
    rejected: str | None = None
    key: bytes | None = None
    feedback: bytes | None = field(default=None, repr=False)


class EditorLog:
    """Opened by the one editor of a codebook. Raises kafka-python's KafkaError where Kafka fails or it was fenced."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._feedback = TopicPartition(settings.topic(FEEDBACK), 0)
        self._consumer = consumer(settings, group_id=settings.topic("editor"), max_poll_records=64)
        self._consumer.assign([self._feedback])
        # Between two transactions the broker may still be closing the last; the default pause costs 100 ms an edit.
        self._producer = producer(settings, transactional_id=settings.topic("editor"), retry_backoff_ms=5)
        self._producer.init_transactions()

    def write_lead(self, delta: bytes) -> None:
        """Write the record that takes a term."""
        self._producer.begin_transaction()
        sent = self._send(DELTAS, delta, None)
        self._producer.commit_transaction()
        sent.get(timeout=30)

    def seek(self) -> int:
        """Go to the first feedback record that has no outcome yet; its offset."""
        committed = self._consumer.committed(self._feedback) or 0
        position = max(committed, self._after_last_outcome())
        self._consumer.seek(self._feedback, position)
        return position

    def poll(self, seconds: float) -> Iterator[tuple[int, bytes | None, bytes | None]]:
        """The next feedback records, as (offset, key, value)."""
        for records in self._consumer.poll(timeout_ms=int(1000 * seconds)).values():
            for record in records:
                yield record.offset, record.key, record.value

    def behind(self) -> int:
        """Feedback records that wait."""
        end: int = self._consumer.end_offsets([self._feedback])[self._feedback]
        position: int = self._consumer.position(self._feedback)
        return max(0, end - position)

    def commit(self, result: Result) -> None:
        """Write it all, or nothing."""
        self._producer.begin_transaction()
        sent = []
        if result.delta is not None:
            sent.append(self._send(DELTAS, result.delta, None))
        if result.outcome is not None:
            key = result.outcome.feedback_id.encode()
            headers = [(OFFSET_HEADER, str(result.offset).encode())]
            sent.append(self._send(EDITS, encode(result.outcome), key, headers))
        if result.rejected is not None:
            headers = rejected_headers(result.rejected, self._feedback.topic, 0, result.offset)
            sent.append(self._send(FEEDBACK_DLQ, result.feedback, rejected_key(result.key, result.feedback), headers))
        done = {self._feedback: OffsetAndMetadata(result.offset + 1, "", -1)}
        self._producer.send_offsets_to_transaction(done, self._consumer.group_metadata())
        self._producer.commit_transaction()
        for future in sent:
            future.get(timeout=30)

    def close(self) -> None:
        """Leave; a transaction that is open is aborted."""
        self._producer.close(timeout=5)
        self._consumer.close()

    def _send(
        self, topic: str, value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes]] | None = None
    ) -> Any:
        return self._producer.send(
            self._settings.topic(topic), value=value, key=key, headers=headers or [], partition=0
        )

    def _after_last_outcome(self) -> int:
        """Walks back from the end of `edits`: transactions leave control records between outcomes."""
        partition = TopicPartition(self._settings.topic(EDITS), 0)
        reader = consumer(self._settings)
        try:
            reader.assign([partition])
            end = reader.end_offsets([partition])[partition]
            window = 16
            while end > 0:
                start = max(0, end - window)
                reader.seek(partition, start)
                last = -1
                while reader.position(partition) < end:
                    for records in reader.poll(timeout_ms=500).values():
                        last = max([last, *(_feedback_offset(record) for record in records)])
                if last >= 0 or start == 0:
                    return last + 1
                window *= 8
            return 0
        finally:
            reader.close()


def _feedback_offset(record: Any) -> int:
    return int(dict(record.headers).get(OFFSET_HEADER, b"-1"))
