"""Lower bounds on distances, which rule keys out without their exact distance (docs/explanation/method.md, lookup).

Each bound returns the slots it cannot exclude: keys that may be within their own radius of the query, or within a
distance given per query. The bounds come from int8 codes of projected points (`Int8Codes`) or from inner products with
the keys themselves (`KeyNorms`).

Guarantees:

1. A key within the radius, or within the distance, is never excluded: each bound allows for every rounding on the way.
2. A number that is not finite excludes nothing.

Not promised: that a slot that survives is within the radius. The caller computes its exact distance.

Derivation, used at every line below. Its symbols in the code:

| symbol | meaning | code |
|---|---|---|
| y, q | stored point of a key, point of the query | `coded_MP`, `coded_BP` |
| e | how far y may be from the key's true point | `offset_M` |
| f | how far q may be from the query's true point | `slack_B`, plus the rounding to codes |
| w | the key's reach | `reach_M` |
| s | the query's reach | `BoundQuery.query_reach_B`, `reach_B` |
| rho | relative allowance for rounding | `_rounding_bound` |

A stored point y is off the true point of a key by at most e. A query point q is
off the true one by at most f. A key within r of the query then satisfies |q - y| <= w + s by the triangle inequality.
Here w is the key's reach and s the query's reach, with w + s = r + e + f: the radius r of a key counts in w, and a
distance given per query counts in s. Squared and rearranged:

    margin = q.y - (|q|^2 + |y|^2) / 2 + (w^2 + s^2) / 2 + w s >= 0

A slot survives unless its computed margin is negative, so the computed margin must not be smaller than the exact one.
Let u = eps / 2. A float32 sum of P products is off by at most P u of the sum of their magnitudes, in any order. Also
2 |q| |y| <= |q|^2 + |y|^2. So q.y - (|q|^2 + |y|^2) / 2 is off by at most P eps (|q|^2 + |y|^2) / 2. Likewise the terms
in w and s are off by a few eps (w^2 + s^2). Let rho be `_rounding_bound(P)` = 8 (P + 8) eps. The code multiplies
|q|^2 and |y|^2 by 1 - rho, and w^2 and s^2 by 1 + rho. This adds rho (|q|^2 + |y|^2 + w^2 + s^2) / 2 to the margin,
which is several times the error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gracestream.pipeline.search.projection import norm_underflow, row_norms

TILE_ELEMENTS = 2**18
"""Elements of one tile of a product, so that the tile stays in the cache."""

MIN_TILE_ROWS = 1024
"""Fewest keys per product."""

INT8_MAX = 127
"""Codes are whole numbers from -127 to 127."""

CLIP_QUANTILE = 1e-4
"""Share of a sample's numbers beyond the range of codes. Their points get a large offset and are rarely excluded.

A wider range would make the codes of all other points coarser.
"""

DENSE_DIVISOR = 32
"""Where more than 1 in 32 pairs survives, survivors are counted before they are listed: a list may be too large."""

TIE_REL_ERROR = 16 * 2.0**-23
"""Slack for ties: upper bound on the difference of half squared distances that round to the same float32.

In units of |q|^2 + |k|^2. An exact distance is off by at most 1.01 eps of itself (`exact_distances`). So the half
squares of equal distances d differ by at most 4.1 eps d^2 / 2, and d^2 / 2 <= |q|^2 + |k|^2. The shift by the centre
displaces q by u |q|, which changes each half square by at most eps (|q|^2 + |k|^2). Together this is under 7 eps, where
eps = 2^-23. Without the slack a tied key could be excluded, and the tie would not go to the first entry id.
"""

_EPS = float(np.finfo(np.float32).eps)
_TINY = float(np.finfo(np.float32).tiny)
"""Smallest normal float32. A result below it may be rounded to 0, and loses at most this."""

_NORM_INFLATION = 1 + 1e-5
"""Factor that makes a computed float32 norm, radius or distance an upper bound.

