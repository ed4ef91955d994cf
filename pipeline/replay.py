"""Replay: the codebook at any point of its history, from `deltas` alone (design, section 5, point 8)."""

from collections.abc import Iterator
from datetime import datetime

from kafka import TopicPartition
from msgspec import UNSET, Struct

from pipeline.clients import consumer
from pipeline.codebook import Codebook, DeltaFault
from pipeline.follower import read_history
from pipeline.settings import Settings
from pipeline.topics import FEEDBACK
from schemas.deltas import Delta, EntryChange, decode_delta
from schemas.messages import Feedback, InvalidMessage, decode


class Step(Struct, frozen=True):
    """One delta in words. `timestamp` is Kafka's, in seconds; `entries` says what happened to each entry."""

    seq: int
    term: int
    op: str
    timestamp: float
    feedback_id: str | None
    inputs: str | None
    target: str | None
    entries: dict[str, str]


def replay_deltas(settings: Settings, seq: int | None = None, until: datetime | None = None) -> Codebook | None:
    """Fold the log up to delta `seq`, or to the last one of `until`; None where there is nothing up to there.

    Raises:
        DeltaFault: the log does not fold: a gap, a broken digest, a record that cannot be read.
    """
    codebook: Codebook | None = None

    def fold(record: bytes, offset: int, timestamp: int) -> bool:
        nonlocal codebook
        if until is not None and timestamp > 1000 * until.timestamp():
            return False
        if codebook is None:
            first = _decoded(record, offset)
            codebook = Codebook(first.codebook, first.model, first.layer)
        if seq is not None and codebook.seq >= seq:
            return False
        codebook.apply(record)
        return True

    read_history(settings, fold)
    if codebook is not None and seq is not None and codebook.seq < seq:
        raise DeltaFault(f"the log ends at delta {codebook.seq}; there is no {seq} yet")
    return codebook if codebook is not None and codebook.seq else None


def describe(settings: Settings) -> Iterator[Step]:
    """Every delta that counts, in words, with the correction behind it."""
    records: list[tuple[Delta, float]] = []
    term = 0

    def keep(record: bytes, offset: int, timestamp: int) -> None:
        nonlocal term
        delta = _decoded(record, offset)
        if delta.term >= term:
            term = delta.term
            records.append((delta, timestamp / 1000))

    read_history(settings, keep)
    corrections = _feedback(settings, {d.cause.offset for d, _ in records if d.cause is not UNSET})
    known: set[str] = set()
    for delta, timestamp in records:
        cause = delta.cause
        asked = None if cause is UNSET else corrections.get(cause.offset)
        yield Step(
            seq=delta.seq,
            term=delta.term,
            op=delta.op,
            timestamp=timestamp,
            feedback_id=None if cause is UNSET else cause.feedback_id,
            inputs=None if asked is None or asked.inputs is UNSET else _text(asked.inputs),
            target=None if asked is None or asked.target is UNSET else asked.target,
            entries={change.entry_id: _words(change, known) for change in delta.entries},
        )
        for change in delta.entries:
            (known.discard if change.removed else known.add)(change.entry_id)


def _decoded(record: bytes, offset: int) -> Delta:
    try:
        return decode_delta(record)
    except InvalidMessage as error:
        raise DeltaFault(f"the record at offset {offset} of deltas cannot be read: {error}") from error


def _feedback(settings: Settings, offsets: set[int]) -> dict[int, Feedback]:
    found: dict[int, Feedback] = {}
    partition = TopicPartition(settings.topic(FEEDBACK), 0)
    reader = consumer(settings)
    try:
        reader.assign([partition])
        reader.seek(partition, min(offsets, default=0))
        end = min(max(offsets, default=-1) + 1, reader.end_offsets([partition])[partition])
        while offsets and reader.position(partition) < end:
            for records in reader.poll(timeout_ms=1000).values():
                for record in records:
                    if record.offset in offsets:
                        try:
                            found[record.offset] = decode(record.value, Feedback)
                        except InvalidMessage:
                            continue  # the delta's cause stands; only its words are lost
        return found
    finally:
        reader.close()


def _text(inputs: str | tuple[str, str]) -> str:
    return inputs if isinstance(inputs, str) else " | ".join(inputs)


def _words(change: EntryChange, known: set[str]) -> str:
    if change.removed:
        return "removed"
    if change.entry_id not in known:
        return f"new, radius {change.radius:.4g}"
    changed = [f"radius {change.radius:.4g}"] if change.radius is not UNSET else []
    return ", ".join([*changed, *(["another value"] if change.value is not UNSET else [])])
