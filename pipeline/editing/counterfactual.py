"""A history rewritten: the log as it was, folded beside the same log without some feedback (design, section 4).

The two are one until the first feedback that goes (`_parting`). From there on a decision keeps what it did where
nothing that it saw has changed; else it is made again by the engine, with the query, the value and the sight of traffic
that it had. So the cost is that of folding the log, of folding what came after the parting again and searching what has
changed for each decision there, and of one decision of the editor, with its pass through the model, for each that
rested on what went.

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
    BARE_MODEL,
    TRAFFIC_SHARE,
    Codebook,
    EditMemory,
    Fold,
    KeyIndex,
    entry_change,
    exception_change,
    query_of,
    together,
)
from gracestream.pipeline.editing.candidate import Again
from gracestream.pipeline.editing.config import plan_of
from gracestream.pipeline.editing.divergence import Apart
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.exceptions import exception_for
from gracestream.pipeline.errors import HistoryError, UserError
from gracestream.schemas.deltas import Cause, Delta, EditChange, EntryChange, ExceptionChange, Seen, Tensor
from gracestream.schemas.messages import Feedback


class MissingFeedbackError(UserError):
    """A decision cannot be made again, because the correction behind it is no longer in the log."""


class History(Protocol):
    """The log, as far as an undo needs it."""

    def each_delta(self, on_record: Callable[[bytes], bool]) -> object:
        """The records of `deltas` in order, until `on_record` returns False: it needs no more."""

    def corrections(self, since: int) -> Mapping[int, Feedback]:
        """The readable feedback from offset `since` on, by offset."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What an undo changes."""

    entries: tuple[EntryChange, ...]
    edits: tuple[EditChange, ...]
    exceptions: tuple[ExceptionChange, ...]


