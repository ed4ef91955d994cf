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

from gracestream.pipeline.search.projection import lengths

PRODUCT = 2**18
"""Numbers of a product that are looked at together: they stay in the cache."""

SHORTEST = 1024
"""Points of one product, at least."""

WHOLE = 127
"""The largest of the numbers that a code is made of."""

FINER = 2 * WHOLE
"""What is left over of a number when it is rounded to a whole one, at most a half, is coded in such parts."""

CLIPPED = 1e-4
"""The share of a sample's numbers that are beyond the scale. Their points are off by much, and looked at in full."""

TOGETHER = 256
"""Slots of one query that are few enough to be looked at together with those of others."""

MANY = 32
"""Points left are many where one in so many is: they are counted then before they are told one by one."""

ROUGH = 3.1 * 2.0**-8
"""What a product in bfloat16 may be off by: each factor and the result by half a place, 2^-8; sums are in float32."""

ROUGHLY = 4
"""Queries, at least, whose product with the keys is one in bfloat16: to convert keys for fewer takes as long."""

SAME = 16 * 2.0**-23
"""Squares of distances that are the same in float32, of differences in float32, differ by less, in parts of the squares
of the two lengths: those of keys are given as much room besides."""

_EPS = float(np.finfo(np.float32).eps)
_TINY = float(np.finfo(np.float32).tiny)
"""The least number of full precision."""

_MORE = 1 + 1e-5
"""What the rounding of a length may take from it."""

_CAPABLE: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
"""Empty below torch 2.12, which has no such function: the slower products are taken then."""

_INTEGERS = any(_CAPABLE.get(name, False) for name in ("avx512_vnni", "avx_vnni"))
"""Whether products of int8 are exact and fast. Where they are not, codes are converted."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked about B queries.

    Attributes:
        slack_B: How far the query's point may lie from the truth, and whatever is added to all radii or distances.
        within_B: The distances; None: each key's own radius.
    """

    slack_B: np.ndarray
    within_B: np.ndarray | None = None

    def rows(self, kept: list[int]) -> "Asked":
        """What is asked about some of them."""
        return Asked(self.slack_B[kept], None if self.within_B is None else self.within_B[kept])

    def looser(self, slack_B: np.ndarray) -> "Asked":
        """The same of points that may lie so much farther from the truth."""
        return Asked(self.slack_B + slack_B, self.within_B)

    @property
    def mode(self) -> int:
        """0: radii are asked about, 1: distances."""
        return 0 if self.within_B is None else 1

    def added_B(self) -> np.ndarray:
        """What the query adds to w."""
        return self.slack_B if self.within_B is None else self.slack_B + self.within_B * np.float32(_MORE)


