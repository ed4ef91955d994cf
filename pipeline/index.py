"""The key index: which key is nearest to a query, exactly (design, section 4, Lookup).

FAISS scans the codebook's own array of keys (`faiss.knn`: no second copy, nothing to rebuild when an entry goes) and
returns candidates by squared distances from a matrix product, whose rounding error grows with the keys' norms. The
winner is found among them by direct difference, and the number of candidates grows until the error bound proves that
no key outside them can win. So the answer equals brute force, whatever the norms.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import faiss
import numpy as np
import torch

from pipeline.codebook import Applied, Codebook
from pipeline.sieve import Sieve

NO_SLOT = -1
CANDIDATES = 8
MOST_CANDIDATES = 512
"""Of one search. Where so many lie within rounding of each other, all keys are compared; FAISS on a GPU takes 2048."""

ROWS = 256
"""Keys that are compared at a time."""

SPARE = 4
"""On a device there is room for one key more in so many."""

CROWD = 4
"""Where the sieve leaves more than one key in so many, all are searched."""


def exact_distances(queries_BD: torch.Tensor, keys_BKD: torch.Tensor) -> torch.Tensor:
    """Euclidean distances (B, K) by direct difference, in float32.

    Differences are float32, their squares are summed in float64 and rounded once: the order of summation, which
    differs between machines, cannot be seen in the result, and a key is at distance 0 from itself at any norm.
    """
    differences_BKD = queries_BD.float()[:, None, :] - keys_BKD.float()
    return differences_BKD.double().square().sum(-1).sqrt().float()


@dataclass(frozen=True, slots=True)
class Nearest:
    """For each query the slot of its nearest key (-1: none, or the query is not finite) and the distance to it.

    On the host, whatever the index's device.
    """

    slots_B: torch.Tensor
    distances_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Candidates:
    """What a search found for B queries.

    Attributes:
        told_B4: On the host, for each: whether it is finite, whether the winner is proven, its slot (-1: there are
            several at that distance), and the distance.
        slots_BK: The candidates.
        distances_BK: How far they are.
    """

    told_B4: torch.Tensor
    slots_BK: torch.Tensor
    distances_BK: torch.Tensor


class Copy:
    """The keys on a device of their own memory, with room for more: a change moves the keys that it touches alone."""

    def __init__(self, device: torch.device) -> None:
        self._room = torch.empty(0, 0, device=device)

    def keys(self, keys_ND: np.ndarray, slots: Sequence[int] | None) -> torch.Tensor:
        """The keys (N, D) as they are now, where those of these slots have changed since the last call; None: all."""
        count, width = keys_ND.shape
        if slots is None or count > len(self._room):
            device, self._room = self._room.device, torch.empty(0)  # given back before there is another
            self._room = torch.empty(count + count // SPARE, width, device=device)
            self._room[:count] = torch.from_numpy(keys_ND)
        elif slots:
            places_M = np.array(slots)
            self._room[torch.from_numpy(places_M).to(self._room.device)] = torch.from_numpy(keys_ND[places_M]).to(
                self._room
            )
        return self._room[:count]


class KeyIndex:
    """Exact nearest keys of a codebook, on one device. Call `refresh` after each delta the codebook applied.

    On a CPU, `covering` asks a sieve first, which rules nearly all keys out; on a GPU a look at all of them is faster.
    """

    def __init__(self, codebook: Codebook, device: torch.device) -> None:
        self._codebook = codebook
        self._device = device
        self._resources = faiss.StandardGpuResources() if _gpu_search(device) else None
        self._copy = None if device.type == "cpu" else Copy(device)
        self._keys = torch.empty(0)
        self._norm = 0.0
        self._known: dict[bytes, tuple[np.ndarray, float]] = {}
        """By query, what its nearest keys are and how far: of the last batch, where a look at all keys told."""
        self._sieve = Sieve(lambda: (codebook.keys_ND, codebook.radii_N))
        self.refresh()

    def refresh(self, *changes: Applied) -> None:
        """Take over what these deltas changed, one after the other; without any, everything."""
        keys_ND = self._codebook.keys_ND
        slots = sorted({slot for applied in changes for slot in applied.slots if slot < len(keys_ND)})
        rows = keys_ND[slots] if changes else keys_ND
        largest = max((_largest_norm(rows[start : start + ROWS]) for start in range(0, len(rows), ROWS)), default=0.0)
        self._norm = max(self._norm, largest) if changes else largest
        self._sieve.changed(slots if changes else None)
        self._known = {}
        self._keys = self._copy.keys(keys_ND, slots if changes else None) if self._copy else torch.from_numpy(keys_ND)

    def nearest(self, queries_BD: torch.Tensor) -> Nearest:
        """The nearest key of each query; of keys at the same distance the one whose entry's id comes first.

        Slots are no part of the answer: they depend on which entries were there before.
        """
        if self._device.type != "cpu":
            return self._scan(queries_BD)
        queries_BD = queries_BD.detach().float().contiguous()
        finite = torch.isfinite(queries_BD).all(dim=1).nonzero()[:, 0] if len(self._keys) else torch.empty(0)
        found = _none(len(queries_BD))
        close: dict[int, np.ndarray] = {}
        for row in map(int, finite):
            query_D = queries_BD[row].numpy()
            if known := self._known.get(query_D.tobytes()):
                self._settle(found, row, *known)
            else:
                close[row] = self._sieve.close(query_D, CANDIDATES)
        reach = {row: far.min() for row, far in self._pairs(queries_BD, close, _exactly).items()}
        self._sieved(queries_BD, reach, found)
        return found

    def covering(self, queries_BD: torch.Tensor) -> Nearest:
        """The nearest key of each query if the query lies in its ball (distance < radius), else none."""
        if self._device.type != "cpu":
            return self._inside(self._scan(queries_BD))
        queries_BD = queries_BD.detach().float().contiguous()
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
        self._sieved(queries_BD, reach, found)
        return self._inside(found)

    def _sieved(self, queries_BD: torch.Tensor, reach: Mapping[int, float], found: Nearest) -> None:
        """Find the nearest key of each query that has a `reach`, which is the distance to some key, or more."""
        crowded = [row for row, distance in reach.items() if not np.isfinite(distance)]
        near = [row for row in reach if row not in crowded]
        if near:
            distances = np.array([reach[row] for row in near])
            left = dict(zip(near, self._sieve.nearest(queries_BD[near].numpy(), distances), strict=True))
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
        told = torch.empty(len(every))  # one for all: small ones between what is freed would keep that from being used
        for start in range(0, len(every), ROWS):
            chunk = slice(start, start + ROWS)
            told[chunk] = tell(queries_BD.index_select(0, rows[chunk]), self._keys.index_select(0, every[chunk]))
        parts = np.split(told.numpy(), np.cumsum(counts)[:-1])
        return dict(zip(slots, parts, strict=True))

    def _crowded(self, slots: np.ndarray) -> bool:
        """Whether the sieve left so many keys that a look at all of them costs less."""
        return CROWD * len(slots) > len(self._keys) > CANDIDATES

    def _scan(self, queries_BD: torch.Tensor) -> Nearest:
        """The nearest key of each query, by a look at all keys; a GPU is waited for once, unless some are not sure."""
        queries_BD = queries_BD.detach().to(self._device, torch.float32).contiguous()
        nearest = _none(len(queries_BD))
        left = list(range(len(queries_BD))) if len(self._keys) else []
        candidates = CANDIDATES
        while left and candidates <= MOST_CANDIDATES:
            some = queries_BD if len(left) == len(queries_BD) else queries_BD[left]
            found = self._search(some, min(candidates, len(self._keys)))
            unsure = []
            for place, (row, told) in enumerate(zip(left, found.told_B4.tolist(), strict=True)):
                finite, proven, slot, distance = told
                if finite and not proven:
                    unsure.append(row)
                elif finite:
                    tied = found.slots_BK[place][found.distances_BK[place] == distance] if slot == NO_SLOT else None
                    nearest.slots_B[row] = int(slot) if tied is None else self._first(tied.tolist())
                    nearest.distances_B[row] = distance
            left = unsure
            candidates *= 8
        every_N = np.arange(len(self._keys))
        for row, (slots, distance) in self._nearest_of(queries_BD, dict.fromkeys(left, every_N)).items():
            self._settle(nearest, row, slots, distance)
        return nearest

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

    def _search(self, queries_BD: torch.Tensor, candidates: int) -> _Candidates:
        finite_B = torch.isfinite(queries_BD).all(dim=1)
        queries_BD = queries_BD.masked_fill(~finite_B[:, None], 0)
        if self._resources is not None:
            squares_BK, slots_BK = faiss.knn_gpu(self._resources, queries_BD, self._keys, candidates)
        else:
            squares, slots = faiss.knn(queries_BD.cpu().numpy(), self._keys.cpu().numpy(), candidates)
            squares_BK = torch.from_numpy(squares).to(self._device)
            slots_BK = torch.from_numpy(slots).to(self._device)
        distances_BK = exact_distances(queries_BD, self._keys[slots_BK]).masked_fill(slots_BK == NO_SLOT, torch.inf)
        distances_B, winner_B = distances_BK.min(dim=1)
        slots_B = slots_BK.gather(1, winner_B[:, None])[:, 0]
        tied_B = (distances_BK == distances_B[:, None]).sum(dim=1) > 1
        # A product of D terms in float32 is off by at most D roundings of the largest possible sum. A key can only win
        # where its norm is within the winner's distance of the query's: one of a huge norm makes no other unsure.
        width, norm_B = queries_BD.shape[1], queries_BD.norm(dim=1)
        largest_B = ((norm_B + distances_B) * (1 + 1e-5)).clamp(max=min(self._norm, torch.finfo(torch.float32).max))
        rounding = torch.finfo(torch.float32)
        error_B = width * (rounding.eps * (norm_B + largest_B).square() + rounding.tiny)  # squares may underflow
        farthest_B = squares_BK.amax(dim=1)
        proven_B = farthest_B - error_B > distances_B.square() * (1 + 1e-6)
        if candidates == len(self._keys):
            proven_B = (slots_BK != NO_SLOT).all(dim=1)  # FAISS leaves out what overflows
        told = (finite_B, proven_B, slots_B.masked_fill(tied_B, NO_SLOT), distances_B)
        return _Candidates(torch.stack([one.double() for one in told], dim=1).cpu(), slots_BK, distances_BK)


def _exactly(queries_MD: torch.Tensor, keys_MD: torch.Tensor) -> torch.Tensor:
    """The distance of each pair."""
    return exact_distances(queries_MD, keys_MD[:, None])[:, 0]


def _roughly(queries_MD: torch.Tensor, keys_MD: torch.Tensor) -> torch.Tensor:
    """The square of the distance of each pair, in float32; of keys that may be written over."""
    return keys_MD.sub_(queries_MD).square_().sum(dim=1)


def _none(count: int) -> Nearest:
    return Nearest(torch.full((count,), NO_SLOT), torch.full((count,), torch.inf))


def _largest_norm(keys_ND: np.ndarray) -> float:
    return float(np.linalg.norm(keys_ND.astype(np.float64), axis=1).max(initial=0.0))


def _gpu_search(device: torch.device) -> bool:
    if device.type != "cuda" or not hasattr(faiss, "StandardGpuResources"):
        return False
    importlib.import_module("faiss.contrib.torch_utils")  # teaches FAISS to take CUDA tensors as they are
    return True
