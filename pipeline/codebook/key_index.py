"""The key index: exact nearest keys of a codebook (docs/explanation/method.md, lookup).

On a CPU a prefilter excludes nearly all keys. If it leaves too many, and always on a GPU, all keys are searched
(`pipeline.search`): a product proposes candidates, and their number grows until the error bound proves the winner.

Guarantees:

1. Results equal those of a comparison with all keys by exact distance, whatever the norms.
2. Of keys at the same distance, the one with the first entry id in order wins. So results do not depend on slots.
3. A query that is not finite matches nothing.

Not promised: current results after a delta unless `refresh` was called.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gracestream.pipeline.codebook.codebook import AppliedDelta, Codebook
from gracestream.pipeline.search import NO_SLOT, KeySearch, Prefilter, exact_distances, search_class_for
from gracestream.pipeline.wording import SameNamesIndex, SameWordsIndex

INITIAL_CANDIDATES = 8
"""Candidates of the first search of all keys; each further search has eight times as many."""

MAX_CANDIDATES = 512
"""Most candidates of one search. If they prove no winner, all keys are compared by exact distance.

FAISS on a GPU supports at most 2048.
"""

HOST_CHUNK_PAIRS = 256
"""Pairs of query and key per call on the host. This limits the size of the copies."""

DEVICE_CHUNK_ELEMENTS = 2**24
"""Elements of keys per call on a device. The calls are queued without waiting for the device."""

CANDIDATES_PER_ENTRY = 4
"""Approximate candidates per requested entry, where many radii contain the query.

