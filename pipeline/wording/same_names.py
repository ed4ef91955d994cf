"""Requests that name what a correction is about, of which people may decide whether they ask for the same.

No rule tells whether "What did Ann write?" asks for "the book by Ann". A prompt is a near miss where it lies a little
outside an entry's radius and has all names of its wording (`pipeline.model.matches`). Entries are found by their
longest name, so that a prompt without such a name costs a few look-ups.

Not promised: that all near misses are found. A wording of common words has no names.
"""

from heapq import nsmallest

from gracestream.pipeline.wording.comparison import agrees, parsed

MOST = 64
"""Entries that are compared for one prompt; of more the first, by their ids."""


class SameNames:
    """Wordings under names of entries, found by a wording that has all their names."""

    def __init__(self) -> None:
        self._wordings: dict[str, str] = {}
        self._entry_ids: dict[str, set[str]] = {}
        """By the longest name in a wording."""

    def __len__(self) -> int:
        return len(self._wordings)

    def put(self, entry_id: str, wording: str) -> None:
        """Keep a wording for an entry, in place of the one that it had."""
        self.drop(entry_id)
        if wording and (longest := _longest(wording)):
            self._wordings[entry_id] = wording
            self._entry_ids.setdefault(longest, set()).add(entry_id)

    def drop(self, entry_id: str) -> None:
        """Forget an entry, if it is known."""
        if (wording := self._wordings.pop(entry_id, None)) is not None:
            longest = _longest(wording)
            self._entry_ids[longest].remove(entry_id)
            if not self._entry_ids[longest]:
                del self._entry_ids[longest]

    def named(self, wording: str) -> list[str]:
        """The entries whose wording agrees, and all of whose names this one has; sorted, at most `MOST`."""
        if not wording or not self._wordings:
            return []
        names = set(parsed(wording).names)
        found = nsmallest(MOST, {entry_id for name in names for entry_id in self._entry_ids.get(name, ())})
        known = ((entry_id, self._wordings[entry_id]) for entry_id in found)
        return [one for one, kept in known if names.issuperset(parsed(kept).names) and agrees(kept, wording)]


def _longest(wording: str) -> str:
    return max(parsed(wording).names, key=lambda name: (len(name), name), default="")
