"""A search of all keys: a matrix product proposes a few candidates for the nearest key, and exact distances decide.

1. The distances of candidates are exact (`exact_distances`).
2. A winner counts as proven only where the rounding of the product cannot hide a nearer key.
3. A key that is not proven nearest is never returned as such: the caller asks for more candidates.

FAISS does the product on the host, and on a GPU where faiss-gpu is installed. Plain torch does it everywhere else: on a
GPU beside faiss-cpu, and on a machine without FAISS. No search copies keys from a device to the host.
"""

import functools
import importlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

from gracestream.pipeline.device import DeviceLostError, prepare_cuda
from gracestream.pipeline.search.distance import exact_distances

T = TypeVar("T")

NO_SLOT = -1

NORM_CHUNK_ROWS = 256
"""Keys whose norms are taken together on the host."""

CANDIDATE_CHUNK_ELEMENTS = 2**23
"""Numbers of candidates' keys that are compared at a time: with float64 sums they take 160 MB."""

MAX_PRODUCT_ELEMENTS = 2**26
"""Numbers of one product of queries with keys: 256 MB."""

MIN_PRODUCT_KEYS = 2**14
"""Keys of one product, at least."""

INITIAL_KEY_CAPACITY = 1024
"""Keys for which a device has room at first."""

GROWTH_DIVISOR = 4
"""When the keys outgrow their room, a device gets room for one key more in so many."""

RECENTER_GROWTH_FACTOR = 4
"""The centre is taken anew when there are so many times as many keys as when it was."""

MAX_CENTER_SAMPLE = 2048
"""Keys that the centre is taken from, at most."""

FAISS_GPU_BYTES = 256 * 2**20
"""Memory that FAISS keeps on a GPU for its own use; by default it takes 1.5 GiB."""

FAISS_TILE_KEYS = 2**18
"""Keys at most that FAISS compares at a time: half of 1 GiB for 512 queries (`chooseTileSize` in FAISS 1.15)."""

_FLOAT32_INFO = torch.finfo(torch.float32)
_MAX_SAFE_SQUARE = 1e38
"""Below it no square, and no product that is compared with it, overflows in float32."""


@dataclass(frozen=True, slots=True)
class KeySearchResult:
    """What a search found for B queries.

    Attributes:
        summary_B4: On the host, for each query: whether it is finite, whether the winner is proven, its slot (-1: there
            are several at that distance), and the distance.
        slots_BK: The candidates.
        distances_BK: Their exact distances.
    """

    summary_B4: torch.Tensor
    slots_BK: torch.Tensor
    distances_BK: torch.Tensor


@dataclass(frozen=True, slots=True)
class _ProposedCandidates:
    """The outcome of one product, of points that both queries and keys are mapped to by the same shift.

    Attributes:
        slots_BK: The candidates; -1: none.
        last_squared_distance_B: The square of the distance of the last candidate, as the product has it, float64.
        norms_B: The lengths of the queries' points, float64.
    """

    slots_BK: torch.Tensor
    last_squared_distance_B: torch.Tensor
    norms_B: torch.Tensor