Those that contain it bound the distance of the requested ones.
"""

MAX_SAME_WORDS_ENTRIES = 64
"""Most entries with the same words that are compared for one prompt."""

FULL_SCAN_DIVISOR = 4
"""If the prefilter leaves more than 1 key in 4, a search of all keys costs less."""


@dataclass(frozen=True, slots=True)
class NearestKeys:
    """The nearest key of each of B queries, on the host.

    Attributes:
        slots_B: The slot of the nearest key; -1: there is none, or the query is not finite.
        distances_B: The exact distance; infinite where there is none.
    """

    slots_B: torch.Tensor
    distances_B: torch.Tensor


class _WordingIndex:
    """The wordings of entries, indexed by words and by names. False if no entry has a wording."""

    def __init__(self) -> None:
        self.same_words, self.same_names = SameWordsIndex(), SameNamesIndex()

    def __bool__(self) -> bool:
        return len(self.same_words) + len(self.same_names) > 0

    def update(self, codebook: Codebook, entry_ids: Iterable[str]) -> None:
        """Adopt the current wordings of these entries, and forget the entries that are gone."""
        for entry_id in entry_ids:
            wording = codebook.wordings[codebook.slot(entry_id)] if entry_id in codebook else ""
            self.same_words.upsert(entry_id, wording)
            self.same_names.upsert(entry_id, wording)


class KeyIndex:
    """Exact nearest keys of a codebook, on one device. Call `refresh` after each delta that the codebook applies.

    Queries may come from any device.

    Args:
        codebook: The codebook.
        device: The device that computes distances.
        search_class: The search of all keys, for every lookup, as on a GPU. None: the device's default, and a
            prefilter on a CPU.
    """

    def __init__(self, codebook: Codebook, device: torch.device, search_class: type[KeySearch] | None = None) -> None:
        self._codebook, self._device = codebook, device
        self._search = (search_class or search_class_for(device))(device, lambda: codebook.keys_ND)
        uses_prefilter = search_class is None and device.type == "cpu"
        self._prefilter = Prefilter(lambda: (codebook.keys_ND, codebook.radii_N)) if uses_prefilter else None
        self._nearest_cache: dict[bytes, tuple[np.ndarray, float]] = {}
        """Nearest keys and their distance by query, for those queries of the last batch that required all keys.

        A `nearest` of the same query then costs nothing.
        """
        self._stale_slots: set[int] | None = None
        """Slots that have changed since the last sync of the search; None: all slots."""
        self._wording_index: _WordingIndex | None = None
        """The index of the entries' wordings; None: it must be rebuilt."""

    def refresh(self, *changes: AppliedDelta) -> None:
        """Adopt the changes of these deltas, in their order. Without arguments everything may have changed."""
        slots = sorted({slot for applied in changes for slot in applied.slots}) if changes else None
        if slots is None:
            self._stale_slots = None
        elif self._stale_slots is not None:
            self._stale_slots.update(slots)
        if self._prefilter is not None:
            self._prefilter.mark_stale(slots)
        self._nearest_cache = {}
        if self._wording_index is not None and changes:
            self._wording_index.update(
                self._codebook, {change.entry_id for applied in changes for change in applied.delta.entries}
            )
        else:
            self._wording_index = None

    def nearest_with_same_words(
        self, query_D: torch.Tensor, get_wording: Callable[[], str]
    ) -> tuple[int, float] | None:
        """Slot and distance of the nearest key whose entry's wording has the same words; None if there is none.

        `get_wording` returns the prompt's wording. It is not called while no entry has a wording.
        """
        wording_index = self._current_wording_index()
        return (
            self._nearest_entry(
                query_D, wording_index.same_words.find(get_wording(), MAX_SAME_WORDS_ENTRIES), get_wording
            )
            if wording_index
            else None
        )

    def nearest_with_same_names(
        self, query_D: torch.Tensor, get_wording: Callable[[], str]
    ) -> tuple[int, float] | None:
        """Slot and distance of the nearest key whose entry's wording agrees and has no further names, or None."""
        wording_index = self._current_wording_index()
        return (
            self._nearest_entry(query_D, wording_index.same_names.find(get_wording()), get_wording)
            if wording_index
            else None
        )

    def _current_wording_index(self) -> "_WordingIndex":
        if self._wording_index is None:
            self._wording_index = _WordingIndex()
            self._wording_index.update(self._codebook, self._codebook.entry_ids)
        return self._wording_index

    def _nearest_entry(
        self, query_D: torch.Tensor, entry_ids: Sequence[str], get_wording: Callable[[], str]
    ) -> tuple[int, float] | None:
        """Slot and distance of the nearest of these entries that no exception excludes for the prompt, or None."""
        exempt = self._codebook.exceptions.is_exempt
        entry_ids = [entry_id for entry_id in entry_ids if not exempt(entry_id, lambda: to_numpy(query_D), get_wording)]
        if not entry_ids:
            return None
        slots = np.array([self._codebook.slot(entry_id) for entry_id in entry_ids])
        queries_1D = query_D.detach().to(self._device, torch.float32)[None].contiguous()
        if not torch.isfinite(queries_1D).all():
            return None
        tied_slots, distance = self._nearest_among(queries_1D, {0: slots})[0]
        return self._first_by_id(tied_slots.tolist()), distance

    def nearest(self, queries_BD: torch.Tensor) -> NearestKeys:
        """The nearest key of each query, whatever its radius.

        1. Approximate candidates give an upper bound on the nearest distance.
        2. The prefilter returns all keys that may be within this bound.
        3. Exact distances decide among them.
        """
        if self._prefilter is None:
            return self._scan_all(queries_BD)
        queries_BD = queries_BD.detach().to(self._device, torch.float32).contiguous()
        finite_rows = torch.isfinite(queries_BD).all(dim=1).nonzero()[:, 0] if len(self._codebook) else torch.empty(0)
        result = _empty_result(len(queries_BD))
        approximate_slots: dict[int, np.ndarray] = {}
        for row in map(int, finite_rows):
            query_D = queries_BD[row].numpy()
            if cached := self._nearest_cache.get(query_D.tobytes()):
                self._set_nearest(result, row, *cached)
            else:
                approximate_slots[row] = self._prefilter.approximate_nearest(query_D, INITIAL_CANDIDATES)
        max_distances = {
            row: distances.min()
            for row, distances in self._compute_pairs(queries_BD, approximate_slots, _pair_distances).items()
        }
        self._search_prefiltered(self._prefilter, queries_BD, max_distances, result)
        return result

    def nearest_within_radius(self, queries_BD: torch.Tensor) -> NearestKeys:
        """The nearest key of each query if the query is within its radius (distance < radius), otherwise none.

        1. The prefilter returns candidates. They include the nearest key if (a) the query is within its radius, (b) it
           is at most `min_radius` away, or (c) the row is `always_included`.
        2. The nearest candidate is final if (b) or (c) holds: no other key can be nearer.
        3. Otherwise, if the query is within its radius, a key with a smaller radius may be nearer. A second search
           finds the nearest key up to this distance.
        4. Otherwise the query is not within the radius of its nearest key, so there is no match.
        """
        if self._prefilter is None:
            return self._keep_within_radius(self._scan_all(queries_BD))
        queries_BD = queries_BD.detach().to(self._device, torch.float32).contiguous()
        result = _empty_result(len(queries_BD))
        candidates, always_included = self._prefilter.candidates_for_match(queries_BD.numpy())
        short_lists = {
            row: slots for row, slots in enumerate(candidates) if len(slots) and not self._prefers_full_scan(slots)
        }
        max_distances = {row: np.inf for row, slots in enumerate(candidates) if self._prefers_full_scan(slots)}
        nearest_by_row = self._nearest_among(queries_BD, short_lists)
        self._nearest_cache = {
            queries_BD[row].numpy().tobytes(): nearest_by_row[row] for row in always_included if row in nearest_by_row
        }
        for row, (slots, distance) in nearest_by_row.items():
            if distance <= self._prefilter.min_radius or row in always_included:
                self._set_nearest(result, row, slots, distance)
            elif (distance < self._codebook.radii_N[slots]).any():
                max_distances[row] = distance
        self._search_prefiltered(self._prefilter, queries_BD, max_distances, result)
        return self._keep_within_radius(result)

    def entries_containing(self, query_D: torch.Tensor, limit: int) -> list[tuple[int, float]]:
        """Slot and distance of the entries whose radius contains the query, nearest first, at most `limit`.

        Entries at the same distance are sorted by id.
        """
        query_D = query_D.detach().to(self._device, torch.float32).contiguous()
        if not len(self._codebook) or not torch.isfinite(query_D).all():
            return []
        slots = self._candidates_containing(query_D, limit)
        distances = self._compute_pairs(query_D[None], {0: slots}, _pair_distances).get(0, np.empty(0))
        containing_places = np.flatnonzero(distances < self._codebook.radii_N[slots])
        distances_and_ids = sorted(
            (float(distances[place]), self._codebook.entry_ids[slots[place]]) for place in containing_places
        )
        return [(self._codebook.slot(entry_id), distance) for distance, entry_id in distances_and_ids[:limit]]

    def _candidates_containing(self, query_D: torch.Tensor, limit: int) -> np.ndarray:
        """Slots that include the `limit` nearest of the entries whose radius contains the query."""
        if self._prefilter is None:
            self._sync_search()
            return np.arange(len(self._codebook))
        query_1D = query_D[None].numpy()
        if (
            candidates := self._prefilter.few_candidates_containing(query_1D[0], CANDIDATES_PER_ENTRY * limit)
        ) is not None:
            return candidates
        approximate_slots = self._prefilter.approximate_nearest(query_1D[0], CANDIDATES_PER_ENTRY * limit)
        distances = self._compute_pairs(query_D[None], {0: approximate_slots}, _pair_distances)[0]
        containing_distances = np.sort(distances[distances < self._codebook.radii_N[approximate_slots]])
        if len(containing_distances) < limit:
            return self._prefilter.candidates_containing(query_1D)[0]
        # `limit` entries at most this far away contain the query, so the nearest `limit` are at most this far away.
        return self._prefilter.candidates_within(query_1D, containing_distances[limit - 1 : limit])[0]

    def _search_prefiltered(
        self, prefilter: Prefilter, queries_BD: torch.Tensor, max_distances: Mapping[int, float], found: NearestKeys
    ) -> None:
        """Find the nearest key of the rows in `max_distances`, and write it to `found`.

        A row's maximum distance is an upper bound on its nearest distance. Rows with an infinite one search all keys.
        """
        full_scan_rows = [row for row, distance in max_distances.items() if not np.isfinite(distance)]
        prefiltered_rows = [row for row in max_distances if row not in full_scan_rows]
        if prefiltered_rows:
            distances = np.array([max_distances[row] for row in prefiltered_rows])
            candidates = dict(
                zip(
                    prefiltered_rows,
                    prefilter.candidates_nearest(queries_BD[prefiltered_rows].numpy(), distances),
                    strict=True,
                )
            )
            full_scan_rows += [row for row, slots in candidates.items() if self._prefers_full_scan(slots)]
            short_lists = {row: slots for row, slots in candidates.items() if row not in full_scan_rows}
            for row, nearest in self._nearest_among(queries_BD, short_lists).items():
                self._set_nearest(found, row, *nearest)
        if full_scan_rows:
            scanned = self._scan_all(queries_BD[full_scan_rows])
            found.slots_B[full_scan_rows], found.distances_B[full_scan_rows] = scanned.slots_B, scanned.distances_B

    def _set_nearest(self, found: NearestKeys, row: int, slots: np.ndarray, distance: float) -> None:
        """Write the nearest key of a row: of these slots, all at one distance, the one with the first entry id."""
        found.slots_B[row], found.distances_B[row] = self._first_by_id(slots.tolist()), distance

    def _nearest_among(
        self, queries_BD: torch.Tensor, slots: Mapping[int, np.ndarray]
    ) -> dict[int, tuple[np.ndarray, float]]:
        """For each row, the nearest of its given slots (several if tied) and their exact distance."""
        slots = self._narrow_candidates(queries_BD, slots)
        nearest: dict[int, tuple[np.ndarray, float]] = {}
        for row, distances in self._compute_pairs(queries_BD, slots, _pair_distances).items():
            least_distance = distances.min()
            nearest[row] = slots[row][distances == least_distance], float(least_distance)
        return nearest

    def _narrow_candidates(self, queries_BD: torch.Tensor, slots: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Reduce long lists of slots to those whose keys may be nearest, by squared distances in float32."""
        # The differences are those of `exact_distances`. A float32 sum of their D squares is off by at most D eps / 2
        # of itself (not of the norms). So a nearest key's sum exceeds the least sum by at most D eps of it. A tie of
        # exact distances after rounding adds at most 2 eps. Together this is at most (D + 2) eps <= 4 D eps. Underflow
        # loses at most tiny in each of D terms.
        narrowed, width, float32 = dict(slots), queries_BD.shape[1], np.finfo(np.float32)
        long_lists = {row: row_slots for row, row_slots in slots.items() if len(row_slots) > INITIAL_CANDIDATES}
        for row, squares in self._compute_pairs(queries_BD, long_lists, _squared_distances).items():
            bound = squares.min() * (1 + 4 * width * float32.eps) + width * float32.tiny
            narrowed[row] = slots[row][~(squares > bound)]
        return narrowed

    def _compute_pairs(
        self,
        queries_BD: torch.Tensor,
        slots: Mapping[int, np.ndarray],
        measure: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> dict[int, np.ndarray]:
        """Apply `measure` to each pair of a row's query and the key of one of its given slots.

        Returns the results by row, in the order of the slots. Copies are made for a chunk of pairs at a time.
        """
        if not slots:
            return {}
        counts = [len(row_slots) for row_slots in slots.values()]
        rows = torch.from_numpy(np.repeat(np.array(list(slots)), counts)).to(self._device)
        all_slots = torch.from_numpy(np.concatenate(list(slots.values()))).to(self._device)
        keys_ND = self._search.keys_ND
        step = (
            HOST_CHUNK_PAIRS
            if self._device.type == "cpu"
            else max(HOST_CHUNK_PAIRS, DEVICE_CHUNK_ELEMENTS // keys_ND.shape[1])
        )
        # One allocation for all results: small ones between the freed chunks would fragment the device's memory.
        results = torch.empty(len(all_slots), device=self._device)
        for start in range(0, len(all_slots), step):
            chunk = slice(start, start + step)
            results[chunk] = measure(queries_BD.index_select(0, rows[chunk]), keys_ND.index_select(0, all_slots[chunk]))
        parts = np.split(results.cpu().numpy(), np.cumsum(counts)[:-1])
        return dict(zip(slots, parts, strict=True))

    def _prefers_full_scan(self, slots: np.ndarray) -> bool:
        """True if so many candidates remain that a search of all keys costs less."""
        return FULL_SCAN_DIVISOR * len(slots) > len(self._codebook) > INITIAL_CANDIDATES

    def _scan_all(self, queries_BD: torch.Tensor) -> NearestKeys:
        """The nearest key of each query, by a search of all keys.

        1. Search with `INITIAL_CANDIDATES` candidates. On a GPU this synchronises once.
        2. Search the rows with an unproven winner again, with eight times as many, up to `MAX_CANDIDATES`.
        3. Compare the remaining rows with all keys by exact distance.
        """
        queries_BD = queries_BD.detach().to(self._device, torch.float32).contiguous()
        nearest = _empty_result(len(queries_BD))
        count = len(self._codebook)
        open_rows = list(range(len(queries_BD))) if count else []
        if open_rows:
            self._sync_search()
        candidate_count = INITIAL_CANDIDATES
        while open_rows and candidate_count <= MAX_CANDIDATES:
            open_queries_BD = queries_BD if len(open_rows) == len(queries_BD) else queries_BD[open_rows]
            found = self._search.search(open_queries_BD, min(candidate_count, count))
            unproven_rows = []
            for place, row in enumerate(open_rows):
                if not found.finite_B[place]:
                    continue
                if not found.proven_B[place]:
                    unproven_rows.append(row)
                    continue
                distances_K = found.distances_BK[place]
                slots = found.slots_BK[place][distances_K == distances_K.min()]
                self._set_nearest(nearest, row, slots, float(distances_K.min()))
            open_rows = unproven_rows
            candidate_count *= 8
        all_slots_N = np.arange(count)
        for row, (slots, distance) in self._nearest_among(queries_BD, dict.fromkeys(open_rows, all_slots_N)).items():
            self._set_nearest(nearest, row, slots, distance)
        return nearest

    def _sync_search(self) -> None:
        """Bring the search of all keys up to date.

        Outside inference mode: tensors created in it could not be changed in place by a later call outside it.
        """
        count = len(self._codebook)
        slots = None if self._stale_slots is None else sorted(slot for slot in self._stale_slots if slot < count)
        with torch.inference_mode(mode=False):
            self._search.sync(slots)
        self._stale_slots = set()

    def _first_by_id(self, slots: list[int]) -> int:
        """The slot of the entry with the first id in order."""
        return min(slots, key=self._codebook.entry_ids.__getitem__)

    def _keep_within_radius(self, found: NearestKeys) -> NearestKeys:
        """Remove the matches whose query is outside the radius, in place. Returns `found`."""
        rows = np.flatnonzero(found.slots_B.numpy() != NO_SLOT)
        if len(rows):
            radii = self._codebook.radii_N[found.slots_B.numpy()[rows]]
            outside = rows[~(found.distances_B.numpy()[rows] < radii)]
            found.slots_B[outside], found.distances_B[outside] = NO_SLOT, torch.inf
        return found


def to_numpy(query_D: torch.Tensor) -> np.ndarray:
    """A query as a float32 array on the host, like the codebook's keys."""
    array_D: np.ndarray = query_D.detach().float().cpu().numpy()
    return array_D


def _pair_distances(queries_MD: torch.Tensor, keys_MD: torch.Tensor) -> torch.Tensor:
    """Exact distances (M) of M pairs of query and key."""
    return exact_distances(queries_MD, keys_MD[:, None])[:, 0]


def _squared_distances(queries_MD: torch.Tensor, keys_MD: torch.Tensor) -> torch.Tensor:
    """Squared distances (M) of M pairs, float32. Overwrites `keys_MD`."""
    return keys_MD.sub_(queries_MD).square_().sum(dim=1)


def _empty_result(count: int) -> NearestKeys:
    """A result without matches."""
    return NearestKeys(torch.full((count,), NO_SLOT), torch.full((count,), torch.inf))
