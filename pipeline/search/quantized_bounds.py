"""Lower bounds on distances, by which points are ruled out without a look at them in full (design, section 4, Lookup).

A bound is asked for the slots that are left, as it cannot rule them out: those whose key may lie within its own radius
of a query, or within a distance that is the query's. It allows for every rounding on the way, and a number that is not
finite rules nothing out.

Rounding. Where a point y stands for a key and is off it by at most e, and a query's q likewise by s, a key within r of
the query has |q - y| <= r + e + s. In P numbers |q|^2 + |y|^2 - 2 q.y is off by at most `_rounding(P)` (|q|^2 + |y|^2),
and the same holds of the square of the sum of w = r + e and s; where r is the query's, it goes with s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gracestream.pipeline.search.projection import row_norms

TILE_ELEMENTS = 2**18
"""Numbers of a product that are looked at together: they stay in the cache."""

MIN_TILE_ROWS = 1024
"""Points of one product, at least."""

INT8_MAX = 127
"""The largest of the numbers that a code is made of."""

RESIDUAL_SCALE = 2 * INT8_MAX
"""What is left over of a number when it is rounded to a whole one, at most a half, is coded in such parts."""

CLIP_QUANTILE = 1e-4
"""The share of a sample's numbers that are beyond the scale. Their points are off by much, and looked at in full."""

MAX_GROUPED_SLOTS = 256
"""Slots of one query that are few enough to be looked at together with those of others."""

DENSE_DIVISOR = 32
"""Points left are many where one in so many is: they are counted then before they are told one by one."""

BF16_REL_ERROR = 3.1 * 2.0**-8
"""What a product in bfloat16 may be off by: each factor and the result by half a place, 2^-8; sums are in float32."""

MIN_QUERIES_FOR_BF16 = 4
"""Queries, at least, whose product with the keys is one in bfloat16: to convert keys for fewer takes as long."""

TIE_REL_ERROR = 16 * 2.0**-23
"""Squares of distances that are the same in float32, of differences in float32, differ by less, in parts of the squares
of the two lengths: those of keys are given as much room besides."""

_EPS = float(np.finfo(np.float32).eps)
_TINY = float(np.finfo(np.float32).tiny)
"""The least number of full precision."""

_NORM_INFLATION = 1 + 1e-5
"""What the rounding of a length may take from it."""

_CPU_CAPABILITIES: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
"""Empty below torch 2.12, which has no such function: the slower products are taken then."""

_HAS_INT8_MATMUL = any(_CPU_CAPABILITIES.get(name, False) for name in ("avx512_vnni", "avx_vnni"))
"""Whether products of int8 are exact and fast. Where they are not, codes are converted."""


@dataclass(frozen=True, slots=True)
class BoundQuery:
    """What is asked about B queries.

    Attributes:
        slack_B: How far the query's point may lie from the truth, and whatever is added to all radii or distances.
        max_distance_B: The distances; None: each key's own radius.
    """

    slack_B: np.ndarray
    max_distance_B: np.ndarray | None = None

    def select_rows(self, indices: list[int]) -> "BoundQuery":
        """What is asked about some of them."""
        return BoundQuery(self.slack_B[indices], None if self.max_distance_B is None else self.max_distance_B[indices])

    def widen(self, slack_B: np.ndarray) -> "BoundQuery":
        """The same of points that may lie so much farther from the truth."""
        return BoundQuery(self.slack_B + slack_B, self.max_distance_B)

    @property
    def constants_index(self) -> int:
        """0: radii are asked about, 1: distances."""
        return 0 if self.max_distance_B is None else 1

    def query_reach_B(self) -> np.ndarray:
        """What the query adds to w."""
        return (
            self.slack_B
            if self.max_distance_B is None
            else self.slack_B + self.max_distance_B * np.float32(_NORM_INFLATION)
        )


