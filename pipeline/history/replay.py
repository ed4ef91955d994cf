"""Replay: the codebook at any point of its history, from `deltas` alone (docs/explanation/consistency.md).

Each record's digest is checked, so the result is equal to the recorded codebook, bit for bit.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime

from msgspec import UNSET, Struct
from msgspec.structs import replace

from gracestream.pipeline.codebook import Codebook
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.history.kafka_history import KafkaHistory
from gracestream.pipeline.kafka import read_history
from gracestream.pipeline.settings import KafkaSettings
from gracestream.pipeline.stores import Snapshot
from gracestream.schemas.deltas import Delta, EntryChange, ExceptionChange, decode_delta
from gracestream.schemas.messages import InvalidMessage, to_display_text

OnApplied = Callable[[bytes, Delta, Codebook], object]
"""Called for each applied record, with the record, its delta, and the codebook after it."""


class HistoryStep(Struct, frozen=True):
    """One delta, described.

    Attributes:
        seq: Of the delta.
        term: Of the delta.
        op: Of the delta.
        outcome: The status that the sender of the feedback got. A correction that the unedited model already answered
            has `unchanged`, though its delta is an `expand`. None without feedback, or if `edits` has no outcome.
        timestamp: Kafka's, in seconds.
        feedback_id: Of the feedback behind the delta; None if there is none.
        author: Of that feedback; None if it names none.
        inputs: Of that feedback, for display; None if there are none.
        target: Of that feedback; None if there is none.
        undoes: The ids of the feedback that an undo takes back.
        entries: By entry id, what happened to the entry. An exception counts for the entries that it concerns.
    """

    seq: int
    term: int
    op: str
    outcome: str | None
    timestamp: float
    feedback_id: str | None
    author: str | None
    inputs: str | None
    target: str | None
    undoes: tuple[str, ...]
    entries: dict[str, str]


def replay_deltas(
    settings: KafkaSettings,
    seq: int | None = None,
    until: datetime | None = None,
    on_applied: OnApplied = lambda *_: None,
) -> Codebook | None:
    """The codebook at delta `seq`, or after the last delta of time `until`; None if there is no delta up to there.

    Raises:
        HistoryError: the log has a gap, a wrong digest, a record that cannot be read, or no delta `seq` yet.
    """
    snapshot = replay_with_offset(settings, seq, until, on_applied)
    return None if snapshot is None else snapshot.codebook


def replay_with_offset(
    settings: KafkaSettings,
    seq: int | None = None,
    until: datetime | None = None,
    on_applied: OnApplied = lambda *_: None,
) -> Snapshot | None:
    """As `replay_deltas`, with the offset of the last applied delta."""
    codebook: Codebook | None = None
    last_offset = -1

    def apply(record: bytes, offset: int, timestamp: int) -> bool:
        nonlocal codebook, last_offset
        if until is not None and timestamp > 1000 * until.timestamp():
            return False
        if codebook is None:
            first = _decode_record(record)
            codebook = Codebook(first.codebook, first.model, first.layer)
        if seq is not None and codebook.seq >= seq:
            return False
        applied = codebook.apply(record)
        if applied is not None:
            last_offset = offset
            on_applied(record, applied.delta, codebook)
        return True

    read_history(settings, apply)
    if codebook is not None and seq is not None and codebook.seq < seq:
        raise HistoryError(f"the log ends at delta {codebook.seq}; there is no {seq} yet")
    return Snapshot(codebook, last_offset) if codebook is not None and codebook.seq else None


def history_steps(settings: KafkaSettings) -> Iterator[HistoryStep]:
    """Every delta that counts, described, with the feedback behind it.

    Deltas of a lower term than an earlier one do not count: a fenced editor wrote them.

    Raises:
        HistoryError: a record cannot be read.
        KafkaError: a topic cannot be read.
    """
    steps: list[tuple[int | None, HistoryStep]] = []
    existing_entries: set[str] = set()
    exceptions: dict[str, ExceptionChange] = {}

    def add_step(record: bytes, _offset: int, timestamp: int) -> None:
        delta = _decode_record(record)
        if not steps or delta.term >= steps[-1][1].term:
            step = _make_step(delta, timestamp / 1000, existing_entries, exceptions)
            steps.append((None if delta.cause is UNSET else delta.cause.offset, step))
            for change in delta.entries:
                (existing_entries.discard if change.removed else existing_entries.add)(change.entry_id)
            for exception in delta.exceptions:
                exceptions[exception.feedback_id] = exception

    read_history(settings, add_step)
    offsets = [offset for offset, _ in steps if offset is not None]
    history = KafkaHistory(settings)
    corrections = history.feedback_since(min(offsets)) if offsets else {}
    statuses = history.outcome_statuses() if offsets else {}
    for offset, step in steps:
        feedback = None if offset is None else corrections.get(offset)
        yield replace(
            step,
            outcome=None if offset is None else statuses.get(offset),
            inputs=None if feedback is None or feedback.inputs is UNSET else to_display_text(feedback.inputs),
            target=None if feedback is None or feedback.target is UNSET else feedback.target,
        )


def _make_step(
    delta: Delta, timestamp: float, existing_entries: Collection[str], exceptions: Mapping[str, ExceptionChange]
) -> HistoryStep:
    """A delta, described without its feedback, given the entries and exceptions before it."""
    cause = delta.cause
    entries = {change.entry_id: _describe_change(change, existing_entries) for change in delta.entries}
    for exception in delta.exceptions:
        description = f"exception {exception.feedback_id}" + (" ended" if exception.removed else "")
        for entry_id in exceptions.get(exception.feedback_id, exception).entry_ids or exception.entry_ids:
            entries[entry_id] = ", ".join(filter(None, (entries.get(entry_id), description)))
    return HistoryStep(
        seq=delta.seq,
        term=delta.term,
        op=delta.op,
        outcome=None,
        timestamp=timestamp,
        feedback_id=None if cause is UNSET else cause.feedback_id,
        author=None if cause is UNSET or cause.author is UNSET else cause.author,
        undoes=() if cause is UNSET else cause.undoes,
        inputs=None,
        target=None,
        entries=entries,
    )


def _decode_record(record: bytes) -> Delta:
    try:
        return decode_delta(record)
    except InvalidMessage as error:
        raise HistoryError(str(error)) from error


def _describe_change(change: EntryChange, existing_entries: Collection[str]) -> str:
    """What happened to an entry, in words."""
    if change.removed:
        return "removed"
    if change.entry_id not in existing_entries:
        return f"new, radius {change.radius:.4g}"
    descriptions = [f"radius {change.radius:.4g}"] if change.radius is not UNSET else []
    return ", ".join([*descriptions, *(["another value"] if change.value is not UNSET else [])])
