"""Which entry serves a prompt: by the distance of its query, by its words, and with the prompt's exceptions."""

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
"""The wording of a batch's row (`pipeline.wording`); empty where nothing is to be compared."""

NEAR_MISS_RADII = 1.4
"""Radii within which a prompt that names the same is a near miss: as far away lie most other requests of a subject."""

OUTSIDE_RADIUS_REASON = "it names the same, and lies a little outside the radius"

MAX_COMPARED_WORDINGS = 16
"""Entries whose wordings are compared with that of one prompt, at most."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The entry within whose radius one row's query lies, or that has the same words: its key is `distance` away.

    It serves the row unless there is a `disagreement` of the wordings, which says why not.
    """

    slot: int
    entry_id: str
    distance: float
    radius: float
    disagreement: str = ""

    @property
    def is_word_match(self) -> bool:
        """Whether the query lies outside the radius, so that the words are the same."""
        return not self.distance < self.radius


@dataclass(frozen=True, slots=True)
class CodebookLookup:
    """Looks prompts up in a codebook by the index of its keys."""

    codebook: Codebook
    index: KeyIndex

    def find_hits(self, queries_BD: Tensor, get_wording: WordingGetter) -> list[Hit | None]:
        """For each query the entry that may serve it.

        1. If the radius of the nearest entry holds the query, the entries whose radius holds it are compared, nearest
           first. The first whose wording agrees serves.
        2. If none of the first `MAX_COMPARED_WORDINGS` agrees, the nearest one with the same words serves.
        3. Else it is the nearest one, which the wording rules out, or one that the query lies a little outside of.
           Its `disagreement` says why it does not serve.

        Entries from which the prompt is an exception are passed over.

        Args:
            queries_BD: Float32.
            get_wording: Gives the wording of a row; it is called for a row that may match alone.
        """
        codebook, index = self.codebook, self.index
        found = index.nearest_within_radius(queries_BD)
        matched: list[Hit | None] = []
        for row, nearest in enumerate(zip(found.slots_B.tolist(), found.distances_B.tolist(), strict=True)):
            query_D, wording = queries_BD[row], cache(partial(get_wording, row))
            match = None
            if nearest[0] != NO_SLOT:
                match = _first_agreeing(_iterate_containing(nearest, query_D, index), query_D, codebook, wording)
            if serving_hit(match) is None:
                known = index.nearest_with_same_words(query_D, wording)
                match = match if known is None else _make_hit(codebook, *known)
            matched.append(match or _near_miss(codebook, index.nearest_with_same_names(query_D, wording)))
        return matched

    def gather_values(self, hits: Sequence[Hit | None]) -> tuple[Tensor, Tensor] | None:
        """The rows that are served (B), and their entries' values (B, V), zeros in the others; None where none is."""
        rows = [row for row, hit in enumerate(hits) if hit is not None]
        if not rows:
            return None
        values_BV = torch.zeros(len(hits), self.codebook.values_NV.shape[1])
        values_BV[rows] = torch.from_numpy(self.codebook.values_NV[[hit.slot for hit in hits if hit is not None]])
        return torch.tensor([hit is not None for hit in hits]), values_BV

    def label(self, hit: Hit) -> Label:
        """The label of the entry of a match."""
        return self.codebook.labels[hit.slot]


def _iterate_containing(nearest: tuple[int, float], query_D: Tensor, index: KeyIndex) -> Iterator[tuple[int, float]]:
    """The entries whose radius holds a query, nearest first; those beyond the nearest are looked up when asked for."""
    yield nearest
    yield from index.entries_containing(query_D, MAX_COMPARED_WORDINGS)[1:]


def _first_agreeing(
    candidates: Iterable[tuple[int, float]], query_D: Tensor, codebook: Codebook, get_wording: Callable[[], str]
) -> Hit | None:
    """Of these entries the first that serves a prompt, or else the first that misses it by its wording."""
    missed = None
    for slot, distance in candidates:
        if codebook.exceptions.is_exempt(codebook.entry_ids[slot], lambda: to_numpy(query_D), get_wording):
            continue
        wording = codebook.wordings[slot]
        hit = _make_hit(codebook, slot, distance, find_disagreement(wording, get_wording()) if wording else "")
        if serving_hit(hit):
            return hit
        missed = missed or hit
    return missed


def _near_miss(codebook: Codebook, nearest: tuple[int, float] | None) -> Hit | None:
    """The entry that names the same, if the query lies a little outside its radius."""
    if nearest is None:
        return None
    hit = _make_hit(codebook, *nearest, OUTSIDE_RADIUS_REASON)
    return hit if hit.radius <= hit.distance < NEAR_MISS_RADII * hit.radius else None


def _make_hit(codebook: Codebook, slot: int, distance: float, disagreement: str = "") -> Hit:
    return Hit(slot, codebook.entry_ids[slot], distance, float(codebook.radii_N[slot]), disagreement)


def serving_hit(hit: Hit | None) -> Hit | None:
    """The match, if its entry serves the row."""
    return None if hit is None or hit.disagreement else hit
