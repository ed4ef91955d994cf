"""The key index: which key is nearest to a query, exactly (design, section 4, Lookup).

On a CPU a sieve rules nearly all keys out. Where it leaves too many, and on a GPU always, all keys are searched
(`pipeline.search`): a product proposes candidates. Their number grows until the error bound proves that no other
key can win. The winner is found by direct difference. So the answer equals brute force, whatever the norms.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gracestream.pipeline.codebook.codebook import AppliedDelta, Codebook
from gracestream.pipeline.search import NO_SLOT, KeySearch, Prefilter, exact_distances, search_class_for
from gracestream.pipeline.wording import SameNamesIndex, SameWordsIndex

INITIAL_CANDIDATES = 8
MAX_CANDIDATES = 512
"""Of one search. Where so many lie within rounding of each other, all keys are compared; FAISS on a GPU takes 2048."""

HOST_CHUNK_PAIRS = 256
"""Keys that are compared at a time on the host."""

DEVICE_CHUNK_ELEMENTS = 2**24
"""Numbers of keys that are compared at a time on a device, which is not waited for in between."""

CANDIDATES_PER_ENTRY = 4
"""Keys that are looked at for each entry that is wanted, to tell how far the wanted ones lie where many radii hold."""

MAX_SAME_WORDS_ENTRIES = 64
"""Entries in the same words that are compared for one prompt."""

FULL_SCAN_DIVISOR = 4
"""Where the sieve leaves more than one key in so many, all are searched."""


@dataclass(frozen=True, slots=True)
class NearestKeys:
    """For each query the slot of its nearest key (-1: none, or the query is not finite) and the distance to it.

    On the host, whatever the index's device.
    """

    slots_B: torch.Tensor
    distances_B: torch.Tensor


class _WordingIndex:
    """The wordings of entries, as they are found; false while no entry has one."""

    def __init__(self) -> None:
        self.same_words, self.same_names = SameWordsIndex(), SameNamesIndex()

    def __bool__(self) -> bool:
        return len(self.same_words) + len(self.same_names) > 0

    def update(self, codebook: Codebook, entry_ids: Iterable[str]) -> None:
        """Take over what the codebook now has of these entries."""
        for entry_id in entry_ids:
            wording = codebook.wordings[codebook.slot(entry_id)] if entry_id in codebook else ""
            self.same_words.upsert(entry_id, wording)
            self.same_names.upsert(entry_id, wording)


class KeyIndex:
    """Exact nearest keys of a codebook, on one device. Call `refresh` after each delta the codebook applied.

    Queries may come from any device. With a `search_class` named it has no sieve, and searches all keys in every
    look-up, as on a GPU.
    """

    def __init__(self, codebook: Codebook, device: torch.device, search_class: type[KeySearch] | None = None) -> None:
        self._codebook, self._device = codebook, device
        self._search = (search_class or search_class_for(device))(device, lambda: codebook.keys_ND)
        sieved = search_class is None and device.type == "cpu"
        self._prefilter = Prefilter(lambda: (codebook.keys_ND, codebook.radii_N)) if sieved else None
        self._nearest_cache: dict[bytes, tuple[np.ndarray, float]] = {}
        """By query, what its nearest keys are and how far: of the last batch, where a look at all keys told."""
        self._stale_slots: set[int] | None = None
        """Slots that the search has not taken over; None: all."""
        self._wording_index: _WordingIndex | None = None
        """What is known of the entries' wordings; None: they have to be read anew."""

    def refresh(self, *changes: AppliedDelta) -> None:
        """Take over what these deltas changed, one after the other; without any, everything."""
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
                self._codebook, {change.entry_id for one in changes for change in one.delta.entries}
            )
        else:
            self._wording_index = None

    def nearest_with_same_words(
        self, query_D: torch.Tensor, get_wording: Callable[[], str]
    ) -> tuple[int, float] | None:
        """The slot of the nearest key whose entry's wording has the same words, and the distance; None: there is none.

        For a query that was looked up. `get_wording` tells its own; it is not called while no entry has one.
        """
        known = self._current_wording_index()
        return (
            self._nearest_entry(query_D, known.same_words.find(get_wording(), MAX_SAME_WORDS_ENTRIES), get_wording)
            if known
            else None
        )

    def nearest_with_same_names(
        self, query_D: torch.Tensor, get_wording: Callable[[], str]
    ) -> tuple[int, float] | None:
        """The slot of the nearest key whose entry's wording agrees and has no other names, and the distance."""
        known = self._current_wording_index()
        return self._nearest_entry(query_D, known.same_names.find(get_wording()), get_wording) if known else None

    def _current_wording_index(self) -> "_WordingIndex":
        if self._wording_index is None:
            self._wording_index = _WordingIndex()
            self._wording_index.update(self._codebook, self._codebook.entry_ids)
        return self._wording_index

    def _nearest_entry(
        self, query_D: torch.Tensor, entry_ids: Sequence[str], get_wording: Callable[[], str]
    ) -> tuple[int, float] | None:
        """Of these entries the nearest from which the prompt is no exception."""
        exempt = self._codebook.exceptions.is_exempt
        entry_ids = [name for name in entry_ids if not exempt(name, lambda: to_numpy(query_D), get_wording)]
        if not entry_ids:
            return None
        slots = np.array([self._codebook.slot(name) for name in entry_ids])
        queries_1D = query_D.detach().to(self._device, torch.float32)[None].contiguous()
        if not torch.isfinite(queries_1D).all():
            return None
        tied, distance = self._nearest_among(queries_1D, {0: slots})[0]
        return self._first_by_id(tied.tolist()), distance

    def nearest(self, queries_BD: torch.Tensor) -> NearestKeys:
        """The nearest key of each query; of keys at the same distance the one whose entry's id comes first.

        Slots are no part of the answer: they depend on which entries were there before.
        """
        if self._prefilter is None:
            return self._scan_all(queries_BD)
        queries_BD = queries_BD.detach().to(self._device, torch.float32).contiguous()
        finite = torch.isfinite(queries_BD).all(dim=1).nonzero()[:, 0] if len(self._codebook) else torch.empty(0)
        found = _empty_result(len(queries_BD))
        close: dict[int, np.ndarray] = {}
        for row in map(int, finite):
            query_D = queries_BD[row].numpy()
            if known := self._nearest_cache.get(query_D.tobytes()):
                self._set_nearest(found, row, *known)
            else:
                close[row] = self._prefilter.approximate_nearest(query_D, INITIAL_CANDIDATES)
        reach = {row: far.min() for row, far in self._compute_pairs(queries_BD, close, _pair_distances).items()}
        self._search_prefiltered(self._prefilter, queries_BD, reach, found)
        return found

    def nearest_within_radius(self, queries_BD: torch.Tensor) -> NearestKeys:
        """The nearest key of each query if the query lies in its ball (distance < radius), else none."""
        if self._prefilter is None:
            return self._keep_within_radius(self._scan_all(queries_BD))
        queries_BD = queries_BD.detach().to(self._device, torch.float32).contiguous()
        found = _empty_result(len(queries_BD))
        left, sure = self._prefilter.candidates_for_match(
            queries_BD.numpy(), lambda slots: self._compute_pairs(queries_BD, slots, _pair_distances)
        )
        nearest = {row: slots for row, slots in enumerate(left) if len(slots) and not self._prefers_full_scan(slots)}
        reach = {row: np.inf for row, slots in enumerate(left) if self._prefers_full_scan(slots)}
        told = self._nearest_among(queries_BD, nearest)
        self._nearest_cache = {queries_BD[row].numpy().tobytes(): told[row] for row in sure if row in told}
        for row, (slots, distance) in told.items():
            if distance <= self._prefilter.min_radius or row in sure:
                self._set_nearest(found, row, slots, distance)
            elif (distance < self._codebook.radii_N[slots]).any():
                reach[row] = distance
        self._search_prefiltered(self._prefilter, queries_BD, reach, found)
        return self._keep_within_radius(found)

    def entries_containing(self, query_D: torch.Tensor, limit: int) -> list[tuple[int, float]]:
        """The entries whose radius holds the query, nearest first, at most so many: the slot and distance of each.

        Of entries at the same distance the one whose id comes first is first.
        """
        query_D = query_D.detach().to(self._device, torch.float32).contiguous()
        if not len(self._codebook) or not torch.isfinite(query_D).all():
            return []
        slots = self._candidates_containing(query_D, limit)
        far = self._compute_pairs(query_D[None], {0: slots}, _pair_distances).get(0, np.empty(0))
        held = np.flatnonzero(far < self._codebook.radii_N[slots])
        found = sorted((float(far[place]), self._codebook.entry_ids[slots[place]]) for place in held)
        return [(self._codebook.slot(entry_id), distance) for distance, entry_id in found[:limit]]

    def _candidates_containing(self, query_D: torch.Tensor, limit: int) -> np.ndarray:
        """Slots among which are the nearest so many of those whose radius holds the query."""
        if self._prefilter is None:
            self._sync_search()
            return np.arange(len(self._codebook))
        query_1D = query_D[None].numpy()
        if (few := self._prefilter.few_candidates_containing(query_1D[0], CANDIDATES_PER_ENTRY * limit)) is not None:
            return few
        close = self._prefilter.approximate_nearest(query_1D[0], CANDIDATES_PER_ENTRY * limit)
        far = self._compute_pairs(query_D[None], {0: close}, _pair_distances)[0]
        held = np.sort(far[far < self._codebook.radii_N[close]])
        if len(held) < limit:
            return self._prefilter.candidates_containing(query_1D)[0]
        # So many hold it at most this far away, so a farther one is not among the nearest.
        return self._prefilter.candidates_within(query_1D, held[limit - 1 : limit])[0]

    def _search_prefiltered(
        self, prefilter: Prefilter, queries_BD: torch.Tensor, max_distances: Mapping[int, float], found: NearestKeys
    ) -> None:
        """Find the nearest key of each query that has a `max_distances`, which is the distance to some key, or more."""
        crowded = [row for row, distance in max_distances.items() if not np.isfinite(distance)]
        near = [row for row in max_distances if row not in crowded]
        if near:
            distances = np.array([max_distances[row] for row in near])
            left = dict(zip(near, prefilter.candidates_nearest(queries_BD[near].numpy(), distances), strict=True))
            crowded += [row for row, slots in left.items() if self._prefers_full_scan(slots)]
            some = {row: slots for row, slots in left.items() if row not in crowded}
            for row, nearest in self._nearest_among(queries_BD, some).items():
                self._set_nearest(found, row, *nearest)
        if crowded:
            scanned = self._scan_all(queries_BD[crowded])
            found.slots_B[crowded], found.distances_B[crowded] = scanned.slots_B, scanned.distances_B

    def _set_nearest(self, found: NearestKeys, row: int, slots: np.ndarray, distance: float) -> None:
        """These are the keys nearest to a query, all at one distance."""
        found.slots_B[row], found.distances_B[row] = self._first_by_id(slots.tolist()), distance

    def _nearest_among(
        self, queries_BD: torch.Tensor, slots: Mapping[int, np.ndarray]
    ) -> dict[int, tuple[np.ndarray, float]]:
        """For some queries, of the slots given for each those whose keys are nearest, and how far: exact."""
        slots = self._narrow_candidates(queries_BD, slots)
        nearest: dict[int, tuple[np.ndarray, float]] = {}
        for row, far in self._compute_pairs(queries_BD, slots, _pair_distances).items():
            least = far.min()
            nearest[row] = slots[row][far == least], float(least)
        return nearest

    def _narrow_candidates(self, queries_BD: torch.Tensor, slots: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Of many slots those whose keys may be nearest to a query by squares in float32.

        Such a sum of squares is off by a few roundings a term of itself, and not of the norms.
        """
        left, width, rounding = dict(slots), queries_BD.shape[1], np.finfo(np.float32)
        many = {row: some for row, some in slots.items() if len(some) > INITIAL_CANDIDATES}
        for row, squares in self._compute_pairs(queries_BD, many, _squared_distances).items():
            bound = squares.min() * (1 + 4 * width * rounding.eps) + width * rounding.tiny
            left[row] = slots[row][~(squares > bound)]
        return left

    def _compute_pairs(
        self,
        queries_BD: torch.Tensor,
        slots: Mapping[int, np.ndarray],
        measure: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> dict[int, np.ndarray]:
        """What is to be told of some queries and the keys of the slots given for each; few are copied at once."""
        if not slots:
            return {}
        counts = [len(some) for some in slots.values()]
        rows = torch.from_numpy(np.repeat(np.array(list(slots)), counts)).to(self._device)
        every = torch.from_numpy(np.concatenate(list(slots.values()))).to(self._device)
        keys_ND = self._search.keys_ND
        step = (
            HOST_CHUNK_PAIRS
            if self._device.type == "cpu"
            else max(HOST_CHUNK_PAIRS, DEVICE_CHUNK_ELEMENTS // keys_ND.shape[1])
        )
        # One for all: small ones between what is freed would keep that from being used.
        told = torch.empty(len(every), device=self._device)
        for start in range(0, len(every), step):
            chunk = slice(start, start + step)
            told[chunk] = measure(queries_BD.index_select(0, rows[chunk]), keys_ND.index_select(0, every[chunk]))
        parts = np.split(told.cpu().numpy(), np.cumsum(counts)[:-1])
        return dict(zip(slots, parts, strict=True))

    def _prefers_full_scan(self, slots: np.ndarray) -> bool:
        """Whether the sieve left so many keys that a look at all of them costs less."""
        return FULL_SCAN_DIVISOR * len(slots) > len(self._codebook) > INITIAL_CANDIDATES

    def _scan_all(self, queries_BD: torch.Tensor) -> NearestKeys:
        """The nearest key of each query, by a look at all keys; a GPU is waited for once, unless some are not sure."""
        queries_BD = queries_BD.detach().to(self._device, torch.float32).contiguous()
        nearest = _empty_result(len(queries_BD))
        count = len(self._codebook)
        left = list(range(len(queries_BD))) if count else []
        if left:
            self._sync_search()
        candidates = INITIAL_CANDIDATES
        while left and candidates <= MAX_CANDIDATES:
            some = queries_BD if len(left) == len(queries_BD) else queries_BD[left]
            found = self._search.search(some, min(candidates, count))
            unsure = []
            for place, (row, told) in enumerate(zip(left, found.summary_B4.tolist(), strict=True)):
                finite, proven, slot, distance = told
                if finite and not proven:
                    unsure.append(row)
                elif finite:
                    tied = found.slots_BK[place][found.distances_BK[place] == distance] if slot == NO_SLOT else None
                    nearest.slots_B[row] = int(slot) if tied is None else self._first_by_id(tied.tolist())
                    nearest.distances_B[row] = distance
            left = unsure
            candidates *= 8
        every_N = np.arange(count)
        for row, (slots, distance) in self._nearest_among(queries_BD, dict.fromkeys(left, every_N)).items():
            self._set_nearest(nearest, row, slots, distance)
        return nearest

    def _sync_search(self) -> None:
        """Bring the search up to date. A look-up may happen in inference mode, and what it fills is changed outside."""
        count = len(self._codebook)
        slots = None if self._stale_slots is None else sorted(slot for slot in self._stale_slots if slot < count)
        with torch.inference_mode(mode=False):
            self._search.sync(slots)
        self._stale_slots = set()

    def _first_by_id(self, slots: list[int]) -> int:
        """Of slots at one distance the one that counts."""
        return min(slots, key=self._codebook.entry_ids.__getitem__)

    def _keep_within_radius(self, found: NearestKeys) -> NearestKeys:
        """Those whose ball holds the query; the others are taken out."""
        rows = np.flatnonzero(found.slots_B.numpy() != NO_SLOT)
        if len(rows):
            radii = self._codebook.radii_N[found.slots_B.numpy()[rows]]
            outside = rows[~(found.distances_B.numpy()[rows] < radii)]
            found.slots_B[outside], found.distances_B[outside] = NO_SLOT, torch.inf
        return found


def to_numpy(query_D: torch.Tensor) -> np.ndarray:
    """A query as the codebook has its keys."""
    found_D: np.ndarray = query_D.detach().float().cpu().numpy()
    return found_D


def _pair_distances(queries_MD: torch.Tensor, keys_MD: torch.Tensor) -> torch.Tensor:
    """The distance of each pair."""
    return exact_distances(queries_MD, keys_MD[:, None])[:, 0]


def _squared_distances(queries_MD: torch.Tensor, keys_MD: torch.Tensor) -> torch.Tensor:
    """The square of the distance of each pair, in float32; of keys that may be written over."""
    return keys_MD.sub_(queries_MD).square_().sum(dim=1)


def _empty_result(count: int) -> NearestKeys:
    return NearestKeys(torch.full((count,), NO_SLOT), torch.full((count,), torch.inf))