class Codes:
    """Points as codes: P whole numbers of a byte, times one scale, from an origin. A product of codes is exact."""

    def __init__(self) -> None:
        self._origin_P = np.zeros(1, np.float32)
        self._scale = np.float32(1)
        self._codes = np.empty((0, 0), np.int8)
        self._beside = np.empty((2, 0, 2), np.float32)
        """Of each slot (w^2 - |y|^2) / 2 and w: with its radius, and with a distance of the query's."""

    def fit(self, sample_MP: np.ndarray) -> None:
        """Take an origin and a scale for points like these."""
        sample_MP = sample_MP[np.isfinite(sample_MP).all(axis=1)]
        if not len(sample_MP):
            return
        self._origin_P = np.median(sample_MP, axis=0)
        scale = np.float32(np.quantile(np.abs(sample_MP - self._origin_P), 1 - CLIPPED) / WHOLE)
        if np.isfinite(scale) and scale > _TINY:
            self._scale = scale

    def write(self, slots_M: np.ndarray, points_MP: np.ndarray, slack_M: np.ndarray, radii_M: np.ndarray) -> None:
        """Take these points, of keys that have these radii and from whose truth they may be so far."""
        size = points_MP.shape[1]
        if (needed := int(slots_M.max()) + 1) > len(self._codes) or self._codes.shape[1] != size:
            room = max(64, 2 * needed)
            self._codes = grown(self._codes, (room, size))
            self._beside = grown(self._beside, (2, room, 2))
        points_MP, slack_M = self._from_origin(points_MP, slack_M)
        codes_MP = np.clip(np.nan_to_num(np.rint(points_MP / self._scale)), -WHOLE, WHOLE).astype(np.int8)
        self._codes[slots_M] = codes_MP
        coded_MP = codes_MP * self._scale
        off_M = slack_M + lengths(points_MP - coded_MP) * np.float32(_MORE)
        rounding = np.float32(_rounding(size))
        squares_M = np.einsum("mp,mp->m", coded_MP, coded_MP) * (1 - rounding)
        reaches: tuple[np.ndarray, ...] = off_M + radii_M * np.float32(_MORE), off_M
        for mode, reach_M in enumerate(reaches):
            self._beside[mode, slots_M, 0] = _finite((reach_M * reach_M * (1 + rounding) - squares_M) / 2)
            self._beside[mode, slots_M, 1] = reach_M

    def reaching(self, points_BP: np.ndarray, asked: Asked, count: int, most: int) -> list[np.ndarray | None]:
        """For each query, in ascending order, the slots of the first `count` that are left; None: more than `most`."""
        asking = _Asking(*self._asked(points_BP, asked), self._scale)
        codes, beside = torch.from_numpy(self._codes), torch.from_numpy(self._beside[asked.mode])
        step = max(SHORTEST, PRODUCT // max(1, len(points_BP)))
        return _told(lambda chunk: asking.surplus(codes[chunk], beside[chunk]), len(points_BP), count, step, most)

    def left(self, slots: Sequence[np.ndarray], points_BP: np.ndarray, asked: Asked) -> list[np.ndarray]:
        """Those of some slots for each query that are left."""
        surpluses = self._surpluses(slots, points_BP, asked)
        return [some[~(surplus < 0)] for some, surplus in zip(slots, surpluses, strict=True)]

    def closest(self, slots: Sequence[np.ndarray], points_BP: np.ndarray, count: int) -> list[np.ndarray]:
        """So many of some slots for each query, or all, whose points are closest to its own."""
        nothing_B = np.zeros(len(points_BP), np.float32)
        surpluses = self._surpluses(slots, points_BP, Asked(nothing_B, nothing_B))
        return [
            some if len(some) <= count else some[np.argpartition(-surplus, count - 1)[:count]]
            for some, surplus in zip(slots, surpluses, strict=True)
        ]

    def _surpluses(self, slots: Sequence[np.ndarray], points_BP: np.ndarray, asked: Asked) -> list[np.ndarray]:
        """Of some slots for each query. Few of several queries are multiplied with all of these at once."""
        together = [row for row, some in enumerate(slots) if len(some) <= TOGETHER]
        found = [np.empty(0, np.float32)] * len(slots)
        for rows in (together, *([row] for row, some in enumerate(slots) if len(some) > TOGETHER)):
            some_M = np.concatenate([np.empty(0, np.int64), *(slots[row] for row in rows)])
            if len(some_M):
                asking = _Asking(*self._asked(points_BP[rows], asked.rows(rows)), self._scale, fine=True)
                codes, beside = self._codes.take(some_M, axis=0), self._beside[asked.mode].take(some_M, axis=0)
                surplus_MB = asking.surplus(torch.from_numpy(codes), torch.from_numpy(beside)).numpy()
                counts = [len(slots[row]) for row in rows]
                own_M = surplus_MB[np.arange(len(some_M)), np.repeat(np.arange(len(rows)), counts)]
                for row, surplus in zip(rows, np.split(own_M, np.cumsum(counts)[:-1]), strict=True):
                    found[row] = surplus
        return found

    def _asked(self, points_BP: np.ndarray, asked: Asked) -> tuple[np.ndarray, Asked]:
        points_BP, slack_B = self._from_origin(points_BP, asked.slack_B)
        return points_BP, Asked(slack_B, asked.within_B)

    def _from_origin(self, points_MP: np.ndarray, slack_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Points from the origin, and how far they may lie from the truth then."""
        points_MP = points_MP - self._origin_P
        return points_MP, slack_M + np.float32(2 * _EPS) * lengths(points_MP)


class _Asking:
    """B queries in codes of their own scale, or in two each, the second of what the first leaves over (`fine`).

    Closeness is q.y + w s + (w^2 - |y|^2) / 2, over both scales; the surplus is what of it is above the least.
    """

    def __init__(self, points_BP: np.ndarray, asked: Asked, scale: np.float32, *, fine: bool = False) -> None:
        largest_B = np.abs(points_BP).max(axis=1)
        scale_B = np.where(largest_B > 0, largest_B, np.float32(1)) / np.float32(WHOLE)
        scaled_BP = points_BP / scale_B[:, None]
        codes_BP = np.rint(scaled_BP)
        self._rest_PB = _codes(((scaled_BP - codes_BP) * FINER).T) if fine else None
        self._codes_PB = _codes(codes_BP.T)
        coded_BP = codes_BP + self._rest_PB.numpy().T / np.float32(FINER) if self._rest_PB is not None else codes_BP
        coded_BP = coded_BP * scale_B[:, None]
        added_B = asked.added_B() + lengths(points_BP - coded_BP) * np.float32(_MORE)
        rounding = np.float32(_rounding(points_BP.shape[1]))
        both_B = scale * scale_B
        squares_B = np.einsum("bp,bp->b", coded_BP, coded_BP)
        least_B = _finite(((1 - rounding) * squares_B - (1 + rounding) * added_B * added_B - 2 * _TINY) / (2 * both_B))
        self._least_1B = torch.from_numpy(-least_B[None])
        self._factors_2B = torch.from_numpy(np.stack([1 / both_B, added_B / both_B]))

    def surplus(self, codes_MP: torch.Tensor, beside_M2: torch.Tensor) -> torch.Tensor:
        """Of M slots for each query, (M, B): those below 0 are ruled out."""
        surplus_MB = torch.addmm(self._least_1B, beside_M2, self._factors_2B)
        if self._rest_PB is not None:
            surplus_MB.add_(exact_product(codes_MP, self._rest_PB), alpha=1 / FINER)
        return surplus_MB.add_(exact_product(codes_MP, self._codes_PB))


def _codes(numbers_PB: np.ndarray) -> torch.Tensor:
    """Rounded to whole numbers of a byte each; what is not finite becomes anything."""
    return torch.from_numpy(np.ascontiguousarray(np.rint(numbers_PB).astype(np.int8)))


class Keys:
    """The keys themselves: what is beside them is their length, and the square of that of their difference to a centre.

    A query q is taken from the centre c. Its product with a key k as it is is q.c more than one with k - c, and off by
    at most `_rounding(D)` of |q| |k|; for one in bfloat16 the key is taken from the centre as it is converted, and the
    product is off by `ROUGH` of |q| |k - c| besides. Closeness is q.k - |k|^2 / 2.
    """

    def __init__(self) -> None:
        self._beside = np.empty((0, 2), np.float32)

    def write(self, slots_M: np.ndarray, keys_MD: np.ndarray, center_D: np.ndarray) -> None:
        """Take what is beside these keys."""
        if (needed := int(slots_M.max()) + 1) > len(self._beside):
            self._beside = grown(self._beside, (max(64, 2 * needed), 2))
        self._beside[slots_M, 0] = lengths(keys_MD) * np.float32(_MORE)
        centred_MD = keys_MD - center_D
        self._beside[slots_M, 1] = np.einsum("md,md->m", centred_MD, centred_MD)

    def reaching(self, products: "Products", radii_N: np.ndarray, asked: Asked, most: int) -> list[np.ndarray | None]:
        """For each query, in ascending order, the slots that are left; None: more than `most`."""
        rounding, length_B = products.rounding, products.length_B
        added_B = asked.added_B() + np.float32(2 * _EPS) * length_B
        least_B = ((1 - rounding) * length_B * length_B - (1 + rounding) * added_B * added_B) / 2 - products.tiny
        least_1B = torch.from_numpy(-_finite((least_B + products.offset_B).astype(np.float32))[None])
        factors_3B = torch.from_numpy(np.stack([np.ones_like(length_B), added_B, products.error * length_B]))

        def surplus(chunk: slice) -> torch.Tensor:
            size_M, squares_M = self._sizes(products, chunk)
            reach_M = np.zeros_like(size_M) if asked.within_B is not None else radii_N[chunk] * np.float32(_MORE)
            closer_M = _finite((reach_M * reach_M * (1 + rounding) - squares_M * (1 - rounding)) / 2)
            beside_M3 = torch.from_numpy(np.column_stack([closer_M, reach_M, size_M]))
            return torch.addmm(least_1B, beside_M3, factors_3B).add_(products.of(chunk))

        return _told(surplus, len(length_B), products.count, SHORTEST, most)

    def nearest(self, products: "Products", most: int) -> list[np.ndarray | None]:
        """For each query, in ascending order, slots of which that of its nearest key is one; None: more than `most`.

        And those of all keys whose distances are the same in float32. How close a key is at least, and at most, is
        known from its product. The closest of the first bounds the second.
        """
        off_B = products.error * products.length_B
        same_B = torch.from_numpy(np.float32(SAME) * products.length_B * products.length_B)
        factors_2B = torch.from_numpy(np.stack([np.ones_like(off_B), off_B]))
        best_B = torch.full((len(off_B),), -torch.inf)

        def surplus(chunk: slice) -> torch.Tensor:
            nonlocal best_B
            size_M, squares_M = self._sizes(products, chunk)
            rounded_M = squares_M * products.rounding / 2 + products.tiny
            most_M2 = torch.from_numpy(np.column_stack([rounded_M - squares_M / 2, size_M]))
            less_M2 = torch.from_numpy(np.column_stack([2 * rounded_M, 2 * size_M]))
            closest_MB = (most_M2 @ factors_2B).add_(products.of(chunk))
            surely_MB = (closest_MB - less_M2 @ factors_2B).nan_to_num_(nan=-torch.inf, posinf=-torch.inf)
            best_B = torch.maximum(best_B, surely_MB.amax(dim=0))
            return closest_MB.sub_(best_B - same_B)

        return _told(surplus, len(off_B), products.count, SHORTEST, most)

    def _sizes(self, products: "Products", chunk: slice) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of the keys as they are multiplied, and squares of those from the centre."""
        size_M, squares_M = self._beside[: products.count][chunk].T
        return np.sqrt(squares_M) * np.float32(_MORE) if products.rough else size_M, squares_M


class Products:
    """Of queries from a centre with keys.

    Attributes:
        count: Keys.
        rough: Whether they are in bfloat16.
        rounding: What float32 may make of squares, and of products with keys, in parts of themselves.
        error: What a product may be off by, in parts of both lengths.
        tiny: What squares and products may lose besides, where they are too small for float32.
        length_B: Lengths of the queries from the centre.
        offset_B: So much more is a product than one of which both are from the centre.
    """

    def __init__(self, keys_ND: np.ndarray, center_D: np.ndarray, queries_BD: np.ndarray) -> None:
        self.count, width = keys_ND.shape
        centred_BD = queries_BD - center_D
        self._keys, self._center, self._asking = map(torch.from_numpy, (keys_ND, center_D, centred_BD))
        self.rough = len(queries_BD) >= ROUGHLY and bool(_CAPABLE.get("avx512_bf16", False))
        self.rounding = np.float32(_rounding(width))
        self.error = self.rounding + np.float32(ROUGH if self.rough else 0)
        self.tiny = np.float32(2 * width * _TINY)
        self.length_B = lengths(centred_BD)
        if self.rough:
            self._asking = self._asking.bfloat16()
            self._converted = torch.empty(SHORTEST, width, dtype=torch.bfloat16)
            self.offset_B = np.zeros(len(queries_BD))
        else:
            # Less what adding it may be off by.
            unsure_B = 4 * _EPS * self.length_B * np.linalg.norm(center_D)
            self.offset_B = centred_BD.astype(np.float64) @ center_D.astype(np.float64) - unsure_B

    def of(self, chunk: slice) -> torch.Tensor:
        """With the keys of at most `SHORTEST` slots, (M, B)."""
        keys_MD = self._keys[chunk]
        if self.rough:
            keys_MD = torch.sub(keys_MD, self._center, out=self._converted[: len(keys_MD)])
        return (self._asking @ keys_MD.T).T


def grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Larger in one dimension, with what it held; or of another shape, and empty."""
    larger = np.zeros(shape, array.dtype)
    if sum(old != new for old, new in zip(array.shape, shape, strict=True)) == 1:
        larger[tuple(slice(length) for length in array.shape)] = array
    return larger


def exact_product(codes_MP: torch.Tensor, codes_PB: torch.Tensor) -> torch.Tensor:
    """Of whole numbers of a byte each."""
    if _INTEGERS:
        return torch._int_mm(codes_MP, codes_PB)  # noqa: SLF001  (torch has no other product of these)
    return codes_MP.float() @ codes_PB.float()


def _told(
    surplus: Callable[[slice], torch.Tensor], queries: int, count: int, step: int, most: int
) -> list[np.ndarray | None]:
    """For each query, in ascending order, the slots of `count` whose surplus (M, B) is not below 0; `step` at a time.

    None where there are more than `most`; where that is so of all queries, the others are not looked at.
    """
    left_B, hopeless_B = np.zeros(queries, np.int64), np.zeros(queries, bool)
    found = [np.empty(0, np.int64)]
    for start in range(0, count, step):
        less_MB = np.less(surplus(slice(start, min(start + step, count))).numpy(), 0)
        left_MB = np.logical_not(less_MB, out=less_MB)  # what is no number is left as well
        if np.count_nonzero(left_MB) * MANY > left_MB.size:
            left_B += left_MB.sum(axis=0)
            hopeless_B |= left_B > most
            if hopeless_B.all():
                return [None] * queries
            left_MB[:, hopeless_B] = False
        found.append(np.flatnonzero(left_MB) + start * queries)
    places = np.concatenate(found)
    slots = places // queries
    rows = (places - slots * queries).astype(np.min_scalar_type(queries))  # so small that they are sorted by digits
    order = np.argsort(rows, kind="stable")
    parts = np.split(slots[order], np.cumsum(np.bincount(rows, minlength=queries))[:-1])
    return [None if hopeless or len(part) > most else part for part, hopeless in zip(parts, hopeless_B, strict=True)]


def _rounding(width: int) -> float:
    return 8 * (width + 8) * _EPS


def _finite(numbers_M: np.ndarray) -> np.ndarray:
    """Where a number overflowed, what rules nothing out."""
    return np.where(np.isfinite(numbers_M), numbers_M, np.float32(np.nan))
