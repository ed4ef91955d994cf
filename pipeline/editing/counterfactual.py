"""Counterfactual replay: the log as it is beside the same log without some feedback (docs/explanation/method.md).

The *actual* history is the log. The *counterfactual* history equals it up to the first removed feedback, the divergence
point. From there on:

1. A recorded decision is reused if none of its inputs differs between the histories.
2. Otherwise the engine decides again, with the recorded query, value and traffic distances.
3. A value is trained anew only if the correction had none of its own, as when an entry that is gone served it. With
   `value_init=label` it is also trained anew if it would start from another value. A correction is dropped if its
   training fails.
4. Feedback that was rejected at the time stays rejected. A rejection leaves nothing in `deltas`, and only `deltas`
   count (docs/explanation/consistency.md). Its author has the reason, and may send it again.

The cost has three parts: a replay of the log; a second replay from the divergence point, with a few searches for each
decision; and one full edit with the model for each decision that depends on the removed feedback.

Not promised: the decisions that an editor would have made at the time. Distances that no delta records come from the
current traffic sample.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch
from msgspec import UNSET, Struct, UnsetType

from gracestream.pipeline.codebook import (
    MAX_TRAFFIC_FRACTION,
    UNEDITED_MODEL,
    Codebook,
    EditMemory,
    EditState,
    KeyIndex,
    diff_entry,
    diff_exception,
    exception_query,
    merge_contexts,
)
from gracestream.pipeline.editing.candidate import RecordedInputs
from gracestream.pipeline.editing.config import edit_config_from_lead
from gracestream.pipeline.editing.divergence import Divergence
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.exceptions import build_exception
from gracestream.pipeline.editing.value_search import warm_start_entry
from gracestream.pipeline.errors import HistoryError, UserError
from gracestream.schemas.deltas import Cause, DecisionContext, Delta, EditChange, EntryChange, ExceptionChange, Tensor
from gracestream.schemas.messages import Feedback


class MissingFeedbackError(UserError):
    """A decision cannot be repeated, because its correction is no longer on `feedback`."""


class History(Protocol):
    """The parts of the log that an undo reads."""

    def for_each_delta(self, on_record: Callable[[bytes], bool]) -> object:
        """Call `on_record` with each record of `deltas` in order, until it returns False."""

    def feedback_since(self, since: int) -> Mapping[int, Feedback]:
        """The readable feedback from offset `since` on, by offset."""


@dataclass(frozen=True, slots=True)
class UndoDifference:
    """The changes that lead from the actual to the counterfactual history."""

    entries: tuple[EntryChange, ...]
    edits: tuple[EditChange, ...]
    exceptions: tuple[ExceptionChange, ...]


class CounterfactualReplay:
    """A replay of both histories.

    Pass the records of the log to `apply` until it returns False, then call `difference`.

    Args:
        engine: The engine at the end of the log; it is not changed.
        removed_ids: The ids of the feedback to leave out.
        history: The source of the corrections behind repeated decisions.
        heartbeat: Called for each record.
    """

    def __init__(
        self, engine: EditEngine, removed_ids: Collection[str], history: History, heartbeat: Callable[[], object]
    ) -> None:
        self.failed: list[str] = []
        """Corrections that cannot be repeated, each with the reason."""
        self.redecided: dict[str, DecisionContext] = {}
        """The contexts of repeated decisions, by feedback id; the `undo` delta records them."""
        self._engine, self._removed_ids, self._history = engine, frozenset(removed_ids), history
        self._divergence_offset = _find_divergence_offset(engine.memory, self._removed_ids)
        codebook = engine.codebook
        self._actual = EditState(Codebook(codebook.name, codebook.model, codebook.layer), EditMemory())
        self._counterfactual: EditEngine | None = None  # from the divergence point on
        self._divergence = Divergence()
        self._feedback_by_offset: Mapping[int, Feedback] | None = None
        self._config, self._heartbeat = engine.config, heartbeat
        self._always_guarded = engine.config.retention_guard
        """Whether every term so far had the retention guard."""

    def apply(self, record: bytes) -> bool:
        """Apply the next record to both histories; False once the actual history has reached the engine's state.

        Raises:
            MissingFeedbackError: a decision must be repeated, but its correction is no longer on `feedback`.
        """
        self._heartbeat()
        # Branch before the record is applied: the counterfactual history must not contain it.
        if (
            self._counterfactual is None
            and msgspec.msgpack.decode(record, type=_DeltaOffset).cause.offset >= self._divergence_offset
        ):
            self._counterfactual = self._branch()
        delta = self._actual.apply(record)
        if delta is not None:
            if delta.environment is not UNSET:
                self._adopt_config(delta.environment)
            if self._counterfactual is not None:
                self._advance(self._counterfactual, delta)
        return self._actual.codebook.seq < self._engine.codebook.seq

    def difference(self) -> UndoDifference:
        """The changes that turn the actual codebook and edit memory into the counterfactual ones.

        Raises:
            HistoryError: the replayed log is not the one behind the engine's state.
        """
        actual, expected = self._actual.codebook, self._engine.codebook
        if actual.digest != expected.digest:
            raise HistoryError(
                f"the log replays to delta {actual.seq} ({actual.digest.hex()[:12]}…), but the editor is at delta"
                f" {expected.seq} ({expected.digest.hex()[:12]}…)"
            )
        if self._counterfactual is None:
            return UndoDifference((), (), ())
        counterfactual = self._counterfactual.codebook
        removed = [name for name in sorted(self._divergence.entry_ids) if name not in counterfactual]
        changed = [name for name in sorted(self._divergence.entry_ids) if name in counterfactual]
        entries = [EntryChange(entry_id=name, removed=True) for name in removed]
        entries += [diff_entry(name, actual, counterfactual) for name in changed]
        memory, edits = self._counterfactual.memory, sorted(self._divergence.edit_ids)
        exceptions = [change for name in edits if (change := diff_exception(name, actual, counterfactual)) is not None]
        return UndoDifference(
            tuple(entries), tuple(self._edit_change(name, memory) for name in edits), tuple(exceptions)
        )

    def _branch(self) -> EditEngine:
        """An engine at the divergence point, with its own copy of everything but the model.

        It searches its keys on the CPU even if the model runs on a GPU; lookups are exact on both.
        """
        engine = EditEngine(self._engine.model, self._engine.codebook.name, self._config)
        engine.codebook = copy.deepcopy(self._actual.codebook)
        # On a GPU these keys would take as much memory as the editor's own, for a few lookups.
        engine.index = KeyIndex(engine.codebook, torch.device("cpu"))
        engine.memory = copy.deepcopy(self._actual.memory)
        engine.traffic_sample = copy.deepcopy(self._engine.traffic_sample)
        return engine

    def _adopt_config(self, environment: Mapping[str, str]) -> None:
        """Take over the configuration of a term from its `lead` delta, if the delta records one."""
        if "policy" in environment:
            self._config = edit_config_from_lead(environment)
            self._always_guarded = self._always_guarded and self._config.retention_guard
            if self._counterfactual is not None:
                self._counterfactual.config = self._config

    def _advance(self, engine: EditEngine, delta: Delta) -> None:
        """Advance the counterfactual history by one delta, after the actual history has applied it."""
        names = _touched_names(delta)
        if delta.op == "except" and delta.cause is not UNSET and delta.cause.feedback_id not in self._removed_ids:
            self._redecide_exceptions(engine, delta, delta.cause)
        elif delta.op in ("lead", "undo") or delta.cause is UNSET or delta.cause.feedback_id in self._removed_ids:
            pass  # a lead changes no entry, `removed_ids` contains the effect of undos, and removed feedback has none
        elif self._decision_unaffected(engine, delta, delta.cause):
            fields = {"entries": delta.entries, "exceptions": delta.exceptions, "cause": delta.cause}
            engine.apply(engine.next_delta(delta.op, **fields))
            return  # the same change in both histories: no new difference
        else:
            names |= self._redecide(engine, delta, delta.cause)
        self._divergence.update(names, self._actual, engine)

    def _redecide_exceptions(self, engine: EditEngine, delta: Delta, cause: Cause) -> None:
        """Repeat the exceptions of a delta for the entries that exist; this needs no pass of the model."""
        for exception in delta.exceptions:
            repeated = build_exception(
                engine,
                exception.feedback_id,
                exception.except_from,
                exception_query(exception),
                exception.wording,
            )
            if isinstance(repeated, ExceptionChange):
                engine.apply(engine.next_delta("except", exceptions=(repeated,), cause=cause))
            elif repeated.status == "rejected":
                self.failed.append(f"{exception.feedback_id} ({repeated.reason})")

    def _redecide(self, engine: EditEngine, delta: Delta, cause: Cause) -> set[str]:
        """Decide on the same correction again; returns the names of the entries and edits that its delta touched."""
        if self._feedback_by_offset is None:
            self._feedback_by_offset = self._history.feedback_since(cause.offset)
        correction = self._feedback_by_offset.get(cause.offset)
        if correction is None or correction.feedback_id != cause.feedback_id:
            raise MissingFeedbackError(
                f"delta {delta.seq} depends on feedback at offset {cause.offset}, which is no longer there"
            )
        context = cause.context if cause.context is not UNSET else DecisionContext(radius=engine.initial_radius())
        query_D, trained = _decision_query(delta, self._actual.codebook), _trained_change(delta)
        value_V = None
        if trained is not None and trained.value is not UNSET and trained.label is not UNSET:
            start = warm_start_entry(engine, trained.label, query_D)
            # The recorded value is reused only if training would start from the same point.
            if start == context.start and start not in self._divergence.entry_ids:
                value_V = trained.value.array()
        if (later := self._engine.memory.repeated_contexts.get(cause.feedback_id)) is not None:
            # An earlier undo repeated this decision too, and recorded the distances that it read in addition.
            context = merge_contexts(context, later)
        rephrases_RD = tuple(_rephrase_queries(delta).values())
        recorded_inputs = RecordedInputs(context, query_D, value_V, rephrases_RD)
        result = engine.edit(correction, cause.offset, recorded_inputs, standing=cause.standing)
        if result.delta_record is None:
            self.failed.append(f"{cause.feedback_id} ({result.rejection_reason})")
            return set()
        applied = engine.apply(result.delta_record)
        assert applied is not None
        assert applied.delta.cause is not UNSET
        if applied.delta.cause.context is not UNSET:
            self.redecided[cause.feedback_id] = applied.delta.cause.context
        return _touched_names(applied.delta)

    def _decision_unaffected(self, engine: EditEngine, delta: Delta, cause: Cause) -> bool:
        """Whether all inputs of a recorded decision are the same in both histories.

        In case of doubt the answer is no: to decide again is slower, but never wrong. The inputs are:

        1. the entries that the delta changes, the edits that it supersedes, and the words of their prompts,
        2. the entry whose value training started from,
        3. the entries nearest to the queries, and those that serve them, if no nearer entry exists now,
        4. the edits that new and changed entries shadow, and the inputs that bound their radii.
        """
        context, divergence = cause.context, self._divergence
        if context is UNSET:
            return False  # an older editor recorded no context
        changed = {change.entry_id for change in delta.entries}
        if divergence.touches(changed) or not divergence.edit_ids.isdisjoint(cause.supersedes):
            return False
        if divergence.shares_words(_touched_wordings(delta, self._actual.codebook)):
            return False
        query_D = _decision_query(delta, self._actual.codebook)
        if not self._same_start_entry(engine, delta, context, query_D):
            return False
        keys = {change.entry_id: change.key.array() for change in delta.entries if change.key is not UNSET}
        lookups = [(query_D, context.nearest, context.distance, cause.entry_id)]
        for rephrase, rephrase_D in zip(cause.rephrases, _rephrase_queries(delta).values(), strict=True):
            if rephrase_D is not None:
                lookups.append((rephrase_D, rephrase.nearest, rephrase.distance, rephrase.entry_id))
        surroundings = [(query_D, nearest, distance) for query_D, nearest, distance, _ in lookups]
        for lookup_D, nearest, _, serving in lookups:
            if serving is not UNSET and serving != nearest and serving not in keys:
                # The wording of the nearest entry disagrees, so an existing entry farther away serves. Everything up to
                # that entry matters.
                if serving in divergence.entry_ids:
                    return False
                serving_distance = float(np.linalg.norm(lookup_D - _entry_key(engine.codebook, serving)))
                surroundings.append((lookup_D, serving, serving_distance))
        keys |= {name: _entry_key(engine.codebook, name) for name in changed - keys.keys()}
        return all(
            self._surroundings_unchanged(engine, context.radius, *place, tuple(keys.values())) for place in surroundings
        )

    def _surroundings_unchanged(
        self,
        engine: EditEngine,
        initial_radius: float,
        query_D: np.ndarray,
        nearest: str | UnsetType,
        distance: float | UnsetType,
        keys: Sequence[np.ndarray],
    ) -> bool:
        """Whether no difference lies near enough to affect a decision.

        Args:
            engine: The counterfactual history.
            initial_radius: The recorded initial radius.
            query_D: A query that the decision looked up.
            nearest: The recorded nearest entry; UNSET if the codebook was empty.
            distance: The recorded distance to it.
            keys: The keys of the entries that the decision added or changed.
        """
        divergence = self._divergence
        # Policy and memory treat distances that differ by up to two tolerances as equal. Four tolerances are allowed
        # here: more can only cause a decision to be repeated without need.
        slack = 4 * engine.tolerance(query_D)
        distance = np.inf if distance is UNSET else distance
        if nearest in divergence.entry_ids or divergence.key_within(query_D, distance + slack):
            return False
        if not self._always_guarded:
            # Without the guard, an entry may serve an edit whose query is nearer to another key.
            same_input = engine.memory.edits_of_input(query_D, slack)
            if not divergence.entry_ids.isdisjoint(map(engine.memory.serving_entry_id, same_input)):
                return False
        # An input bounds a radius R only if it lies within R / MAX_TRAFFIC_FRACTION of the key. A new entry has at most
        # the initial radius. The nearest entry, if it overlaps, grows to at most max(distance, radius) plus the initial
        # radius. Inputs that bound that one lie up to `distance` farther from the query than from its key.
        reach = (initial_radius + slack) / MAX_TRAFFIC_FRACTION
        if nearest is not UNSET:
            radius = float(engine.codebook.radii_N[engine.codebook.slot(nearest)])
            if distance <= radius + initial_radius + slack:
                reach += distance + max(distance, radius) / MAX_TRAFFIC_FRACTION
        return not any(divergence.edit_within(key_D, reach, slack) for key_D in (*keys, query_D))

    def _same_start_entry(
        self, engine: EditEngine, delta: Delta, recorded: DecisionContext, query_D: np.ndarray
    ) -> bool:
        """Whether training would start from the same entry in both histories; true for a decision without training."""
        trained = _trained_change(delta)
        if engine.config.value_init != "label" or trained is None or trained.label is UNSET:
            return True
        if recorded.start is UNSET:
            return not self._divergence.label_changed(trained.label)
        if recorded.start in self._divergence.entry_ids:
            return False
        start_D = _entry_key(engine.codebook, recorded.start)
        distance = float(np.linalg.norm(start_D - query_D))
        return not self._divergence.key_within(query_D, distance + 4 * engine.tolerance(query_D))

    def _edit_change(self, name: str, memory: EditMemory) -> EditChange:
        """The change that gives an edit its state in the counterfactual `memory`."""
        if name not in memory:
            return EditChange(feedback_id=name, removed=True)
        entry_id = memory.serving_entry_id(name)
        return EditChange(
            feedback_id=name,
            entry_id=UNSET if entry_id == UNEDITED_MODEL else entry_id,
            query=UNSET if name in self._actual.memory else Tensor.from_array(memory.query(name)),
            wording="" if name in self._actual.memory else memory.wording(name),
        )


class _CauseOffset(Struct, frozen=True):
    offset: int = -1


class _DeltaOffset(Struct, frozen=True):
    """The part of a delta with the offset of its feedback; -1 for a lead, which has none. It is fast to decode."""

    cause: _CauseOffset = _CauseOffset()


def _find_divergence_offset(memory: EditMemory, removed_ids: frozenset[str]) -> float:
    """The offset of the first feedback at which the two histories differ; infinite if they do not.

    Feedback that an earlier undo removed is missing from the actual history too, as far as that undo came before the
    divergence. The offset limits the undos that count, and these determine the offset: so it is lowered step by step.
    """
    divergence_offset = np.inf
    while differing := removed_ids ^ memory.undone_ids(before_offset=divergence_offset):
        earliest = min(memory.offsets[name] for name in differing)
        if earliest >= divergence_offset:
            break
        divergence_offset = earliest
    return divergence_offset


def _touched_names(delta: Delta) -> set[str]:
    """The names of the entries and edits that a delta may have changed."""
    names = {change.entry_id for change in delta.entries} | {edit.feedback_id for edit in delta.edits}
    if delta.cause is not UNSET:
        names |= {delta.cause.feedback_id, *delta.cause.supersedes, *delta.cause.rephrases_by_name()}
    return names


def _decision_query(delta: Delta, codebook: Codebook) -> np.ndarray:
    """The query of the decision behind a delta: recorded in its cause, or else the key of the entry that it added."""
    cause = delta.cause
    assert cause is not UNSET
    if cause.query is not UNSET:
        return cause.query.array()
    for change in delta.entries:
        if change.entry_id == cause.entry_id and change.key is not UNSET:
            return change.key.array()
    assert cause.entry_id is not UNSET
    return _entry_key(codebook, cause.entry_id)


def _rephrase_queries(delta: Delta) -> dict[str, np.ndarray | None]:
    """The queries of the rephrases behind a delta, by the names of their keys; None for one without a query."""
    assert delta.cause is not UNSET
    added_keys = {change.entry_id: change.key.array() for change in delta.entries if change.key is not UNSET}
    queries: dict[str, np.ndarray | None] = {}
    for name, key in delta.cause.rephrases_by_name().items():
        if key.query is not UNSET:
            queries[name] = key.query.array()
        else:
            queries[name] = None if key.entry_id is UNSET else added_keys[key.entry_id]
    return queries


def _touched_wordings(delta: Delta, codebook: Codebook) -> set[str]:
    """The wordings of the prompts behind a delta, and of the existing entries that it changed."""
    assert delta.cause is not UNSET
    wordings = {delta.cause.wording, *(rephrase.wording for rephrase in delta.cause.rephrases)}
    names = [change.entry_id for change in delta.entries if change.entry_id in codebook]
    return wordings | {codebook.wordings[codebook.slot(name)] for name in names}


def _entry_key(codebook: Codebook, name: str) -> np.ndarray:
    key_D: np.ndarray = codebook.keys_ND[codebook.slot(name)]
    return key_D


def _trained_change(delta: Delta) -> EntryChange | None:
    """The change with the value that was trained for this correction, if there is one."""
    cause = delta.cause
    if cause is UNSET or delta.op == "expand":
        return None
    return next((c for c in delta.entries if c.entry_id == cause.entry_id and c.value is not UNSET), None)
