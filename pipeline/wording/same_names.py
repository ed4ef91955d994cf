"""Requests that name what a correction is about, of which people may decide whether they ask for the same.

No rule tells whether "What did Ann write?" asks for "the book by Ann". A prompt is a near miss where it lies a little
outside an entry's radius and has all names of its wording (`pipeline.model.matches`). Entries are found by their
longest name, so that a prompt without such a name costs a few look-ups.

Not promised: that all near misses are found. A wording of common words has no names.
"""

from heapq import nsmallest

from gracestream.pipeline.wording.comparison import parse_wording, wordings_agree

MAX_COMPARED_ENTRIES = 64
"""Entries that are compared for one prompt; of more the first, by their ids."""


class SameNamesIndex:
    """Wordings under names of entries, found by a wording that has all their names."""

    def __init__(self) -> None:
        self._wordings: dict[str, str] = {}
        self._ids_by_name: dict[str, set[str]] = {}
        """By the longest name in a wording."""

    def __len__(self) -> int:
        return len(self._wordings)

    def upsert(self, entry_id: str, wording: str) -> None:
        """Keep a wording for an entry, in place of the one that it had."""
        self.remove(entry_id)
        if wording and (longest := _longest_name(wording)):
            self._wordings[entry_id] = wording
            self._ids_by_name.setdefault(longest, set()).add(entry_id)

    def remove(self, entry_id: str) -> None:
        """Forget an entry, if it is known."""
        if (wording := self._wordings.pop(entry_id, None)) is not None:
            longest = _longest_name(wording)
            self._ids_by_name[longest].remove(entry_id)
            if not self._ids_by_name[longest]:
                del self._ids_by_name[longest]

    def find(self, wording: str) -> list[str]:
        """The entries whose wording agrees and whose names all occur here; sorted, at most `MAX_COMPARED_ENTRIES`."""
        if not wording or not self._wordings:
            return []
        names = set(parse_wording(wording).names)
        found = nsmallest(
            MAX_COMPARED_ENTRIES, {entry_id for name in names for entry_id in self._ids_by_name.get(name, ())}
        )
        known = ((entry_id, self._wordings[entry_id]) for entry_id in found)
        return [
            one for one, kept in known if names.issuperset(parse_wording(kept).names) and wordings_agree(kept, wording)
        ]


def _longest_name(wording: str) -> str:
    return max(parse_wording(wording).names, key=lambda name: (len(name), name), default="")
