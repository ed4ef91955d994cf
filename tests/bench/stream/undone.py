"""The undo of a random half, and the history that never had that half.

What one author sent is undone by one undo. Beside it the same engine decides on the corrections of the other author
alone, in their order, with the queries, the values and the sight of traffic that the log has.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import UNSET

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.compare import EditState
from gracestream.pipeline.codebook.edit_memory import EditMemory, merge_contexts
from gracestream.pipeline.editing.candidate import ReplayContext
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.undo import undo
from gracestream.schemas.deltas import Delta, Seen, decode_delta
from gracestream.schemas.messages import Feedback
from tests.bench.framework import BenchError, Row
from tests.bench.stream.corrections import AUTHORS
from tests.bench.stream.edits import begun
from tests.bench.stream.log import StreamLog
from tests.bench.stream.measure import Past

UNDO = Feedback(v=1, feedback_id="undo", undo_author=AUTHORS[0])


class Told:
    """The history of a stream, as an undo reads it: the records of its log, and what was sent."""

    def __init__(self, log: StreamLog, feedback: Sequence[Feedback]) -> None:
        self._log, self._feedback = log, feedback

    def for_each_delta(self, on_record: Callable[[bytes], bool]) -> None:
        """The records in their order, until one returns False."""
        all(map(on_record, self.records()))

    def feedback_since(self, since: int) -> Mapping[int, Feedback]:
        """What was sent from this offset on."""
        return dict(enumerate(self._feedback[since:], since))

    def records(self) -> Iterator[bytes]:
        """The record by which the engine began, and those of the corrections."""
        return self._log.records(len(self._feedback))


def undo_rows(past: Past, log: StreamLog, at_work: Callable[[], object]) -> Iterator[Row]:
    """Undo a half, and compare. The engine holds what is left from then on.

    Raises:
        BenchError: the undo was rejected.
    """
    told = Told(log, past.feedback[: len(past.made)])
    fold = _fold_seconds(past.engine.codebook, told)
    started = time.perf_counter()
    edited = undo(past.engine, UNDO, len(past.made), told, at_work)
    seconds = time.perf_counter() - started
    if edited.delta_record is None:
        raise BenchError(f"the undo had no effect: {edited.outcome}")
    past.engine.apply(edited.delta_record)
    other = without(past, told, at_work)
    setting = f"undo/{past.setting}"
    gone = [number for number in past.accepted() if past.feedback[number].author == AUTHORS[0]]
    yield Row(f"{setting}/undone", len(gone), "count")
    yield Row(f"{setting}/decided again", len(decode_delta(edited.delta_record).decided), "count")
    yield Row(f"{setting}/seconds", seconds, "s", fold)
    yield Row(f"{setting}/delta", len(edited.delta_record), "B")
    yield Row(f"{setting}/entries", len(past.engine.codebook), "count", len(other.codebook))
    yield Row(f"{setting}/equal", float(same(past.engine, other)), "share", 1.0)


def without(past: Past, told: Told, at_work: Callable[[], object]) -> EditEngine:
    """The engine that never had what is undone."""
    records = told.records()
    engine = begun(past.engine.model, past.engine.config, past.data.traffic, past.texts, next(records))
    for delta in map(decode_delta, records):
        at_work()
        assert delta.cause is not UNSET
        feedback = past.feedback[delta.cause.offset]
        if feedback.author == AUTHORS[0]:
            continue
        edited = engine.edit(feedback, delta.cause.offset, _as_before(delta, past.engine.memory))
        if edited.delta_record is not None:
            engine.apply(edited.delta_record)
    return engine


def same(ours: EditEngine, theirs: EditEngine) -> bool:
    """Whether all entries are equal, bit for bit, and serve the same edits with equal queries."""
    return ours.codebook.state_digest() == theirs.codebook.state_digest() and _serving(ours) == _serving(theirs)


def _serving(engine: EditEngine) -> dict[str, tuple[str, bytes]]:
    memory = engine.memory
    return {name: (memory.serving_entry_id(name), memory.query(name).tobytes()) for name in memory.feedback_ids}


def _as_before(delta: Delta, memory: EditMemory) -> ReplayContext:
    """What the decision behind a delta saw, its query, and its value where it had one of its own."""
    cause = delta.cause
    assert cause is not UNSET
    assert cause.seen is not UNSET
    seen: Seen = cause.seen
    if (later := memory.replay_contexts.get(cause.feedback_id)) is not None:
        seen = merge_contexts(seen, later)
    own = next((change for change in delta.entries if change.entry_id == cause.entry_id), None)
    query_D: np.ndarray | None = None
    if cause.query is not UNSET:
        query_D = cause.query.array()
    elif own is not None and own.key is not UNSET:
        query_D = own.key.array()
    value_V = None if own is None or own.value is UNSET or delta.op == "expand" else own.value.array()
    return ReplayContext(seen, query_D, value_V)


def _fold_seconds(codebook: Codebook, told: Told) -> float:
    """What reading the records alone takes, which is the floor of an undo."""
    folded = EditState(Codebook(codebook.name, codebook.model, codebook.layer), EditMemory())
    started = time.perf_counter()
    for record in told.records():
        folded.apply(record)
    return time.perf_counter() - started
