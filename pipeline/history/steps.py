"""The steps of a history: each delta, described, with the feedback and the outcome behind it."""

from collections.abc import Collection, Iterator, Mapping

from msgspec import UNSET, Struct
from msgspec.structs import replace

from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.history.kafka_history import KafkaHistory
from gracestream.pipeline.kafka import read_history
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.deltas import Delta, EntryChange, decode_delta
from gracestream.schemas.messages import InvalidMessage, to_display_text


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


def history_steps(settings: KafkaSettings) -> Iterator[HistoryStep]:
    """Every delta that counts, described, with the feedback behind it.

    Deltas of a lower term than an earlier one do not count: a fenced editor wrote them.

    Raises:
        HistoryError: a record cannot be read.
        KafkaError: a topic cannot be read.
    """
    steps: list[tuple[int | None, HistoryStep]] = []
    describer = StepDescriber()

    def add_step(record: bytes, _offset: int, timestamp: int) -> None:
        delta = decode_history_delta(record)
        step = describer.describe(delta, timestamp / 1000)
        if step is not None:
            steps.append((None if delta.cause is UNSET else delta.cause.offset, step))

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


class StepDescriber:
    """Describes the deltas of a history in order. It knows the entries and exceptions before each.

    Attributes:
        term: The highest term so far.
        existing_entries: The ids of the entries after the last delta.
        exceptions: By feedback id, the ids of the entries that each exception concerns.
    """

    def __init__(self) -> None:
        self.term = 0
        self.existing_entries: set[str] = set()
        self.exceptions: dict[str, tuple[str, ...]] = {}

    def describe(self, delta: Delta, timestamp: float) -> HistoryStep | None:
        """The next delta, described without its feedback; None if it does not count. `timestamp` is in seconds."""
        if delta.term < self.term:
            return None
        step = _make_step(delta, timestamp, self.existing_entries, self.exceptions)
        self.term = delta.term
        for change in delta.entries:
            (self.existing_entries.discard if change.removed else self.existing_entries.add)(change.entry_id)
        for exception in delta.exceptions:
            self.exceptions[exception.feedback_id] = exception.entry_ids
        return step


def decode_history_delta(record: bytes) -> Delta:
    """The delta of a record of `deltas`.

    Raises:
        HistoryError: the record cannot be read.
    """
    try:
        return decode_delta(record)
    except InvalidMessage as error:
        raise HistoryError(str(error)) from error


def _make_step(
    delta: Delta, timestamp: float, existing_entries: Collection[str], exceptions: Mapping[str, tuple[str, ...]]
) -> HistoryStep:
    """A delta, described without its feedback, given the entries and exceptions before it."""
    cause = delta.cause
    entries = {change.entry_id: _describe_change(change, existing_entries) for change in delta.entries}
    for exception in delta.exceptions:
        description = f"exception {exception.feedback_id}" + (" ended" if exception.removed else "")
        for entry_id in exceptions.get(exception.feedback_id) or exception.entry_ids:
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


def _describe_change(change: EntryChange, existing_entries: Collection[str]) -> str:
    """What happened to an entry, in words."""
    if change.removed:
        return "removed"
    if change.entry_id not in existing_entries:
        return f"new, radius {change.radius:.4g}"
    descriptions = [f"radius {change.radius:.4g}"] if change.radius is not UNSET else []
    return ", ".join([*descriptions, *(["another value"] if change.value is not UNSET else [])])
