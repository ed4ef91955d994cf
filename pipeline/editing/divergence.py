"""What is not the same in two histories of one codebook, and whether a decision had to do with any of it."""

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np

from gracestream.pipeline.codebook import UNEDITED_MODEL, EditState, Label, diff_exception, edits_equal, entries_equal
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.search import PointSet
from gracestream.pipeline.wording import ELLIPSIS, SameWordsIndex

_ENTRY_PREFIX, _EDIT_PREFIX = "entry ", "edit "
"""In front of names among the wordings: an edit may bear the name of an entry."""


class Divergence:
    """The names of entries and edits that are not the same in both histories, and where they lie.

    A decision of the first history shows by name which of its entries and edits it changed; of the second one, and of
    inputs that the bare model serves, which bound radii, it shows nothing. So only these are held by their place.
    """

    def __init__(self) -> None:
        self.entry_ids: set[str] = set()
        self.edit_ids: set[str] = set()
        self._keys = PointSet()  # of entries, in the second history
        self._labels: dict[str, Label] = {}
        self._label_counts: Counter[Label] = Counter()
        self._served_queries = (
            PointSet()
        )  # of edits that an entry serves, in the second history; the reach is its distance
        self._entry_by_edit: dict[str, str] = {}
        self._edit_counts: Counter[str] = Counter()
        self._unedited_queries = PointSet()  # of edits that the bare model serves, in either
        self._wordings = SameWordsIndex()  # of these entries, and of edits that the unedited model serves, in either

    def update(self, names: Iterable[str], actual: EditState, counterfactual: EditEngine) -> None:
        """Note which of these entries and edits are the same in both."""
        for name in names:
            self._update_entry(name, actual, counterfactual)
            self._update_edit(name, actual, counterfactual)

    def touches(self, entry_ids: Collection[str]) -> bool:
        """Whether a change of these entries would be another one now, or touch an edit that they serve only now.

        An entry that an edit was given by the guard bears the edit's name.
        """
        return any(name in self.entry_ids or name in self.edit_ids or self._edit_counts[name] for name in entry_ids)

    def key_within(self, query_D: np.ndarray, distance: float) -> bool:
        """Whether one of these entries may lie so near to a query."""
        return bool(len(self._keys.within(query_D, distance)))

    def label_changed(self, label: Label) -> bool:
        """Whether one of these entries has this label now."""
        return self._label_counts[label] > 0

    def edit_within(self, key_D: np.ndarray, distance: float, slack: float) -> bool:
        """Whether a key may take over one of these edits, or `distance` one that the bare model serves."""
        taken_over = self._served_queries.containing(key_D, slack)
        return bool(len(taken_over) or len(self._unedited_queries.within(key_D, distance + slack)))

    def shares_words(self, wordings: Iterable[str]) -> bool:
        """Whether one of these entries, or an edit that the unedited model serves, has the words of one of these.

        The guard gives an entry a wording that nothing has in common because of such an edit.
        """
        return any(self._wordings.find(wording.removeprefix(ELLIPSIS)) for wording in wordings)

    def _update_entry(self, name: str, actual: EditState, counterfactual: EditEngine) -> None:
        if name in self._labels:
            self._keys.remove(name)
            self._label_counts[self._labels.pop(name)] -= 1
        if entries_equal(name, actual.codebook, counterfactual.codebook):
            self.entry_ids.discard(name)
            self._wordings.remove(_ENTRY_PREFIX + name)
            return
        self.entry_ids.add(name)
        books = [book for book in (actual.codebook, counterfactual.codebook) if name in book]
        self._wordings.upsert(_ENTRY_PREFIX + name, *[book.wordings[book.slot(name)] for book in books])
        if name in counterfactual.codebook:
            slot = counterfactual.codebook.slot(name)
            self._keys.upsert(name, counterfactual.codebook.keys_ND[slot])
            self._labels[name] = counterfactual.codebook.labels[slot]
            self._label_counts[self._labels[name]] += 1

    def _update_edit(self, name: str, actual: EditState, counterfactual: EditEngine) -> None:
        was, now = actual.memory, counterfactual.memory
        if name in self._entry_by_edit:
            self._served_queries.remove(name)
            self._edit_counts[self._entry_by_edit.pop(name)] -= 1
        if name in self._unedited_queries:
            self._unedited_queries.remove(name)
        self._wordings.remove(_EDIT_PREFIX + name)
        if edits_equal(name, was, now) and diff_exception(name, actual.codebook, counterfactual.codebook) is None:
            self.edit_ids.discard(name)
            return
        self.edit_ids.add(name)
        for memory in (was, now):
            if name in memory and memory.serving_entry_id(name) == UNEDITED_MODEL:
                self._unedited_queries.upsert(name, memory.query(name))
                self._wordings.upsert(_EDIT_PREFIX + name, memory.wording(name))
        if name in now and (entry_id := now.serving_entry_id(name)) != UNEDITED_MODEL:
            self._served_queries.upsert(name, now.query(name), now.distance(name))
            self._entry_by_edit[name] = entry_id
            self._edit_counts[entry_id] += 1