class Rewritten:
    """The history of an engine beside itself without some feedback (`without`: feedback ids).

    Give `fold` the records of the log until it returns False; then ask for the `difference`.
    """

    def __init__(
        self, engine: EditEngine, without: Collection[str], history: History, at_work: Callable[[], object]
    ) -> None:
        self.failed: list[str] = []
        """Corrections that cannot be made any more, each with the reason."""
        self.decided: dict[str, Seen] = {}
        """What the decisions saw that were made again, by feedback id."""
        self._engine, self._without, self._history = engine, frozenset(without), history
        self._parting = _parting(engine.memory, self._without)
        book = engine.codebook
        self._was = Fold(Codebook(book.name, book.model, book.layer), EditMemory())
        self._is: EditEngine | None = None  # once they part
        self._apart = Apart()
        self._corrections: Mapping[int, Feedback] | None = None
        self._plan, self._at_work = engine.plan, at_work
        self._guarded = engine.plan.guard  # all the time

    def fold(self, record: bytes) -> bool:
        """The next record of the log; False once the log has come as far as the engine."""
        self._at_work()
        if self._is is None and msgspec.msgpack.decode(record, type=_Peeked).cause.offset >= self._parting:
            self._is = self._branch()
        delta = self._was.apply(record)
        if delta is not None:
            if delta.environment is not UNSET:
                self._take_plan(delta.environment)
            if self._is is not None:
                self._follow(self._is, delta)
        return self._was.codebook.seq < self._engine.codebook.seq

    def difference(self) -> Difference:
        """What turns the codebook and the memory as they were into what they would be.

        Raises:
            HistoryError: the log that was folded is not the engine's own.
        """
        was, ours = self._was.codebook, self._engine.codebook
        if was.digest != ours.digest:
            raise HistoryError(
                f"the log folds to delta {was.seq} ({was.digest.hex()[:12]}…), but the editor holds {ours.seq}"
                f" ({ours.digest.hex()[:12]}…)"
            )
        if self._is is None:
            return Difference((), (), ())
        book = self._is.codebook
        gone = [name for name in sorted(self._apart.entries) if name not in book]
        kept = [name for name in sorted(self._apart.entries) if name in book]
        entries = [EntryChange(entry_id=name, removed=True) for name in gone]
        entries += [entry_change(name, was, book) for name in kept]
        memory, edits = self._is.memory, sorted(self._apart.edits)
        exceptions = [change for name in edits if (change := exception_change(name, was, book)) is not None]
        return Difference(tuple(entries), tuple(self._edit_change(name, memory) for name in edits), tuple(exceptions))

    def _branch(self) -> EditEngine:
        """An engine at the place where the two part, with its own copy of everything but the model.

        It searches its keys on the host, wherever the model runs: the look-ups are exact there too.
        """
        engine = EditEngine(self._engine.model, self._engine.codebook.name, self._plan)
        engine.codebook = copy.deepcopy(self._was.codebook)
        # On a GPU the keys of the branch would take as much memory as the editor's own, for a few look-ups.
        engine.index = KeyIndex(engine.codebook, torch.device("cpu"))
        engine.memory = copy.deepcopy(self._was.memory)
        engine.traffic = copy.deepcopy(self._engine.traffic)
        return engine

    def _take_plan(self, environment: Mapping[str, str]) -> None:
        """Decide as the editor of the term did, where its `lead` delta tells how."""
        if "policy" in environment:
            self._plan = plan_of(environment)
            self._guarded = self._guarded and self._plan.guard
            if self._is is not None:
                self._is.plan = self._plan

    def _follow(self, engine: EditEngine, delta: Delta) -> None:
        """Do in the rewritten history what comes of a delta there, now that it is folded in the other."""
        names = _touched(delta)
        if delta.op == "retune":
            self._retune(engine, delta)
        elif delta.op == "except" and delta.cause is not UNSET and delta.cause.feedback_id not in self._without:
            self._except_again(engine, delta, delta.cause)
        elif delta.op in ("lead", "undo") or delta.cause is UNSET or delta.cause.feedback_id in self._without:
            pass
        elif self._stays(engine, delta, delta.cause):
            same = {"entries": delta.entries, "exceptions": delta.exceptions, "cause": delta.cause}
            engine.apply(engine.record(delta.op, **same))
            return  # it did the same in both
        else:
            names |= self._decide_again(engine, delta, delta.cause)
        self._apart.compare(names, self._was, engine)

    @staticmethod
    def _retune(engine: EditEngine, delta: Delta) -> None:
        """No feedback is behind it, so it stays: for the entries that are there."""
        entries = tuple(change for change in delta.entries if change.entry_id in engine.codebook)
        if entries:
            engine.apply(engine.record("retune", entries=entries))

    def _except_again(self, engine: EditEngine, delta: Delta, cause: Cause) -> None:
        """Make the exceptions of a delta from the entries that there are; the model has no part in it."""
        for one in delta.exceptions:
            found = exception_for(engine, one.feedback_id, one.except_from, query_of(one), one.wording)
            if isinstance(found, ExceptionChange):
                engine.apply(engine.record("except", exceptions=(found,), cause=cause))
            elif found.status == "rejected":
                self.failed.append(f"{one.feedback_id} ({found.reason})")

    def _decide_again(self, engine: EditEngine, delta: Delta, cause: Cause) -> set[str]:
        """Let the engine decide on the same correction; the names that its delta touched."""
        if self._corrections is None:
            self._corrections = self._history.corrections(cause.offset)
        correction = self._corrections.get(cause.offset)
        if correction is None or correction.feedback_id != cause.feedback_id:
            raise MissingFeedbackError(f"delta {delta.seq} rests on feedback at offset {cause.offset}: it is not there")
        seen = cause.seen if cause.seen is not UNSET else Seen(radius=engine.initial_radius())
        query_D, trained = _query(delta, self._was.codebook), _trained(delta)
        value_V = None
        if trained is not None and trained.value is not UNSET and trained.label is not UNSET:
            start = engine.warm_start(trained.label, query_D)
            if start == seen.start and start not in self._apart.entries:
                value_V = trained.value.array()
        if (later := self._engine.memory.decided.get(cause.feedback_id)) is not None:
            seen = together(seen, later)
        rephrases_RD = tuple(_rephrases(delta).values())
        again = Again(seen, query_D, value_V, rephrases_RD)
        edited = engine.edit(correction, cause.offset, again, standing=cause.standing)
        if edited.record is None:
            self.failed.append(f"{cause.feedback_id} ({edited.reason})")
            return set()
        applied = engine.apply(edited.record)
        assert applied is not None
        assert applied.delta.cause is not UNSET
        if applied.delta.cause.seen is not UNSET:
            self.decided[cause.feedback_id] = applied.delta.cause.seen
        return _touched(applied.delta)

    def _stays(self, engine: EditEngine, delta: Delta, cause: Cause) -> bool:
        """Whether everything that the decision depended on is the same in both.

        The entry nearest to the query and the one that serves it, unless another one is nearer now; the edits that its
        new and changed entries would take over; the inputs that bounded its radii; the entry whose value its own
        started from. Where it is unsure it says no: deciding again is never wrong.
        """
        seen, apart = cause.seen, self._apart
        if seen is UNSET:
            return False
        changed = {change.entry_id for change in delta.entries}
        if apart.concerns(changed) or not apart.edits.isdisjoint(cause.supersedes):
            return False
        if apart.has_words(_wordings(delta, self._was.codebook)):
            return False
        query_D = _query(delta, self._was.codebook)
        if not self._starts_alike(engine, delta, seen, query_D):
            return False
        keys = {change.entry_id: change.key.array() for change in delta.entries if change.key is not UNSET}
        looked_up = [(query_D, seen.nearest, seen.distance, cause.entry_id)]
        for one, rephrase_D in zip(cause.rephrases, _rephrases(delta).values(), strict=True):
            if rephrase_D is not None:
                looked_up.append((rephrase_D, one.nearest, one.distance, one.entry_id))
        around = [(query_D, nearest, distance) for query_D, nearest, distance, _ in looked_up]
        for found_D, nearest, _, serving in looked_up:
            if serving is not UNSET and serving != nearest and serving not in keys:
                # An entry beyond the nearest serves, since the wording of the nearest disagrees.
                if serving in apart.entries:
                    return False
                around.append((found_D, serving, float(np.linalg.norm(found_D - _key(engine.codebook, serving)))))
        keys |= {name: _key(engine.codebook, name) for name in changed - keys.keys()}
        return all(self._sees_the_same(engine, seen.radius, *place, tuple(keys.values())) for place in around)

    def _sees_the_same(
        self,
        engine: EditEngine,
        initial_radius: float,
        query_D: np.ndarray,
        nearest: str | UnsetType,
        distance: float | UnsetType,
        keys: Sequence[np.ndarray],
    ) -> bool:
        """Whether nothing has changed around a query of a decision, and around the keys of the entries it changed."""
        apart = self._apart
        slack = 4 * engine.noise(query_D)
        distance = np.inf if distance is UNSET else distance
        if nearest in apart.entries or apart.has_key(query_D, distance + slack):
            return False
        if not self._guarded:  # then an entry may serve an edit that lies nearer to another key
            same_input = engine.memory.same_input(query_D, slack)
            if not apart.entries.isdisjoint(map(engine.memory.serving_entry, same_input)):
                return False
        # As far as a radius of this delta could reach if nothing bounded it: its own, or the nearest entry's.
        reach = (initial_radius + slack) / TRAFFIC_SHARE
        if nearest is not UNSET:
            radius = float(engine.codebook.radii_N[engine.codebook.slot(nearest)])
            if distance <= radius + initial_radius + slack:
                reach += distance + max(distance, radius) / TRAFFIC_SHARE
        return not any(apart.has_edit(key_D, reach, slack) for key_D in (*keys, query_D))

    def _starts_alike(self, engine: EditEngine, delta: Delta, seen: Seen, query_D: np.ndarray) -> bool:
        """Whether a value that was trained would start from the same entry's now; others start from no entry's."""
        trained = _trained(delta)
        if engine.plan.init != "label" or trained is None or trained.label is UNSET:
            return True
        if seen.start is UNSET:
            return not self._apart.has_label(trained.label)
        if seen.start in self._apart.entries:
            return False
        start_D = _key(engine.codebook, seen.start)
        distance = float(np.linalg.norm(start_D - query_D))
        return not self._apart.has_key(query_D, distance + 4 * engine.noise(query_D))

    def _edit_change(self, name: str, memory: EditMemory) -> EditChange:
        if name not in memory:
            return EditChange(feedback_id=name, removed=True)
        entry_id = memory.serving_entry(name)
        return EditChange(
            feedback_id=name,
            entry_id=UNSET if entry_id == BARE_MODEL else entry_id,
            query=UNSET if name in self._was.memory else Tensor.of(memory.query(name)),
            wording="" if name in self._was.memory else memory.wording(name),
        )


