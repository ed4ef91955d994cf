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

from gracestream.pipeline.codebook import Codebook, original_setting_hint
from gracestream.pipeline.editing import (
    DraftValue,
    EditConfig,
    EditEngine,
    EditResult,
    NoChangeDecision,
    ReplayContext,
    decide_exception,
    edit_config_from_lead,
    undo,
)
from gracestream.pipeline.editor import model_failure
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import EditableModel
from gracestream.schemas.deltas import Cause, Delta, EntryChange, Seen, Standing, Tensor, decode_delta
from gracestream.schemas.messages import Feedback

MAX_CACHED_BATCHES = 64
"""Of values that were trained together; as many as an editor can have made at once."""


class ReproductionReport(Struct):
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


class ReproductionRun:
    """Feed it the records of `deltas` in order, then `finish_seq`; `records` are the reproduced ones.

    Each term is decided with as many torch threads as its editor had, which holds for the whole process.

    `feedback_by_offset` is all feedback by offset; `describe_environment` tells what is recorded of a term under a
    plan; `no_change_decisions` are the decisions that left no delta, in the order of feedback.
    """

    def __init__(
        self,
        model: EditableModel,
        feedback_by_offset: Mapping[int, Feedback],
        describe_environment: Callable[[EditConfig], Mapping[str, str]],
        no_change_decisions: Iterable[NoChangeDecision] = (),
    ) -> None:
        self.report = ReproductionReport()
        self.records: list[bytes] = []
        self._model, self._feedback_by_offset, self._describe_environment = (
            model,
            feedback_by_offset,
            describe_environment,
        )
        self._engine: EditEngine | None = None
        self._term = 0
        self._drafts_by_batch: dict[tuple[int, ...], dict[int, DraftValue]] = {}
        """What was trained together of late, by offsets: the next decisions may want the rest of it."""
        self._no_change_decisions: dict[tuple[int, int], list[NoChangeDecision]] = defaultdict(list)
        """By term and seq of the codebook."""
        for one in no_change_decisions:
            self._no_change_decisions[one.term, one.seq].append(one)

    @property
    def codebook(self) -> Codebook | None:
        """What has come out so far."""
        return None if self._engine is None else self._engine.codebook

    def for_each_delta(self, on_record: Callable[[bytes], bool]) -> None:
        """The retrained history, for an undo in it."""
        all(map(on_record, self.records))

    def feedback_since(self, since: int) -> Mapping[int, Feedback]:
        """The feedback from an offset on."""
        return {offset: one for offset, one in self._feedback_by_offset.items() if offset >= since}

    def reproduce(self, record: bytes) -> bool:
        """Decide on what was decided up to the next record, and by it; False once a decision has come out otherwise.

        Raises:
            HistoryError: the record cannot be read, or the history is of another model.
        """
        delta = decode_delta(record)
        if delta.term < self._term:
            return True  # an editor that was no longer in charge; every reader drops it
        if not self.finish_seq():
            return False
        self._term = delta.term
        if delta.op == "lead":
            self._start_term(delta)
            return True
        assert self._engine is not None
        return self._reproduce_delta(self._engine, delta)

    def finish_seq(self) -> bool:
        """Decide on what left no delta on the codebook as it is now; False where a decision has come out otherwise."""
        if self._engine is None:
            return True
        book = self._engine.codebook
        return all(
            self._reproduce_no_change(self._engine, one)
            for one in self._no_change_decisions.pop((book.term, book.seq), [])
        )

    def _reproduce_delta(self, engine: EditEngine, delta: Delta) -> bool:
        """Whether a decision that left a delta leaves the same one again, numbers apart; which is applied then."""
        cause = delta.cause
        if cause is UNSET:
            raise HistoryError(f"no feedback is behind delta {delta.seq}, so it cannot be decided anew")
        self.report.decisions += 1
        place = f"delta {delta.seq}"
        feedback = self._feedback_at(cause.offset, place)
        engine.memory.remember_contexts(delta.decided)
        read = {} if cause.traffic is UNSET else cause.traffic
        engine.reservoir.positions = {int(partition): end for partition, end in read.items()}
        seen = None if cause.seen is UNSET else cause.seen
        edited = self._decide(engine, feedback, cause.offset, seen, cause.standing, cause.together)
        if edited.delta_record is None:
            assert edited.outcome is not None
            how = f"it is {edited.outcome.status} now: {edited.reason}"
            return self._record_difference(place, cause.feedback_id, cause.offset, how)
        ours = decode_delta(edited.delta_record)
        if (other := _describe_difference(delta, ours)) is not None:
            return self._record_difference(place, cause.feedback_id, cause.offset, other)
        self.report.same_decisions += 1
        self.report.same_records += _without_digest(delta) == _without_digest(ours)
        self.report.value_difference = max(self.report.value_difference, _max_value_difference(delta, ours))
        self._apply(edited.delta_record)
        return True

    def _reproduce_no_change(self, engine: EditEngine, decision: NoChangeDecision) -> bool:
        """Whether a decision that left no delta comes to the same status again."""
        was, place = decision.outcome, f"after delta {decision.seq}"
        self.report.decisions += 1
        feedback = self._feedback_at(decision.offset, f"a decision {place}")
        edited = self._decide(engine, feedback, decision.offset, decision.context, decision.standing)
        assert edited.outcome is not None
        if edited.outcome.status != was.status:
            before = f"{was.status!r} ({was.reason})" if was.status == "rejected" else repr(was.status)
            now = f"{edited.outcome.status!r} now" + (f": {edited.reason}" if edited.reason else "")
            return self._record_difference(place, was.feedback_id, decision.offset, f"it was {before} and is {now}")
        self.report.same_decisions += 1
        self.report.same_fruitless += 1
        return True

    def _start_term(self, delta: Delta) -> None:
        environment = {} if delta.environment is UNSET else delta.environment
        plan = edit_config_from_lead(environment)
        if environment.get("threads", "").isdecimal():
            torch.set_num_threads(int(environment["threads"]))  # sums come out otherwise with another number of them
        if self._engine is None:
            if (delta.model, delta.layer) != (self._model.fingerprint, self._model.layer):
                raise HistoryError(
                    f"the history is of model {delta.model[:12]}… at {delta.layer}; this one is"
                    f" {self._model.fingerprint[:12]}… at {self._model.layer}: set --model, --layer,"
                    f" GRACESTREAM_QUERY, _ENCODER and _REPLACE each {original_setting_hint(delta)}"
                )
            self._engine = EditEngine(self._model, delta.codebook, plan)
        self._engine.config = plan
        now = self._describe_environment(plan)
        self.report.other_environment |= {
            name: (value, now[name]) for name, value in environment.items() if name in now and now[name] != value
        }
        self._apply(self._engine.next_delta("lead", term=delta.term, environment=delta.environment))

    def _feedback_at(self, offset: int, consumer_name: str) -> Feedback:
        if offset not in self._feedback_by_offset:
            raise HistoryError(f"the feedback behind {consumer_name} is not there, so it cannot be decided anew")
        return self._feedback_by_offset[offset]

    def _decide(
        self,
        engine: EditEngine,
        feedback: Feedback,
        offset: int,
        context: Seen | None,
        standing: Standing | UnsetType,
        batch_offsets: tuple[int, ...] = (),
    ) -> EditResult:
        try:
            if feedback.is_undo:
                return undo(engine, feedback, offset, self, standing=standing)
            if feedback.is_exception:
                return decide_exception(engine, feedback, offset, standing)
            ahead = self._train_batch(engine, batch_offsets).pop(offset, None) if batch_offsets else None
            return engine.edit(feedback, offset, None if context is None else ReplayContext(context), ahead, standing)
        except Exception as error:  # noqa: BLE001  (as the editor does)
            return model_failure(feedback, error)

    def _train_batch(self, engine: EditEngine, batch_offsets: tuple[int, ...]) -> dict[int, DraftValue]:
        """What comes of training the values of the feedback at these offsets in one batch."""
        if batch_offsets not in self._drafts_by_batch:
            first = min(batch_offsets)
            self._drafts_by_batch = {
                others: found for others, found in self._drafts_by_batch.items() if max(others) >= first
            }
            corrections = [
                (self._feedback_at(offset, f"a batch with offset {offset}"), offset) for offset in batch_offsets
            ]
            while len(self._drafts_by_batch) >= MAX_CACHED_BATCHES:
                del self._drafts_by_batch[next(iter(self._drafts_by_batch))]
            self._drafts_by_batch[batch_offsets] = engine.train_batch(corrections)
        return self._drafts_by_batch[batch_offsets]

    def _apply(self, record: bytes) -> None:
        assert self._engine is not None
        self.records.append(record)
        self._engine.apply(record)

    def _record_difference(self, position: str, feedback_id: str, offset: int, description: str) -> Literal[False]:
        self.report.first_difference = f"{position} (feedback {feedback_id!r}, offset {offset}): {description}"
        return False


