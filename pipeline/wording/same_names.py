"""An index of wordings by names, for near misses: prompts about the same names that may ask for the same.

No rule can decide whether "What did Ann write?" asks for "the book by Ann", so people decide on near misses. A near
miss of an entry is a prompt a little outside its radius with all names of its wording (`pipeline.codebook.lookup`).
Entries are indexed by their longest name, so a prompt without that name costs little.

Not promised: that all near misses are found. A wording of common words has no names.
"""

from heapq import nsmallest

from gracestream.pipeline.wording.comparison import parse_wording, wordings_agree

MAX_COMPARED_ENTRIES = 64
"""Most entries that are compared for one prompt: the first ones by id."""


class SameNamesIndex:
    """Wordings of entries, found by another wording with all their names."""

    def __init__(self) -> None:
        self._wordings: dict[str, str] = {}
        self._ids_by_name: dict[str, set[str]] = {}
        """Entry ids by the longest name in their wording."""

    def __len__(self) -> int:
        return len(self._wordings)

    def upsert(self, entry_id: str, wording: str) -> None:
        """Set the wording of an entry. An entry without a wording or names is not indexed."""
        self.remove(entry_id)
        if wording and (longest := _longest_name(wording)):
            self._wordings[entry_id] = wording
            self._ids_by_name.setdefault(longest, set()).add(entry_id)

    def remove(self, entry_id: str) -> None:
        """Remove an entry, if it is indexed."""
        if (wording := self._wordings.pop(entry_id, None)) is not None:
            longest = _longest_name(wording)
            self._ids_by_name[longest].remove(entry_id)
            if not self._ids_by_name[longest]:
                del self._ids_by_name[longest]

    def find(self, wording: str) -> list[str]:
        """The sorted ids of entries whose wording agrees and whose names all occur in `wording`.

        At most `MAX_COMPARED_ENTRIES` entries are compared.
        """
        if not wording or not self._wordings:
            return []
        names = set(parse_wording(wording).names)
        candidate_ids = nsmallest(
            MAX_COMPARED_ENTRIES, {entry_id for name in names for entry_id in self._ids_by_name.get(name, ())}
        )
        candidates = ((entry_id, self._wordings[entry_id]) for entry_id in candidate_ids)
        return [
            entry_id
            for entry_id, entry_wording in candidates
            if names.issuperset(parse_wording(entry_wording).names) and wordings_agree(entry_wording, wording)
        ]


def _longest_name(wording: str) -> str:
    """The longest name in a wording, of equally long ones the last in order; empty if it has no names."""
    return max(parse_wording(wording).names, key=lambda name: (len(name), name), default="")