class _PeekedCause(Struct, frozen=True):
    offset: int = -1


class _Peeked(Struct, frozen=True):
    """As much of a delta as tells where in the log of feedback it stands; a lead stands nowhere."""

    cause: _PeekedCause = _PeekedCause()


def _parting(memory: EditMemory, without: frozenset[str]) -> float:
    """The offset of feedback from which the two histories differ.

    What was taken back by an undo before that is not there in the history as it was either.
    """
    parting = np.inf
    while differ := without ^ memory.undone(before=parting):
        earliest = min(memory.offsets[name] for name in differ)
        if earliest >= parting:
            break
        parting = earliest
    return parting


def _touched(delta: Delta) -> set[str]:
    """Names of the entries and edits that a delta may have changed."""
    named = {change.entry_id for change in delta.entries} | {edit.feedback_id for edit in delta.edits}
    if delta.cause is not UNSET:
        named |= {delta.cause.feedback_id, *delta.cause.supersedes, *delta.cause.named_rephrases()}
    return named


def _query(delta: Delta, codebook: Codebook) -> np.ndarray:
    """The query of the decision behind a delta, which is the key of the entry that it added unless it says."""
    cause = delta.cause
    assert cause is not UNSET
    if cause.query is not UNSET:
        return cause.query.array()
    for change in delta.entries:
        if change.entry_id == cause.entry_id and change.key is not UNSET:
            return change.key.array()
    assert cause.entry_id is not UNSET
    return _key(codebook, cause.entry_id)


