"""What the editor remembers of past edits, and the guard that keeps one edit from undoing another (design, section 4).

For each edit in force the memory holds its query and the entry that serves it, or that the bare model does: a
correction that was right already is kept right too. Each rephrase of a correction is held likewise, as an edit under
the name of its key. Like the codebook it is a fold over `deltas`: a starting editor folds the log and knows what its
predecessor knew.
"""

from collections.abc import Collection, Mapping

import numpy as np
from msgspec import UNSET

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.search import PointSet, exact_distance
from gracestream.pipeline.wording import SameWordsIndex, limits_radius
from gracestream.schemas.deltas import Cause, Delta, Seen

UNEDITED_MODEL = ""
"""In place of an entry id: no entry serves the edit, because the model needs none."""


def resolve_undos(undo_targets: Mapping[str, Collection[str]]) -> set[str]:
    """What these undos, in their order, take back when each counts unless a later one takes it back."""
    gone: set[str] = set()
    for feedback_id, taken_back in reversed(list(undo_targets.items())):
        if feedback_id not in gone:
            gone.update(taken_back)
    return gone


class EditMemory:
    """The queries of the edits in force, each with its serving entry and the distance to that entry's key."""

    def __init__(self) -> None:
        self.entry_ids: list[str] = []
        """Of each row: the entry that serves the edit, or `UNEDITED_MODEL`."""
        self.offsets: dict[str, int] = {}
        """Offset in `feedback` of every feedback id that ever made a delta."""
        self.authors: dict[str, str] = {}
        """Author of each of these ids that had one."""
        self.signed_ids: set[str] = set()
        """Those of these ids whose author had signed."""
        self.undo_targets: dict[str, tuple[str, ...]] = {}
        """By the id of each undo, in order: the ids that it takes back."""
        self.rephrase_owners: dict[str, str] = {}
        """By the name of each rephrase's key, in force or not: the id of its correction."""
        self.replay_contexts: dict[str, Seen] = {}
        """What decisions saw when an undo made them again, by feedback id."""
        self._wordings: dict[str, str] = {}
        """By feedback id: the wording of its prompt, where it has one."""
        self._edits = PointSet()
        """The queries; the reach of each is the distance to the key that serves it."""
        self._confirmed = PointSet()
        """The queries that the bare model serves."""
        self._confirmed_words = SameWordsIndex()
        """Their wordings."""
        self._edits_by_entry: dict[str, set[str]] = {}
        """By entry id: the edits that it serves beside the one whose own it is."""

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
        """A view; float32."""
        return self._edits.points_ND

    @property
    def distances_E(self) -> np.ndarray:
        """From each query to the key that serves it; a view; float32."""
        return self._edits.radii_N

    def feedback_id_of(self, name: str) -> str:
        """The id of the feedback behind an edit in force, or behind a rephrase's key."""
        return self.rephrase_owners.get(name, name)

    def query(self, feedback_id: str) -> np.ndarray:
        """A copy of one edit's query (D); KeyError where no such edit is in force."""
        query_D: np.ndarray = self.queries_ED[self._edits.row(feedback_id)].copy()
        return query_D

    def wording(self, feedback_id: str) -> str:
        """Of one edit's prompt (`pipeline.wording`); empty where nothing is to be compared."""
        return self._wordings.get(feedback_id, "")

    def serving_entry_id(self, feedback_id: str) -> str:
        """The id of the entry that serves an edit; KeyError where no such edit is in force."""
        return self.entry_ids[self._edits.row(feedback_id)]

    def distance(self, feedback_id: str) -> float:
        """From an edit's query to the key that serves it; KeyError where no such edit is in force."""
        return float(self.distances_E[self._edits.row(feedback_id)])

    def apply_delta(self, delta: Delta, codebook: Codebook) -> None:
        """Take over what a delta did, after `codebook` has applied it.

        Raises:
            HistoryError: it names an edit or an entry that is not there, or holds a query that does not fit.
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
                own = change.entry_id
                self._upsert(own, self.query(own), own, codebook, self.wording(own))
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
        for name, one in cause.rephrases_by_name().items():
            if not one.left_out:
                entry_id = UNEDITED_MODEL if one.entry_id is UNSET else one.entry_id
                if one.query is UNSET:
                    self._upsert(name, *_arguments_at_key(entry_id, codebook))
                else:
                    self._upsert(name, one.query.array(), entry_id, codebook, one.wording)

    def _record_source(self, cause: Cause) -> None:
        """Keep where a feedback id came from."""
        self.offsets[cause.feedback_id] = cause.offset
        self.rephrase_owners |= dict.fromkeys(cause.rephrases_by_name(), cause.feedback_id)
        if cause.author is not UNSET:
            self.authors[cause.feedback_id] = cause.author
        if cause.standing is not UNSET and cause.standing.signed:
            self.signed_ids.add(cause.feedback_id)

    def _apply_undo(self, delta: Delta, codebook: Codebook) -> None:
        if delta.cause is not UNSET:
            self.undo_targets[delta.cause.feedback_id] = delta.cause.undoes
        self.remember_contexts(delta.decided)
        for edit in delta.edits:
            if edit.removed:
                self._remove(edit.feedback_id)
                continue
            name = edit.feedback_id
            entry_id = UNEDITED_MODEL if edit.entry_id is UNSET else edit.entry_id
            if edit.query is UNSET:
                self._upsert(name, self.query(name), entry_id, codebook, self.wording(name))
            else:
                self._upsert(name, edit.query.array(), entry_id, codebook, edit.wording)

    def remember_contexts(self, contexts: Mapping[str, Seen]) -> None:
        """Keep what decisions saw when they were made again, beside what they saw in earlier undos."""
        for feedback_id, seen in contexts.items():
            earlier = self.replay_contexts.get(feedback_id)
            self.replay_contexts[feedback_id] = seen if earlier is None else merge_contexts(seen, earlier)

    def undone_ids(self, before_offset: float = np.inf) -> set[str]:
        """The ids of feedback that counts as never sent, by the undos of offsets below `before_offset`."""
        return resolve_undos(
            {name: ids for name, ids in self.undo_targets.items() if self.offsets[name] < before_offset}
        )

    def edits_of_input(self, query_D: np.ndarray, tolerance: float) -> list[str]:
        """Edits of this very input: their queries lie within `tolerance`."""
        return [self.feedback_ids[row] for row in self._edits.within(query_D, tolerance)]

    def nearest_confirmed_distance(
        self, key_D: np.ndarray, tolerance: float, excluded_D: np.ndarray | None = None, wording: str = ""
    ) -> float:
        """The distance to the nearest input that the unedited model serves, other than the key's own and `excluded_D`.

        Only those count whose wording agrees in other words: what is asked in the same words has been corrected, too.
        """
        return self._confirmed.nearest_distance(
            key_D, tolerance, excluded_D, lambda name: limits_radius(wording, self.wording(name))
        )

    def confirmed_with_same_words(self, wording: str) -> list[str]:
        """The edits that the unedited model serves whose prompts have the same words as this wording."""
        return self._confirmed_words.find(wording)

    def edits_needing_entry(
        self,
        keys: Mapping[str, np.ndarray],
        shrunk: Mapping[str, float],
        relabelled: Collection[str],
        tolerance: float,
        ignore: Collection[str],
    ) -> list[str]:
        """The edits that need an entry of their own before a decision is carried out, in a fixed order.

        An edit does where one of these keys is nearer to its query than the one that serves it. It does, too, where the
        radius of that entry would no longer hold it (`shrunk`), or the entry gets another value (`relabelled`).
        A key may be nearer before the decision, too: its entry did not serve the edit, as the wordings disagree or its
        radius does not hold it. An entry of its own is a new key too, so this is followed to its end; each edit is
        named once at most.

        Args:
            keys: Of the entries that the decision adds, or whose radius or wording it changes; by entry id.
            shrunk: New radii of entries, by entry id.
            relabelled: Entries whose value and label are replaced.
            tolerance: Distances closer to each other than twice this are not told apart.
            ignore: Feedback ids of the same input, which the decision supersedes or serves.
        """
        taken = {self._edits.row(name) for name in ignore if name in self}
        lost = {
            row
            for entry_id in {*shrunk, *relabelled}
            for row in map(self._edits.row, self._edits_by_entry.get(entry_id, ()))
            if entry_id in relabelled or self.distances_E[row] + 2 * tolerance > shrunk[entry_id]
        }
        for entry_id, key_D in keys.items():
            lost |= {row for row in self._shadowed_rows(key_D, tolerance) if self.entry_ids[row] != entry_id}
        named: list[str] = []
        while lost := lost - taken:
            row = min(lost)
            taken.add(row)
            named.append(self.feedback_ids[row])
            lost |= self._shadowed_rows(self.queries_ED[row], tolerance)
        return named

    def _shadowed_rows(self, key_D: np.ndarray, tolerance: float) -> set[int]:
        """Rows of the edits that are nearer to a new key than to the one that serves them, which is another's.

        An edit that lies at its serving key has a key of its own in all but name.
        """
        rows = self._edits.containing(key_D, 2 * tolerance)
        served_by = ((row, self.entry_ids[row]) for row in rows[self.distances_E[rows] > tolerance].tolist())
        return {row for row, entry_id in served_by if entry_id not in (UNEDITED_MODEL, self.feedback_ids[row])}

    def _upsert(self, feedback_id: str, query_D: np.ndarray, entry_id: str, codebook: Codebook, wording: str) -> None:
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
        """The last row takes the dropped one's place."""
        self._detach_from_entry(feedback_id)
        self._wordings.pop(feedback_id, None)
        row = self._edits.remove(feedback_id)
        self.entry_ids[row] = self.entry_ids[-1]
        self.entry_ids.pop()

    def _detach_from_entry(self, feedback_id: str) -> None:
        entry_id = self.serving_entry_id(feedback_id)
        if entry_id == UNEDITED_MODEL:
            self._confirmed.remove(feedback_id)
            self._confirmed_words.remove(feedback_id)
        elif entry_id != feedback_id:
            self._edits_by_entry[entry_id].remove(feedback_id)
            if not self._edits_by_entry[entry_id]:
                del self._edits_by_entry[entry_id]


def _arguments_at_key(entry_id: str, codebook: Codebook) -> tuple[np.ndarray, str, Codebook, str]:
    """What `EditMemory._put` takes of an edit that lies at the key of the entry that serves it."""
    slot = codebook.slot(entry_id)
    return codebook.keys_ND[slot], entry_id, codebook, codebook.wordings[slot]


def merge_contexts(first: Seen, later: Seen) -> Seen:
    """What a decision saw when it was made, and what it saw beside that when it was made again."""
    return Seen(radius=first.radius, clearance=later.clearance | first.clearance)
