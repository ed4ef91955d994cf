"""The differences between two histories of one codebook, and tests of whether a recorded decision depends on them.

The actual history is the log. The counterfactual history is the same log without some feedback
(`pipeline.editing.counterfactual`).

1. `update` keeps the differences current after each delta.
2. The tests err on one side only: they may report a dependency that does not exist, never the reverse.
"""

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np

from gracestream.pipeline.codebook import UNEDITED_MODEL, EditState, Label, diff_exception, edits_equal, entries_equal
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.search import PointSet
from gracestream.pipeline.wording import ELLIPSIS, SameWordsIndex

_ENTRY_PREFIX, _EDIT_PREFIX = "entry ", "edit "
"""Prefixes of names in the index of wordings, because an edit and an entry may have the same name."""


class Divergence:
    """The entries and edits that differ between the two histories: their names, positions and wordings.

    A recorded delta names the entries and edits that it changed, so these are compared by name. It does not name the
    entries and edits of the counterfactual history, nor the inputs that the unedited model serves and that bound radii.
    Those are indexed by position in key space.

    Attributes:
        entry_ids: The entries that differ.
        edit_ids: The edits, exceptions among them, that differ.
    """

    def __init__(self) -> None:
        self.entry_ids: set[str] = set()
        self.edit_ids: set[str] = set()
        self._keys = PointSet()
        """The keys of differing entries, in the counterfactual history."""
        self._labels: dict[str, Label] = {}
        """The labels of the same entries."""
        self._label_counts: Counter[Label] = Counter()
        self._served_queries = PointSet()
        """The queries of differing edits that an entry serves in the counterfactual history.

        The radius of each is the distance to the serving key: a nearer key would shadow the edit.
        """
        self._entry_by_edit: dict[str, str] = {}
        """The serving entry of each of these edits."""
        self._edit_counts: Counter[str] = Counter()
        """By entry id: the number of these edits that it serves."""
        self._unedited_queries = PointSet()
        """The queries of differing edits that the unedited model serves in either history."""
        self._wordings = SameWordsIndex()
        """The wordings of differing entries, and of these unedited edits, in either history."""

    def update(self, names: Iterable[str], actual: EditState, counterfactual: EditEngine) -> None:
        """Compare the entries and edits with these names in both histories, and record which of them differ."""
        for name in names:
            self._update_entry(name, actual, counterfactual)
            self._update_edit(name, actual, counterfactual)

    def touches(self, entry_ids: Collection[str]) -> bool:
        """Whether any of these entries differs, or serves an edit only in the counterfactual history.

        A retention entry has the id of the edit that it protects, so the names are looked up among edits too.
        """
        return any(name in self.entry_ids or name in self.edit_ids or self._edit_counts[name] for name in entry_ids)

    def key_within(self, query_D: np.ndarray, distance: float) -> bool:
        """Whether a differing entry of the counterfactual history lies within this distance of a query."""
        return bool(len(self._keys.within(query_D, distance)))

    def label_changed(self, label: Label) -> bool:
        """Whether a differing entry of the counterfactual history has this label."""
        return self._label_counts[label] > 0

    def edit_within(self, key_D: np.ndarray, distance: float, slack: float) -> bool:
        """Whether a key may affect a differing edit.

        It may shadow an edit that an entry serves, if it is nearer to the edit's query than the serving key. Or its
        radius, of at most `distance`, may be bounded by an edit that the unedited model serves. `slack` is added to
        each distance.
        """
        shadowed = self._served_queries.containing(key_D, slack)
        return bool(len(shadowed) or len(self._unedited_queries.within(key_D, distance + slack)))

    def shares_words(self, wordings: Iterable[str]) -> bool:
        """Whether a differing entry, or a differing edit of the unedited model, has the same words as any of these.

        Such an edit matters because the wording of a retention entry depends on it.
        """
        return any(self._wordings.find(wording.removeprefix(ELLIPSIS)) for wording in wordings)

    def _update_entry(self, name: str, actual: EditState, counterfactual: EditEngine) -> None:
        """Compare one entry. The earlier record of it is removed first, so that counts stay right."""
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
        """Compare one edit, and the exception of the same name. The earlier record of it is removed first."""
        actual_memory, counterfactual_memory = actual.memory, counterfactual.memory
        if name in self._entry_by_edit:
            self._served_queries.remove(name)
            self._edit_counts[self._entry_by_edit.pop(name)] -= 1
        if name in self._unedited_queries:
            self._unedited_queries.remove(name)
        self._wordings.remove(_EDIT_PREFIX + name)
        if (
            edits_equal(name, actual_memory, counterfactual_memory)
            and diff_exception(name, actual.codebook, counterfactual.codebook) is None
        ):
            self.edit_ids.discard(name)
            return
        self.edit_ids.add(name)
        for memory in (actual_memory, counterfactual_memory):
            if name in memory and memory.serving_entry_id(name) == UNEDITED_MODEL:
                self._unedited_queries.upsert(name, memory.query(name))
                self._wordings.upsert(_EDIT_PREFIX + name, memory.wording(name))
        if (
            name in counterfactual_memory
            and (entry_id := counterfactual_memory.serving_entry_id(name)) != UNEDITED_MODEL
        ):
            self._served_queries.upsert(name, counterfactual_memory.query(name), counterfactual_memory.distance(name))
            self._entry_by_edit[name] = entry_id
            self._edit_counts[entry_id] += 1
