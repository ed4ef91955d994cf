"""The sieve: which points lie near a query, nearly without a look at the others (design, section 4, Lookup).

It looks through the keys of a codebook, whose radii are their reach, and through whatever else is to be found by place.
Here a point with its reach is a key with its ball.

Most queries lie in no ball, and to know that, one need not find the nearest key: it is enough that no ball reaches the
query. Keys are projected on a few orthonormal directions; a projection never lengthens, so what is farther than a
ball's radius there is farther in truth. A query reads `COARSE` projections of each key, by a matrix product, and of the
few keys that are left all projections. Where they are not few, it takes the product with all projections, and where
those too rule little out, with the keys.

What it guarantees: no key that covers a query is ever left out. The bounds allow for every rounding on the way, and a
number that is not finite rules nothing out. Which directions were chosen cannot be seen in any answer.

Rounding. The projection of a key, or of a query, is off by at most its slack (`Directions.project`) in all directions
together. A squared distance in P directions comes from squares and a product, which together are off by at most
`_rounding(P)` (|y|^2 + |q|^2); it is compared with the square of a radius to which both slacks were added.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch

COARSE = 16
"""Directions that every key is looked at in, at most."""

ALL = 64
"""Directions, at most."""

FEW = 64
"""Keys are few where there are so many times as many in all."""

SAMPLE = 2048
"""Keys that the directions are fitted to, at most."""

REFIT = 4
"""Directions are fitted anew where there are so many times as many keys as when they were."""

CHUNK = 8192
"""Keys that are looked at together: their numbers stay in the cache."""

_EPS = float(np.finfo(np.float32).eps)
_TINY = float(np.finfo(np.float32).tiny)
"""What squares may lose where they are too small for float32."""

_MORE = 1 + 1e-5
"""What the rounding of the distance itself may add to a radius."""


class Directions:
    """Where a point lies in some orthonormal directions from a centre.

    Args:
        sample_MD: Keys like those to come. Their principal directions are taken, the widest first; where there are no
            more keys than directions, any.
    """

    def __init__(self, sample_MD: np.ndarray) -> None:
        width = sample_MD.shape[1]
        sample_MD = sample_MD[np.isfinite(sample_MD).all(axis=1) & (np.abs(sample_MD) < 1e15).all(axis=1)]
        sample_MD = sample_MD.astype(np.float64)
        center_D = sample_MD.mean(axis=0) if len(sample_MD) else np.zeros(width)
        basis_DP = np.random.default_rng(0).standard_normal((width, min(ALL, width)))
        if len(sample_MD) > basis_DP.shape[1]:
            centred_MD = sample_MD - center_D
            for _ in range(3):  # of subspace iteration: directions need not be the very widest
                basis_DP = centred_MD.T @ (centred_MD @ np.linalg.qr(basis_DP)[0])
            basis_DP = np.linalg.svd(basis_DP, full_matrices=False)[0]
        self._center_D = center_D.astype(np.float32)
        self._basis_DP = np.linalg.qr(basis_DP)[0].astype(np.float32)

    def project(self, points_MD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Projections (M, P), float32, and how far each (M) may lie from the true one."""
        width, count = self._basis_DP.shape
        projected_MP = np.empty((len(points_MD), count), np.float32)
        slack_M = np.empty(len(points_MD), np.float32)
        for start in range(0, len(points_MD), CHUNK):
            rows = slice(start, start + CHUNK)
            centred_MD = points_MD[rows] - self._center_D
            projected_MP[rows] = _product(centred_MD, self._basis_DP)
            np.sqrt(np.einsum("md,md->m", centred_MD, centred_MD), out=slack_M[rows])
        slack_M *= 2 * _EPS * (width + 8) * count**0.5
        return projected_MP, slack_M


