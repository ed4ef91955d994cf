"""The lookup: finds the entry that serves a prompt, by query, wording and exceptions (docs/explanation/method.md)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from gracestream.pipeline.codebook.codebook import Codebook, Label
from gracestream.pipeline.codebook.key_index import KeyIndex, to_numpy
from gracestream.pipeline.search import NO_SLOT
from gracestream.pipeline.wording import find_disagreement

WordingGetter = Callable[[int], str]
"""Returns the wording of a row of the batch (`pipeline.wording`); empty if there is none to compare."""

NEAR_MISS_RADII = 1.4
"""A prompt with the same names is a near miss up to this multiple of the radius.

Most other requests about a subject lie at least this far away.
"""

OUTSIDE_RADIUS_REASON = "the prompt has all names of the correction, and is a little outside its radius"

MAX_COMPARED_WORDINGS = 16
"""Limit on the entries compared with one prompt by wording, of those whose radius contains the query."""


@dataclass(frozen=True, slots=True)
class FoundEntry:
    """The entry found for one row. It serves the row unless `reason_not_served` is set.

    Attributes:
        slot: The entry's slot.
        entry_id: The entry's id.
        distance: The exact distance from the query to the entry's key.
        radius: The entry's radius.
        reason_not_served: Why the entry does not serve the row; empty if it does.
    """

    slot: int
    entry_id: str
    distance: float
    radius: float
    reason_not_served: str = ""

    @property
    def is_outside_radius(self) -> bool:
        """True if the query is outside the radius: the entry matches by its words, or is a near miss."""
        return not self.distance < self.radius


@dataclass(frozen=True, slots=True)
class CodebookLookup:
    """Looks up prompts in a codebook, by the index of its keys."""

    codebook: Codebook
    index: KeyIndex

    def find_entries(self, queries_BD: Tensor, get_wording: WordingGetter) -> list[FoundEntry | None]:
        """The entry that may serve each query; None if there is none.

        1. If the query is within the nearest entry's radius, the entries whose radius contains it are compared, nearest
           first. The first one whose wording agrees serves.
        2. If none of the first `MAX_COMPARED_WORDINGS` agrees, the nearest entry with the same words serves.
        3. Otherwise no entry serves the query. The result is the nearest entry, which its wording excludes, or a near
           miss. `reason_not_served` gives the reason.

        Entries that an exception excludes for the prompt are skipped.

        Args:
            queries_BD: The queries, float32.
            get_wording: Returns the wording of a row; called only for rows that may match.
        """
        codebook, index = self.codebook, self.index
        nearest_keys = index.nearest_within_radius(queries_BD)
        found_entries: list[FoundEntry | None] = []
        for row, nearest in enumerate(
            zip(nearest_keys.slots_B.tolist(), nearest_keys.distances_B.tolist(), strict=True)
        ):
            query_D, wording = queries_BD[row], cache(partial(get_wording, row))
            found = None
            if nearest[0] != NO_SLOT:
                found = _first_agreeing(_iterate_containing(nearest, query_D, index), query_D, codebook, wording)
            if if_serving(found) is None:
                same_words = index.nearest_with_same_words(query_D, wording)
                found = found if same_words is None else _found_entry(codebook, *same_words)
            found_entries.append(found or _near_miss(codebook, index.nearest_with_same_names(query_D, wording)))
        return found_entries

    def gather_values(self, serving: Sequence[FoundEntry | None]) -> tuple[Tensor, Tensor] | None:
        """A mask (B) of the rows with an entry, and the entries' values (B, V), zeros elsewhere; None without any."""
        rows = [row for row, entry in enumerate(serving) if entry is not None]
        if not rows:
            return None
        values_BV = torch.zeros(len(serving), self.codebook.values_NV.shape[1])
        values_BV[rows] = torch.from_numpy(
            self.codebook.values_NV[[entry.slot for entry in serving if entry is not None]]
        )
        return torch.tensor([entry is not None for entry in serving]), values_BV

    def label(self, found: FoundEntry) -> Label:
        """The label of the entry."""
        return self.codebook.labels[found.slot]


def _iterate_containing(nearest: tuple[int, float], query_D: Tensor, index: KeyIndex) -> Iterator[tuple[int, float]]:
    """The entries whose radius contains a query, nearest first.

    Entries after the nearest are searched only when they are needed.
    """
    yield nearest
    yield from index.entries_containing(query_D, MAX_COMPARED_WORDINGS)[1:]


def _first_agreeing(
    candidates: Iterable[tuple[int, float]], query_D: Tensor, codebook: Codebook, get_wording: Callable[[], str]
) -> FoundEntry | None:
    """The first candidate that serves the prompt, or else the first whose wording disagrees; None if there is none."""
    first_disagreeing = None
    for slot, distance in candidates:
        if codebook.exceptions.is_exempt(codebook.entry_ids[slot], lambda: to_numpy(query_D), get_wording):
            continue
        wording = codebook.wordings[slot]
        found = _found_entry(codebook, slot, distance, find_disagreement(wording, get_wording()) if wording else "")
        if if_serving(found):
            return found
        first_disagreeing = first_disagreeing or found
    return first_disagreeing


def _near_miss(codebook: Codebook, nearest: tuple[int, float] | None) -> FoundEntry | None:
    """The entry with the same names as a near miss, if the query is a little outside its radius, else None."""
    if nearest is None:
        return None
    found = _found_entry(codebook, *nearest, OUTSIDE_RADIUS_REASON)
    return found if found.radius <= found.distance < NEAR_MISS_RADII * found.radius else None


def _found_entry(codebook: Codebook, slot: int, distance: float, reason_not_served: str = "") -> FoundEntry:
    return FoundEntry(slot, codebook.entry_ids[slot], distance, float(codebook.radii_N[slot]), reason_not_served)


def if_serving(found: FoundEntry | None) -> FoundEntry | None:
    """The found entry if it serves the row, else None."""
    return None if found is None or found.reason_not_served else found
