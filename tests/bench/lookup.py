"""The cost of a lookup alone: beside two simple baselines, and with each part of the prefilter taken out.

CPU milliseconds of `KeyIndex.nearest_within_radius` for one batch, on one thread. All variants take turns on each
batch, and each number is a median over batches. Every variant gives the same entries; the benchmark fails if one does
not.

Baselines:

- `pca-range`: 64 principal directions, FAISS range search within the largest radius, exact distances to the results.
- `faiss-knn`: FAISS k-NN over all keys, exact distances, and more neighbours until an error bound proves the winner.

Ablations; each is the full lookup without one part:

- `always-coarse-codes`: stage 1 runs even while it settles few queries.
- `no-coarse-codes`: without stage 1. Every key is bounded by the codes of 127 directions.
- `no-fine-codes`: without stage 2. The codes of 63 directions are the only ones.
- `no-products`: without stage 3. A query with too many survivors searches all keys.
- `no-short-lists`: stage 2 checks every key, even if stage 1 leaves few.
- `no-radius-floor`: small radii do not count as `Prefilter.min_radius`.
- `no-narrowing`: exact distances to all candidates, without the sums of squares in float32 first.
- `no-counting`: survivors are always listed before they are counted.
"""

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import faiss
import numpy as np
import torch

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.search import exact_distances, prefilter, projection, quantized_bounds
from gracestream.pipeline.search.key_search import NO_SLOT, FaissOnHost
from tests.bench.codebooks import filled, queries, radii_of, stored
from tests.bench.device import timed
from tests.bench.framework import BenchError, Options, Row
from tests.bench.models import BenchModel, load_known

REPEATS = {1: 80, 32: 12}
"""Batches of each size."""

COUNTS = {"10k": 10_000, "100k": 100_000, "1M": 1_000_000}
REAL_KEYS, OTHER_QUERIES = 2048, 512
MODELS = (
    BenchModel("encoder", partial(load_known, "smollm2", "encoder")),
    BenchModel("smollm2", partial(load_known, "smollm2", "last")),
    BenchModel("minilm", partial(load_known, "intent", "first")),
)
"""Sources of queries: the sentence encoder (the default of causal models), a layer of SmolLM2, a classifier's layer."""

PCA_DIMENSIONS = 64
ROOM = 1 + 1e-3
"""Factor on distances in few directions, for rounding."""

SLOW_EACH = 4
"""A baseline runs one batch in so many."""

MAX_BASELINE_PAIRS = 4_000_000
"""A baseline is not measured if a batch has more pairs of query and key: it takes seconds."""

CPU = torch.device("cpu")

Search = Callable[[np.ndarray], np.ndarray]
"""Maps queries (B, D) to the matching slots (B)."""


