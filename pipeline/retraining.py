"""Replay with training anew: the same corrections through the same engine (design, section 5, point 8).

Each decision is compared with the recorded one. Corrections come from `feedback`; what a decision saw of `requests`
stands in its delta, since requests are kept for days and deltas for ever, and so does the plan of each term. Under the
same versions and on the same device every record comes out the same, byte for byte; elsewhere the decisions do, and
values differ by rounding.
"""

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import torch
from msgspec import UNSET, Struct

from pipeline.codebook import Codebook, DeltaFault
from pipeline.edited import Edited
from pipeline.editing import Again, EditEngine
from pipeline.model import EditableModel
from pipeline.plan import Plan, plan_of
from pipeline.undo import undo
from schemas.deltas import Delta, EntryChange, Tensor, decode_delta
from schemas.messages import Feedback


class Compared(Struct):
    """How far the retrained history is the recorded one.

    Attributes:
        decisions: Feedback that was decided on anew: all that left a delta; `lead` deltas are none.
        same_decisions: Those that did the same to the same entries.
        same_records: Those of them that are equal in every bit.
        value_difference: The largest difference of a number in a value, in the layer's units.
        first_difference: Where and how the first decision differs; retraining ends there.
        other_environment: Versions, device and the like that were other ones then: what was, and what is.
    """

    decisions: int = 0
    same_decisions: int = 0
    same_records: int = 0
    value_difference: float = 0.0
    first_difference: str | None = None
    other_environment: dict[str, tuple[str, str]] = {}


class Retraining:
    """Feed it the records of `deltas` in order; `records` are its own, which may be published elsewhere.

    Each term is decided with as many torch threads as its editor had, which holds for the whole process.

    `corrections` is all feedback by offset; `environment` tells what is recorded of a term under a plan. What was
    rejected is not tried again: it left no record of what it saw.
    """

    def __init__(
        self,
        model: EditableModel,
        corrections: Mapping[int, Feedback],
        environment: Callable[[Plan], Mapping[str, str]],
    ) -> None:
        self.compared = Compared()
        self.records: list[bytes] = []
        self._model, self._corrections, self._environment = model, corrections, environment
        self._engine: EditEngine | None = None
        self._term = 0

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
        """Decide on what the next record decided; False once a decision has come out otherwise.

        Raises:
            DeltaFault: the record cannot be read, or the history is of another model.
        """
        delta = decode_delta(record)
        if delta.term < self._term:
            return True  # an editor that was no longer in charge; every reader drops it
        self._term = delta.term
        if delta.op == "lead":
            self._lead(delta)
            return True
        assert self._engine is not None
        self.compared.decisions += 1
        edited = self._decide(self._engine, delta)
        if edited.record is None:
            self._differ(delta, f"it is {edited.outcome.status if edited.outcome else 'refused'} now: {edited.reason}")
            return False
        ours = decode_delta(edited.record)
        if (other := _other_decision(delta, ours)) is not None:
            self._differ(delta, other)
            return False
        self.compared.same_decisions += 1
        self.compared.same_records += _content(delta) == _content(ours)
        self.compared.value_difference = max(self.compared.value_difference, _value_difference(delta, ours))
        self._apply(edited.record)
        return True

    def _lead(self, delta: Delta) -> None:
        environment = {} if delta.environment is UNSET else delta.environment
        plan = plan_of(environment)
        if environment.get("threads", "").isdecimal():
            torch.set_num_threads(int(environment["threads"]))  # sums come out otherwise with another number of them
        if self._engine is None:
            if (delta.model, delta.layer) != (self._model.fingerprint, self._model.layer):
                raise DeltaFault(
                    f"the history is of model {delta.model[:12]}… at {delta.layer}; this one is"
                    f" {self._model.fingerprint[:12]}… at {self._model.layer}: set --model and --layer as they were"
                )
            self._engine = EditEngine(self._model, delta.codebook, plan)
        self._engine.plan = plan
        now = self._environment(plan)
        self.compared.other_environment |= {
            name: (value, now[name]) for name, value in environment.items() if name in now and now[name] != value
        }
        self._apply(self._engine.record("lead", term=delta.term, environment=delta.environment))

    def _decide(self, engine: EditEngine, delta: Delta) -> Edited:
        cause = delta.cause
        if cause is UNSET or cause.offset not in self._corrections:
            raise DeltaFault(f"the feedback behind delta {delta.seq} is not there, so it cannot be decided anew")
        feedback = self._corrections[cause.offset]
        if feedback.undoes:
            engine.memory.recall(delta.decided)
            return undo(engine, feedback, cause.offset, self)
        read = {} if cause.traffic is UNSET else cause.traffic
        engine.traffic.positions = {int(partition): end for partition, end in read.items()}
        return engine.edit(feedback, cause.offset, None if cause.seen is UNSET else Again(cause.seen))

    def _apply(self, record: bytes) -> None:
        assert self._engine is not None
        self.records.append(record)
        self._engine.apply(record)

    def _differ(self, delta: Delta, how: str) -> None:
        cause = delta.cause
        whose = "" if cause is UNSET else f" (feedback {cause.feedback_id!r}, offset {cause.offset})"
        self.compared.first_difference = f"delta {delta.seq}{whose}: {how}"


def _content(delta: Delta) -> Delta:
    """A delta but for its digest, which follows from all before it."""
    return msgspec.structs.replace(delta, digest=b"")


def _other_decision(recorded: Delta, ours: Delta) -> str | None:
    """In words how a decision differs, numbers apart; None where it is the same."""
    if recorded.op != ours.op:
        return f"it was {recorded.op!r} and is {ours.op!r} now"
    was, now = (None if d.cause is UNSET else (d.cause.entry_id, d.cause.supersedes) for d in (recorded, ours))
    if was != now:
        return f"it was served by {was} and is by {now} now"
    entries, again = ({_shape(change) for change in d.entries} for d in (recorded, ours))
    before, after = _names(entries - again), _names(again - entries)
    if before != after:
        return f"it changed {before} and changes {after} now"
    if entries != again:
        return f"it changes {after} to another target, or other fields of it"
    if recorded.edits and _edits(recorded) != _edits(ours):
        return "it left other edits in force"
    return None


def _shape(change: EntryChange) -> tuple[str, bool, object, tuple[bool, ...]]:
    """What of an entry changed, without the numbers."""
    fields = (change.key, change.value, change.radius)
    return change.entry_id, change.removed, change.label, tuple(field is not UNSET for field in fields)


def _names(entries: set[tuple[str, bool, object, tuple[bool, ...]]]) -> str:
    return ", ".join(sorted(repr(name) for name, *_ in entries)) or "nothing"


def _edits(delta: Delta) -> set[tuple[str, object, bool]]:
    return {(edit.feedback_id, edit.entry_id, edit.removed) for edit in delta.edits}


def _value_difference(recorded: Delta, ours: Delta) -> float:
    theirs = {change.entry_id: change.value for change in ours.entries}
    pairs = [(change.value, theirs[change.entry_id]) for change in recorded.entries if change.value is not UNSET]
    return max(
        (float(np.abs(was.array() - now.array()).max()) for was, now in pairs if isinstance(now, Tensor)), default=0.0
    )