def _without_digest(delta: Delta) -> Delta:
    """A delta but for its digest, which follows from all before it."""
    return msgspec.structs.replace(delta, digest=b"")


def _describe_difference(recorded: Delta, reproduced: Delta) -> str | None:
    """In words how a decision differs, numbers apart; None where it is the same."""
    if recorded.op != reproduced.op:
        return f"it was {recorded.op!r} and is {reproduced.op!r} now"
    was, now = (
        None if d.cause is UNSET else (d.cause.entry_id, d.cause.supersedes, *_rephrase_entries(d.cause))
        for d in (recorded, reproduced)
    )
    if was != now:
        return f"it was served by {was} and is by {now} now"
    entries, again = ({_change_signature(change) for change in d.entries} for d in (recorded, reproduced))
    before, after = _format_entry_ids(entries - again), _format_entry_ids(again - entries)
    if before != after:
        return f"it changed {before} and changes {after} now"
    if entries != again:
        return f"it changes {after} to another target, or other fields of it"
    return _describe_effect_difference(recorded, reproduced)


def _describe_effect_difference(recorded: Delta, reproduced: Delta) -> str | None:
    """The same, of what a decision does beside changing entries."""
    if _exception_signatures(recorded) != _exception_signatures(reproduced):
        return "it makes or ends other exceptions"
    if recorded.edits and _edit_signatures(recorded) != _edit_signatures(reproduced):
        return "it left other edits in force"
    return None


