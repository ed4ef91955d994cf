"""The key index: which key is nearest to a query, exactly (design, section 4, Lookup).

On a CPU a sieve rules nearly all keys out. Where it leaves too many, and on a GPU always, all keys are searched
(`pipeline.search`): a product proposes candidates. Their number grows until the error bound proves that no other
key can win. The winner is found by direct difference. So the answer equals brute force, whatever the norms.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gracestream.pipeline.codebook.codebook import Applied, Codebook
from gracestream.pipeline.search import NO_SLOT, KeySearch, Sieve, exact_distances, search_for
from gracestream.pipeline.wording import SameNames, SameWords

CANDIDATES = 8
MOST_CANDIDATES = 512
"""Of one search. Where so many lie within rounding of each other, all keys are compared; FAISS on a GPU takes 2048."""

ROWS = 256
"""Keys that are compared at a time on the host."""

CELLS = 2**24
"""Numbers of keys that are compared at a time on a device, which is not waited for in between."""

CLOSE = 4
"""Keys that are looked at for each entry that is wanted, to tell how far the wanted ones lie where many radii hold."""

MOST_WORDED = 64
"""Entries in the same words that are compared for one prompt."""

CROWD = 4
"""Where the sieve leaves more than one key in so many, all are searched."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """For each query the slot of its nearest key (-1: none, or the query is not finite) and the distance to it.

    On the host, whatever the index's device.
    """

    slots_B: torch.Tensor
    distances_B: torch.Tensor


class _Wordings:
    """The wordings of entries, as they are found; false while no entry has one."""

    def __init__(self) -> None:
        self.words, self.names = SameWords(), SameNames()

    def __bool__(self) -> bool:
        return len(self.words) + len(self.names) > 0

    def take(self, codebook: Codebook, entry_ids: Iterable[str]) -> None:
        """Take over what the codebook now has of these entries."""
        for entry_id in entry_ids:
            wording = codebook.wordings[codebook.slot(entry_id)] if entry_id in codebook else ""
            self.words.put(entry_id, wording)
            self.names.put(entry_id, wording)


class KeyIndex:
    """Exact nearest keys of a codebook, on one device. Call `refresh` after each delta the codebook applied.

    Queries may come from any device. With a `search` named it has no sieve, and searches all keys in every look-up, as
    on a GPU.
    """

    def __init__(self, codebook: Codebook, device: torch.device, search: type[KeySearch] | None = None) -> None:
        self._codebook, self._device = codebook, device
        self._search = (search or search_for(device))(device, lambda: codebook.keys_ND)
        sieved = search is None and device.type == "cpu"
        self._sieve = Sieve(lambda: (codebook.keys_ND, codebook.radii_N)) if sieved else None
        self._known: dict[bytes, tuple[np.ndarray, float]] = {}
        """By query, what its nearest keys are and how far: of the last batch, where a look at all keys told."""
        self._stale: set[int] | None = None
        """Slots that the search has not taken over; None: all."""
        self._wordings: _Wordings | None = None
        """What is known of the entries' wordings; None: they have to be read anew."""

    def refresh(self, *changes: Applied) -> None:
        """Take over what these deltas changed, one after the other; without any, everything."""
        slots = sorted({slot for applied in changes for slot in applied.slots}) if changes else None
        if slots is None:
            self._stale = None
        elif self._stale is not None:
            self._stale.update(slots)
        if self._sieve is not None:
            self._sieve.changed(slots)
        self._known = {}
        if self._wordings is not None and changes:
            self._wordings.take(self._codebook, {change.entry_id for one in changes for change in one.delta.entries})
        else:
            self._wordings = None

    def in_same_words(self, query_D: torch.Tensor, wording: Callable[[], str]) -> tuple[int, float] | None:
        """The slot of the nearest key whose entry's wording has the same words, and the distance; None: there is none.

        For a query that was looked up. `wording` tells its own; it is not called while no entry has one.
        """
        known = self._known_wordings()
        return self._nearest_entry(query_D, known.words.named(wording(), MOST_WORDED), wording) if known else None

    def about_same(self, query_D: torch.Tensor, wording: Callable[[], str]) -> tuple[int, float] | None:
        """The slot of the nearest key whose entry's wording agrees and has no other names, and the distance."""
        known = self._known_wordings()
        return self._nearest_entry(query_D, known.names.named(wording()), wording) if known else None

    def _known_wordings(self) -> "_Wordings":
        if self._wordings is None:
            self._wordings = _Wordings()
            self._wordings.take(self._codebook, self._codebook.entry_ids)
        return self._wordings

    def _nearest_entry(
        self, query_D: torch.Tensor, entry_ids: Sequence[str], wording: Callable[[], str]
    ) -> tuple[int, float] | None:
        """Of these entries the nearest from which the prompt is no exception."""
        exempt = self._codebook.exceptions.exempt
        entry_ids = [name for name in entry_ids if not exempt(name, lambda: on_host(query_D), wording)]
        if not entry_ids:
            return None
        slots = np.array([self._codebook.slot(name) for name in entry_ids])
        queries_1D = query_D.detach().to(self._device, torch.float32)[None].contiguous()
        if not torch.isfinite(queries_1D).all():
            return None
        tied, distance = self._nearest_of(queries_1D, {0: slots})[0]
        return self._first(tied.tolist()), distance

    def nearest(self, queries_BD: torch.Tensor) -> Nearest:
        """The nearest key of each query; of keys at the same distance the one whose entry's id comes first.

        Slots are no part of the answer: they depend on which entries were there before.
        """
        if self._sieve is None:
            return self._scan(queries_BD)
        queries_BD = queries_BD.detach().to(self._device, torch.float32).contiguous()
        finite = torch.isfinite(queries_BD).all(dim=1).nonzero()[:, 0] if len(self._codebook) else torch.empty(0)
        found = _none(len(queries_BD))
        close: dict[int, np.ndarray] = {}
        for row in map(int, finite):
            query_D = queries_BD[row].numpy()
            if known := self._known.get(query_D.tobytes()):
                self._settle(found, row, *known)
            else:
                close[row] = self._sieve.close(query_D, CANDIDATES)
        reach = {row: far.min() for row, far in self._pairs(queries_BD, close, _exactly).items()}
        self._sieved(self._sieve, queries_BD, reach, found)
        return found

    def covering(self, queries_BD: torch.Tensor) -> Nearest:
        """The nearest key of each query if the query lies in its ball (distance < radius), else none."""
        if self._sieve is None:
            return self._inside(self._scan(queries_BD))
        queries_BD = queries_BD.detach().to(self._device, torch.float32).contiguous()
        found = _none(len(queries_BD))
        left, sure = self._sieve.serving(queries_BD.numpy(), lambda slots: self._pairs(queries_BD, slots, _exactly))
        nearest = {row: slots for row, slots in enumerate(left) if len(slots) and not self._crowded(slots)}
        reach = {row: np.inf for row, slots in enumerate(left) if self._crowded(slots)}
        told = self._nearest_of(queries_BD, nearest)
        self._known = {queries_BD[row].numpy().tobytes(): told[row] for row in sure if row in told}
        for row, (slots, distance) in told.items():
            if distance <= self._sieve.near or row in sure:
                self._settle(found, row, slots, distance)
            elif (distance < self._codebook.radii_N[slots]).any():
                reach[row] = distance
        self._sieved(self._sieve, queries_BD, reach, found)
        return self._inside(found)

    def holding(self, query_D: torch.Tensor, count: int) -> list[tuple[int, float]]:
        """The entries whose radius holds the query, nearest first, at most so many: the slot and distance of each.

        Of entries at the same distance the one whose id comes first is first.
        """
        query_D = query_D.detach().to(self._device, torch.float32).contiguous()
        if not len(self._codebook) or not torch.isfinite(query_D).all():
            return []
        slots = self._may_hold(query_D, count)
        far = self._pairs(query_D[None], {0: slots}, _exactly).get(0, np.empty(0))
        held = np.flatnonzero(far < self._codebook.radii_N[slots])
        found = sorted((float(far[place]), self._codebook.entry_ids[slots[place]]) for place in held)
        return [(self._codebook.slot(entry_id), distance) for distance, entry_id in found[:count]]

    def _may_hold(self, query_D: torch.Tensor, count: int) -> np.ndarray:
        """Slots among which are the nearest so many of those whose radius holds the query."""
        if self._sieve is None:
            self._settle_search()
            return np.arange(len(self._codebook))
        query_1D = query_D[None].numpy()
        if (few := self._sieve.few_covering(query_1D[0], CLOSE * count)) is not None:
            return few
        close = self._sieve.close(query_1D[0], CLOSE * count)
        far = self._pairs(query_D[None], {0: close}, _exactly)[0]
        held = np.sort(far[far < self._codebook.radii_N[close]])
        if len(held) < count:
            return self._sieve.covering(query_1D)[0]
        # So many hold it at most this far away, so a farther one is not among the nearest.
        return self._sieve.within(query_1D, held[count - 1 : count])[0]

    def _sieved(self, sieve: Sieve, queries_BD: torch.Tensor, reach: Mapping[int, float], found: Nearest) -> None:
        """Find the nearest key of each query that has a `reach`, which is the distance to some key, or more."""
        crowded = [row for row, distance in reach.items() if not np.isfinite(distance)]
        near = [row for row in reach if row not in crowded]
        if near:
            distances = np.array([reach[row] for row in near])
            left = dict(zip(near, sieve.nearest(queries_BD[near].numpy(), distances), strict=True))
            crowded += [row for row, slots in left.items() if self._crowded(slots)]
            some = {row: slots for row, slots in left.items() if row not in crowded}
            for row, nearest in self._nearest_of(queries_BD, some).items():
                self._settle(found, row, *nearest)
        if crowded:
            scanned = self._scan(queries_BD[crowded])
            found.slots_B[crowded], found.distances_B[crowded] = scanned.slots_B, scanned.distances_B

    def _settle(self, found: Nearest, row: int, slots: np.ndarray, distance: float) -> None:
        """These are the keys nearest to a query, all at one distance."""
        found.slots_B[row], found.distances_B[row] = self._first(slots.tolist()), distance

    def _nearest_of(
        self, queries_BD: torch.Tensor, slots: Mapping[int, np.ndarray]
    ) -> dict[int, tuple[np.ndarray, float]]:
        """For some queries, of the slots given for each those whose keys are nearest, and how far: exact."""
        slots = self._nearly(queries_BD, slots)
        nearest: dict[int, tuple[np.ndarray, float]] = {}
        for row, far in self._pairs(queries_BD, slots, _exactly).items():
            least = far.min()
            nearest[row] = slots[row][far == least], float(least)
        return nearest

    def _nearly(self, queries_BD: torch.Tensor, slots: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Of many slots those whose keys may be nearest to a query by squares in float32.

        Such a sum of squares is off by a few roundings a term of itself, and not of the norms.
        """
        left, width, rounding = dict(slots), queries_BD.shape[1], np.finfo(np.float32)
        many = {row: some for row, some in slots.items() if len(some) > CANDIDATES}
        for row, squares in self._pairs(queries_BD, many, _roughly).items():
            bound = squares.min() * (1 + 4 * width * rounding.eps) + width * rounding.tiny
            left[row] = slots[row][~(squares > bound)]
        return left

    def _pairs(
        self,
        queries_BD: torch.Tensor,
        slots: Mapping[int, np.ndarray],
        tell: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> dict[int, np.ndarray]:
        """What is to be told of some queries and the keys of the slots given for each; few are copied at once."""
        if not slots:
            return {}
        counts = [len(some) for some in slots.values()]
        rows = torch.from_numpy(np.repeat(np.array(list(slots)), counts)).to(self._device)
        every = torch.from_numpy(np.concatenate(list(slots.values()))).to(self._device)
        keys_ND = self._search.keys_ND
        step = ROWS if self._device.type == "cpu" else max(ROWS, CELLS // keys_ND.shape[1])
        # One for all: small ones between what is freed would keep that from being used.
        told = torch.empty(len(every), device=self._device)
        for start in range(0, len(every), step):
            chunk = slice(start, start + step)
            told[chunk] = tell(queries_BD.index_select(0, rows[chunk]), keys_ND.index_select(0, every[chunk]))
        parts = np.split(told.cpu().numpy(), np.cumsum(counts)[:-1])
        return dict(zip(slots, parts, strict=True))

    def _crowded(self, slots: np.ndarray) -> bool:
        """Whether the sieve left so many keys that a look at all of them costs less."""
        return CROWD * len(slots) > len(self._codebook) > CANDIDATES

    def _scan(self, queries_BD: torch.Tensor) -> Nearest:
        """The nearest key of each query, by a look at all keys; a GPU is waited for once, unless some are not sure."""
        queries_BD = queries_BD.detach().to(self._device, torch.float32).contiguous()
        nearest = _none(len(queries_BD))
        count = len(self._codebook)
        left = list(range(len(queries_BD))) if count else []
        if left:
            self._settle_search()
        candidates = CANDIDATES
        while left and candidates <= MOST_CANDIDATES:
            some = queries_BD if len(left) == len(queries_BD) else queries_BD[left]
            found = self._search.search(some, min(candidates, count))
            unsure = []
            for place, (row, told) in enumerate(zip(left, found.summary_B4.tolist(), strict=True)):
                finite, proven, slot, distance = told
                if finite and not proven:
                    unsure.append(row)
                elif finite:
                    tied = found.slots_BK[place][found.distances_BK[place] == distance] if slot == NO_SLOT else None
                    nearest.slots_B[row] = int(slot) if tied is None else self._first(tied.tolist())
                    nearest.distances_B[row] = distance
            left = unsure
            candidates *= 8
        every_N = np.arange(count)
        for row, (slots, distance) in self._nearest_of(queries_BD, dict.fromkeys(left, every_N)).items():
            self._settle(nearest, row, slots, distance)
        return nearest

    def _settle_search(self) -> None:
        """Bring the search up to date. A look-up may happen in inference mode, and what it fills is changed outside."""
        count = len(self._codebook)
        slots = None if self._stale is None else sorted(slot for slot in self._stale if slot < count)
        with torch.inference_mode(mode=False):
            self._search.settle(slots)
        self._stale = set()

    def _first(self, slots: list[int]) -> int:
        """Of slots at one distance the one that counts."""
        return min(slots, key=self._codebook.entry_ids.__getitem__)

    def _inside(self, found: Nearest) -> Nearest:
        """Those whose ball holds the query; the others are taken out."""
        rows = np.flatnonzero(found.slots_B.numpy() != NO_SLOT)
        if len(rows):
            radii = self._codebook.radii_N[found.slots_B.numpy()[rows]]
            outside = rows[~(found.distances_B.numpy()[rows] < radii)]
            found.slots_B[outside], found.distances_B[outside] = NO_SLOT, torch.inf
        return found


def on_host(query_D: torch.Tensor) -> np.ndarray:
    """A query as the codebook has its keys."""
    found_D: np.ndarray = query_D.detach().float().cpu().numpy()
    return found_D


def _exactly(queries_MD: torch.Tensor, keys_MD: torch.Tensor) -> torch.Tensor:
    """The distance of each pair."""
    return exact_distances(queries_MD, keys_MD[:, None])[:, 0]


def _roughly(queries_MD: torch.Tensor, keys_MD: torch.Tensor) -> torch.Tensor:
    """The square of the distance of each pair, in float32; of keys that may be written over."""
    return keys_MD.sub_(queries_MD).square_().sum(dim=1)


def _none(count: int) -> Nearest:
    return Nearest(torch.full((count,), NO_SLOT), torch.full((count,), torch.inf))