class PcaRangeSearch:
    """The simplest exact filter: range search in a few principal directions, then exact distances.

    A projection on orthonormal directions shortens every distance, so keys within the largest radius are all found.
    """

    def __init__(self, codebook: Codebook) -> None:
        self._keys_ND, self._radii_N = codebook.keys_ND, codebook.radii_N
        width = self._keys_ND.shape[1]
        sample_MD = np.ascontiguousarray(self._keys_ND[:: -(-len(self._keys_ND) // 4096)])
        self._pca = faiss.PCAMatrix(width, min(PCA_DIMENSIONS, width, len(sample_MD)))
        self._pca.train(sample_MD)
        self._index = faiss.IndexFlatL2(self._pca.d_out)
        self._index.add(self._pca.apply_py(self._keys_ND))
        self._max_radius = float(self._radii_N.max())

    def __call__(self, queries_BD: np.ndarray) -> np.ndarray:
        """The matching slots (B)."""
        max_square = (self._max_radius * ROOM) ** 2
        limits, squares, slots = self._index.range_search(self._pca.apply_py(queries_BD), max_square)
        found_B = np.full(len(queries_BD), NO_SLOT)
        for row, query_D in enumerate(queries_BD):
            near = slice(limits[row], limits[row + 1])
            slots_M, squares_M = slots[near], squares[near]
            containing_M = slots_M[squares_M <= (self._radii_N[slots_M] * ROOM) ** 2]
            distances_M = self._distances(query_D, containing_M)
            if (distances_M < self._radii_N[containing_M]).any():
                nearer_M = slots_M[squares_M <= (distances_M.min() * ROOM) ** 2]
                distances_M = self._distances(query_D, nearer_M)
                place = distances_M.argmin()
                if distances_M[place] < self._radii_N[nearer_M[place]]:
                    found_B[row] = nearer_M[place]
        return found_B

    def _distances(self, query_D: np.ndarray, slots_M: np.ndarray) -> np.ndarray:
        if not len(slots_M):
            return np.empty(0, np.float32)
        keys_1MD = torch.from_numpy(self._keys_ND[slots_M])[None]
        distances_M: np.ndarray = exact_distances(torch.from_numpy(query_D)[None], keys_1MD)[0].numpy()
        return distances_M


@dataclass(frozen=True, slots=True)
class Variant:
    """A lookup with some attributes replaced while it is built and while it runs."""

    name: str
    replaced: Sequence[tuple[Any, str, Any]] = ()

    def wrap(self, make: Callable[[], Search]) -> Search:
        """The lookup that `make` builds, with the attributes replaced."""
        with self._applied():
            search = make()

        def searched(queries_BD: np.ndarray) -> np.ndarray:
            with self._applied():
                return search(queries_BD)

        return searched

    def _applied(self) -> ExitStack:
        stack = ExitStack()
        for owner, name, value in self.replaced:
            stack.enter_context(patch.object(owner, name, value))
        return stack


def _without_products(_norms: Any, products: Any, _limit: int) -> list[None]:
    return [None] * len(products.query_norm_B)


def _without_narrowing(_index: Any, _queries_BD: Any, slots: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    return dict(slots)


NEVER = 2**62

ABLATIONS = (
    Variant("no-coarse-codes", [(prefilter, "COARSE_DIMENSIONS", projection.MAX_DIMENSIONS)]),
    Variant(
        "always-coarse-codes",
        [(prefilter, "MIN_SETTLED_SHARE", 0.0), (prefilter, "MIN_SETTLED_SHARE_OF_BATCH", 0.0)],
    ),
    Variant("no-fine-codes", [(projection, "MAX_DIMENSIONS", prefilter.COARSE_DIMENSIONS)]),
    Variant("no-products", [(quantized_bounds.KeyNorms, "nearest_candidates", _without_products)]),
    Variant("no-short-lists", [(prefilter, "SHORT_LIST_DIVISOR", NEVER)]),
    Variant("no-radius-floor", [(prefilter, "MIN_RADIUS_QUANTILE", 0.0)]),
    Variant("no-narrowing", [(KeyIndex, "_narrow_candidates", _without_narrowing)]),
    Variant("no-counting", [(quantized_bounds, "DENSE_DIVISOR", 0)]),
)


def run(options: Options) -> Iterator[Row]:
    """The rows of every source of queries with 10k, 100k and 1M keys; `--quick`: with 10k keys."""
    query_count = max(size * repeats for size, repeats in REPEATS.items())
    for bench_model in MODELS:
        model = bench_model.load("cpu")
        prompts = bench_model.prompts(model, REAL_KEYS + OTHER_QUERIES + query_count)
        real_ND = queries(model, prompts[:REAL_KEYS])
        others_RD = queries(model, prompts[REAL_KEYS : REAL_KEYS + OTHER_QUERIES])
        queries_QD = queries(model, prompts[REAL_KEYS + OTHER_QUERIES :])
        fingerprint, layer = model.fingerprint, model.layer
        del model, prompts
        for size, count in list(COUNTS.items())[: 1 if options.quick else None]:
            keys_ND = stored(real_ND, count)
            codebook = filled(fingerprint, layer, keys_ND, radii_of(keys_ND, others_RD), 1)
            for batch in REPEATS:
                yield from lookup_rows(f"lookup/{bench_model.name}/{size}/batch{batch}", queries_QD, codebook, batch)
            del codebook, keys_ND
            gc.collect()


def lookup_rows(name: str, queries_QD: np.ndarray, codebook: Codebook, batch: int) -> Iterator[Row]:
    """Rows of one codebook and batch size: milliseconds of the lookup, of the baselines and of each ablation.

    Raises:
        BenchError: a variant found other entries.
    """
    batches = [queries_QD[start : start + batch] for start in range(0, batch * REPEATS[batch], batch)]
    batches = [rows for rows in batches if len(rows) == batch]
    full = partial(_build, codebook)
    searches = {"lookup": full(), **{variant.name: variant.wrap(full) for variant in ABLATIONS}}
    if batch * len(codebook) <= MAX_BASELINE_PAIRS:
        searches["pca-range"] = PcaRangeSearch(codebook)
        searches["faiss-knn"] = partial(_slots, KeyIndex(codebook, CPU, FaissOnHost))
    seconds = _take_turns(codebook, searches, batches)
    for variant, spent in seconds.items():
        yield Row(f"{name}/{variant}", 1000 * statistics.median(spent), "ms")
    gc.collect()


def _build(codebook: Codebook) -> Search:
    index = KeyIndex(codebook, CPU)
    index.nearest_within_radius(torch.zeros(1, codebook.keys_ND.shape[1]))  # encodes all keys
    return partial(_slots, index)


def _slots(index: KeyIndex, queries_BD: np.ndarray) -> np.ndarray:
    slots_B: np.ndarray = index.nearest_within_radius(torch.from_numpy(queries_BD)).slots_B.numpy()
    return slots_B


def _take_turns(
    codebook: Codebook, searches: Mapping[str, Search], batches: Sequence[np.ndarray]
) -> dict[str, list[float]]:
    """CPU seconds of each search for each batch that it ran. The first round warms up.

    The order changes with each batch, so that no search always runs after the same one.
    """
    expected = [searches["lookup"](queries_BD) for queries_BD in batches]
    names = list(searches)
    seconds: dict[str, list[float]] = {variant: [] for variant in searches}
    for number in range(-1, len(batches)):
        queries_BD, expected_B = batches[number], expected[number]
        for variant in names[number % len(names) :] + names[: number % len(names)]:
            if variant in ("pca-range", "faiss-knn") and number % SLOW_EACH:
                continue
            spent, found_B = timed(CPU, partial(searches[variant], queries_BD))
            if not _same_matches(codebook, found_B, expected_B):
                raise BenchError(f"{variant} found other entries: {found_B} instead of {expected_B}")
            if number >= 0:
                seconds[variant].append(spent)
    return seconds


def _same_matches(codebook: Codebook, found_B: np.ndarray, expected_B: np.ndarray) -> bool:
    """True if both name the same entries, or others with the same key: a baseline does not know the rule for ties."""
    matched_B = expected_B != NO_SLOT
    same_rows = np.array_equal(found_B != NO_SLOT, matched_B)
    return same_rows and np.array_equal(codebook.keys_ND[found_B[matched_B]], codebook.keys_ND[expected_B[matched_B]])