@dataclass(slots=True)
class _Level:
    """Points of all slots, P numbers each, with what a comparison with their radii needs.

    Attributes:
        points_NP: The points.
        beside_N3: For each, with its radius and slack together as r: -|y|^2 / 2, r^2 / 2 and r.
    """

    points_NP: np.ndarray
    beside_N3: np.ndarray

    def reaching(self, points_BP: np.ndarray, slack_B: np.ndarray, within: float | None) -> list[np.ndarray]:
        """For each of B points the slots that may reach it, or may lie within a distance of it."""
        rounding = _rounding(points_BP.shape[1])
        factors_3B = np.zeros((3, len(points_BP)), np.float32)
        factors_3B[0] = 1
        reach_B = slack_B if within is None else slack_B + np.float32(within)
        if within is None:
            factors_3B[1], factors_3B[2] = 1, slack_B
        squares_B = np.einsum("bp,bp->b", points_BP, points_BP)
        least_B = _finite((1 - rounding) / 2 * squares_B - (1 + rounding) / 2 * reach_B * reach_B - _TINY)
        found: list[list[np.ndarray]] = [[] for _ in points_BP]
        for start in range(0, len(self.beside_N3), CHUNK):
            rows = slice(start, start + CHUNK)
            closeness_MB = _product(self.points_NP[rows], points_BP.T)
            closeness_MB += _product(self.beside_N3[rows], factors_3B)
            slots_M, rows_M = (~(closeness_MB < least_B)).nonzero()
            if len(slots_M):
                for row in np.unique(rows_M).tolist():
                    found[row].append(slots_M[rows_M == row] + start)
        return [np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in found]