class KeySearch(ABC):
    """Searches all keys of a codebook, on one device. `sync` brings it up to date.

    Args:
        device: Where it computes.
        get_keys: Gives the keys (N, D), float32, as they are now.

    Raises:
        DeviceError: the environment makes products on the device inexact.
    """

    def __init__(self, device: torch.device, get_keys: Callable[[], np.ndarray]) -> None:
        self.device, self._get_keys = device, get_keys
        if device.type == "cuda":
            prepare_cuda()  # the proof of a winner holds for products in full float32

    @property
    @abstractmethod
    def keys_ND(self) -> torch.Tensor:
        """The keys, float32, on the device."""

    @property
    @abstractmethod
    def _max_norm(self) -> torch.Tensor:
        """At least the length of every key's point, float64."""

    @abstractmethod
    def sync(self, slots: Sequence[int] | None) -> None:
        """Take over the keys as they are now; those of these slots have changed since the last call, or all (None)."""

    @abstractmethod
    def _propose(self, queries_BD: torch.Tensor, count: int) -> _ProposedCandidates:
        """So many candidates for the nearest key of each query."""

    def search(self, queries_BD: torch.Tensor, count: int) -> KeySearchResult:
        """So many candidates, at most all keys, for each query: float32, on the device. A GPU is waited for once."""
        finite_B = torch.isfinite(queries_BD).all(dim=1)
        queries_BD = queries_BD.masked_fill(~finite_B[:, None], 0)
        proposed = self._propose(queries_BD, count)
        slots_BK = proposed.slots_BK
        distances_BK = self._exact_distances(queries_BD, slots_BK)
        distances_B, winner_B = distances_BK.min(dim=1)
        slots_B = slots_BK.gather(1, winner_B[:, None])[:, 0]
        tied_B = (distances_BK == distances_B[:, None]).sum(dim=1) > 1
        proven_B = self._proven_mask(proposed, distances_B)
        if count == len(self.keys_ND):
            proven_B = (slots_BK != NO_SLOT).all(dim=1)  # FAISS leaves out keys whose distances overflow
        summary = (finite_B, proven_B, slots_B.masked_fill(tied_B, NO_SLOT), distances_B)
        return KeySearchResult(torch.stack([part.double() for part in summary], dim=1).cpu(), slots_BK, distances_BK)

    def _exact_distances(self, queries_BD: torch.Tensor, slots_BK: torch.Tensor) -> torch.Tensor:
        """The exact distances of candidates, some queries at a time."""
        step = max(1, CANDIDATE_CHUNK_ELEMENTS // max(1, slots_BK.shape[1] * queries_BD.shape[1]))
        parts = [
            exact_distances(queries_BD[start : start + step], self.keys_ND[slots_BK[start : start + step]])
            for start in range(0, max(1, len(queries_BD)), step)
        ]
        return torch.cat(parts).masked_fill(slots_BK == NO_SLOT, torch.inf)

    def _proven_mask(self, proposed: _ProposedCandidates, distances_B: torch.Tensor) -> torch.Tensor:
        """Whether no key but the candidates can be the nearest, or as near.

        Let s be the sum of the lengths of a query's and a key's point, and D the width. By float32 products the square
        of their distance comes out wrong by at most (D + 1/2) eps s^2, and the shift of both points adds eps s^2. This
        holds for every order of summation, and not for TF32. A nearer key is no longer than the query and the winner's
        distance together, so a key of a huge norm makes no other one unsure.
        """
        width, distances_B = self.keys_ND.shape[1], distances_B.double()
        reach_B = ((proposed.norms_B + distances_B) * (1 + 1e-5)).clamp(max=self._max_norm)
        squares_B = (proposed.norms_B + reach_B).square()
        error_B = (1.01 * width + 8) * (_FLOAT32_INFO.eps * squares_B + _FLOAT32_INFO.tiny)  # squares may underflow
        nearest_B = distances_B.square() * (1 + 1e-6)
        return (proposed.last_squared_distance_B - error_B > nearest_B) & (squares_B < _MAX_SAFE_SQUARE)


class FaissOnHost(KeySearch):
    """FAISS over the codebook's own array of keys: no second copy, and nothing to rebuild when an entry goes."""

    def __init__(self, device: torch.device, get_keys: Callable[[], np.ndarray]) -> None:
        super().__init__(device, get_keys)
        self._norm_bound = 0.0

    @property
    def keys_ND(self) -> torch.Tensor:
        """The codebook's own keys."""
        return torch.from_numpy(self._get_keys())

    @property
    def _max_norm(self) -> torch.Tensor:
        return torch.tensor(self._norm_bound, dtype=torch.float64)

    def sync(self, slots: Sequence[int] | None) -> None:
        """Take the greatest norm; an entry that is gone may leave it too large, which is harmless."""
        rows = self._get_keys() if slots is None else self._get_keys()[slots]
        norms = (_max_row_norm(rows[start : start + NORM_CHUNK_ROWS]) for start in range(0, len(rows), NORM_CHUNK_ROWS))
        self._norm_bound = max(norms, default=0.0) if slots is None else max([self._norm_bound, *norms])

    def _propose(self, queries_BD: torch.Tensor, count: int) -> _ProposedCandidates:
        faiss: Any = load_faiss()
        squares_BK, slots_BK = faiss.knn(queries_BD.numpy(), self._get_keys(), count)
        farthest_B = torch.from_numpy(squares_BK).double().amax(dim=1)
        return _ProposedCandidates(torch.from_numpy(slots_BK), farthest_B, queries_BD.double().norm(dim=1))


class _CenteredSearch(KeySearch):
    """Keeps the keys in the device's memory: as they are, and from a centre, which the product takes.

    Keys far from the origin but near to each other are short from there, and so is the error of their products. The
    centre is never seen in an answer. On the host the keys as they are stay the codebook's own.
    """

    def __init__(self, device: torch.device, get_keys: Callable[[], np.ndarray]) -> None:
        super().__init__(device, get_keys)
        self._has_key_copy = device.type != "cpu"
        self._release(0)
        self._count = self._fitted_count = 0

    @property
    def keys_ND(self) -> torch.Tensor:
        """A view."""
        return self._keys[: self._count] if self._has_key_copy else torch.from_numpy(self._get_keys())

    @property
    def _max_norm(self) -> torch.Tensor:
        return self._norm_bound

    def sync(self, slots: Sequence[int] | None) -> None:
        """Move the keys of these slots to the device, or all where they have outgrown their room there."""
        keys_ND = self._get_keys()
        self._count = len(keys_ND)
        if slots is None or self._count > len(self._centered_keys):
            self._reload(keys_ND)
        elif slots:
            places_M = torch.tensor(slots, device=self.device)
            if self._has_key_copy:
                self._keys[places_M] = torch.from_numpy(keys_ND[slots]).to(self._keys)
            if self._count < RECENTER_GROWTH_FACTOR * self._fitted_count:
                self._center_rows(places_M)
            else:
                self._fit_center()

    def _release(self, width: int) -> None:
        self._keys, self._centered_keys = torch.empty(0, width), torch.empty(0, width)
        self._half_squares, self._center_D = torch.empty(0), torch.empty(0)
        self._norm_bound = torch.zeros((), dtype=torch.float64, device=self.device)

    def _reload(self, keys_ND: np.ndarray) -> None:
        count, width = keys_ND.shape
        self._release(width)  # given back before there is another
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # else torch keeps the old room, which is too small for anything alike
        room = max(INITIAL_KEY_CAPACITY, count + count // GROWTH_DIVISOR) if count else 0
        if self._has_key_copy:
            self._keys = torch.empty(room, width, device=self.device)
            self._keys[:count] = torch.from_numpy(keys_ND)
        self._centered_keys = torch.empty(room, width, device=self.device)
        self._half_squares = torch.empty(room, device=self.device)
        self._fit_center()

    def _fit_center(self) -> None:
        """Take a centre, and all keys from there."""
        self._fitted_count = count = self._count
        if not count:
            return
        sample_MD = self.keys_ND[:: -(-count // MAX_CENTER_SAMPLE)]
        self._center_D = sample_MD.sort(dim=0).values[len(sample_MD) // 2]  # the median: a huge key does not move it
        self._norm_bound = torch.zeros_like(self._norm_bound)
        step = max(1, CANDIDATE_CHUNK_ELEMENTS // sample_MD.shape[1])
        for start in range(0, count, step):
            self._center_rows(slice(start, min(start + step, count)))

    def _center_rows(self, rows: torch.Tensor | slice) -> None:
        points_MD = self.keys_ND[rows] - self._center_D
        halves_M = points_MD.square().sum(dim=1) / 2
        self._centered_keys[rows], self._half_squares[rows] = points_MD, halves_M
        width = points_MD.shape[1]
        longest = (2 * halves_M.max().double()).sqrt() * (1 + width * _FLOAT32_INFO.eps) + math.sqrt(
            width * _FLOAT32_INFO.tiny
        )
        self._norm_bound = torch.maximum(self._norm_bound, longest)

    def _propose(self, queries_BD: torch.Tensor, count: int) -> _ProposedCandidates:
        points_BD = queries_BD - self._center_D
        lengths_B = points_BD.double().norm(dim=1)
        farthest_B, slots_BK = self._nearest_points(points_BD, lengths_B, count)
        return _ProposedCandidates(slots_BK, farthest_B, lengths_B)

    @abstractmethod
    def _nearest_points(
        self, points_BD: torch.Tensor, norms_B: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots (B, K) of the closest points, and the square of the distance to the last of them (B), float64."""


class TorchSearch(_CenteredSearch):
    """Products by torch, on any device. The norms of keys are computed once, so a search reads the keys once."""

    def _nearest_points(
        self, points_BD: torch.Tensor, norms_B: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = max(MIN_PRODUCT_KEYS, MAX_PRODUCT_ELEMENTS // max(1, len(points_BD)))
        best, slots = [], []
        for start in range(0, self._count, step):
            rows = slice(start, min(start + step, self._count))
            # Half of |q|^2 - |q - k|^2. Where that is no number, as after an overflow, `topk` takes it for the largest.
            closeness_BM = torch.addmm(self._half_squares[rows], points_BD, self._centered_keys[rows].T, beta=-1)
            best_BK, places_BK = closeness_BM.topk(min(count, closeness_BM.shape[1]), dim=1)
            best.append(best_BK)
            slots.append(places_BK + start)
        best_BK, slots_BK = torch.cat(best, dim=1), torch.cat(slots, dim=1)
        if len(best) > 1:
            best_BK, places_BK = best_BK.topk(count, dim=1)
            slots_BK = slots_BK.gather(1, places_BK)
        return norms_B.square() - 2 * best_BK[:, -1].double(), slots_BK


class FaissOnGpu(_CenteredSearch):
    """Products by FAISS on an NVIDIA GPU."""

    def __init__(self, device: torch.device, get_keys: Callable[[], np.ndarray]) -> None:
        super().__init__(device, get_keys)
        origin_12 = torch.zeros(1, 2, device=device)
        self._knn(origin_12, origin_12, 1)  # FAISS takes its memory now, and not in the first request

    def _nearest_points(
        self, points_BD: torch.Tensor, norms_B: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del norms_B
        step = max_queries_per_call(self._count, count)
        parts = [
            self._knn(points_BD[start : start + step], self._centered_keys[: self._count], count)
            for start in range(0, max(1, len(points_BD)), step)
        ]
        squares_BK, slots_BK = (torch.cat(some) for some in zip(*parts, strict=True))
        return squares_BK.double().amax(dim=1), slots_BK

    def _knn(self, points_BD: torch.Tensor, points_ND: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """So many nearest points: squares of distances (B, K) and slots (B, K)."""
        faiss: Any = load_faiss()
        # An error that CUDA reports to FAISS aborts the process. One of an earlier kernel is raised here instead.
        torch.cuda.current_stream(self.device).synchronize()
        found: tuple[torch.Tensor, torch.Tensor] = retry_on_memory_error(
            lambda: faiss.knn_gpu(_gpu_resources(), points_BD, points_ND, count)
        )
        return found


def max_queries_per_call(key_count: int, candidate_count: int) -> int:
    """Queries that FAISS can search in one call within `FAISS_GPU_BYTES`, for so many candidates each.

    Where its own memory does not suffice, FAISS asks CUDA for more in each call. That waits for the GPU, and no log
    tells of it.
    """
    compared = min(key_count, FAISS_TILE_KEYS)
    tiles = -(-key_count // compared)
    # Each of two streams has the distances to the keys of a tile, float32, and the candidates of all tiles: distances,
    # and slots of 8 bytes. Besides there are the norms of the query and of all keys.
    each = 2 * (4 * compared + (4 + 8) * tiles * candidate_count) + 4
    left = FAISS_GPU_BYTES - 4 * key_count - 8 * 256  # each of these eight arrays is rounded up to 256 bytes
    return max(1, left // each)


def search_class_for(device: torch.device) -> type[KeySearch]:
    """The search for a device: by FAISS where one is installed for it, else by torch."""
    faiss = load_faiss()
    if device.type == "cpu":
        return TorchSearch if faiss is None else FaissOnHost
    return FaissOnGpu if device.type == "cuda" and hasattr(faiss, "StandardGpuResources") else TorchSearch


def set_threads(count: int) -> None:
    """Let torch and FAISS use so many threads."""
    torch.set_num_threads(count)
    if (faiss := load_faiss()) is not None:
        faiss.omp_set_num_threads(count)


@functools.cache
def load_faiss() -> ModuleType | None:
    """FAISS; None where it is not installed, or cannot be loaded."""
    try:
        return importlib.import_module("faiss")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        warnings.warn(f"FAISS cannot be loaded ({error}): torch searches the keys instead", stacklevel=2)
        return None


@functools.cache
def _gpu_resources() -> Any:
    """FAISS's memory on the GPU: one for the process, since each would keep its own."""
    faiss: Any = load_faiss()
    importlib.import_module("faiss.contrib.torch_utils")  # lets FAISS take CUDA tensors, on torch's stream
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(FAISS_GPU_BYTES)
    resources.setPinnedMemory(0)  # it copies nothing from the host
    return resources


def retry_on_memory_error(search: Callable[[], T]) -> T:
    """What a search of FAISS returns; where it finds no memory, torch gives back what it keeps, and it runs again.

    Raises:
        DeviceFault: there is no memory even so. Every later search would fail as well.
    """
    try:
        return search()
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    try:
        return search()
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise DeviceLostError(
            f"the device has no memory left for FAISS: {str(error).strip().splitlines()[0]}"
        ) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    return "alloc fail" in str(error) or "cudaMalloc error" in str(error)


def _max_row_norm(keys_ND: np.ndarray) -> float:
    return float(np.linalg.norm(keys_ND.astype(np.float64), axis=1).max(initial=0.0))