The norm of P <= 128 numbers loses at most (P / 2 + 2) u < 4e-6 of itself. An exact distance loses less. Norms of
whole keys may lose more, but they enter only the error of a product, with a bound at least eight times too large.
"""

_CPU_CAPABILITIES: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
"""Empty below torch 2.12, which lacks `get_capabilities`; products then take the slower, portable path."""

_HAS_INT8_MATMUL = any(_CPU_CAPABILITIES.get(name, False) for name in ("avx512_vnni", "avx_vnni"))
"""True if the CPU multiplies int8 exactly and fast. Otherwise `int8_matmul` converts the codes to float32."""


@dataclass(frozen=True, slots=True)
class BoundQuery:
    """The question that a bound answers for B queries.

    Attributes:
        slack_B: How far the query's point may be from its true point (f), plus any distance that the caller adds.
        max_distance_B: The distance per query; None: each key's own radius decides.
    """

    slack_B: np.ndarray
    max_distance_B: np.ndarray | None = None

    def select_rows(self, indices: list[int]) -> "BoundQuery":
        """The same question for the queries at these indices."""
        return BoundQuery(self.slack_B[indices], None if self.max_distance_B is None else self.max_distance_B[indices])

    def widen(self, slack_B: np.ndarray) -> "BoundQuery":
        """The same question with `slack_B` added to the slack."""
        return BoundQuery(self.slack_B + slack_B, self.max_distance_B)

    @property
    def constants_index(self) -> int:
        """Index into `Int8Codes._key_constants`: 0 for radii, 1 for distances."""
        return 0 if self.max_distance_B is None else 1

    def query_reach_B(self) -> np.ndarray:
        """The query's reach s: its slack, plus its distance where one is given."""
        return (
            self.slack_B
            if self.max_distance_B is None
            else self.slack_B + self.max_distance_B * np.float32(_NORM_INFLATION)
        )


