"""What the editor remembers of past edits, and the guard that keeps one edit from undoing another (design, section 4).

For each edit in force the memory holds its query and the entry that serves it. Like the codebook it is a fold over
`deltas`: a starting editor folds the log and knows what its predecessor knew.
"""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from msgspec import UNSET

from pipeline.codebook import Codebook
from pipeline.index import exact_distances
from schemas.deltas import Delta


class EditMemory:
    """The queries of the edits in force, each with its serving entry and the distance to that entry's key."""

    def __init__(self) -> None:
        self.feedback_ids: list[str] = []
        self.entry_ids: list[str] = []
        self.offsets: dict[str, int] = {}
        """Offset in `feedback` of every feedback id that ever made a delta."""
        self._rows: dict[str, int] = {}
        self._queries = np.empty((0, 0), np.float32)
        self._distances = np.empty(0, np.float32)

    def __len__(self) -> int:
        return len(self.feedback_ids)

    def __contains__(self, feedback_id: object) -> bool:
        return feedback_id in self._rows

    @property
    def queries_ED(self) -> np.ndarray:
        """A view; float32."""
        return self._queries[: len(self)]

    @property
    def distances_E(self) -> np.ndarray:
        """From each query to the key that serves it; a view; float32."""
        return self._distances[: len(self)]

    def query(self, feedback_id: str) -> np.ndarray:
        """A copy of one edit's query (D); KeyError where no such edit is in force."""
        query_D: np.ndarray = self._queries[self._rows[feedback_id]].copy()
        return query_D

    def serving_entry(self, feedback_id: str) -> str:
        """The id of the entry that serves an edit; KeyError where no such edit is in force."""
        return self.entry_ids[self._rows[feedback_id]]

    def fold(self, delta: Delta, codebook: Codebook) -> None:
        """Take over what a delta did, after `codebook` has applied it."""
        for change in delta.entries:
            if change.entry_id in self._rows and not change.removed:
                self._put(change.entry_id, self.query(change.entry_id), change.entry_id, codebook)
        if delta.cause is UNSET:
            return
        for feedback_id in delta.cause.supersedes:
            self._drop(feedback_id)
        if delta.cause.entry_id is UNSET:
            return
        self.offsets[delta.cause.feedback_id] = delta.cause.offset
        entry_id = delta.cause.entry_id
        query_D = codebook.keys_ND[codebook.slot(entry_id)] if delta.cause.query is UNSET else delta.cause.query.array()
        self._put(delta.cause.feedback_id, query_D, entry_id, codebook)

    def same_input(self, query_D: np.ndarray, noise: float) -> list[str]:
        """Edits of this very input: their queries lie within `noise`."""
        return [self.feedback_ids[row] for row in np.flatnonzero(self._distances_to(query_D) <= noise)]

    def displaced(
        self,
        new_keys: Mapping[str, np.ndarray],
        shrunk: Mapping[str, float],
        relabelled: Collection[str],
        noise: float,
        ignore: Collection[str],
    ) -> list[str]:
        """The edits that need an entry of their own before a decision is carried out, in a fixed order.

        An edit does where another key would be nearer to its query than the one that serves it, where that entry's
        ball would no longer reach it (`shrunk`: new radii), or where the entry gets another value (`relabelled`).
        An entry of its own is a new key too, so this is followed to its end; each edit is named once at most.

        Args:
            new_keys: What the decision adds, by entry id.
            shrunk: New radii of entries, by entry id.
            relabelled: Entries whose value and label are replaced.
            noise: Distances closer to each other than twice this are not told apart.
            ignore: Feedback ids of the same input, which the decision supersedes or serves.
        """
        own_E = np.array([fid == eid for fid, eid in zip(self.feedback_ids, self.entry_ids, strict=True)], bool)
        open_E = ~own_E if len(self) else own_E
        for feedback_id in ignore:
            if feedback_id in self._rows:
                open_E[self._rows[feedback_id]] = False
        named: list[str] = []
        lost_E = np.zeros(len(self), bool)
        for row in np.flatnonzero(open_E).tolist():
            radius = shrunk.get(self.entry_ids[row], np.inf)
            lost_E[row] = self.entry_ids[row] in relabelled or self._distances[row] + 2 * noise > radius
        # An edit that lies at its serving key has a key of its own in all but name.
        apart_E = self.distances_E > noise
        for key_D in new_keys.values():
            lost_E |= (self._distances_to(key_D) <= self.distances_E + 2 * noise) & apart_E
        while (lost_E & open_E).any():
            row = int(np.flatnonzero(lost_E & open_E)[0])
            open_E[row] = False
            named.append(self.feedback_ids[row])
            lost_E |= (self._distances_to(self._queries[row]) <= self.distances_E + 2 * noise) & apart_E
        return named

    def _distances_to(self, key_D: np.ndarray) -> np.ndarray:
        if not len(self):
            return np.empty(0, np.float32)
        queries_1ED = torch.from_numpy(self.queries_ED)[None]
        return exact_distances(torch.tensor(key_D)[None], queries_1ED)[0].numpy()

    def _put(self, feedback_id: str, query_D: np.ndarray, entry_id: str, codebook: Codebook) -> None:
        row = self._rows.get(feedback_id)
        if row is None:
            row = len(self)
            if row == len(self._distances):
                room = max(64, row + row // 4)
                queries = np.zeros((room, len(query_D)), np.float32)
                queries[:row] = self._queries[:row] if row else 0
                self._queries = queries
                self._distances = np.concatenate([self._distances, np.zeros(room - row, np.float32)])
            self.feedback_ids.append(feedback_id)
            self.entry_ids.append(entry_id)
            self._rows[feedback_id] = row
        self._queries[row] = query_D
        self.entry_ids[row] = entry_id
        key_D = torch.tensor(codebook.keys_ND[codebook.slot(entry_id)])
        self._distances[row] = float(exact_distances(torch.tensor(query_D)[None], key_D[None, None])[0, 0])

    def _drop(self, feedback_id: str) -> None:
        """The last row takes the dropped one's place."""
        row, last = self._rows.pop(feedback_id), len(self) - 1
        if row != last:
            self._queries[row], self._distances[row] = self._queries[last], self._distances[last]
            self.feedback_ids[row], self.entry_ids[row] = self.feedback_ids[last], self.entry_ids[last]
            self._rows[self.feedback_ids[row]] = row
        self.feedback_ids.pop()
        self.entry_ids.pop()
