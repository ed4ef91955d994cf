"""Branches a history: copies it up to a delta into topics of another prefix, where an editor can continue.

Guarantees:

1. All or nothing. Feedback, outcomes and deltas are written in one Kafka transaction, so no reader sees an interrupted
   branch.
2. Offsets of feedback in deltas and outcomes become those of the copy. If codebook name and offsets are the same as in
   the source, so are the digests.
3. Each record keeps its timestamp. The topics accept sender timestamps only during the copy. Before the branch is
   readable they use the broker's clock again, on which rate limits depend.

Not promised: a copy of requests, predictions, dead letters or snapshots.
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
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.deltas import GENESIS_DIGEST, Delta, decode_delta, seal_delta
from gracestream.schemas.headers import FEEDBACK_OFFSET_HEADER, feedback_offset_of

TRANSACTION_TIMEOUT_MS = 900_000
"""Milliseconds that the copy may take. Brokers allow no more by default."""


class BranchError(UserError):
    """The branch cannot be made; the text gives the reason."""


def branch_history(
    source: KafkaSettings,
    target: KafkaSettings,
    codebook: str,
    records: Sequence[bytes],
    replication: int | None = None,
) -> str:
    """Write the deltas `records`, with the feedback and outcomes behind them, to the target; its digest in hex.

    1. Read feedback and outcomes up to the last feedback that a delta names.
    2. Create the target's topics, and check that they are empty.
    3. In one transaction, write feedback first: its new offsets go into the outcomes and deltas.

    Args:
        source: Where the history is.
        target: Where the branch goes; needs another prefix.
        codebook: The name of the branch's codebook.
        records: Deltas without a gap, from the first.
        replication: Copies of each topic; None: as many as the source's `deltas` has.

    Raises:
        BranchError: the target is the source, has a history already, or the source lacks feedback.
        TopicError: topics of the target's prefix exist and are configured otherwise.
    """
    if target.topic_prefix == source.topic_prefix:
        raise BranchError(f"the branch needs a prefix of its own; {target.topic_prefix!r} is that of the source")
    deltas = [decode_delta(record) for record in records]
    referenced = {offset for delta in deltas for offset in _referenced_offsets(delta)}
    last_offset = max(referenced, default=-1)
    feedback = [record for record in read_topic(source, FEEDBACK) if record.offset <= last_offset]
    outcomes = [record for record in read_topic(source, EDITS) if 0 <= feedback_offset_of(record) <= last_offset]
    present = {record.offset for record in feedback}
    needed = referenced | set(map(feedback_offset_of, outcomes))
    if missing := sorted(needed - present):
        raise BranchError(f"the history depends on feedback at offset {missing[0]}, which is not in the topic any more")
    times = _delta_timestamps(source, deltas[-1])
    partitions, copies = topic_layout(source)
    create_topics(target, partitions, replication or copies)
    writer = producer(target, transactional_id=target.topic("editor"), transaction_timeout_ms=TRANSACTION_TIMEOUT_MS)
    try:
        writer.init_transactions()  # fences a running editor of the target; a later editor fences this producer
        for name in (DELTAS, FEEDBACK, EDITS):
            if any(True for _ in read_topic(target, name)):
                raise BranchError(f"topic {target.topic(name)!r} has records already; choose another prefix")
        with use_sender_timestamps(target, (DELTAS, FEEDBACK, EDITS)):
            writer.begin_transaction()
            sent_feedback = [_send_copy(writer, target, FEEDBACK, record, record.headers) for record in feedback]
            writer.flush()
            offsets = {
                record.offset: _copied_offset(record.timestamp, sent)
                for record, sent in zip(feedback, sent_feedback, strict=True)
            }
            copied: list[tuple[int, Any]] = []
            for record in outcomes:
                copied_offset = str(offsets[feedback_offset_of(record)]).encode()
                headers = [
                    (name, copied_offset if name == FEEDBACK_OFFSET_HEADER else value) for name, value in record.headers
                ]
                copied.append((record.timestamp, _send_copy(writer, target, EDITS, record, headers)))
            digest = GENESIS_DIGEST
            for delta in deltas:
                sealed, sealed_delta = seal_delta(_with_copied_offsets(delta, codebook, offsets), digest)
                digest, time = sealed_delta.digest, times[delta.term, delta.seq]
                copy = writer.send(target.topic(DELTAS), value=sealed, partition=0, timestamp_ms=time)
                copied.append((time, copy))
            writer.flush()
            for time, copy in copied:
                _copied_offset(time, copy)
        writer.commit_transaction()
    finally:
        writer.close(timeout=10)
    return digest.hex()


def _delta_timestamps(source: KafkaSettings, last: Delta) -> dict[tuple[int, int], int]:
    """Kafka's timestamps in ms of the deltas up to `last`, by term and seq.

    `branch_history` may write reproduced deltas, which have the same term and seq as the recorded ones.
    """
    timestamps: dict[tuple[int, int], int] = {}

    def add_timestamp(record: bytes, _offset: int, timestamp: int) -> bool:
        delta = decode_delta(record)
        timestamps[delta.term, delta.seq] = timestamp
        return (delta.term, delta.seq) != (last.term, last.seq)

    read_history(source, add_timestamp)
    return timestamps


def _copied_offset(expected_timestamp: int, sent: Any) -> int:
    """The offset of a copy.

    Raises:
        BranchError: a broker still stamps its own time, since it does not know the topic's new setting yet.
    """
    metadata = sent.get(timeout=30)
    if metadata.timestamp != expected_timestamp:
        raise BranchError(f"Kafka has not kept the time of a record in its copy on {metadata.topic!r}; try again")
    return int(metadata.offset)


def _referenced_offsets(delta: Delta) -> tuple[int, ...]:
    """The offsets of feedback that a delta names: its own, and those of its training batch."""
    return () if delta.cause is UNSET else (delta.cause.offset, *delta.cause.together)


def _with_copied_offsets(delta: Delta, codebook: str, offsets: dict[int, int]) -> Delta:
    """The delta for another codebook name and other offsets, unsealed."""
    cause = delta.cause
    if cause is not UNSET:
        batch_offsets = tuple(offsets[offset] for offset in cause.together)
        cause = msgspec.structs.replace(cause, offset=offsets[cause.offset], together=batch_offsets)
    return msgspec.structs.replace(delta, codebook=codebook, cause=cause, digest=b"")


def _send_copy(
    kafka_producer: KafkaProducer, target: KafkaSettings, topic: str, record: Any, headers: Sequence[tuple[str, bytes]]
) -> Any:
    """Send a copy of a record, with its key, value and timestamp; the future of its offset."""
    return kafka_producer.send(
        target.topic(topic),
        value=record.value,
        key=record.key,
        headers=list(headers),
        partition=0,
        timestamp_ms=record.timestamp,
    )