class Int8Codes:
    """Points as codes of P int8 numbers, times one scale, relative to an origin. A product of two codes is exact."""

    def __init__(self) -> None:
        self._origin_P = np.zeros(1, np.float32)
        self._scale = np.float32(1)
        self._codes = np.empty((0, 0), np.int8)
        self._key_constants = np.empty((2, 0, 2), np.float32)
        """Per slot (w^2 - |y|^2) / 2 and w. Index 0: w includes the key's radius. Index 1: w is the offset alone."""

    def fit(self, sample_MP: np.ndarray) -> None:
        """Choose origin and scale from a sample of points (M, P). Rows that are not finite are ignored."""
        sample_MP = sample_MP[np.isfinite(sample_MP).all(axis=1)]
        if not len(sample_MP):
            return
        self._origin_P = np.median(sample_MP, axis=0)
        scale = np.float32(np.quantile(np.abs(sample_MP - self._origin_P), 1 - CLIP_QUANTILE) / INT8_MAX)
        if np.isfinite(scale) and scale > _TINY:
            self._scale = scale

    def write(self, slots_M: np.ndarray, points_MP: np.ndarray, slack_M: np.ndarray, radii_M: np.ndarray) -> None:
        """Encode the points of some slots.

        Args:
            slots_M: The slots.
            points_MP: The projected keys.
            slack_M: Bounds on the errors of these points.
            radii_M: The radii of the keys.
        """
        width = points_MP.shape[1]
        if (needed := int(slots_M.max()) + 1) > len(self._codes) or self._codes.shape[1] != width:
            capacity = max(64, 2 * needed)
            self._codes = resize_array(self._codes, (capacity, width))
            self._key_constants = resize_array(self._key_constants, (2, capacity, 2))
        points_MP, slack_M = self._subtract_origin(points_MP, slack_M)
        codes_MP = np.clip(np.nan_to_num(np.rint(points_MP / self._scale)), -INT8_MAX, INT8_MAX).astype(np.int8)
        self._codes[slots_M] = codes_MP
        coded_MP = codes_MP * self._scale
        # The offset e: error of the point, plus its distance to its code. The computed `coded_MP` is off y by at most
        # u |y|. That adds 2 (w + s) u |y| <= u (2 w^2 + 2 s^2 + |y|^2) to the square, which rho covers.
        offset_M = slack_M + row_norms(points_MP - coded_MP) * np.float32(_NORM_INFLATION) + norm_underflow(width)
        rounding = np.float32(_rounding_bound(width))
        squares_M = np.einsum("mp,mp->m", coded_MP, coded_MP) * (1 - rounding)
        # w for radii, and w for distances. The radius is inflated, since a rounded exact distance may be just below it.
        reaches: tuple[np.ndarray, ...] = offset_M + radii_M * np.float32(_NORM_INFLATION), offset_M
        for constants_index, reach_M in enumerate(reaches):
            self._key_constants[constants_index, slots_M, 0] = _nan_unless_finite(
                (reach_M * reach_M * (1 + rounding) - squares_M) / 2
            )
            self._key_constants[constants_index, slots_M, 1] = reach_M

    def find_survivors(
        self, points_BP: np.ndarray, bound_query: BoundQuery, slot_count: int, limit: int
    ) -> list[np.ndarray | None]:
        """For each query, the sorted slots below `slot_count` that survive; None if they are more than `limit`."""
        quantized_query = _QuantizedQuery(*self._shift_query(points_BP, bound_query), self._scale)
        codes, key_constants = (
            torch.from_numpy(self._codes),
            torch.from_numpy(self._key_constants[bound_query.constants_index]),
        )
        return _collect_survivors(
            lambda chunk: quantized_query.margins(codes[chunk], key_constants[chunk]),
            len(points_BP),
            slot_count,
            _tile_rows(len(points_BP)),
            limit,
        )

    def filter_slots(
        self, slots: Sequence[np.ndarray], points_BP: np.ndarray, bound_query: BoundQuery
    ) -> list[np.ndarray]:
        """The survivors among the given slots of each query. `slots` has one array per query."""
        margins = self._margins_of_slots(slots, points_BP, bound_query)
        # `~(margin < 0)` instead of `margin >= 0`: a NaN survives.
        return [row_slots[~(row_margins < 0)] for row_slots, row_margins in zip(slots, margins, strict=True)]

    def top_k_by_bound(self, slots: Sequence[np.ndarray], points_BP: np.ndarray, count: int) -> list[np.ndarray]:
        """For each query, the `count` of its given slots with the largest margins, or all of fewer, unsorted.

        These are likely, but not certainly, the nearest keys.
        """
        zeros_B = np.zeros(len(points_BP), np.float32)
        margins = self._margins_of_slots(slots, points_BP, BoundQuery(zeros_B, zeros_B))
        return [
            row_slots if len(row_slots) <= count else row_slots[np.argpartition(-row_margins, count - 1)[:count]]
            for row_slots, row_margins in zip(slots, margins, strict=True)
        ]

    def _margins_of_slots(
        self, slots: Sequence[np.ndarray], points_BP: np.ndarray, bound_query: BoundQuery
    ) -> list[np.ndarray]:
        """Margins for the given slots of each query, in the order of the slots."""
        key_constants = self._key_constants[bound_query.constants_index]

        def margins(row: int, slots_M: np.ndarray) -> np.ndarray:
            point, question = self._shift_query(points_BP[[row]], bound_query.select_rows([row]))
            constants_M2 = torch.from_numpy(key_constants.take(slots_M, axis=0))
            codes_MP = torch.from_numpy(self._codes.take(slots_M, axis=0))
            return _QuantizedQuery(point, question, self._scale).margins(codes_MP, constants_M2)[:, 0].numpy()

        return [margins(row, slots_M) for row, slots_M in enumerate(slots)]

    def _shift_query(self, points_BP: np.ndarray, bound_query: BoundQuery) -> tuple[np.ndarray, BoundQuery]:
        points_BP, slack_B = self._subtract_origin(points_BP, bound_query.slack_B)
        return points_BP, BoundQuery(slack_B, bound_query.max_distance_B)

    def _subtract_origin(self, points_MP: np.ndarray, slack_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Points relative to the origin, and their slack with the rounding of this subtraction.

        The difference is off by at most u of its norm. 2 eps is four times that, and covers the rounding of the norm.
        """
        points_MP = points_MP - self._origin_P
        return points_MP, slack_M + np.float32(2 * _EPS) * row_norms(points_MP)


class _QuantizedQuery:
    """B queries as int8 codes, each with its own scale.

    Margins are computed in units of the product of both scales, so that q.y is the exact product of the two codes:

        margin = q.y + w s + (w^2 - |y|^2) / 2 - threshold, with threshold = (|q|^2 - s^2) / 2

    Key constants and threshold contain rho (module docstring).
    """

    def __init__(self, points_BP: np.ndarray, bound_query: BoundQuery, scale: np.float32) -> None:
        largest_B = np.abs(points_BP).max(axis=1)
        scale_B = np.where(largest_B > 0, largest_B, np.float32(1)) / np.float32(INT8_MAX)
        codes_BP = np.rint(points_BP / scale_B[:, None])
        # Where a number is not finite the code is arbitrary, and the query's threshold is NaN.
        self._codes_PB = torch.from_numpy(np.ascontiguousarray(codes_BP.T.astype(np.int8)))
        coded_BP = codes_BP * scale_B[:, None]
        reach_B = bound_query.query_reach_B() + row_norms(points_BP - coded_BP) * np.float32(_NORM_INFLATION)
        reach_B = reach_B + norm_underflow(points_BP.shape[1])
        rounding = np.float32(_rounding_bound(points_BP.shape[1]))
        # A subnormal product of scales is off by at most 2^-150. Times a product of codes (under 2^21) it is tiny / 8.
        # A product of scales that is 0 makes the threshold infinite, hence NaN, so it excludes nothing.
        scale_product_B = scale * scale_B
        squares_B = np.einsum("bp,bp->b", coded_BP, coded_BP)
        # 2 tiny: w^2 and s^2 lose at most tiny each where a CPU flushes subnormals to 0. Then a subnormal product of
        # scales is 0, too. With gradual underflow they lose far less, which leaves room for the tiny / 8 above. Where
        # |q|^2 or |y|^2 underflows, the margin grows.
        threshold_B = _nan_unless_finite(
            ((1 - rounding) * squares_B - (1 + rounding) * reach_B * reach_B - 2 * _TINY) / (2 * scale_product_B)
        )
        self._negated_threshold_1B = torch.from_numpy(-threshold_B[None])
        self._factors_2B = torch.from_numpy(np.stack([1 / scale_product_B, reach_B / scale_product_B]))

    def margins(self, codes_MP: torch.Tensor, constants_M2: torch.Tensor) -> torch.Tensor:
        """Margins (M, B) of M slots, given their codes and key constants. A negative margin excludes the slot."""
        margins_MB = torch.addmm(self._negated_threshold_1B, constants_M2, self._factors_2B)
        return margins_MB.add_(int8_matmul(codes_MP, self._codes_PB))


class KeyNorms:
    """Bounds from inner products with the keys themselves. Per key: its norm and its squared distance to the centre.

    The query q is relative to the centre c, the keys are as they are stored: q.k = q.(k - c) + q.c. The product is off
    by at most rho |q| |k|. The constant q.c is subtracted.
    """

    def __init__(self) -> None:
        self._key_constants = np.empty((0, 2), np.float32)

    def write(self, slots_M: np.ndarray, keys_MD: np.ndarray, center_D: np.ndarray) -> None:
        """Store norm and squared distance to the centre for the keys (M, D) of these slots."""
        if (needed := int(slots_M.max()) + 1) > len(self._key_constants):
            self._key_constants = resize_array(self._key_constants, (max(64, 2 * needed), 2))
        self._key_constants[slots_M, 0] = row_norms(keys_MD) * np.float32(_NORM_INFLATION)
        centred_MD = keys_MD - center_D
        self._key_constants[slots_M, 1] = np.einsum("md,md->m", centred_MD, centred_MD)

    def find_survivors(
        self, products: "InnerProducts", radii_N: np.ndarray, bound_query: BoundQuery, limit: int
    ) -> list[np.ndarray | None]:
        """For each query, the sorted slots that survive; None if they are more than `limit`.

        `radii_N` are the radii of all keys; they count where `bound_query` gives no distance.
        """
        rounding, norm_B = products.rounding_error, products.query_norm_B
        # The shift by the centre displaces the query by at most u |q|; 2 eps |q| also covers the rounding of the norm.
        query_reach_B = bound_query.query_reach_B() + np.float32(2 * _EPS) * norm_B
        threshold_B = (
            (1 - rounding) * norm_B * norm_B - (1 + rounding) * query_reach_B * query_reach_B
        ) / 2 - products.underflow_error
        negated_threshold_1B = torch.from_numpy(
            -_nan_unless_finite((threshold_B + products.center_offset_B).astype(np.float32))[None]
        )
        factors_3B = torch.from_numpy(np.stack([np.ones_like(norm_B), query_reach_B, rounding * norm_B]))

        def margins(chunk: slice) -> torch.Tensor:
            norm_M, squares_M = self._key_constants[: products.key_count][chunk].T
            # The key's reach w is its radius or 0: a key is not displaced. The rounding of k - c is part of rho.
            reach_M = (
                np.zeros_like(norm_M)
                if bound_query.max_distance_B is not None
                else radii_N[chunk] * np.float32(_NORM_INFLATION)
            )
            constant_M = _nan_unless_finite((reach_M * reach_M * (1 + rounding) - squares_M * (1 - rounding)) / 2)
            constants_M3 = torch.from_numpy(np.column_stack([constant_M, reach_M, norm_M]))
            # constant + w s + (error of the product, so that the margin is an upper bound) - threshold + product.
            return torch.addmm(negated_threshold_1B, constants_M3, factors_3B).add_(products.compute(chunk))

        return _collect_survivors(margins, len(norm_B), products.key_count, _tile_rows(len(norm_B)), limit)

    def nearest_candidates(self, products: "InnerProducts", limit: int) -> list[np.ndarray | None]:
        """For each query, sorted slots that include the nearest key and all keys tied with it; None: more than `limit`.

        Keys are tied if their exact distances are the same float32. Half the squared distance is |q|^2 / 2 - c(k), with
        the closeness c(k) = q.k - |k|^2 / 2, all relative to the centre. (A float32 product adds the same q.c for each
        key.) The product gives a lower and an upper bound on the closeness of each key. A key survives if its upper
        bound, plus the slack for ties, reaches the best lower bound of all keys so far.
        """
        error_B = products.rounding_error * products.query_norm_B
        # The part of the slack in |k|^2 is not added here, as `square_error_M` contains it: rho |k|^2 / 2 is
        # 4 (D + 8) eps |k|^2, and exceeds the error of |k|^2 / 2, below (D + 4) eps |k|^2 / 2, by over 16 eps |k|^2.
        tie_slack_B = torch.from_numpy(np.float32(TIE_REL_ERROR) * products.query_norm_B * products.query_norm_B)
        factors_2B = torch.from_numpy(np.stack([np.ones_like(error_B), error_B]))
        best_lower_B = torch.full((len(error_B),), -torch.inf)

        def margins(chunk: slice) -> torch.Tensor:
            nonlocal best_lower_B
            norm_M, squares_M = self._key_constants[: products.key_count][chunk].T
            # Error of |k|^2 / 2, and of everything that underflows.
            square_error_M = squares_M * products.rounding_error / 2 + products.underflow_error
            upper_M2 = torch.from_numpy(np.column_stack([square_error_M - squares_M / 2, norm_M]))
            gap_M2 = torch.from_numpy(np.column_stack([2 * square_error_M, 2 * norm_M]))
            # Upper bound: -|k|^2 / 2 + its error + error of the product + product. The lower bound is two errors below.
            upper_MB = (upper_M2 @ factors_2B).add_(products.compute(chunk))
            lower_MB = (upper_MB - gap_M2 @ factors_2B).nan_to_num_(nan=-torch.inf, posinf=-torch.inf)
            # `best_lower_B` only grows, so an earlier chunk keeps more slots than needed, never fewer.
            best_lower_B = torch.maximum(best_lower_B, lower_MB.amax(dim=0))
            return upper_MB.sub_(best_lower_B - tie_slack_B)

        return _collect_survivors(margins, len(error_B), products.key_count, _tile_rows(len(error_B)), limit)


class InnerProducts:
    """Inner products of centred queries with all keys, computed in chunks.

    Attributes:
        key_count: Number of keys.
        rounding_error: Relative error rho of squares, and of products in units of |q| |k|.
        underflow_error: Absolute error of squares and products that underflow.
        query_norm_B: Norms of the centred queries.
        center_offset_B: Lower bound on q.c, by which a product exceeds the product with the centred key.
    """

    def __init__(self, keys_ND: np.ndarray, center_D: np.ndarray, queries_BD: np.ndarray) -> None:
        self.key_count, width = keys_ND.shape
        centred_BD = queries_BD - center_D
        self._keys, self._center, self._queries = map(torch.from_numpy, (keys_ND, center_D, centred_BD))
        self.rounding_error = np.float32(_rounding_bound(width))
        # Each of the D terms of a product may underflow and lose tiny, and so may (w^2 + s^2) / 2. In
        # `nearest_candidates` |k|^2 / 2 loses at most D tiny / 2 instead.
        self.underflow_error = np.float32(2 * width * _TINY)
        self.query_norm_B = row_norms(centred_BD)
        # The float32 sums with this offset are off by a few u |q| |c|; 4 eps is 8 u. Subtracted here, the error can
        # only enlarge the margin.
        offset_error_B = 4 * _EPS * self.query_norm_B * np.linalg.norm(center_D)
        self.center_offset_B = centred_BD.astype(np.float64) @ center_D.astype(np.float64) - offset_error_B

    def compute(self, chunk: slice) -> torch.Tensor:
        """Products (M, B) with the keys of a range of slots."""
        return (self._queries @ self._keys[chunk].T).T


def resize_array(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A new array of this shape: a copy of the old content if one dimension changes, zeros if more do."""
    larger = np.zeros(shape, array.dtype)
    if sum(old != new for old, new in zip(array.shape, shape, strict=True)) == 1:
        larger[tuple(slice(length) for length in array.shape)] = array
    return larger


def int8_matmul(codes_MP: torch.Tensor, codes_PB: torch.Tensor) -> torch.Tensor:
    """The exact product of int8 codes (M, P) and (P, B)."""
    if _HAS_INT8_MATMUL:
        return torch._int_mm(codes_MP, codes_PB)  # noqa: SLF001  (torch has no public product of int8)
    # Exact in float32 as well, in any order: every partial sum is a whole number of at most 128 * 127^2 < 2^24.
    return codes_MP.float() @ codes_PB.float()


def _collect_survivors(
    compute_margins: Callable[[slice], torch.Tensor], query_count: int, slot_count: int, chunk_size: int, limit: int
) -> list[np.ndarray | None]:
    """For each query, the sorted slots with no negative margin, computed for `chunk_size` slots at a time.

    None for a query with more than `limit` survivors. Once all queries have more, the remaining slots are skipped.
    `compute_margins` maps a range of slots to margins (M, B).
    """
    survivors_B, over_limit_B = np.zeros(query_count, np.int64), np.zeros(query_count, bool)
    places_by_chunk = [np.empty(0, np.int64)]
    for start in range(0, slot_count, chunk_size):
        ruled_out_MB = np.less(compute_margins(slice(start, min(start + chunk_size, slot_count))).numpy(), 0)
        survives_MB = np.logical_not(ruled_out_MB, out=ruled_out_MB)  # by negation, so that NaN survives
        if np.count_nonzero(survives_MB) * DENSE_DIVISOR > survives_MB.size:
            survivors_B += survives_MB.sum(axis=0)
            over_limit_B |= survivors_B > limit
            if over_limit_B.all():
                return [None] * query_count
            survives_MB[:, over_limit_B] = False
        places_by_chunk.append(np.flatnonzero(survives_MB) + start * query_count)
    places = np.concatenate(places_by_chunk)
    slots = places // query_count  # a place is slot * B + row
    rows = (places - slots * query_count).astype(
        np.min_scalar_type(query_count)
    )  # numpy sorts numbers of up to 16 bits by radix, in linear time
    order = np.argsort(rows, kind="stable")
    slots_by_row = np.split(slots[order], np.cumsum(np.bincount(rows, minlength=query_count))[:-1])
    return [
        None if over_limit or len(row_slots) > limit else row_slots
        for row_slots, over_limit in zip(slots_by_row, over_limit_B, strict=True)
    ]


def _tile_rows(query_count: int) -> int:
    """Keys per product, so that the margins of one product stay in the cache."""
    return max(MIN_TILE_ROWS, TILE_ELEMENTS // max(1, query_count))


def _rounding_bound(width: int) -> float:
    """Rho for sums of `width` products (module docstring)."""
    return 8 * (width + 8) * _EPS


def _nan_unless_finite(numbers_M: np.ndarray) -> np.ndarray:
    """NaN in place of infinite numbers: a margin computed from it is NaN, which excludes nothing."""
    return np.where(np.isfinite(numbers_M), numbers_M, np.float32(np.nan))
