"""Reproduces a history: makes every decision again, values included, and compares it with the recorded one.

Inputs (docs/explanation/determinism.md):

- Corrections come from `feedback`, which is kept for ever.
- Deltas record the decision contexts, because `requests` are deleted after days, and the configuration of each term.
- A decision without a delta is recorded by its outcome on `edits`: rejections, unchanged repetitions, undos of nothing.

Guarantees:

1. With the same versions on the same device, every record is reproduced byte for byte.
2. Elsewhere the decisions are the same, and values differ by rounding.
3. A decision without a delta must have the same status again. Its reason may have other words and numbers.

Not reproduced: results in which neither codebook nor model took part. These are unreadable feedback, copies of signed
feedback, and rejections by rate limits or by the list of authors at that time.
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
    DecisionResult,
    DraftValue,
    EditConfig,
    EditEngine,
    RecordedInputs,
    decide_exception,
    edit_config_from_lead,
    undo,
)
from gracestream.pipeline.editor import model_failure
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import EditableModel
from gracestream.schemas.deltas import Cause, DecisionContext, Delta, EntryChange, Standing, Tensor, decode_delta
from gracestream.schemas.messages import Feedback
from gracestream.schemas.no_change import NoChangeDecision

MAX_CACHED_BATCHES = 64
"""Batch-trained values that are cached; an editor has at most this many at the same time."""


class ReproductionReport(Struct):
    """How far the reproduced history equals the recorded one.

    Attributes:
        decisions: Feedback that was decided again; `lead` deltas do not count.
        same_decisions: Decisions with the same effect on the same entries, or without a delta and with the same status.
        same_records: Those of them with a delta that is equal in every bit.
        same_without_delta: Those of them without a delta.
        value_difference: The largest difference of a number in a value, in the layer's units.
        first_difference: Where and how the first decision differs; reproduction ends there.
        other_environment: Versions, device and the like that differ: recorded and present value by name.
    """

    decisions: int = 0
    same_decisions: int = 0
    same_records: int = 0
    same_without_delta: int = 0
    value_difference: float = 0.0
    first_difference: str | None = None
    other_environment: dict[str, tuple[str, str]] = {}


class ReproductionRun:
    """A reproduction in progress: call `reproduce` with the records of `deltas` in order, then `finish_seq`.

    `records` holds the reproduced deltas. Each term uses as many torch threads as its editor had; this setting holds
    for the whole process.

    Args:
        model: The model of the history.
        feedback_by_offset: All feedback, by offset.
        describe_environment: Returns the environment that a `lead` delta records under a configuration.
        no_change_decisions: The decisions without a delta, in the order of feedback.
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
        """Recently trained batches by the offsets of their feedback; the next decisions may need the other values."""
        self._no_change_decisions: dict[tuple[int, int], list[NoChangeDecision]] = defaultdict(list)
        """By term and seq of the codebook that they were made on."""
        for decision in no_change_decisions:
            self._no_change_decisions[decision.term, decision.seq].append(decision)

    @property
    def codebook(self) -> Codebook | None:
        """The reproduced codebook; None before the first `lead`."""
        return None if self._engine is None else self._engine.codebook

    def for_each_delta(self, on_record: Callable[[bytes], bool]) -> None:
        """Pass the reproduced deltas to `on_record` until it returns False; an undo reads its history here."""
        all(map(on_record, self.records))

    def feedback_since(self, since: int) -> Mapping[int, Feedback]:
        """The feedback from an offset on, by offset."""
        return {offset: feedback for offset, feedback in self._feedback_by_offset.items() if offset >= since}

    def reproduce(self, record: bytes) -> bool:
        """Reproduce the decisions before this record, then its own; False once a decision differs.

        Raises:
            HistoryError: the record cannot be read, its feedback is missing, or the history is of another model.
        """
        delta = decode_delta(record)
        if delta.term < self._term:
            return True  # written by a fenced editor; every reader skips it
        if not self.finish_seq():
            return False
        self._term = delta.term
        if delta.op == "lead":
            self._start_term(delta)
            return True
        assert self._engine is not None
        return self._reproduce_delta(self._engine, delta)

    def finish_seq(self) -> bool:
        """Reproduce the decisions without a delta on the present codebook; False if one differs."""
        if self._engine is None:
            return True
        codebook = self._engine.codebook
        return all(
            self._reproduce_no_change(self._engine, decision)
            for decision in self._no_change_decisions.pop((codebook.term, codebook.seq), [])
        )

    def _reproduce_delta(self, engine: EditEngine, delta: Delta) -> bool:
        """Reproduce a decision with a delta, and apply it; False if it differs in more than numbers."""
        cause = delta.cause
        if cause is UNSET:
            raise HistoryError(f"no feedback is behind delta {delta.seq}, so it cannot be decided anew")
        self.report.decisions += 1
        position = f"delta {delta.seq}"
        feedback = self._feedback_at(cause.offset, position)
        engine.memory.remember_contexts(delta.decided)
        read_positions = {} if cause.traffic is UNSET else cause.traffic
        engine.traffic_sample.positions = {int(partition): end for partition, end in read_positions.items()}
        context = None if cause.context is UNSET else cause.context
        result = self._decide(engine, feedback, cause.offset, context, cause.standing, cause.together)
        if result.delta_record is None:
            assert result.outcome is not None
            description = f"it is {result.outcome.status} now: {result.rejection_reason}"
            return self._record_difference(position, cause.feedback_id, cause.offset, description)
        reproduced = decode_delta(result.delta_record)
        if (difference := _describe_difference(delta, reproduced)) is not None:
            return self._record_difference(position, cause.feedback_id, cause.offset, difference)
        self.report.same_decisions += 1
        self.report.same_records += _without_digest(delta) == _without_digest(reproduced)
        self.report.value_difference = max(self.report.value_difference, _max_value_difference(delta, reproduced))
        self._apply(result.delta_record)
        return True

    def _reproduce_no_change(self, engine: EditEngine, decision: NoChangeDecision) -> bool:
        """Reproduce a decision without a delta; False if its status differs."""
        recorded, position = decision.outcome, f"after delta {decision.seq}"
        self.report.decisions += 1
        feedback = self._feedback_at(decision.offset, f"a decision {position}")
        result = self._decide(engine, feedback, decision.offset, decision.context, decision.standing)
        assert result.outcome is not None
        if result.outcome.status != recorded.status:
            before = (
                f"{recorded.status!r} ({recorded.reason})" if recorded.status == "rejected" else repr(recorded.status)
            )
            now = f"{result.outcome.status!r} now" + (f": {result.rejection_reason}" if result.rejection_reason else "")
            return self._record_difference(
                position, recorded.feedback_id, decision.offset, f"it was {before} and is {now}"
            )
        self.report.same_decisions += 1
        self.report.same_without_delta += 1
        return True

    def _start_term(self, delta: Delta) -> None:
        """Begin a term with the recorded configuration and number of threads, and compare environments.

        Raises:
            HistoryError: the history is of another model or layer.
        """
        environment = {} if delta.environment is UNSET else delta.environment
        config = edit_config_from_lead(environment)
        if environment.get("threads", "").isdecimal():
            # The number of threads changes the order of sums, and so their rounding.
            torch.set_num_threads(int(environment["threads"]))
        if self._engine is None:
            if (delta.model, delta.layer) != (self._model.fingerprint, self._model.layer):
                raise HistoryError(
                    f"the history is of model {delta.model[:12]}… at {delta.layer}; this one is"
                    f" {self._model.fingerprint[:12]}… at {self._model.layer}: set --model, --layer,"
                    f" GRACESTREAM_QUERY_SOURCE, GRACESTREAM_ENCODER and GRACESTREAM_INJECT_TOKENS each"
                    f" {original_setting_hint(delta)}"
                )
            self._engine = EditEngine(self._model, delta.codebook, config)
        self._engine.config = config
        present = self._describe_environment(config)
        self.report.other_environment |= {
            name: (value, present[name])
            for name, value in environment.items()
            if name in present and present[name] != value
        }
        self._apply(self._engine.next_delta("lead", term=delta.term, environment=delta.environment))

    def _feedback_at(self, offset: int, consumer_name: str) -> Feedback:
        """The feedback at an offset.

        Raises:
            HistoryError: it is missing.
        """
        if offset not in self._feedback_by_offset:
            raise HistoryError(f"the feedback behind {consumer_name} is not there, so it cannot be decided anew")
        return self._feedback_by_offset[offset]

    def _decide(
        self,
        engine: EditEngine,
        feedback: Feedback,
        offset: int,
        context: DecisionContext | None,
        standing: Standing | UnsetType,
        batch_offsets: tuple[int, ...] = (),
    ) -> DecisionResult:
        """The engine's decision, made as the editor makes it; `context` are the recorded inputs."""
        try:
            if feedback.is_undo:
                return undo(engine, feedback, offset, self, standing=standing)
            if feedback.is_exception:
                return decide_exception(engine, feedback, offset, standing)
            draft = self._train_batch(engine, batch_offsets).pop(offset, None) if batch_offsets else None
            return engine.edit(feedback, offset, None if context is None else RecordedInputs(context), draft, standing)
        except Exception as error:  # noqa: BLE001  (as the editor does)
            return model_failure(feedback, error)

    def _train_batch(self, engine: EditEngine, batch_offsets: tuple[int, ...]) -> dict[int, DraftValue]:
        """The values of the feedback at these offsets, trained as one batch; cached.

        Batches entirely before this one are dropped: decisions come in the order of offsets.
        """
        if batch_offsets not in self._drafts_by_batch:
            first_offset = min(batch_offsets)
            self._drafts_by_batch = {
                offsets: drafts for offsets, drafts in self._drafts_by_batch.items() if max(offsets) >= first_offset
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
        """Record where and how a decision differs; always False."""
        self.report.first_difference = f"{position} (feedback {feedback_id!r}, offset {offset}): {description}"
        return False


def _without_digest(delta: Delta) -> Delta:
    """The delta without its digest, which depends on every delta before it."""
    return msgspec.structs.replace(delta, digest=b"")


def _describe_difference(recorded: Delta, reproduced: Delta) -> str | None:
    """How a decision differs, numbers apart; None if it is the same."""
    if recorded.op != reproduced.op:
        return f"it was {recorded.op!r} and is {reproduced.op!r} now"
    recorded_serving, reproduced_serving = (
        None
        if delta.cause is UNSET
        else (delta.cause.entry_id, delta.cause.supersedes, *_rephrase_entries(delta.cause))
        for delta in (recorded, reproduced)
    )
    if recorded_serving != reproduced_serving:
        return f"it was served by {recorded_serving} and is by {reproduced_serving} now"
    recorded_changes, reproduced_changes = (
        {_change_signature(change) for change in delta.entries} for delta in (recorded, reproduced)
    )
    before, after = (
        _format_entry_ids(recorded_changes - reproduced_changes),
        _format_entry_ids(reproduced_changes - recorded_changes),
    )
    if before != after:
        return f"it changed {before} and changes {after} now"
    if recorded_changes != reproduced_changes:
        return f"it changes {after} to another target, or other fields of it"
    return _describe_effect_difference(recorded, reproduced)


def _describe_effect_difference(recorded: Delta, reproduced: Delta) -> str | None:
    """How the exceptions or the edits in force differ; None if they are the same."""
    if _exception_signatures(recorded) != _exception_signatures(reproduced):
        return "it makes or ends other exceptions"
    if recorded.edits and _edit_signatures(recorded) != _edit_signatures(reproduced):
        return "it left other edits in force"
    return None


def _change_signature(change: EntryChange) -> tuple[str, bool, object, tuple[bool, ...]]:
    """What changed of an entry, without the numbers."""
    fields = (change.key, change.value, change.radius)
    return change.entry_id, change.removed, change.label, tuple(field is not UNSET for field in fields)


def _rephrase_entries(cause: Cause) -> list[str]:
    """The entry that serves each rephrase."""
    return [
        "left out" if rephrase.left_out else "the unedited model" if rephrase.entry_id is UNSET else rephrase.entry_id
        for rephrase in cause.rephrases
    ]


def _format_entry_ids(signatures: set[tuple[str, bool, object, tuple[bool, ...]]]) -> str:
    return ", ".join(sorted(repr(name) for name, *_ in signatures)) or "nothing"


def _edit_signatures(delta: Delta) -> set[tuple[str, object, bool]]:
    return {(edit.feedback_id, edit.entry_id, edit.removed) for edit in delta.edits}


def _exception_signatures(delta: Delta) -> set[tuple[str, tuple[str, ...], bool]]:
    return {(change.feedback_id, change.entry_ids, change.removed) for change in delta.exceptions}


def _max_value_difference(recorded: Delta, reproduced: Delta) -> float:
    """The largest difference of a number in the values of both deltas; 0 if there are none."""
    reproduced_values = {change.entry_id: change.value for change in reproduced.entries}
    pairs = [
        (change.value, reproduced_values[change.entry_id]) for change in recorded.entries if change.value is not UNSET
    ]
    return max(
        (
            float(np.abs(recorded_value.array() - reproduced_value.array()).max())
            for recorded_value, reproduced_value in pairs
            if isinstance(reproduced_value, Tensor)
        ),
        default=0.0,
    )
