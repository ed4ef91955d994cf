"""The editor's memory of past edits, and the retention guard (docs/explanation/method.md, policies).

The retention guard ensures that no edit undoes an earlier one. For each edit in force the memory holds its query and
the entry that serves it. The unedited model may also serve an edit: it was right already, and must stay right. Each
rephrase of a correction is an edit of its own, under the name of its key.

Guarantees:

1. Equal deltas in equal order give equal memories. A starting editor rebuilds its predecessor's memory from the log.
2. Each lookup by distance equals a comparison with all edits (`PointSet`).

Not promised: an unchanged memory after a `HistoryError`.
"""

from collections.abc import Collection, Mapping

import numpy as np
from msgspec import UNSET

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.search import PointSet, exact_distance
from gracestream.pipeline.wording import SameWordsIndex, limits_radius
from gracestream.schemas.deltas import Cause, DecisionContext, Delta

UNEDITED_MODEL = ""
"""Stands in place of an entry id: the unedited model serves the edit, so it needs no entry."""


def resolve_undos(undo_targets: Mapping[str, Collection[str]]) -> set[str]:
    """The ids of feedback that the undos take back. An undo counts unless a later undo in force takes it back.

    `undo_targets` maps the id of each undo to the ids that it takes back, in the order of the undos.
    """
    undone: set[str] = set()
    for feedback_id, target_ids in reversed(list(undo_targets.items())):
        if feedback_id not in undone:
            undone.update(target_ids)
    return undone