def _change_signature(change: EntryChange) -> tuple[str, bool, object, tuple[bool, ...]]:
    """What of an entry changed, without the numbers."""
    fields = (change.key, change.value, change.radius)
    return change.entry_id, change.removed, change.label, tuple(field is not UNSET for field in fields)


def _rephrase_entries(cause: Cause) -> list[str]:
    """What serves each rephrase."""
    return [
        "left out" if one.left_out else "the bare model" if one.entry_id is UNSET else one.entry_id
        for one in cause.rephrases
    ]


def _format_entry_ids(signatures: set[tuple[str, bool, object, tuple[bool, ...]]]) -> str:
    return ", ".join(sorted(repr(name) for name, *_ in signatures)) or "nothing"


def _edit_signatures(delta: Delta) -> set[tuple[str, object, bool]]:
    return {(edit.feedback_id, edit.entry_id, edit.removed) for edit in delta.edits}


def _exception_signatures(delta: Delta) -> set[tuple[str, tuple[str, ...], bool]]:
    return {(one.feedback_id, one.entry_ids, one.removed) for one in delta.exceptions}


def _max_value_difference(recorded: Delta, reproduced: Delta) -> float:
    theirs = {change.entry_id: change.value for change in reproduced.entries}
    pairs = [(change.value, theirs[change.entry_id]) for change in recorded.entries if change.value is not UNSET]
    return max(
        (float(np.abs(was.array() - now.array()).max()) for was, now in pairs if isinstance(now, Tensor)), default=0.0
    )