def _rephrases(delta: Delta) -> dict[str, np.ndarray | None]:
    """The queries of the rephrases behind a delta, by the names of their keys; None where the model took none."""
    assert delta.cause is not UNSET
    own = {change.entry_id: change.key.array() for change in delta.entries if change.key is not UNSET}
    queries: dict[str, np.ndarray | None] = {}
    for name, one in delta.cause.named_rephrases().items():
        if one.query is not UNSET:
            queries[name] = one.query.array()
        else:
            queries[name] = None if one.entry_id is UNSET else own[one.entry_id]
    return queries


def _wordings(delta: Delta, codebook: Codebook) -> set[str]:
    """The wordings of the prompts behind a delta, and of the entries that it changed."""
    assert delta.cause is not UNSET
    wordings = {delta.cause.wording, *(one.wording for one in delta.cause.rephrases)}
    names = [change.entry_id for change in delta.entries if change.entry_id in codebook]
    return wordings | {codebook.wordings[codebook.slot(name)] for name in names}


def _key(codebook: Codebook, name: str) -> np.ndarray:
    key_D: np.ndarray = codebook.keys_ND[codebook.slot(name)]
    return key_D


def _trained(delta: Delta) -> EntryChange | None:
    """The change that gave a value which was trained for this correction, where there is one."""
    cause = delta.cause
    if cause is UNSET or delta.op == "expand":
        return None
    return next((c for c in delta.entries if c.entry_id == cause.entry_id and c.value is not UNSET), None)
