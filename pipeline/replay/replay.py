"""Replay: the codebook at any point of its history, from `deltas` alone (docs/explanation/consistency.md).

Each record's digest is checked, so the result is equal to the recorded codebook, bit for bit.
"""

from collections.abc import Callable
from datetime import datetime

from gracestream.pipeline.codebook import Codebook
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.history import decode_history_delta
from gracestream.pipeline.kafka import read_history
from gracestream.pipeline.settings import KafkaSettings
from gracestream.pipeline.stores import Snapshot
from gracestream.schemas.deltas import Delta

OnApplied = Callable[[bytes, Delta, Codebook], object]
"""Called for each applied record, with the record, its delta, and the codebook after it."""


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
            first = decode_history_delta(record)
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