class Sieve:
    """A sieve over keys. Call `changed` with the slots that hold something new; the work is done at the next query.

    Args:
        held: Gives the keys (N, D) and their radii (N), float32, as they are now.
    """

    def __init__(self, held: Callable[[], tuple[np.ndarray, np.ndarray]]) -> None:
        self._held = held
        self._directions = Directions(np.empty((0, 1)))
        self._fitted = 0
        self._coarse = np.empty((0, 0), np.float32)
        self._all = np.empty((0, 0), np.float32)
        self._beside = np.empty((3, 0, 3), np.float32)
        self._slack = np.empty(0, np.float32)
        self._stale: set[int] | None = None
        """Slots that hold something new; None: all of them."""

    def changed(self, slots: Collection[int] | None) -> None:
        """Slots that hold something new; None: everything is new."""
        if slots is None:
            self._stale = None
        elif self._stale is not None:
            self._stale.update(slots)

    def settle(self) -> None:
        """Take in what changed."""
        count = len(self._held()[0])
        with np.errstate(all="ignore"):
            if self._stale is None or count >= REFIT * self._fitted:
                self._fit()
            elif stale := [slot for slot in self._stale if slot < count]:
                self._write(np.array(stale))
        self._stale = set()

    def covering(self, queries_BD: np.ndarray, slack: float = 0.0) -> list[np.ndarray]:
        """For each query, in ascending order, slots of which every one whose ball holds it is one.

        `slack` is added to every radius.
        """
        return self._left(queries_BD, None, slack)

    def within(self, query_D: np.ndarray, distance: float) -> np.ndarray:
        """Slots, in ascending order, of which every one whose key lies within a distance of the query is one."""
        return self._left(query_D[None], distance, 0.0)[0]

    def close(self, query_D: np.ndarray, count: int) -> np.ndarray:
        """So many slots, or all, whose keys look nearest in a few directions; nothing is said of the others."""
        self.settle()
        held = len(self._held()[0])
        if held <= count:
            return np.arange(held)
        with np.errstate(all="ignore"):
            point_P = self._directions.project(query_D[None])[0][0, :COARSE]
            closeness_N = _product(self._coarse[:held], point_P[:, None])[:, 0]
            closeness_N += self._beside[0, :held, 0]
        nearest: np.ndarray = np.argpartition(-closeness_N, count - 1)[:count]
        return nearest

    def _fit(self) -> None:
        """Choose directions, and project every key."""
        keys_ND = self._held()[0]
        self._fitted = count = len(keys_ND)
        if count:
            self._directions = Directions(keys_ND[:: -(-count // SAMPLE)])
            for start in range(0, count, CHUNK):
                self._write(np.arange(start, min(start + CHUNK, count)))

    def _write(self, slots_M: np.ndarray) -> None:
        keys_ND, radii_N = self._held()
        keys_MD = keys_ND[slots_M]
        projected_MP, slack_M = self._directions.project(keys_MD)
        count, directions = len(keys_ND), projected_MP.shape[1]
        if count > len(self._slack) or self._all.shape[1] != directions:
            room = max(64, 2 * count)
            self._coarse = _grown(self._coarse, (room, min(COARSE, directions)))
            self._all = _grown(self._all, (room, directions))
            self._beside = np.stack([_grown(beside, (room, 3)) for beside in self._beside])
            self._slack = _grown(self._slack, (room,))
        self._coarse[slots_M] = projected_MP[:, :COARSE]
        self._all[slots_M] = projected_MP
        self._slack[slots_M] = slack_M
        radii_M = radii_N[slots_M] * np.float32(_MORE)
        for beside, points_MP, slack in zip(
            self._beside, (projected_MP[:, :COARSE], projected_MP, keys_MD), (slack_M, slack_M, 0), strict=True
        ):
            rounding, reach_M = _rounding(points_MP.shape[1]), radii_M + slack
            squares_M = np.einsum("mp,mp->m", points_MP, points_MP)
            beside[slots_M, 0] = _finite(squares_M * np.float32(-(1 - rounding) / 2))
            beside[slots_M, 1] = reach_M * reach_M * np.float32((1 + rounding) / 2)
            beside[slots_M, 2] = reach_M

    def _left(self, queries_BD: np.ndarray, distance: float | None, slack: float) -> list[np.ndarray]:
        self.settle()
        keys_ND = self._held()[0]
        count = len(keys_ND)
        if not count:
            return [np.empty(0, np.int64) for _ in queries_BD]
        with np.errstate(all="ignore"):
            points_BP, slack_B = self._directions.project(queries_BD)
            own_slack_B = np.full_like(slack_B, slack * _MORE)
            slack_B += own_slack_B
            within = None if distance is None else distance * _MORE + float(self._slack[:count].max())
            level = _Level(self._coarse[:count], self._beside[0, :count])
            found = level.reaching(points_BP[:, :COARSE], slack_B, within)
            self._again(found, _Level(self._all[:count], self._beside[1, :count]), points_BP, slack_B, within)
            level = _Level(keys_ND, self._beside[2, :count])
            within = None if distance is None else distance * _MORE
            self._again(found, level, queries_BD, own_slack_B, within)
            for row, slots in enumerate(found):
                if len(slots):
                    found[row] = self._finely(slots, points_BP[row], float(slack_B[row]), distance)
        return found

    def _again(
        self, found: list[np.ndarray], level: _Level, points_BP: np.ndarray, slack_B: np.ndarray, within: float | None
    ) -> None:
        """Ask a finer level about the queries of which too many slots are left."""
        many = [row for row, slots in enumerate(found) if len(slots) * FEW > max(len(level.points_NP), FEW * FEW)]
        if many:
            for row, slots in zip(many, level.reaching(points_BP[many], slack_B[many], within), strict=True):
                found[row] = slots

    def _finely(self, slots_M: np.ndarray, point_P: np.ndarray, slack: float, distance: float | None) -> np.ndarray:
        """Those that all directions leave, by direct differences."""
        apart_MP = self._all[slots_M] - point_P
        squares_M = np.einsum("mp,mp->m", apart_MP, apart_MP)
        if distance is None:
            limit_M = self._beside[1, slots_M, 2] + np.float32(slack)
        else:
            limit_M = self._slack[slots_M] + np.float32(distance * _MORE + slack)
        ruled_out_M: np.ndarray = squares_M * np.float32(1 - 1e-4) > limit_M * limit_M + _TINY
        left_M: np.ndarray = slots_M[~ruled_out_M]
        return left_M


def _product(left_MP: np.ndarray, right_PB: np.ndarray) -> np.ndarray:
    """By torch, in as many threads as a worker is given; those of numpy's products cannot be set at run time."""
    product_MB: np.ndarray = (torch.from_numpy(left_MP) @ torch.from_numpy(right_PB)).numpy()
    return product_MB


def _rounding(width: int) -> float:
    return 8 * (width + 8) * _EPS


def _finite(numbers_M: np.ndarray) -> np.ndarray:
    """Where a number overflowed, what rules nothing out."""
    return np.where(np.isfinite(numbers_M), numbers_M, np.float32(np.nan))


def _grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    grown = np.zeros(shape, np.float32)
    if array.shape[1:] == shape[1:]:
        grown[: len(array)] = array
    return grown
