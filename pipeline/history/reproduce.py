"""Replay with training anew: the same corrections through the same engine (design, section 5, point 8).

Each decision is compared with the recorded one. Corrections come from `feedback`; what a decision saw of `requests`
stands in its delta, since requests are kept for days and deltas for ever, and so does the plan of each term. Under the
same versions and on the same device every record comes out the same, byte for byte; elsewhere the decisions do, and
values differ by rounding.

What left no delta is decided again too, on the codebook that it was decided on, as its outcome on `edits` tells: what
was rejected, be it that no value was found, that the model cannot take the input or failed on it, or that the id was
used; the same correction again, which was unchanged; and undos of nothing. Its status must be the same again; the
reason may be in other words and numbers. Not decided again is what no codebook and no model had a part in: feedback
that could not be read, and what admission refused: copies of signed feedback, and by the limits and the list of authors
of that minute.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec
import numpy as np
import torch
from msgspec import UNSET, Struct, UnsetType

from gracestream.pipeline.codebook import Codebook, as_it_was
from gracestream.pipeline.editing import Again, Ahead, Edited, EditEngine, Fruitless, Plan, except_from, plan_of, undo
from gracestream.pipeline.editor import failed
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import EditableModel
from gracestream.schemas.deltas import Cause, Delta, EntryChange, Seen, Standing, Tensor, decode_delta
from gracestream.schemas.messages import Feedback

GROUPS = 64
"""Of values that were trained together; as many as an editor can have made at once."""


class Compared(Struct):
    """How far the retrained history is the recorded one.

    Attributes:
        decisions: Feedback that was decided on anew; `lead` deltas are none.
        same_decisions: Those that did the same to the same entries, or left no delta for the same status.
        same_records: Those of them that left a delta which is equal in every bit.
        same_fruitless: Those of them that left no delta.
        value_difference: The largest difference of a number in a value, in the layer's units.
        first_difference: Where and how the first decision differs; retraining ends there.
        other_environment: Versions, device and the like that were other ones then: what was, and what is.
    """

    decisions: int = 0
    same_decisions: int = 0
    same_records: int = 0
    same_fruitless: int = 0
    value_difference: float = 0.0
    first_difference: str | None = None
    other_environment: dict[str, tuple[str, str]] = {}


class Retraining:
    """Feed it the records of `deltas` in order, then `settle`; `records` are its own, which may be published elsewhere.

    Each term is decided with as many torch threads as its editor had, which holds for the whole process.

    `corrections` is all feedback by offset; `environment` tells what is recorded of a term under a plan; `fruitless`
    are the decisions that left no delta, in the order of feedback.
    """

    def __init__(
        self,
        model: EditableModel,
        corrections: Mapping[int, Feedback],
        environment: Callable[[Plan], Mapping[str, str]],
        fruitless: Iterable[Fruitless] = (),
    ) -> None:
        self.compared = Compared()
        self.records: list[bytes] = []
        self._model, self._corrections, self._environment = model, corrections, environment
        self._engine: EditEngine | None = None
        self._term = 0
        self._ahead: dict[tuple[int, ...], dict[int, Ahead]] = {}
        """What was trained together of late, by offsets: the next decisions may want the rest of it."""
        self._fruitless: dict[tuple[int, int], list[Fruitless]] = defaultdict(list)
        """By term and seq of the codebook."""
        for one in fruitless:
            self._fruitless[one.term, one.seq].append(one)

    @property
    def codebook(self) -> Codebook | None:
        """What has come out so far."""
        return None if self._engine is None else self._engine.codebook

    def each_delta(self, on_record: Callable[[bytes], bool]) -> None:
        """The retrained history, for an undo in it."""
        all(map(on_record, self.records))

    def corrections(self, since: int) -> Mapping[int, Feedback]:
        """The feedback from an offset on."""
        return {offset: one for offset, one in self._corrections.items() if offset >= since}

    def fold(self, record: bytes) -> bool:
        """Decide on what was decided up to the next record, and by it; False once a decision has come out otherwise.

        Raises:
            HistoryError: the record cannot be read, or the history is of another model.
        """
        delta = decode_delta(record)
        if delta.term < self._term:
            return True  # an editor that was no longer in charge; every reader drops it
        if not self.settle():
            return False
        self._term = delta.term
        if delta.op == "lead":
            self._lead(delta)
            return True
        assert self._engine is not None
        return self._comes_again(self._engine, delta)

    def settle(self) -> bool:
        """Decide on what left no delta on the codebook as it is now; False where a decision has come out otherwise."""
        if self._engine is None:
            return True
        book = self._engine.codebook
        return all(
            self._is_fruitless_again(self._engine, one) for one in self._fruitless.pop((book.term, book.seq), [])
        )

    def _comes_again(self, engine: EditEngine, delta: Delta) -> bool:
        """Whether a decision that left a delta leaves the same one again, numbers apart; which is applied then."""
        cause = delta.cause
        if cause is UNSET:
            raise HistoryError(f"no feedback is behind delta {delta.seq}, so it cannot be decided anew")
        self.compared.decisions += 1
        place = f"delta {delta.seq}"
        feedback = self._feedback(cause.offset, place)
        engine.memory.recall(delta.decided)
        read = {} if cause.traffic is UNSET else cause.traffic
        engine.traffic.positions = {int(partition): end for partition, end in read.items()}
        seen = None if cause.seen is UNSET else cause.seen
        edited = self._decide(engine, feedback, cause.offset, seen, cause.standing, cause.together)
        if edited.record is None:
            assert edited.outcome is not None
            how = f"it is {edited.outcome.status} now: {edited.reason}"
            return self._differ(place, cause.feedback_id, cause.offset, how)
        ours = decode_delta(edited.record)
        if (other := _other_decision(delta, ours)) is not None:
            return self._differ(place, cause.feedback_id, cause.offset, other)
        self.compared.same_decisions += 1
        self.compared.same_records += _content(delta) == _content(ours)
        self.compared.value_difference = max(self.compared.value_difference, _value_difference(delta, ours))
        self._apply(edited.record)
        return True

    def _is_fruitless_again(self, engine: EditEngine, one: Fruitless) -> bool:
        """Whether a decision that left no delta comes to the same status again."""
        was, place = one.outcome, f"after delta {one.seq}"
        self.compared.decisions += 1
        feedback = self._feedback(one.offset, f"a decision {place}")
        edited = self._decide(engine, feedback, one.offset, one.seen, one.standing)
        assert edited.outcome is not None
        if edited.outcome.status != was.status:
            before = f"{was.status!r} ({was.reason})" if was.status == "rejected" else repr(was.status)
            now = f"{edited.outcome.status!r} now" + (f": {edited.reason}" if edited.reason else "")
            return self._differ(place, was.feedback_id, one.offset, f"it was {before} and is {now}")
        self.compared.same_decisions += 1
        self.compared.same_fruitless += 1
        return True

    def _lead(self, delta: Delta) -> None:
        environment = {} if delta.environment is UNSET else delta.environment
        plan = plan_of(environment)
        if environment.get("threads", "").isdecimal():
            torch.set_num_threads(int(environment["threads"]))  # sums come out otherwise with another number of them
        if self._engine is None:
            if (delta.model, delta.layer) != (self._model.fingerprint, self._model.layer):
                raise HistoryError(
                    f"the history is of model {delta.model[:12]}… at {delta.layer}; this one is"
                    f" {self._model.fingerprint[:12]}… at {self._model.layer}: set --model, --layer,"
                    f" GRACESTREAM_QUERY, _ENCODER and _REPLACE each {as_it_was(delta)}"
                )
            self._engine = EditEngine(self._model, delta.codebook, plan)
        self._engine.plan = plan
        now = self._environment(plan)
        self.compared.other_environment |= {
            name: (value, now[name]) for name, value in environment.items() if name in now and now[name] != value
        }
        self._apply(self._engine.record("lead", term=delta.term, environment=delta.environment))

    def _feedback(self, offset: int, what: str) -> Feedback:
        if offset not in self._corrections:
            raise HistoryError(f"the feedback behind {what} is not there, so it cannot be decided anew")
        return self._corrections[offset]

    def _decide(
        self,
        engine: EditEngine,
        feedback: Feedback,
        offset: int,
        seen: Seen | None,
        standing: Standing | UnsetType,
        together: tuple[int, ...] = (),
    ) -> Edited:
        try:
            if feedback.undoes:
                return undo(engine, feedback, offset, self, standing=standing)
            if feedback.excepts:
                return except_from(engine, feedback, offset, standing)
            ahead = self._trained(engine, together).pop(offset, None) if together else None
            return engine.edit(feedback, offset, None if seen is None else Again(seen), ahead, standing)
        except Exception as error:  # noqa: BLE001  (as the editor does)
            return failed(feedback, error)

    def _trained(self, engine: EditEngine, together: tuple[int, ...]) -> dict[int, Ahead]:
        """What comes of training the values of the feedback at these offsets in one batch."""
        if together not in self._ahead:
            first = min(together)
            self._ahead = {others: found for others, found in self._ahead.items() if max(others) >= first}
            corrections = [(self._feedback(offset, f"a batch with offset {offset}"), offset) for offset in together]
            while len(self._ahead) >= GROUPS:
                del self._ahead[next(iter(self._ahead))]
            self._ahead[together] = engine.train_together(corrections)
        return self._ahead[together]

    def _apply(self, record: bytes) -> None:
        assert self._engine is not None
        self.records.append(record)
        self._engine.apply(record)

    def _differ(self, place: str, feedback_id: str, offset: int, how: str) -> Literal[False]:
        self.compared.first_difference = f"{place} (feedback {feedback_id!r}, offset {offset}): {how}"
        return False


def _content(delta: Delta) -> Delta:
    """A delta but for its digest, which follows from all before it."""
    return msgspec.structs.replace(delta, digest=b"")


def _other_decision(recorded: Delta, ours: Delta) -> str | None:
    """In words how a decision differs, numbers apart; None where it is the same."""
    if recorded.op != ours.op:
        return f"it was {recorded.op!r} and is {ours.op!r} now"
    was, now = (
        None if d.cause is UNSET else (d.cause.entry_id, d.cause.supersedes, *_rephrases(d.cause))
        for d in (recorded, ours)
    )
    if was != now:
        return f"it was served by {was} and is by {now} now"
    entries, again = ({_shape(change) for change in d.entries} for d in (recorded, ours))
    before, after = _names(entries - again), _names(again - entries)
    if before != after:
        return f"it changed {before} and changes {after} now"
    if entries != again:
        return f"it changes {after} to another target, or other fields of it"
    return _other_effect(recorded, ours)


def _other_effect(recorded: Delta, ours: Delta) -> str | None:
    """The same, of what a decision does beside changing entries."""
    if _exceptions(recorded) != _exceptions(ours):
        return "it makes or ends other exceptions"
    if recorded.edits and _edits(recorded) != _edits(ours):
        return "it left other edits in force"
    return None


def _shape(change: EntryChange) -> tuple[str, bool, object, tuple[bool, ...]]:
    """What of an entry changed, without the numbers."""
    fields = (change.key, change.value, change.radius)
    return change.entry_id, change.removed, change.label, tuple(field is not UNSET for field in fields)


def _rephrases(cause: Cause) -> list[str]:
    """What serves each rephrase."""
    return [
        "left out" if one.left_out else "the bare model" if one.entry_id is UNSET else one.entry_id
        for one in cause.rephrases
    ]


def _names(entries: set[tuple[str, bool, object, tuple[bool, ...]]]) -> str:
    return ", ".join(sorted(repr(name) for name, *_ in entries)) or "nothing"


def _edits(delta: Delta) -> set[tuple[str, object, bool]]:
    return {(edit.feedback_id, edit.entry_id, edit.removed) for edit in delta.edits}


def _exceptions(delta: Delta) -> set[tuple[str, tuple[str, ...], bool]]:
    return {(one.feedback_id, one.entry_ids, one.removed) for one in delta.exceptions}


def _value_difference(recorded: Delta, ours: Delta) -> float:
    theirs = {change.entry_id: change.value for change in ours.entries}
    pairs = [(change.value, theirs[change.entry_id]) for change in recorded.entries if change.value is not UNSET]
    return max(
        (float(np.abs(was.array() - now.array()).max()) for was, now in pairs if isinstance(now, Tensor)), default=0.0
    )
