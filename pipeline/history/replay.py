"""Replay: the codebook at any point of its history, from `deltas` alone (design, section 5, point 8)."""

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime

from msgspec import UNSET, Struct
from msgspec.structs import replace

from gracestream.pipeline.codebook import Codebook
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.history.kafka_history import KafkaHistory
from gracestream.pipeline.kafka import read_history
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores import Snapshot
from gracestream.schemas.deltas import Delta, EntryChange, ExceptionChange, decode_delta
from gracestream.schemas.messages import InvalidMessage, to_display_text

OnApplied = Callable[[bytes, Delta, Codebook], object]
"""Called with each record that counts, what it says, and the codebook that has just applied it."""


class HistoryStep(Struct, frozen=True):
    """One delta in words. `timestamp` is Kafka's, in seconds; `entries` says what happened to each entry.

    An exception counts as something that happened to the entries that it is of.

    `outcome` is the status that the sender of the feedback got. A correction that the model fulfilled already is
    `unchanged`, and its delta an `expand`. It is None where no feedback is behind the delta, or `edits` does not tell.
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
    settings: Settings,
    seq: int | None = None,
    until: datetime | None = None,
    on_applied: OnApplied = lambda *_: None,
) -> Codebook | None:
    """Fold the log up to delta `seq`, or to the last one of `until`; None where there is nothing up to there.

    Raises:
        HistoryError: the log does not fold: a gap, a broken digest, a record that cannot be read.
    """
    folded = replay_with_offset(settings, seq, until, on_applied)
    return None if folded is None else folded.codebook


def replay_with_offset(
    settings: Settings,
    seq: int | None = None,
    until: datetime | None = None,
    on_applied: OnApplied = lambda *_: None,
) -> Snapshot | None:
    """As `replay_deltas`, with the offset of the last delta that counts."""
    codebook: Codebook | None = None
    last = -1

    def fold(record: bytes, offset: int, timestamp: int) -> bool:
        nonlocal codebook, last
        if until is not None and timestamp > 1000 * until.timestamp():
            return False
        if codebook is None:
            first = _decode_record(record)
            codebook = Codebook(first.codebook, first.model, first.layer)
        if seq is not None and codebook.seq >= seq:
            return False
        applied = codebook.apply(record)
        if applied is not None:
            last = offset
            on_applied(record, applied.delta, codebook)
        return True

    read_history(settings, fold)
    if codebook is not None and seq is not None and codebook.seq < seq:
        raise HistoryError(f"the log ends at delta {codebook.seq}; there is no {seq} yet")
    return Snapshot(codebook, last) if codebook is not None and codebook.seq else None


def history_steps(settings: Settings) -> Iterator[HistoryStep]:
    """Every delta that counts, in words, with the correction behind it."""
    steps: list[tuple[int | None, HistoryStep]] = []
    known: set[str] = set()
    exceptions: dict[str, ExceptionChange] = {}

    def keep(record: bytes, _offset: int, timestamp: int) -> None:
        delta = _decode_record(record)
        if not steps or delta.term >= steps[-1][1].term:
            step = _make_step(delta, timestamp / 1000, known, exceptions)
            steps.append((None if delta.cause is UNSET else delta.cause.offset, step))
            for change in delta.entries:
                (known.discard if change.removed else known.add)(change.entry_id)
            for exception in delta.exceptions:
                exceptions[exception.feedback_id] = exception

    read_history(settings, keep)
    offsets = [offset for offset, _ in steps if offset is not None]
    history = KafkaHistory(settings)
    corrections = history.feedback_since(min(offsets)) if offsets else {}
    statuses = history.outcome_statuses() if offsets else {}
    for offset, step in steps:
        asked = None if offset is None else corrections.get(offset)
        yield replace(
            step,
            outcome=None if offset is None else statuses.get(offset),
            inputs=None if asked is None or asked.inputs is UNSET else to_display_text(asked.inputs),
            target=None if asked is None or asked.target is UNSET else asked.target,
        )


def _make_step(
    delta: Delta, timestamp: float, existing_entries: Collection[str], exceptions: Mapping[str, ExceptionChange]
) -> HistoryStep:
    """Describe a delta without the correction that caused it, given the entries and exceptions before it."""
    cause = delta.cause
    entries = {change.entry_id: _describe_change(change, existing_entries) for change in delta.entries}
    for exception in delta.exceptions:
        what = f"exception {exception.feedback_id}" + (" ended" if exception.removed else "")
        for entry_id in exceptions.get(exception.feedback_id, exception).entry_ids or exception.entry_ids:
            entries[entry_id] = ", ".join(filter(None, (entries.get(entry_id), what)))
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
    if change.removed:
        return "removed"
    if change.entry_id not in existing_entries:
        return f"new, radius {change.radius:.4g}"
    changed = [f"radius {change.radius:.4g}"] if change.radius is not UNSET else []
    return ", ".join([*changed, *(["another value"] if change.value is not UNSET else [])])
