"""A search of all keys: a matrix product proposes a few candidates for the nearest key, and exact distances decide.

FAISS computes the product on the host, and on a GPU if faiss-gpu is installed. Otherwise torch does: on a GPU beside
faiss-cpu, and on a machine without FAISS.

Guarantees:

1. The distances of candidates are exact (`exact_distances`).
2. A winner is proven only if the rounding of the product cannot hide a nearer key.
3. An unproven winner is reported as such, and the caller asks for more candidates.
4. No search copies keys from a device to the host.

Not promised: a proven winner. Where many keys lie within rounding of each other, no number of candidates may suffice.
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
"""Keys per float64 copy when norms are computed on the host."""

CANDIDATE_CHUNK_ELEMENTS = 2**23
"""Elements of candidate keys per call of `exact_distances`. Float32 and float64 copies together take 160 MB."""

MAX_PRODUCT_ELEMENTS = 2**26
"""Largest number of elements of one product of queries with keys: 256 MB."""

MIN_PRODUCT_KEYS = 2**14
"""Fewest keys per product."""

INITIAL_KEY_CAPACITY = 1024
"""Smallest number of keys for which memory is allocated."""

GROWTH_DIVISOR = 4
"""An allocation has room for a quarter more keys than there are."""

RECENTER_GROWTH_FACTOR = 4
"""The centre is computed again when the number of keys has grown by this factor."""

MAX_CENTER_SAMPLE = 2048
"""Most keys from which the centre is computed."""

FAISS_GPU_BYTES = 256 * 2**20
"""Memory that FAISS reserves on a GPU for temporary data. Its default is 1.5 GiB."""

MAX_FAISS_GPU_KEYS = 2**18
"""Most keys that FAISS searches on a GPU: one tile (`chooseTileSize`, FAISS 1.15).

