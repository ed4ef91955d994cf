"""The undo of a random half, compared with a history that never had that half.

One undo removes the corrections of one author. A second engine decides only on the corrections of the other author, in
order, with the queries, values and traffic distances of the log.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import UNSET

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.compare import EditState
from gracestream.pipeline.codebook.edit_memory import EditMemory, merge_contexts
from gracestream.pipeline.editing.candidate import RecordedInputs
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.undo import undo
from gracestream.schemas.deltas import DecisionContext, Delta, decode_delta
from gracestream.schemas.messages import Feedback
from tests.bench.framework import BenchError, Row
from tests.bench.stream.corrections import AUTHORS
from tests.bench.stream.edits import start_engine
from tests.bench.stream.log import StreamLog
from tests.bench.stream.measure import StreamState

UNDO = Feedback(v=1, feedback_id="undo", undo_author=AUTHORS[0])


class LoggedHistory:
    """The history of a stream as an undo reads it: the deltas in its log, and the feedback."""

    def __init__(self, log: StreamLog, feedback: Sequence[Feedback]) -> None:
        self._log, self._feedback = log, feedback

    def for_each_delta(self, on_record: Callable[[bytes], bool]) -> None:
        """Call `on_record` with each delta, in order, until it returns False."""
        all(map(on_record, self.records()))

    def feedback_since(self, since: int) -> Mapping[int, Feedback]:
        """The feedback from this offset on."""
        return dict(enumerate(self._feedback[since:], since))

    def records(self) -> Iterator[bytes]:
        """The lead delta, and the deltas of the corrections."""
        return self._log.records(len(self._feedback))


def undo_rows(state: StreamState, log: StreamLog, heartbeat: Callable[[], object]) -> Iterator[Row]:
    """The rows of the undo and of the comparison. The undo is applied to the engine of the stream.

    Raises:
        BenchError: The undo was rejected.
    """
    history = LoggedHistory(log, state.feedback[: len(state.corrections)])
    floor = _apply_seconds(state.engine.codebook, history)
    started = time.perf_counter()
    result = undo(state.engine, UNDO, len(state.corrections), history, heartbeat)
    seconds = time.perf_counter() - started
    if result.delta_record is None:
        raise BenchError(f"the undo had no effect: {result.outcome}")
    state.engine.apply(result.delta_record)
    other = rebuild_without(state, history, heartbeat)
    setting = f"undo/{state.setting}"
    undone = [number for number in state.not_rejected() if state.feedback[number].author == AUTHORS[0]]
    yield Row(f"{setting}/undone", len(undone), "count")
    yield Row(f"{setting}/decided again", len(decode_delta(result.delta_record).decided), "count")
    yield Row(f"{setting}/seconds", seconds, "s", floor)
    yield Row(f"{setting}/delta", len(result.delta_record), "B")
    yield Row(f"{setting}/entries", len(state.engine.codebook), "count", len(other.codebook))
    yield Row(f"{setting}/equal", float(entries_equal(state.engine, other)), "share", 1.0)


def rebuild_without(state: StreamState, history: LoggedHistory, heartbeat: Callable[[], object]) -> EditEngine:
    """An engine that never had the undone corrections."""
    records = history.records()
    engine = start_engine(
        state.engine.model, state.engine.config, state.data.traffic, state.prompt_cache, next(records)
    )
    for delta in map(decode_delta, records):
        heartbeat()
        assert delta.cause is not UNSET
        feedback = state.feedback[delta.cause.offset]
        if feedback.author == AUTHORS[0]:
            continue
        result = engine.edit(feedback, delta.cause.offset, _recorded_context(delta, state.engine.memory))
        if result.delta_record is not None:
            engine.apply(result.delta_record)
    return engine


def entries_equal(first: EditEngine, second: EditEngine) -> bool:
    """Whether all entries are equal, bit for bit, and serve the same edits with equal queries."""
    equal = first.codebook.state_digest() == second.codebook.state_digest()
    return equal and _serving_entries(first) == _serving_entries(second)


def _serving_entries(engine: EditEngine) -> dict[str, tuple[str, bytes]]:
    memory = engine.memory
    return {name: (memory.serving_entry_id(name), memory.query(name).tobytes()) for name in memory.feedback_ids}


def _recorded_context(delta: Delta, memory: EditMemory) -> RecordedInputs:
    """The recorded inputs of the decision behind a delta, its query, and its value if it had an own one."""
    cause = delta.cause
    assert cause is not UNSET
    assert cause.context is not UNSET
    context: DecisionContext = cause.context
    if (later := memory.repeated_contexts.get(cause.feedback_id)) is not None:
        context = merge_contexts(context, later)
    own_entry = next((change for change in delta.entries if change.entry_id == cause.entry_id), None)
    query_D: np.ndarray | None = None
    if cause.query is not UNSET:
        query_D = cause.query.array()
    elif own_entry is not None and own_entry.key is not UNSET:
        query_D = own_entry.key.array()
    value_V = None if own_entry is None or own_entry.value is UNSET or delta.op == "expand" else own_entry.value.array()
    return RecordedInputs(context, query_D, value_V)


def _apply_seconds(codebook: Codebook, history: LoggedHistory) -> float:
    """Seconds of applying all records once: the floor of an undo."""
    applied = EditState(Codebook(codebook.name, codebook.model, codebook.layer), EditMemory())
    started = time.perf_counter()
    for record in history.records():
        applied.apply(record)
    return time.perf_counter() - started