class EditMemory:
    """The queries of the edits in force, each with its serving entry and the distance to that entry's key."""

    def __init__(self) -> None:
        self.entry_ids: list[str] = []
        """By row: the id of the entry that serves the edit, or `UNEDITED_MODEL`."""
        self.offsets: dict[str, int] = {}
        """Offset in `feedback` of every feedback id that has caused a delta."""
        self.authors: dict[str, str] = {}
        """Author of each of these ids, if known."""
        self.signed_ids: set[str] = set()
        """The feedback ids that their authors had signed."""
        self.undo_targets: dict[str, tuple[str, ...]] = {}
        """The ids that each undo takes back, by the undo's id, in the order of the undos."""
        self.rephrase_owners: dict[str, str] = {}
        """The id of the correction, by the name of each rephrase's key, in force or not."""
        self.repeated_contexts: dict[str, DecisionContext] = {}
        """The contexts of decisions that an undo repeated, by feedback id."""
        self._wordings: dict[str, str] = {}
        """The wording of each edit's prompt, by feedback id; edits without a wording are absent."""
        self._edits = PointSet()
        """The queries of all edits. Each radius is the distance to the key of the serving entry."""
        self._confirmed = PointSet()
        """The queries that the unedited model serves."""
        self._confirmed_words = SameWordsIndex()
        """The wordings of these queries."""
        self._edits_by_entry: dict[str, set[str]] = {}
        """The edits that each entry serves, by entry id, without the edit of the same id."""

    def __len__(self) -> int:
        return len(self._edits)

    def __contains__(self, feedback_id: object) -> bool:
        return feedback_id in self._edits

    @property
    def feedback_ids(self) -> list[str]:
        """The edits in force, in the order of their rows."""
        return self._edits.names

    @property
    def queries_ED(self) -> np.ndarray:
        """The queries of the edits in force; a view, float32."""
        return self._edits.points_ND

    @property
    def distances_E(self) -> np.ndarray:
        """Distance from each query to the key of its serving entry; a view, float32."""
        return self._edits.radii_N

    def feedback_id_of(self, name: str) -> str:
        """The id of the feedback behind an edit in force, or behind a rephrase's key."""
        return self.rephrase_owners.get(name, name)

    def query(self, feedback_id: str) -> np.ndarray:
        """A copy of an edit's query (D).

        Raises:
            KeyError: no such edit is in force.
        """
        query_D: np.ndarray = self.queries_ED[self._edits.row(feedback_id)].copy()
        return query_D

    def wording(self, feedback_id: str) -> str:
        """The wording of an edit's prompt (`pipeline.wording`); empty if it has none to compare."""
        return self._wordings.get(feedback_id, "")

    def serving_entry_id(self, feedback_id: str) -> str:
        """The id of the entry that serves an edit, or `UNEDITED_MODEL`.

        Raises:
            KeyError: no such edit is in force.
        """
        return self.entry_ids[self._edits.row(feedback_id)]

    def distance(self, feedback_id: str) -> float:
        """The distance from an edit's query to the key of its serving entry.

        Raises:
            KeyError: no such edit is in force.
        """
        return float(self.distances_E[self._edits.row(feedback_id)])

    def apply_delta(self, delta: Delta, codebook: Codebook) -> None:
        """Record the effect of a delta, after `codebook` has applied it.

        Raises:
            HistoryError: the delta names an unknown edit or entry, or its query has another width than the keys.
        """
        try:
            self._apply_delta(delta, codebook)
        except (KeyError, ValueError) as error:
            raise HistoryError(f"delta {delta.seq} does not fit the edits before it: {error!r}") from error

    def _apply_delta(self, delta: Delta, codebook: Codebook) -> None:
        cause = delta.cause
        if cause is not UNSET:
            self._record_source(cause)
        if delta.op == "undo":
            self._apply_undo(delta, codebook)
            return
        for change in delta.entries:
            if change.entry_id in self and not change.removed:
                own_id = change.entry_id
                self._upsert(own_id, self.query(own_id), own_id, codebook, self.wording(own_id))
        if cause is UNSET:
            return
        for feedback_id in cause.supersedes:
            self._remove(feedback_id)
        if cause.query is not UNSET:
            entry_id = UNEDITED_MODEL if cause.entry_id is UNSET else cause.entry_id
            self._upsert(cause.feedback_id, cause.query.array(), entry_id, codebook, cause.wording)
        elif cause.entry_id is not UNSET:
            self._upsert(cause.feedback_id, *_arguments_at_key(cause.entry_id, codebook))
        self._apply_rephrases(cause, codebook)

    def _apply_rephrases(self, cause: Cause, codebook: Codebook) -> None:
        """Record the rephrases of a correction, except those that the decision left out."""
        for name, rephrase in cause.rephrases_by_name().items():
            if not rephrase.left_out:
                entry_id = UNEDITED_MODEL if rephrase.entry_id is UNSET else rephrase.entry_id
                if rephrase.query is UNSET:
                    self._upsert(name, *_arguments_at_key(entry_id, codebook))
                else:
                    self._upsert(name, rephrase.query.array(), entry_id, codebook, rephrase.wording)

    def _record_source(self, cause: Cause) -> None:
        """Record offset, author, signature and rephrases of a feedback id."""
        self.offsets[cause.feedback_id] = cause.offset
        self.rephrase_owners |= dict.fromkeys(cause.rephrases_by_name(), cause.feedback_id)
        if cause.author is not UNSET:
            self.authors[cause.feedback_id] = cause.author
        if cause.standing is not UNSET and cause.standing.signed:
            self.signed_ids.add(cause.feedback_id)

    def _apply_undo(self, delta: Delta, codebook: Codebook) -> None:
        """Record an undo: its targets, the contexts of repeated decisions, and each edit that changes its entry."""
        if delta.cause is not UNSET:
            self.undo_targets[delta.cause.feedback_id] = delta.cause.undoes
        self.remember_contexts(delta.decided)
        for edit in delta.edits:
            if edit.removed:
                self._remove(edit.feedback_id)
                continue
            feedback_id = edit.feedback_id
            entry_id = UNEDITED_MODEL if edit.entry_id is UNSET else edit.entry_id
            if edit.query is UNSET:
                self._upsert(feedback_id, self.query(feedback_id), entry_id, codebook, self.wording(feedback_id))
            else:
                self._upsert(feedback_id, edit.query.array(), entry_id, codebook, edit.wording)

    def remember_contexts(self, contexts: Mapping[str, DecisionContext]) -> None:
        """Store the recorded inputs of repeated decisions, merged with those of earlier undos."""
        for feedback_id, context in contexts.items():
            earlier = self.repeated_contexts.get(feedback_id)
            self.repeated_contexts[feedback_id] = context if earlier is None else merge_contexts(context, earlier)

    def undone_ids(self, before_offset: float = np.inf) -> set[str]:
        """The ids of feedback that undos at offsets below `before_offset` take back: it counts as never sent."""
        return resolve_undos(
            {
                feedback_id: target_ids
                for feedback_id, target_ids in self.undo_targets.items()
                if self.offsets[feedback_id] < before_offset
            }
        )

    def edits_of_input(self, query_D: np.ndarray, tolerance: float) -> list[str]:
        """Feedback ids of the edits of this input: their queries are at most `tolerance` away."""
        return [self.feedback_ids[row] for row in self._edits.within(query_D, tolerance)]

    def nearest_confirmed_distance(
        self, key_D: np.ndarray, tolerance: float, excluded_D: np.ndarray | None = None, wording: str = ""
    ) -> float:
        """The distance to the nearest input that the unedited model serves, except the key's own and `excluded_D`.

        Only inputs that limit the radius count (`limits_radius`): their wording agrees with `wording`, but in other
        words. An input in the same words asks for the same, so the correction applies to it as well.
        """
        return self._confirmed.nearest_distance(
            key_D, tolerance, excluded_D, lambda name: limits_radius(wording, self.wording(name))
        )

    def confirmed_with_same_words(self, wording: str) -> list[str]:
        """Feedback ids of the edits served by the unedited model with the same words as this wording."""
        return self._confirmed_words.find(wording)

    def edits_needing_entry(
        self,
        keys: Mapping[str, np.ndarray],
        shrunk: Mapping[str, float],
        relabelled: Collection[str],
        tolerance: float,
        ignore: Collection[str],
    ) -> list[str]:
        """The edits that need an entry of their own for a decision not to undo them, each once, in a fixed order.

        An edit needs its own entry if

        1. one of these keys is nearer to its query than the key of its serving entry;
        2. the new radius of its serving entry no longer contains its query (`shrunk`); or
        3. its serving entry gets another value (`relabelled`).

        A key of an existing entry may already be nearer (1): the entry did not serve the edit, because of its wording
        or its radius. A new entry is a new key, which may shadow further edits. So this repeats until nothing changes.

        Args:
            keys: Keys of the entries that the decision adds, or whose radius or wording it changes; by entry id.
            shrunk: New radii of entries, by entry id.
            relabelled: Ids of entries whose value and label are replaced.
            tolerance: Numerical tolerance. Distances that differ by less than twice this count as equal.
            ignore: Ids of edits of the same input, which the decision supersedes or serves.
        """
        done_rows = {self._edits.row(feedback_id) for feedback_id in ignore if feedback_id in self}
        pending_rows = {
            row
            for entry_id in {*shrunk, *relabelled}
            for row in map(self._edits.row, self._edits_by_entry.get(entry_id, ()))
            if entry_id in relabelled or self.distances_E[row] + 2 * tolerance > shrunk[entry_id]
        }
        for entry_id, key_D in keys.items():
            pending_rows |= {row for row in self._shadowed_rows(key_D, tolerance) if self.entry_ids[row] != entry_id}
        affected_ids: list[str] = []
        while pending_rows := pending_rows - done_rows:
            row = min(pending_rows)  # a fixed order, so that repeated decisions give equal deltas
            done_rows.add(row)
            affected_ids.append(self.feedback_ids[row])
            pending_rows |= self._shadowed_rows(self.queries_ED[row], tolerance)
        return affected_ids

    def _shadowed_rows(self, key_D: np.ndarray, tolerance: float) -> set[int]:
        """Rows of the edits that a new key would shadow: it is nearer to their query than their serving key.

        Edits with their own entry, or served by the unedited model, are not among them. Neither are edits at most
        `tolerance` from their serving key: that key is as good as their own.
        """
        rows = self._edits.containing(key_D, 2 * tolerance)
        rows_and_entries = ((row, self.entry_ids[row]) for row in rows[self.distances_E[rows] > tolerance].tolist())
        return {row for row, entry_id in rows_and_entries if entry_id not in (UNEDITED_MODEL, self.feedback_ids[row])}

    def _upsert(self, feedback_id: str, query_D: np.ndarray, entry_id: str, codebook: Codebook, wording: str) -> None:
        """Add or replace an edit that an entry, or the unedited model, serves.

        Raises:
            ValueError: the query has another width than the keys.
            KeyError: the codebook lacks the entry.
        """
        width = codebook.keys_ND.shape[1] or self.queries_ED.shape[1]
        if width and query_D.shape != (width,):
            raise ValueError(f"a query of shape {query_D.shape}, not {(width,)}")
        distance = 0.0
        if entry_id not in (UNEDITED_MODEL, feedback_id):  # its own entry's key is its query
            distance = exact_distance(query_D, codebook.keys_ND[codebook.slot(entry_id)])
        if feedback_id in self:
            self._detach_from_entry(feedback_id)
        if entry_id == UNEDITED_MODEL:
            self._confirmed.upsert(feedback_id, query_D)
            self._confirmed_words.upsert(feedback_id, wording)
        elif entry_id != feedback_id:
            self._edits_by_entry.setdefault(entry_id, set()).add(feedback_id)
        row = self._edits.upsert(feedback_id, query_D, distance)
        self.entry_ids[row : row + 1] = [entry_id]
        self._wordings.pop(feedback_id, None)
        if wording:
            self._wordings[feedback_id] = wording

    def _remove(self, feedback_id: str) -> None:
        """Remove an edit. The last row moves to its place, as in `PointSet.remove`."""
        self._detach_from_entry(feedback_id)
        self._wordings.pop(feedback_id, None)
        row = self._edits.remove(feedback_id)
        self.entry_ids[row] = self.entry_ids[-1]
        self.entry_ids.pop()

    def _detach_from_entry(self, feedback_id: str) -> None:
        """Remove an edit from the indexes by its serving entry or, for the unedited model, by query and wording."""
        entry_id = self.serving_entry_id(feedback_id)
        if entry_id == UNEDITED_MODEL:
            self._confirmed.remove(feedback_id)
            self._confirmed_words.remove(feedback_id)
        elif entry_id != feedback_id:
            self._edits_by_entry[entry_id].remove(feedback_id)
            if not self._edits_by_entry[entry_id]:
                del self._edits_by_entry[entry_id]


def _arguments_at_key(entry_id: str, codebook: Codebook) -> tuple[np.ndarray, str, Codebook, str]:
    """The arguments of `EditMemory._upsert` for an edit whose query is the key of its serving entry."""
    slot = codebook.slot(entry_id)
    return codebook.keys_ND[slot], entry_id, codebook, codebook.wordings[slot]


def merge_contexts(first: DecisionContext, later: DecisionContext) -> DecisionContext:
    """The recorded inputs of a decision: those of its first run, and further distances recorded in a later run."""
    return DecisionContext(radius=first.radius, clearance=later.clearance | first.clearance)
