"""Branch a history: copy it up to a delta into topics of another prefix, where an editor can go on from it.

All or nothing: feedback, outcomes and deltas are written in one Kafka transaction, so a branch that was interrupted has
no record that anyone reads. Offsets of feedback become those of the copy, in the deltas and the outcomes as well. A
branch whose codebook bears the same name and whose offsets came out the same has the very digests of its source.

Each record keeps its timestamp, so a branch is the same at any time of its source's history. The topics take the
sender's timestamps for the copy alone: before it can be read, they have Kafka's clock again, on which limits rest.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from kafka import KafkaProducer
from msgspec import UNSET

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.kafka import (
    DELTAS,
    EDITS,
    FEEDBACK,
    create_topics,
    producer,
    read_history,
    read_topic,
    topic_layout,
    use_sender_timestamps,
)
from gracestream.pipeline.settings import Settings
from gracestream.schemas.deltas import GENESIS_DIGEST, Delta, decode_delta, seal_delta
from gracestream.schemas.headers import FEEDBACK_OFFSET_HEADER, feedback_offset_of

TRANSACTION_TIMEOUT_MS = 900_000
"""How long the copy may take; no broker allows more unless it is told to."""


class BranchError(UserError):
    """The branch cannot be made; the text says why."""


def branch_history(source: Settings, target: Settings, records: Sequence[bytes], replication: int | None = None) -> str:
    """Write `records`, which continue each other from the first delta, with the feedback behind them; the digest (hex).

    The target's topics get `replication` copies, or as many as the source's `deltas` has.

    Raises:
        BranchError: the target is the source, or has a history already.
        TopicError: topics of the target's prefix exist and are not as they must be.
    """
    if target.prefix == source.prefix:
        raise BranchError(f"the branch needs a prefix of its own; {target.prefix!r} is that of the source")
    deltas = [decode_delta(record) for record in records]
    named = {offset for delta in deltas for offset in _referenced_offsets(delta)}
    last = max(named, default=-1)
    feedback = [record for record in read_topic(source, FEEDBACK) if record.offset <= last]
    outcomes = [record for record in read_topic(source, EDITS) if 0 <= feedback_offset_of(record) <= last]
    present = {record.offset for record in feedback}
    needed = named | set(map(feedback_offset_of, outcomes))
    if missing := sorted(needed - present):
        raise BranchError(f"the history rests on feedback at offset {missing[0]}, which is not there any more")
    times = _delta_timestamps(source, deltas[-1])
    partitions, copies = topic_layout(source)
    create_topics(target, partitions, replication or copies)
    writer = producer(target, transactional_id=target.topic("editor"), transaction_timeout_ms=TRANSACTION_TIMEOUT_MS)
    try:
        writer.init_transactions()  # an editor that is there already writes no more, or ends this transaction
        for name in (DELTAS, FEEDBACK, EDITS):
            if any(True for _ in read_topic(target, name)):
                raise BranchError(f"topic {target.topic(name)!r} has records already; choose another prefix")
        with use_sender_timestamps(target, (DELTAS, FEEDBACK, EDITS)):
            writer.begin_transaction()
            sent = [_send_copy(writer, target, FEEDBACK, record, record.headers) for record in feedback]
            writer.flush()
            offsets = {
                record.offset: _copied_offset(record.timestamp, one) for record, one in zip(feedback, sent, strict=True)
            }
            copied: list[tuple[int, Any]] = []
            for record in outcomes:
                moved = str(offsets[feedback_offset_of(record)]).encode()
                headers = [(name, moved if name == FEEDBACK_OFFSET_HEADER else value) for name, value in record.headers]
                copied.append((record.timestamp, _send_copy(writer, target, EDITS, record, headers)))
            digest = GENESIS_DIGEST
            for delta in deltas:
                sealed, made = seal_delta(_with_copied_offsets(delta, target.codebook, offsets), digest)
                digest, time = made.digest, times[delta.term, delta.seq]
                copy = writer.send(target.topic(DELTAS), value=sealed, partition=0, timestamp_ms=time)
                copied.append((time, copy))
            writer.flush()
            for time, copy in copied:
                _copied_offset(time, copy)
        writer.commit_transaction()
    finally:
        writer.close(timeout=10)
    return digest.hex()


def _delta_timestamps(source: Settings, last: Delta) -> dict[tuple[int, int], int]:
    """When the deltas up to `last` came, in ms, by term and seq, which a history that was trained anew shares."""
    times: dict[tuple[int, int], int] = {}

    def keep(record: bytes, _offset: int, timestamp: int) -> bool:
        delta = decode_delta(record)
        times[delta.term, delta.seq] = timestamp
        return (delta.term, delta.seq) != (last.term, last.seq)

    read_history(source, keep)
    return times


def _copied_offset(expected_timestamp: int, sent: Any) -> int:
    """The offset of a copy.

    Raises:
        BranchError: a broker that has not heard of the topic's clock yet has put another time on it.
    """
    copy = sent.get(timeout=30)
    if copy.timestamp != expected_timestamp:
        raise BranchError(f"Kafka has not kept the time of a record in its copy on {copy.topic!r}; try again")
    return int(copy.offset)


def _referenced_offsets(delta: Delta) -> tuple[int, ...]:
    """The offsets of feedback that a delta names: its own, and those whose values were trained with its own."""
    return () if delta.cause is UNSET else (delta.cause.offset, *delta.cause.together)


def _with_copied_offsets(delta: Delta, codebook: str, offsets: dict[int, int]) -> Delta:
    cause = delta.cause
    if cause is not UNSET:
        together = tuple(offsets[one] for one in cause.together)
        cause = msgspec.structs.replace(cause, offset=offsets[cause.offset], together=together)
    return msgspec.structs.replace(delta, codebook=codebook, cause=cause, digest=b"")


def _send_copy(
    kafka_producer: KafkaProducer, target: Settings, topic: str, record: Any, headers: Sequence[tuple[str, bytes]]
) -> Any:
    return kafka_producer.send(
        target.topic(topic),
        value=record.value,
        key=record.key,
        headers=list(headers),
        partition=0,
        timestamp_ms=record.timestamp,
    )
