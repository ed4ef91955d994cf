"""What is not the same in two histories of one codebook, and whether a decision had to do with any of it."""

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np

from gracestream.pipeline.codebook import BARE_MODEL, Fold, Label, exception_change, same_edit, same_entry
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.search import Points
from gracestream.pipeline.wording import ELLIPSIS, SameWords

_ENTRY, _EDIT = "entry ", "edit "
"""In front of names among the wordings: an edit may bear the name of an entry."""


class Apart:
    """The names of entries and edits that are not the same in both histories, and where they lie.

    A decision of the first history shows by name which of its entries and edits it changed; of the second one, and of
    inputs that the bare model serves, which bound radii, it shows nothing. So only these are held by their place.
    """

    def __init__(self) -> None:
        self.entries: set[str] = set()
        self.edits: set[str] = set()
        self._keys = Points()  # of entries, in the second history
        self._labels: dict[str, Label] = {}
        self._labelled: Counter[Label] = Counter()
        self._queries = Points()  # of edits that an entry serves, in the second history; the reach is its distance
        self._served_by: dict[str, str] = {}
        self._serving: Counter[str] = Counter()
        self._bare = Points()  # of edits that the bare model serves, in either
        self._words = SameWords()  # of these entries, and of edits that the unedited model serves, in either

    def compare(self, names: Iterable[str], was: Fold, now: EditEngine) -> None:
        """Note which of these entries and edits are the same in both."""
        for name in names:
            self._compare_entry(name, was, now)
            self._compare_edit(name, was, now)

    def concerns(self, changed: Collection[str]) -> bool:
        """Whether a change of these entries would be another one now, or touch an edit that they serve only now.

        An entry that an edit was given by the guard bears the edit's name.
        """
        return any(name in self.entries or name in self.edits or self._serving[name] for name in changed)

    def has_key(self, query_D: np.ndarray, reach: float) -> bool:
        """Whether one of these entries may lie so near to a query."""
        return bool(len(self._keys.within(query_D, reach)))

    def has_label(self, label: Label) -> bool:
        """Whether one of these entries has this label now."""
        return self._labelled[label] > 0

    def has_edit(self, key_D: np.ndarray, reach: float, slack: float) -> bool:
        """Whether a key may take over one of these edits, or `reach` one that the bare model serves."""
        taken_over = self._queries.reaching(key_D, slack)
        return bool(len(taken_over) or len(self._bare.within(key_D, reach + slack)))

    def has_words(self, wordings: Iterable[str]) -> bool:
        """Whether one of these entries, or an edit that the unedited model serves, has the words of one of these.

        The guard gives an entry a wording that nothing has in common because of such an edit.
        """
        return any(self._words.named(wording.removeprefix(ELLIPSIS)) for wording in wordings)

    def _compare_entry(self, name: str, was: Fold, now: EditEngine) -> None:
        if name in self._labels:
            self._keys.drop(name)
            self._labelled[self._labels.pop(name)] -= 1
        if same_entry(name, was.codebook, now.codebook):
            self.entries.discard(name)
            self._words.drop(_ENTRY + name)
            return
        self.entries.add(name)
        books = [book for book in (was.codebook, now.codebook) if name in book]
        self._words.put(_ENTRY + name, *[book.wordings[book.slot(name)] for book in books])
        if name in now.codebook:
            slot = now.codebook.slot(name)
            self._keys.put(name, now.codebook.keys_ND[slot])
            self._labels[name] = now.codebook.labels[slot]
            self._labelled[self._labels[name]] += 1

    def _compare_edit(self, name: str, before: Fold, after: EditEngine) -> None:
        was, now = before.memory, after.memory
        if name in self._served_by:
            self._queries.drop(name)
            self._serving[self._served_by.pop(name)] -= 1
        if name in self._bare:
            self._bare.drop(name)
        self._words.drop(_EDIT + name)
        if same_edit(name, was, now) and exception_change(name, before.codebook, after.codebook) is None:
            self.edits.discard(name)
            return
        self.edits.add(name)
        for memory in (was, now):
            if name in memory and memory.serving_entry(name) == BARE_MODEL:
                self._bare.put(name, memory.query(name))
                self._words.put(_EDIT + name, memory.wording(name))
        if name in now and (entry_id := now.serving_entry(name)) != BARE_MODEL:
            self._queries.put(name, now.query(name), now.distance(name))
            self._served_by[name] = entry_id
            self._serving[entry_id] += 1