FAISS computes the norms of all keys in each call, so it reads them twice. On an H200, one query takes as long as with
torch among 100,000 keys of 1,536 dimensions, and three times as long among a million (8.4 and 2.8 ms).
"""

_FLOAT32_INFO = torch.finfo(torch.float32)
_MAX_SAFE_SQUARE = 1e38
"""Squares below this, and products that are compared with them, do not overflow float32 (3.4e38)."""


@dataclass(frozen=True, slots=True)
class KeySearchResult:
    """The result of a search for B queries, on the host.

    Attributes:
        finite_B: True where the query is finite. Only there the other fields have a meaning.
        proven_B: True where no key outside the candidates can be nearest, or tied with the nearest.
        slots_BK: The candidates.
        distances_BK: Their exact distances, float64; infinite where there is no candidate.
    """

    finite_B: np.ndarray
    proven_B: np.ndarray
    slots_BK: np.ndarray
    distances_BK: np.ndarray


@dataclass(frozen=True, slots=True)
class _ProposedCandidates:
    """Candidates from one product. Queries and keys enter it as points: both shifted by the same centre, if any.

    Attributes:
        slots_BK: The candidates; -1: none.
        last_squared_distance_B: The last candidate's squared distance according to the product, float64.
        norms_B: The norms of the queries' points, float64.
    """

    slots_BK: torch.Tensor
    last_squared_distance_B: torch.Tensor
    norms_B: torch.Tensor


class KeySearch(ABC):
    """A search of all keys of a codebook, on one device. Call `sync` after the keys change.

    Args:
        device: The device that computes.
        get_keys: Returns the current keys (N, D), float32.

    Raises:
        DeviceError: the environment makes products on the device inexact.
    """

    def __init__(self, device: torch.device, get_keys: Callable[[], np.ndarray]) -> None:
        self.device, self._get_keys = device, get_keys
        if device.type == "cuda":
            prepare_cuda()  # the proof of a winner needs products in full float32, not TF32

    @property
    @abstractmethod
    def keys_ND(self) -> torch.Tensor:
        """The keys, float32, on the device."""

    @property
    @abstractmethod
    def _max_norm(self) -> torch.Tensor:
        """An upper bound on the norm of every key's point, float64."""

    @abstractmethod
    def sync(self, slots: Sequence[int] | None) -> None:
        """Adopt the current keys. `slots` names those changed since the last call; None: all keys may have changed."""

    @abstractmethod
    def _propose(self, queries_BD: torch.Tensor, count: int) -> _ProposedCandidates:
        """Propose `count` candidates for the nearest key of each query."""

    def search(self, queries_BD: torch.Tensor, count: int) -> KeySearchResult:
        """Compare `count` candidates per query by exact distance; `count` is at most the number of keys.

        Queries are float32, on the device. A GPU is synchronised once, for one copy to the host. What has B or B x K
        elements is computed there, since each operation on a GPU costs the start of a kernel.
        """
        on_host = self._compare(queries_BD, count).cpu().numpy()
        largest_B, norms_B, last_squared_distance_B, max_norm_B = on_host[:, :4].T
        slots_BK, distances_BK = on_host[:, 4 : 4 + count].astype(np.int64), on_host[:, 4 + count :]
        distances_BK[slots_BK == NO_SLOT] = np.inf
        if count == len(self.keys_ND):
            # All keys were compared, so the winner needs no proof. FAISS omits keys whose distances overflow.
            proven_B = (slots_BK != NO_SLOT).all(axis=1)
        else:
            proven_B = _proven_mask(
                norms_B, last_squared_distance_B, max_norm_B, distances_BK.min(axis=1), queries_BD.shape[1]
            )
        return KeySearchResult(np.isfinite(largest_B), proven_B, slots_BK, distances_BK)

    def _compare(self, queries_BD: torch.Tensor, count: int) -> torch.Tensor:
        """The part of a search on the device: one row per query, float64.

        A row holds the largest magnitude in the query (NaN if a number is NaN), the norm of its point, the last
        candidate's squared distance, the bound on the norms of keys, the candidates, and their exact distances.
        """
        proposed = self._propose(queries_BD, count)
        columns = (
            torch.linalg.vector_norm(queries_BD, torch.inf, dim=1, keepdim=True).double(),
            proposed.norms_B[:, None],
            proposed.last_squared_distance_B[:, None],
            self._max_norm.expand(len(queries_BD), 1),
            proposed.slots_BK.double(),
            self._exact_distances(queries_BD, proposed.slots_BK).double(),
        )
        return torch.cat(columns, dim=1)

    def _exact_distances(self, queries_BD: torch.Tensor, slots_BK: torch.Tensor) -> torch.Tensor:
        """Exact distances (B, K) of candidates, for a chunk of queries at a time; any number where there is none."""
        step = max(1, CANDIDATE_CHUNK_ELEMENTS // max(1, slots_BK.shape[1] * queries_BD.shape[1]))
        parts = [
            exact_distances(queries_BD[start : start + step], self.keys_ND[slots_BK[start : start + step]])
            for start in range(0, max(1, len(queries_BD)), step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _proven_mask(
    norms_B: np.ndarray,
    last_squared_distance_B: np.ndarray,
    max_norm_B: np.ndarray,
    distances_B: np.ndarray,
    width: int,
) -> np.ndarray:
    """True (B) where no key outside the candidates can be nearest, or tied with the nearest.

    Holds for every order of summation, but not for TF32.

    Args:
        norms_B: The norms of the queries' points.
        last_squared_distance_B: The last candidate's squared distance according to the product.
        max_norm_B: An upper bound on the norm of every key's point.
        distances_B: The winners' exact distances.
        width: The number of dimensions, D.
    """
    # Let p and k be the points of a query and a key, s = |p| + |k|, D the width and u = eps / 2.
    # - A float32 sum of D products is off by at most D u of the sum of their magnitudes. So |p|^2 - 2 p.k + |k|^2
    #   is off by at most D u (|p|^2 + 2 |p| |k| + |k|^2) = D u s^2, and by a few u s^2 for the sum of the three.
    # - The shift displaces the points by at most u |p| and u |k|. A distance of at most s then changes by u s, and
    #   its square by 2 u s^2 = eps s^2.
    # `error_B` is more than twice the sum of both, and has tiny for each term that underflows.
    with np.errstate(invalid="ignore", over="ignore"):  # queries that are not finite
        # A key as near as the winner has |k| <= |p| + distance. So one key of huge norm leaves other winners proven.
        max_key_norm_B = np.minimum((norms_B + distances_B) * (1 + 1e-5), max_norm_B)
        squares_B = np.square(norms_B + max_key_norm_B)
        error_B = (1.01 * width + 8) * (_FLOAT32_INFO.eps * squares_B + _FLOAT32_INFO.tiny)
        # Every key outside the candidates is at least as far as the last candidate, according to the product. A key
        # that ties with the winner has a true squared distance of at most 1 + 2.1 eps times the winner's square below,
        # since an exact distance is off by at most 1.01 eps of itself. The factor 1 + 1e-6 (8 eps) covers this.
        winner_square_B = np.square(distances_B) * (1 + 1e-6)
        proven_B: np.ndarray = (last_squared_distance_B - error_B > winner_square_B) & (squares_B < _MAX_SAFE_SQUARE)
    return proven_B


class FaissOnHost(KeySearch):
    """FAISS over the codebook's own array of keys: no second copy, and nothing to rebuild when an entry is removed."""

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
        """Update the bound on the norms. A removed entry may leave it too large, which only proves fewer winners."""
        rows = self._get_keys() if slots is None else self._get_keys()[slots]
        norms = (_max_row_norm(rows[start : start + NORM_CHUNK_ROWS]) for start in range(0, len(rows), NORM_CHUNK_ROWS))
        self._norm_bound = max(norms, default=0.0) if slots is None else max([self._norm_bound, *norms])

    def _propose(self, queries_BD: torch.Tensor, count: int) -> _ProposedCandidates:
        faiss: Any = load_faiss()
        squares_BK, slots_BK = faiss.knn(queries_BD.numpy(), self._get_keys(), count)
        last_square_B = torch.from_numpy(squares_BK).double().amax(dim=1)
        norms_B = torch.linalg.vector_norm(queries_BD, dim=1, dtype=torch.float64)
        return _ProposedCandidates(torch.from_numpy(slots_BK), last_square_B, norms_B)


class _CenteredSearch(KeySearch):
    """A search with two arrays in the device's memory: the keys, and the keys relative to a centre.

    Products use the centred keys. Keys far from the origin but near each other have small norms there, so their
    products have small errors. The choice of the centre affects no answer. On the host the keys themselves are not
    copied: `keys_ND` is the codebook's array.
    """

    def __init__(self, device: torch.device, get_keys: Callable[[], np.ndarray]) -> None:
        super().__init__(device, get_keys)
        self._has_key_copy = device.type != "cpu"
        self._release(0)
        self._count = self._fitted_count = 0

    @property
    def keys_ND(self) -> torch.Tensor:
        """The keys; a view."""
        return self._keys[: self._count] if self._has_key_copy else torch.from_numpy(self._get_keys())

    @property
    def _max_norm(self) -> torch.Tensor:
        return self._norm_bound

    def sync(self, slots: Sequence[int] | None) -> None:
        """Copy the keys of these slots to the device, or all keys if they no longer fit in the allocated memory."""
        keys_ND = self._get_keys()
        self._count = len(keys_ND)
        if slots is None or self._count > len(self._centered_keys):
            self._reload(keys_ND)
        elif slots:
            slots_M = torch.tensor(slots, device=self.device)
            if self._has_key_copy:
                self._keys[slots_M] = torch.from_numpy(keys_ND[slots]).to(self._keys)
            if self._count < RECENTER_GROWTH_FACTOR * self._fitted_count:
                self._center_rows(slots_M)
            else:
                self._fit_center()

    def _release(self, width: int) -> None:
        self._keys, self._centered_keys = torch.empty(0, width), torch.empty(0, width)
        self._half_squares, self._center_D = torch.empty(0), torch.empty(0)
        self._norm_bound = torch.zeros((), dtype=torch.float64, device=self.device)

    def _reload(self, keys_ND: np.ndarray) -> None:
        count, width = keys_ND.shape
        self._release(width)  # before the new allocation, so that both never exist at once
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise torch keeps the old block, which is too small to be reused
        capacity = max(INITIAL_KEY_CAPACITY, count + count // GROWTH_DIVISOR) if count else 0
        if self._has_key_copy:
            self._keys = torch.empty(capacity, width, device=self.device)
            self._keys[:count] = torch.from_numpy(keys_ND)
        self._centered_keys = torch.empty(capacity, width, device=self.device)
        self._half_squares = torch.empty(capacity, device=self.device)
        self._fit_center()

    def _fit_center(self) -> None:
        """Compute the centre from a sample, and centre all keys."""
        self._fitted_count = count = self._count
        if not count:
            return
        sample_MD = self.keys_ND[:: -(-count // MAX_CENTER_SAMPLE)]
        self._center_D = sample_MD.sort(dim=0).values[len(sample_MD) // 2]  # median: one huge key does not move it
        self._norm_bound = torch.zeros_like(self._norm_bound)
        step = max(1, CANDIDATE_CHUNK_ELEMENTS // sample_MD.shape[1])
        for start in range(0, count, step):
            self._center_rows(slice(start, min(start + step, count)))

    def _center_rows(self, rows: torch.Tensor | slice) -> None:
        points_MD = self.keys_ND[rows] - self._center_D
        half_squares_M = points_MD.square().sum(dim=1) / 2
        self._centered_keys[rows], self._half_squares[rows] = points_MD, half_squares_M
        width = points_MD.shape[1]
        # The computed square of a norm is off by at most D u of itself, its root by D u / 2: D eps is four times that.
        # Underflow loses at most tiny in each of D squares, so at most sqrt(D tiny) of the norm.
        max_norm = (2 * half_squares_M.max().double()).sqrt() * (1 + width * _FLOAT32_INFO.eps) + math.sqrt(
            width * _FLOAT32_INFO.tiny
        )
        self._norm_bound = torch.maximum(self._norm_bound, max_norm)

    def _propose(self, queries_BD: torch.Tensor, count: int) -> _ProposedCandidates:
        points_BD = queries_BD - self._center_D
        norms_B = torch.linalg.vector_norm(points_BD, dim=1, dtype=torch.float64)
        last_square_B, slots_BK = self._nearest_points(points_BD, norms_B, count)
        return _ProposedCandidates(slots_BK, last_square_B, norms_B)

    def _nearest_points(
        self, points_BD: torch.Tensor, norms_B: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The squared distance (B), float64, of the last candidate, and the slots (B, K) of the nearest points.

        The norms of keys are precomputed, so this reads the keys once.
        """
        step = max(MIN_PRODUCT_KEYS, MAX_PRODUCT_ELEMENTS // max(1, len(points_BD)))
        best_by_chunk, slots_by_chunk = [], []
        for start in range(0, self._count, step):
            rows = slice(start, min(start + step, self._count))
            # q.k - |k|^2 / 2, which is half of |q|^2 - |q - k|^2. `topk` ranks NaN (after an overflow) as largest.
            # So such a key becomes a candidate, and its exact distance decides.
            closeness_BM = torch.addmm(self._half_squares[rows], points_BD, self._centered_keys[rows].T, beta=-1)
            best_BK, places_BK = closeness_BM.topk(min(count, closeness_BM.shape[1]), dim=1)
            best_by_chunk.append(best_BK)
            slots_by_chunk.append(places_BK + start if start else places_BK)
        best_BK, slots_BK = best_by_chunk[0], slots_by_chunk[0]
        if len(best_by_chunk) > 1:
            best_BK, places_BK = torch.cat(best_by_chunk, dim=1).topk(count, dim=1)
            slots_BK = torch.cat(slots_by_chunk, dim=1).gather(1, places_BK)
        return norms_B.square() - 2 * best_BK[:, -1].double(), slots_BK


class TorchSearch(_CenteredSearch):
    """Products by torch, on any device."""


class FaissOnGpu(_CenteredSearch):
    """Products by FAISS on an NVIDIA GPU; by torch for more than `MAX_FAISS_GPU_KEYS` keys."""

    def __init__(self, device: torch.device, get_keys: Callable[[], np.ndarray]) -> None:
        super().__init__(device, get_keys)
        origin_12 = torch.zeros(1, 2, device=device)
        self._knn(origin_12, origin_12, 1)  # makes FAISS allocate its memory now instead of in the first request

    def _nearest_points(
        self, points_BD: torch.Tensor, norms_B: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._count > MAX_FAISS_GPU_KEYS:
            return super()._nearest_points(points_BD, norms_B, count)
        step = max_queries_per_call(self._count, count)
        parts = [
            self._knn(points_BD[start : start + step], self._centered_keys[: self._count], count)
            for start in range(0, max(1, len(points_BD)), step)
        ]
        squares_BK, slots_BK = (torch.cat(chunk_results) for chunk_results in zip(*parts, strict=True))
        return squares_BK.double().amax(dim=1), slots_BK

    def _knn(self, points_BD: torch.Tensor, points_ND: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared distances (B, K) and slots (B, K) of the `count` nearest points."""
        faiss, resources = _load_faiss_gpu()
        # FAISS aborts the process on a CUDA error. Synchronising raises an earlier kernel's error as an exception.
        torch.cuda.current_stream(self.device).synchronize()
        squares_and_slots: tuple[torch.Tensor, torch.Tensor] = retry_on_memory_error(
            lambda: faiss.knn_gpu(resources, points_BD, points_ND, count)
        )
        return squares_and_slots


def max_queries_per_call(key_count: int, candidate_count: int) -> int:
    """The number of queries that FAISS can search in one call within `FAISS_GPU_BYTES`; at least 1.

    Beyond its own memory, FAISS allocates from CUDA in each call. This synchronises the GPU and is not logged.
    """
    # Per query, each of two streams holds float32 distances to all keys. It also holds the candidates: float32
    # distances and 8-byte slots. The last 4 bytes are the query's norm.
    bytes_per_query = 2 * (4 * key_count + (4 + 8) * candidate_count) + 4
    free_bytes = (
        FAISS_GPU_BYTES - 4 * key_count - 8 * 256
    )  # the keys' norms; each of eight arrays is rounded up to 256 bytes
    return max(1, free_bytes // bytes_per_query)


def search_class_for(device: torch.device) -> type[KeySearch]:
    """The search class for a device: FAISS if it is installed for this device, otherwise torch."""
    faiss = load_faiss()
    if device.type == "cpu":
        return TorchSearch if faiss is None else FaissOnHost
    return FaissOnGpu if device.type == "cuda" and hasattr(faiss, "StandardGpuResources") else TorchSearch


def set_threads(count: int) -> None:
    """Set the number of threads of torch and FAISS."""
    torch.set_num_threads(count)
    if (faiss := load_faiss()) is not None:
        faiss.omp_set_num_threads(count)


@functools.cache
def load_faiss() -> ModuleType | None:
    """The module `faiss`; None if it is not installed, or cannot be loaded (with a warning)."""
    try:
        return importlib.import_module("faiss")
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError, RuntimeError) as error:  # faiss-gpu raises the last two without CUDA's libraries
        warnings.warn(f"FAISS cannot be loaded ({error}): torch searches the keys instead", stacklevel=2)
        return None


@functools.cache
def _load_faiss_gpu() -> tuple[Any, Any]:
    """FAISS's module and its resources on the GPU. One object per process, since each one reserves its own memory."""
    faiss: Any = load_faiss()
    # Replaces functions of FAISS by others that take CUDA tensors, on torch's stream. No function of it may be looked
    # up before.
    importlib.import_module("faiss.contrib.torch_utils")
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(FAISS_GPU_BYTES)
    resources.setPinnedMemory(0)  # nothing is copied from the host
    return faiss, resources


def retry_on_memory_error(search: Callable[[], T]) -> T:
    """Run a FAISS search. If memory runs out, release torch's cached memory and run it once more.

    Raises:
        DeviceLostError: memory runs out again. Every later search would fail as well.
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