class Int8Codes:
    """Points as codes: P whole numbers of a byte, times one scale, from an origin. A product of codes is exact."""

    def __init__(self) -> None:
        self._origin_P = np.zeros(1, np.float32)
        self._scale = np.float32(1)
        self._codes = np.empty((0, 0), np.int8)
        self._key_constants = np.empty((2, 0, 2), np.float32)
        """Of each slot (w^2 - |y|^2) / 2 and w: with its radius, and with a distance of the query's."""

    def fit(self, sample_MP: np.ndarray) -> None:
        """Take an origin and a scale for points like these."""
        sample_MP = sample_MP[np.isfinite(sample_MP).all(axis=1)]
        if not len(sample_MP):
            return
        self._origin_P = np.median(sample_MP, axis=0)
        scale = np.float32(np.quantile(np.abs(sample_MP - self._origin_P), 1 - CLIP_QUANTILE) / INT8_MAX)
        if np.isfinite(scale) and scale > _TINY:
            self._scale = scale

    def write(self, slots_M: np.ndarray, points_MP: np.ndarray, slack_M: np.ndarray, radii_M: np.ndarray) -> None:
        """Take these points, of keys that have these radii and from whose truth they may be so far."""
        size = points_MP.shape[1]
        if (needed := int(slots_M.max()) + 1) > len(self._codes) or self._codes.shape[1] != size:
            room = max(64, 2 * needed)
            self._codes = resize_array(self._codes, (room, size))
            self._key_constants = resize_array(self._key_constants, (2, room, 2))
        points_MP, slack_M = self._subtract_origin(points_MP, slack_M)
        codes_MP = np.clip(np.nan_to_num(np.rint(points_MP / self._scale)), -INT8_MAX, INT8_MAX).astype(np.int8)
        self._codes[slots_M] = codes_MP
        coded_MP = codes_MP * self._scale
        off_M = slack_M + row_norms(points_MP - coded_MP) * np.float32(_NORM_INFLATION)
        rounding = np.float32(_rounding_bound(size))
        squares_M = np.einsum("mp,mp->m", coded_MP, coded_MP) * (1 - rounding)
        reaches: tuple[np.ndarray, ...] = off_M + radii_M * np.float32(_NORM_INFLATION), off_M
        for mode, reach_M in enumerate(reaches):
            self._key_constants[mode, slots_M, 0] = _nan_unless_finite(
                (reach_M * reach_M * (1 + rounding) - squares_M) / 2
            )
            self._key_constants[mode, slots_M, 1] = reach_M

    def find_survivors(
        self, points_BP: np.ndarray, bound_query: BoundQuery, slot_count: int, limit: int
    ) -> list[np.ndarray | None]:
        """For each query, the ascending slots below `slot_count` that survive; None if they are more than `limit`."""
        asking = _QuantizedQuery(*self._shift_query(points_BP, bound_query), self._scale)
        codes, beside = (
            torch.from_numpy(self._codes),
            torch.from_numpy(self._key_constants[bound_query.constants_index]),
        )
        step = max(MIN_TILE_ROWS, TILE_ELEMENTS // max(1, len(points_BP)))
        return _collect_survivors(
            lambda chunk: asking.margins(codes[chunk], beside[chunk]), len(points_BP), slot_count, step, limit
        )

    def filter_slots(
        self, slots: Sequence[np.ndarray], points_BP: np.ndarray, bound_query: BoundQuery
    ) -> list[np.ndarray]:
        """Those of some slots for each query that are left."""
        surpluses = self._margins_of_slots(slots, points_BP, bound_query)
        return [some[~(surplus < 0)] for some, surplus in zip(slots, surpluses, strict=True)]

    def top_k_by_bound(self, slots: Sequence[np.ndarray], points_BP: np.ndarray, count: int) -> list[np.ndarray]:
        """So many of some slots for each query, or all, whose points are closest to its own."""
        nothing_B = np.zeros(len(points_BP), np.float32)
        surpluses = self._margins_of_slots(slots, points_BP, BoundQuery(nothing_B, nothing_B))
        return [
            some if len(some) <= count else some[np.argpartition(-surplus, count - 1)[:count]]
            for some, surplus in zip(slots, surpluses, strict=True)
        ]

    def _margins_of_slots(
        self, slots: Sequence[np.ndarray], points_BP: np.ndarray, bound_query: BoundQuery
    ) -> list[np.ndarray]:
        """Of some slots for each query. Few of several queries are multiplied with all of these at once."""
        together = [row for row, some in enumerate(slots) if len(some) <= MAX_GROUPED_SLOTS]
        found = [np.empty(0, np.float32)] * len(slots)
        for rows in (together, *([row] for row, some in enumerate(slots) if len(some) > MAX_GROUPED_SLOTS)):
            some_M = np.concatenate([np.empty(0, np.int64), *(slots[row] for row in rows)])
            if len(some_M):
                asking = _QuantizedQuery(
                    *self._shift_query(points_BP[rows], bound_query.select_rows(rows)), self._scale, with_residual=True
                )
                codes, beside = (
                    self._codes.take(some_M, axis=0),
                    self._key_constants[bound_query.constants_index].take(some_M, axis=0),
                )
                surplus_MB = asking.margins(torch.from_numpy(codes), torch.from_numpy(beside)).numpy()
                counts = [len(slots[row]) for row in rows]
                own_M = surplus_MB[np.arange(len(some_M)), np.repeat(np.arange(len(rows)), counts)]
                for row, surplus in zip(rows, np.split(own_M, np.cumsum(counts)[:-1]), strict=True):
                    found[row] = surplus
        return found

    def _shift_query(self, points_BP: np.ndarray, bound_query: BoundQuery) -> tuple[np.ndarray, BoundQuery]:
        points_BP, slack_B = self._subtract_origin(points_BP, bound_query.slack_B)
        return points_BP, BoundQuery(slack_B, bound_query.max_distance_B)

    def _subtract_origin(self, points_MP: np.ndarray, slack_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Points from the origin, and how far they may lie from the truth then."""
        points_MP = points_MP - self._origin_P
        return points_MP, slack_M + np.float32(2 * _EPS) * row_norms(points_MP)


class _QuantizedQuery:
    """B queries as integer codes, each with its own scale; with `with_residual` a second code of the rest.

    Closeness is q.y + w s + (w^2 - |y|^2) / 2, over both scales; the surplus is what of it is above the least.
    """

    def __init__(
        self, points_BP: np.ndarray, bound_query: BoundQuery, scale: np.float32, *, with_residual: bool = False
    ) -> None:
        largest_B = np.abs(points_BP).max(axis=1)
        scale_B = np.where(largest_B > 0, largest_B, np.float32(1)) / np.float32(INT8_MAX)
        scaled_BP = points_BP / scale_B[:, None]
        codes_BP = np.rint(scaled_BP)
        self._residual_codes_PB = _round_to_int8(((scaled_BP - codes_BP) * RESIDUAL_SCALE).T) if with_residual else None
        self._codes_PB = _round_to_int8(codes_BP.T)
        coded_BP = (
            codes_BP + self._residual_codes_PB.numpy().T / np.float32(RESIDUAL_SCALE)
            if self._residual_codes_PB is not None
            else codes_BP
        )
        coded_BP = coded_BP * scale_B[:, None]
        added_B = bound_query.query_reach_B() + row_norms(points_BP - coded_BP) * np.float32(_NORM_INFLATION)
        rounding = np.float32(_rounding_bound(points_BP.shape[1]))
        both_B = scale * scale_B
        squares_B = np.einsum("bp,bp->b", coded_BP, coded_BP)
        least_B = _nan_unless_finite(
            ((1 - rounding) * squares_B - (1 + rounding) * added_B * added_B - 2 * _TINY) / (2 * both_B)
        )
        self._negated_threshold_1B = torch.from_numpy(-least_B[None])
        self._factors_2B = torch.from_numpy(np.stack([1 / both_B, added_B / both_B]))

    def margins(self, codes_MP: torch.Tensor, constants_M2: torch.Tensor) -> torch.Tensor:
        """Of M slots for each query, (M, B): those below 0 are ruled out."""
        surplus_MB = torch.addmm(self._negated_threshold_1B, constants_M2, self._factors_2B)
        if self._residual_codes_PB is not None:
            surplus_MB.add_(int8_matmul(codes_MP, self._residual_codes_PB), alpha=1 / RESIDUAL_SCALE)
        return surplus_MB.add_(int8_matmul(codes_MP, self._codes_PB))


def _round_to_int8(numbers_PB: np.ndarray) -> torch.Tensor:
    """Rounded to whole numbers of a byte each; what is not finite becomes anything."""
    return torch.from_numpy(np.ascontiguousarray(np.rint(numbers_PB).astype(np.int8)))


class KeyNorms:
    """The keys themselves: what is beside them is their length, and the square of that of their difference to a centre.

    A query q is taken from the centre c. Its product with a key k as it is is q.c more than one with k - c, and off by
    at most `_rounding(D)` of |q| |k|; for one in bfloat16 the key is taken from the centre as it is converted, and the
    product is off by `BF16_REL_ERROR` of |q| |k - c| besides. Closeness is q.k - |k|^2 / 2.
    """

    def __init__(self) -> None:
        self._key_constants = np.empty((0, 2), np.float32)

    def write(self, slots_M: np.ndarray, keys_MD: np.ndarray, center_D: np.ndarray) -> None:
        """Take what is beside these keys."""
        if (needed := int(slots_M.max()) + 1) > len(self._key_constants):
            self._key_constants = resize_array(self._key_constants, (max(64, 2 * needed), 2))
        self._key_constants[slots_M, 0] = row_norms(keys_MD) * np.float32(_NORM_INFLATION)
        centred_MD = keys_MD - center_D
        self._key_constants[slots_M, 1] = np.einsum("md,md->m", centred_MD, centred_MD)

    def find_survivors(
        self, products: "InnerProducts", radii_N: np.ndarray, bound_query: BoundQuery, limit: int
    ) -> list[np.ndarray | None]:
        """For each query, in ascending order, the slots that are left; None: more than `limit`."""
        rounding, length_B = products.rounding_error, products.query_norm_B
        added_B = bound_query.query_reach_B() + np.float32(2 * _EPS) * length_B
        least_B = (
            (1 - rounding) * length_B * length_B - (1 + rounding) * added_B * added_B
        ) / 2 - products.underflow_error
        least_1B = torch.from_numpy(-_nan_unless_finite((least_B + products.center_offset_B).astype(np.float32))[None])
        factors_3B = torch.from_numpy(np.stack([np.ones_like(length_B), added_B, products.product_error * length_B]))

        def surplus(chunk: slice) -> torch.Tensor:
            size_M, squares_M = self._norms_and_squares(products, chunk)
            reach_M = (
                np.zeros_like(size_M)
                if bound_query.max_distance_B is not None
                else radii_N[chunk] * np.float32(_NORM_INFLATION)
            )
            closer_M = _nan_unless_finite((reach_M * reach_M * (1 + rounding) - squares_M * (1 - rounding)) / 2)
            beside_M3 = torch.from_numpy(np.column_stack([closer_M, reach_M, size_M]))
            return torch.addmm(least_1B, beside_M3, factors_3B).add_(products.compute(chunk))

        return _collect_survivors(surplus, len(length_B), products.key_count, MIN_TILE_ROWS, limit)

    def nearest_candidates(self, products: "InnerProducts", limit: int) -> list[np.ndarray | None]:
        """For each query, in ascending order, slots of which that of its nearest key is one; None: more than `limit`.

        And those of all keys whose distances are the same in float32. How close a key is at least, and at most, is
        known from its product. The closest of the first bounds the second.
        """
        off_B = products.product_error * products.query_norm_B
        same_B = torch.from_numpy(np.float32(TIE_REL_ERROR) * products.query_norm_B * products.query_norm_B)
        factors_2B = torch.from_numpy(np.stack([np.ones_like(off_B), off_B]))
        best_B = torch.full((len(off_B),), -torch.inf)

        def surplus(chunk: slice) -> torch.Tensor:
            nonlocal best_B
            size_M, squares_M = self._norms_and_squares(products, chunk)
            rounded_M = squares_M * products.rounding_error / 2 + products.underflow_error
            most_M2 = torch.from_numpy(np.column_stack([rounded_M - squares_M / 2, size_M]))
            less_M2 = torch.from_numpy(np.column_stack([2 * rounded_M, 2 * size_M]))
            closest_MB = (most_M2 @ factors_2B).add_(products.compute(chunk))
            surely_MB = (closest_MB - less_M2 @ factors_2B).nan_to_num_(nan=-torch.inf, posinf=-torch.inf)
            best_B = torch.maximum(best_B, surely_MB.amax(dim=0))
            return closest_MB.sub_(best_B - same_B)

        return _collect_survivors(surplus, len(off_B), products.key_count, MIN_TILE_ROWS, limit)

    def _norms_and_squares(self, products: "InnerProducts", chunk: slice) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of the keys as they are multiplied, and squares of those from the centre."""
        size_M, squares_M = self._key_constants[: products.key_count][chunk].T
        return np.sqrt(squares_M) * np.float32(_NORM_INFLATION) if products.is_bfloat16 else size_M, squares_M


class InnerProducts:
    """Of queries from a centre with keys.

    Attributes:
        key_count: Keys.
        is_bfloat16: Whether they are in bfloat16.
        rounding_error: What float32 may make of squares, and of products with keys, in parts of themselves.
        product_error: What a product may be off by, in parts of both lengths.
        underflow_error: What squares and products may lose besides, where they are too small for float32.
        query_norm_B: Lengths of the queries from the centre.
        center_offset_B: So much more is a product than one of which both are from the centre.
    """

    def __init__(self, keys_ND: np.ndarray, center_D: np.ndarray, queries_BD: np.ndarray) -> None:
        self.key_count, width = keys_ND.shape
        centred_BD = queries_BD - center_D
        self._keys, self._center, self._queries = map(torch.from_numpy, (keys_ND, center_D, centred_BD))
        self.is_bfloat16 = len(queries_BD) >= MIN_QUERIES_FOR_BF16 and bool(_CPU_CAPABILITIES.get("avx512_bf16", False))
        self.rounding_error = np.float32(_rounding_bound(width))
        self.product_error = self.rounding_error + np.float32(BF16_REL_ERROR if self.is_bfloat16 else 0)
        self.underflow_error = np.float32(2 * width * _TINY)
        self.query_norm_B = row_norms(centred_BD)
        if self.is_bfloat16:
            self._queries = self._queries.bfloat16()
            self._bfloat16_buffer = torch.empty(MIN_TILE_ROWS, width, dtype=torch.bfloat16)
            self.center_offset_B = np.zeros(len(queries_BD))
        else:
            # Less what adding it may be off by.
            unsure_B = 4 * _EPS * self.query_norm_B * np.linalg.norm(center_D)
            self.center_offset_B = centred_BD.astype(np.float64) @ center_D.astype(np.float64) - unsure_B

    def compute(self, chunk: slice) -> torch.Tensor:
        """With the keys of at most `MIN_TILE_ROWS` slots, (M, B)."""
        keys_MD = self._keys[chunk]
        if self.is_bfloat16:
            keys_MD = torch.sub(keys_MD, self._center, out=self._bfloat16_buffer[: len(keys_MD)])
        return (self._queries @ keys_MD.T).T


def resize_array(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Larger in one dimension, with what it held; or of another shape, and empty."""
    larger = np.zeros(shape, array.dtype)
    if sum(old != new for old, new in zip(array.shape, shape, strict=True)) == 1:
        larger[tuple(slice(length) for length in array.shape)] = array
    return larger


def int8_matmul(codes_MP: torch.Tensor, codes_PB: torch.Tensor) -> torch.Tensor:
    """Of whole numbers of a byte each."""
    if _HAS_INT8_MATMUL:
        return torch._int_mm(codes_MP, codes_PB)  # noqa: SLF001  (torch has no other product of these)
    return codes_MP.float() @ codes_PB.float()


def _collect_survivors(
    compute_margins: Callable[[slice], torch.Tensor], query_count: int, slot_count: int, chunk_size: int, limit: int
) -> list[np.ndarray | None]:
    """For each query, the ascending slots whose surplus (M, B) is not negative, `chunk_size` slots at a time.

    None where there are more than `limit`; where that is so of all queries, the others are not looked at.
    """
    left_B, hopeless_B = np.zeros(query_count, np.int64), np.zeros(query_count, bool)
    found = [np.empty(0, np.int64)]
    for start in range(0, slot_count, chunk_size):
        less_MB = np.less(compute_margins(slice(start, min(start + chunk_size, slot_count))).numpy(), 0)
        left_MB = np.logical_not(less_MB, out=less_MB)  # what is no number is left as well
        if np.count_nonzero(left_MB) * DENSE_DIVISOR > left_MB.size:
            left_B += left_MB.sum(axis=0)
            hopeless_B |= left_B > limit
            if hopeless_B.all():
                return [None] * query_count
            left_MB[:, hopeless_B] = False
        found.append(np.flatnonzero(left_MB) + start * query_count)
    places = np.concatenate(found)
    slots = places // query_count
    rows = (places - slots * query_count).astype(
        np.min_scalar_type(query_count)
    )  # so small that they are sorted by digits
    order = np.argsort(rows, kind="stable")
    parts = np.split(slots[order], np.cumsum(np.bincount(rows, minlength=query_count))[:-1])
    return [None if hopeless or len(part) > limit else part for part, hopeless in zip(parts, hopeless_B, strict=True)]


def _rounding_bound(width: int) -> float:
    return 8 * (width + 8) * _EPS


def _nan_unless_finite(numbers_M: np.ndarray) -> np.ndarray:
    """Where a number overflowed, what rules nothing out."""
    return np.where(np.isfinite(numbers_M), numbers_M, np.float32(np.nan))
