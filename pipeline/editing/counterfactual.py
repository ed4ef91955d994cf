"""A history rewritten: the log as it was, folded beside the same log without some feedback (design, section 4).

The two are one until the first feedback that goes (`_find_divergence_offset`). From there on a decision keeps what it
did where nothing that it saw has changed; else it is made again by the engine, with the query, the value and the sight
of traffic that it had. So the cost is that of folding the log, of folding what came after the parting again and
searching what has changed for each decision there, and of one decision of the editor, with its pass through the model,
for each that rested on what went.

A value is trained anew only for a correction that never had one of its own, as one that was served by an entry which is
now gone, or whose value would start from another one now (`init=label`). Where that does not converge, the correction
falls away.

What was rejected at the time stays so. A rejection leaves nothing in `deltas`, and whatever is not there did not happen
(design, section 5, point 1). Its author was told, and may send it again.
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
from gracestream.pipeline.editing.candidate import ReplayContext
from gracestream.pipeline.editing.config import edit_config_from_lead
from gracestream.pipeline.editing.divergence import Divergence
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.exceptions import build_exception
from gracestream.pipeline.editing.value_search import warm_start_entry
from gracestream.pipeline.errors import HistoryError, UserError
from gracestream.schemas.deltas import Cause, Delta, EditChange, EntryChange, ExceptionChange, Seen, Tensor
from gracestream.schemas.messages import Feedback


class MissingFeedbackError(UserError):
    """A decision cannot be made again, because the correction behind it is no longer in the log."""


class History(Protocol):
    """The log, as far as an undo needs it."""

    def for_each_delta(self, on_record: Callable[[bytes], bool]) -> object:
        """The records of `deltas` in order, until `on_record` returns False: it needs no more."""

    def feedback_since(self, since: int) -> Mapping[int, Feedback]:
        """The readable feedback from offset `since` on, by offset."""


@dataclass(frozen=True, slots=True)
class UndoDifference:
    """What an undo changes."""

    entries: tuple[EntryChange, ...]
    edits: tuple[EditChange, ...]
    exceptions: tuple[ExceptionChange, ...]


class CounterfactualReplay:
    """The history of an engine beside itself without some feedback (`removed_ids`: feedback ids).

    Give `apply` the records of the log until it returns False; then ask for the `difference`.
    """

    def __init__(
        self, engine: EditEngine, removed_ids: Collection[str], history: History, heartbeat: Callable[[], object]
    ) -> None:
        self.failed: list[str] = []
        """Corrections that cannot be made any more, each with the reason."""
        self.redecided: dict[str, Seen] = {}
        """What the decisions saw that were made again, by feedback id."""
        self._engine, self._removed_ids, self._history = engine, frozenset(removed_ids), history
        self._divergence_offset = _find_divergence_offset(engine.memory, self._removed_ids)
        book = engine.codebook
        self._actual = EditState(Codebook(book.name, book.model, book.layer), EditMemory())
        self._counterfactual: EditEngine | None = None  # once they part
        self._divergence = Divergence()
        self._feedback_by_offset: Mapping[int, Feedback] | None = None
        self._config, self._heartbeat = engine.config, heartbeat
        self._always_guarded = engine.config.guard  # all the time

    def apply(self, record: bytes) -> bool:
        """The next record of the log; False once the log has come as far as the engine."""
        self._heartbeat()
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
        """What turns the codebook and the memory as they were into what they would be.

        Raises:
            HistoryError: the log that was folded is not the engine's own.
        """
        was, ours = self._actual.codebook, self._engine.codebook
        if was.digest != ours.digest:
            raise HistoryError(
                f"the log folds to delta {was.seq} ({was.digest.hex()[:12]}…), but the editor holds {ours.seq}"
                f" ({ours.digest.hex()[:12]}…)"
            )
        if self._counterfactual is None:
            return UndoDifference((), (), ())
        book = self._counterfactual.codebook
        gone = [name for name in sorted(self._divergence.entry_ids) if name not in book]
        kept = [name for name in sorted(self._divergence.entry_ids) if name in book]
        entries = [EntryChange(entry_id=name, removed=True) for name in gone]
        entries += [diff_entry(name, was, book) for name in kept]
        memory, edits = self._counterfactual.memory, sorted(self._divergence.edit_ids)
        exceptions = [change for name in edits if (change := diff_exception(name, was, book)) is not None]
        return UndoDifference(
            tuple(entries), tuple(self._edit_change(name, memory) for name in edits), tuple(exceptions)
        )

    def _branch(self) -> EditEngine:
        """An engine at the place where the two part, with its own copy of everything but the model.

        It searches its keys on the host, wherever the model runs: the look-ups are exact there too.
        """
        engine = EditEngine(self._engine.model, self._engine.codebook.name, self._config)
        engine.codebook = copy.deepcopy(self._actual.codebook)
        # On a GPU the keys of the branch would take as much memory as the editor's own, for a few look-ups.
        engine.index = KeyIndex(engine.codebook, torch.device("cpu"))
        engine.memory = copy.deepcopy(self._actual.memory)
        engine.reservoir = copy.deepcopy(self._engine.reservoir)
        return engine

    def _adopt_config(self, environment: Mapping[str, str]) -> None:
        """Decide as the editor of the term did, where its `lead` delta tells how."""
        if "policy" in environment:
            self._config = edit_config_from_lead(environment)
            self._always_guarded = self._always_guarded and self._config.guard
            if self._counterfactual is not None:
                self._counterfactual.config = self._config

    def _advance(self, engine: EditEngine, delta: Delta) -> None:
        """Do in the rewritten history what comes of a delta there, now that it is folded in the other."""
        names = _touched_names(delta)
        if delta.op == "retune":
            self._retune(engine, delta)
        elif delta.op == "except" and delta.cause is not UNSET and delta.cause.feedback_id not in self._removed_ids:
            self._redecide_exceptions(engine, delta, delta.cause)
        elif delta.op in ("lead", "undo") or delta.cause is UNSET or delta.cause.feedback_id in self._removed_ids:
            pass
        elif self._decision_unaffected(engine, delta, delta.cause):
            same = {"entries": delta.entries, "exceptions": delta.exceptions, "cause": delta.cause}
            engine.apply(engine.next_delta(delta.op, **same))
            return  # it did the same in both
        else:
            names |= self._redecide(engine, delta, delta.cause)
        self._divergence.update(names, self._actual, engine)

    @staticmethod
    def _retune(engine: EditEngine, delta: Delta) -> None:
        """No feedback is behind it, so it stays: for the entries that are there."""
        entries = tuple(change for change in delta.entries if change.entry_id in engine.codebook)
        if entries:
            engine.apply(engine.next_delta("retune", entries=entries))

    def _redecide_exceptions(self, engine: EditEngine, delta: Delta, cause: Cause) -> None:
        """Make the exceptions of a delta from the entries that there are; the model has no part in it."""
        for one in delta.exceptions:
            found = build_exception(engine, one.feedback_id, one.except_from, exception_query(one), one.wording)
            if isinstance(found, ExceptionChange):
                engine.apply(engine.next_delta("except", exceptions=(found,), cause=cause))
            elif found.status == "rejected":
                self.failed.append(f"{one.feedback_id} ({found.reason})")

    def _redecide(self, engine: EditEngine, delta: Delta, cause: Cause) -> set[str]:
        """Let the engine decide on the same correction; the names that its delta touched."""
        if self._feedback_by_offset is None:
            self._feedback_by_offset = self._history.feedback_since(cause.offset)
        correction = self._feedback_by_offset.get(cause.offset)
        if correction is None or correction.feedback_id != cause.feedback_id:
            raise MissingFeedbackError(f"delta {delta.seq} rests on feedback at offset {cause.offset}: it is not there")
        seen = cause.seen if cause.seen is not UNSET else Seen(radius=engine.initial_radius())
        query_D, trained = _decision_query(delta, self._actual.codebook), _trained_change(delta)
        value_V = None
        if trained is not None and trained.value is not UNSET and trained.label is not UNSET:
            start = warm_start_entry(engine, trained.label, query_D)
            if start == seen.start and start not in self._divergence.entry_ids:
                value_V = trained.value.array()
        if (later := self._engine.memory.replay_contexts.get(cause.feedback_id)) is not None:
            seen = merge_contexts(seen, later)
        rephrases_RD = tuple(_rephrase_queries(delta).values())
        again = ReplayContext(seen, query_D, value_V, rephrases_RD)
        edited = engine.edit(correction, cause.offset, again, standing=cause.standing)
        if edited.delta_record is None:
            self.failed.append(f"{cause.feedback_id} ({edited.reason})")
            return set()
        applied = engine.apply(edited.delta_record)
        assert applied is not None
        assert applied.delta.cause is not UNSET
        if applied.delta.cause.seen is not UNSET:
            self.redecided[cause.feedback_id] = applied.delta.cause.seen
        return _touched_names(applied.delta)

    def _decision_unaffected(self, engine: EditEngine, delta: Delta, cause: Cause) -> bool:
        """Whether everything that the decision depended on is the same in both.

        The entry nearest to the query and the one that serves it, unless another one is nearer now; the edits that its
        new and changed entries would take over; the inputs that bounded its radii; the entry whose value its own
        started from. Where it is unsure it says no: deciding again is never wrong.
        """
        seen, apart = cause.seen, self._divergence
        if seen is UNSET:
            return False
        changed = {change.entry_id for change in delta.entries}
        if apart.touches(changed) or not apart.edit_ids.isdisjoint(cause.supersedes):
            return False
        if apart.shares_words(_touched_wordings(delta, self._actual.codebook)):
            return False
        query_D = _decision_query(delta, self._actual.codebook)
        if not self._same_start_entry(engine, delta, seen, query_D):
            return False
        keys = {change.entry_id: change.key.array() for change in delta.entries if change.key is not UNSET}
        looked_up = [(query_D, seen.nearest, seen.distance, cause.entry_id)]
        for one, rephrase_D in zip(cause.rephrases, _rephrase_queries(delta).values(), strict=True):
            if rephrase_D is not None:
                looked_up.append((rephrase_D, one.nearest, one.distance, one.entry_id))
        around = [(query_D, nearest, distance) for query_D, nearest, distance, _ in looked_up]
        for found_D, nearest, _, serving in looked_up:
            if serving is not UNSET and serving != nearest and serving not in keys:
                # An entry beyond the nearest serves, since the wording of the nearest disagrees.
                if serving in apart.entry_ids:
                    return False
                around.append((found_D, serving, float(np.linalg.norm(found_D - _entry_key(engine.codebook, serving)))))
        keys |= {name: _entry_key(engine.codebook, name) for name in changed - keys.keys()}
        return all(self._surroundings_unchanged(engine, seen.radius, *place, tuple(keys.values())) for place in around)

    def _surroundings_unchanged(
        self,
        engine: EditEngine,
        initial_radius: float,
        query_D: np.ndarray,
        nearest: str | UnsetType,
        distance: float | UnsetType,
        keys: Sequence[np.ndarray],
    ) -> bool:
        """Whether nothing has changed around a query of a decision, and around the keys of the entries it changed."""
        apart = self._divergence
        slack = 4 * engine.tolerance(query_D)
        distance = np.inf if distance is UNSET else distance
        if nearest in apart.entry_ids or apart.key_within(query_D, distance + slack):
            return False
        if not self._always_guarded:  # then an entry may serve an edit that lies nearer to another key
            same_input = engine.memory.edits_of_input(query_D, slack)
            if not apart.entry_ids.isdisjoint(map(engine.memory.serving_entry_id, same_input)):
                return False
        # As far as a radius of this delta could reach if nothing bounded it: its own, or the nearest entry's.
        reach = (initial_radius + slack) / MAX_TRAFFIC_FRACTION
        if nearest is not UNSET:
            radius = float(engine.codebook.radii_N[engine.codebook.slot(nearest)])
            if distance <= radius + initial_radius + slack:
                reach += distance + max(distance, radius) / MAX_TRAFFIC_FRACTION
        return not any(apart.edit_within(key_D, reach, slack) for key_D in (*keys, query_D))

    def _same_start_entry(self, engine: EditEngine, delta: Delta, recorded: Seen, query_D: np.ndarray) -> bool:
        """Whether a value that was trained would start from the same entry's now; others start from no entry's."""
        trained = _trained_change(delta)
        if engine.config.init != "label" or trained is None or trained.label is UNSET:
            return True
        if recorded.start is UNSET:
            return not self._divergence.label_changed(trained.label)
        if recorded.start in self._divergence.entry_ids:
            return False
        start_D = _entry_key(engine.codebook, recorded.start)
        distance = float(np.linalg.norm(start_D - query_D))
        return not self._divergence.key_within(query_D, distance + 4 * engine.tolerance(query_D))

    def _edit_change(self, name: str, memory: EditMemory) -> EditChange:
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
    """As much of a delta as tells where in the log of feedback it stands; a lead stands nowhere."""

    cause: _CauseOffset = _CauseOffset()


def _find_divergence_offset(memory: EditMemory, removed_ids: frozenset[str]) -> float:
    """The offset of feedback from which the two histories differ.

    What was taken back by an undo before that is not there in the history as it was either.
    """
    parting = np.inf
    while differ := removed_ids ^ memory.undone_ids(before_offset=parting):
        earliest = min(memory.offsets[name] for name in differ)
        if earliest >= parting:
            break
        parting = earliest
    return parting


def _touched_names(delta: Delta) -> set[str]:
    """Names of the entries and edits that a delta may have changed."""
    named = {change.entry_id for change in delta.entries} | {edit.feedback_id for edit in delta.edits}
    if delta.cause is not UNSET:
        named |= {delta.cause.feedback_id, *delta.cause.supersedes, *delta.cause.rephrases_by_name()}
    return named


def _decision_query(delta: Delta, codebook: Codebook) -> np.ndarray:
    """The query of the decision behind a delta, which is the key of the entry that it added unless it says."""
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
    """The queries of the rephrases behind a delta, by the names of their keys; None where the model took none."""
    assert delta.cause is not UNSET
    own = {change.entry_id: change.key.array() for change in delta.entries if change.key is not UNSET}
    queries: dict[str, np.ndarray | None] = {}
    for name, one in delta.cause.rephrases_by_name().items():
        if one.query is not UNSET:
            queries[name] = one.query.array()
        else:
            queries[name] = None if one.entry_id is UNSET else own[one.entry_id]
    return queries


def _touched_wordings(delta: Delta, codebook: Codebook) -> set[str]:
    """The wordings of the prompts behind a delta, and of the entries that it changed."""
    assert delta.cause is not UNSET
    wordings = {delta.cause.wording, *(one.wording for one in delta.cause.rephrases)}
    names = [change.entry_id for change in delta.entries if change.entry_id in codebook]
    return wordings | {codebook.wordings[codebook.slot(name)] for name in names}


def _entry_key(codebook: Codebook, name: str) -> np.ndarray:
    key_D: np.ndarray = codebook.keys_ND[codebook.slot(name)]
    return key_D


def _trained_change(delta: Delta) -> EntryChange | None:
    """The change that gave a value which was trained for this correction, where there is one."""
    cause = delta.cause
    if cause is UNSET or delta.op == "expand":
        return None
    return next((c for c in delta.entries if c.entry_id == cause.entry_id and c.value is not UNSET), None)
