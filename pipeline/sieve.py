"""The sieve: which points lie near a query, nearly without a look at the others (design, section 4, Lookup).

It looks through the keys of a codebook, whose radii are their reach, and through whatever else is to be found by place.
Here a point with its reach is a key with its ball.

Most queries lie in no ball, and to know that, one need not find the nearest key: it is enough that no ball reaches the
query. Each key is mapped to a point of few numbers: its projections on some orthonormal directions, and the length of
what is left of it beside them. Such a map never lengthens, so what is farther than a ball's radius there is farther in
truth. A query reads `COARSE` projections of each key and that length, by a matrix product, and of the few keys that are
left all projections. Where they are not few, it takes the product with all projections, and where those too rule little
out, with the keys.

What it guarantees: no key that covers a query is ever left out. The bounds allow for every rounding on the way, and a
number that is not finite rules nothing out. Which directions were chosen cannot be seen in any answer.

Rounding. The point of a key, or of a query, is off by at most its slack (`Directions.project`) in all its numbers
together. A squared distance in P numbers comes from squares and a product, which together are off by at most
`_rounding(P)` (|y|^2 + |q|^2); it is compared with the square of a radius to which both slacks were added.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

COARSE = 28
"""Directions that every key is looked at in, at most."""

ALL = 64
"""Directions, at most."""

BESIDE = 3
"""Numbers that a comparison needs beside a point: with the key's radius and slack together as r, -|y|^2 / 2, r^2 / 2
and r."""

FEW = 16
"""Keys are few where there are so many times as many in all."""

SAMPLE = 2048
"""Keys that the directions are fitted to, at most."""

REFIT = 4
"""Directions are fitted anew where there are so many times as many keys as when they were."""

CHUNK = 8192
"""Keys that are mapped together."""

PRODUCT = 2**17
"""Numbers of a product that are looked at together: they stay in the cache."""

SHORTEST = 1024
"""Keys of one product at least."""

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
        """Projections and the length beside them (M, P + 1), float32, and how far each (M) may lie from the truth."""
        width, count = self._basis_DP.shape
        mapped_MP = np.empty((len(points_MD), count + 1), np.float32)
        slack_M = np.empty(len(points_MD), np.float32)
        for start in range(0, len(points_MD), CHUNK):
            rows = slice(start, start + CHUNK)
            centred_MD = points_MD[rows] - self._center_D
            mapped_MP[rows, :-1] = _product(centred_MD, self._basis_DP)
            slack_M[rows] = _lengths(centred_MD)
            # By difference, and not from the squares of both, which may be nearly equal.
            centred_MD -= _product(mapped_MP[rows, :-1], self._basis_DP.T)
            mapped_MP[rows, -1] = _lengths(centred_MD)
        slack_M *= 4 * _EPS * (width + 8) * count**0.5
        return mapped_MP, slack_M

    @staticmethod
    def coarse(mapped_MP: np.ndarray) -> np.ndarray:
        """The points in fewer directions, (M, C + 1): what lies in the others is added to the length beside."""
        few = min(COARSE, mapped_MP.shape[1] - 1)
        return np.column_stack([mapped_MP[:, :few], _lengths(mapped_MP[:, few:])])


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of every level about B queries: the slots whose ball may hold them, or those within a distance.

    Attributes:
        slack_B: How far the query's point may lie from the truth, and whatever is added to all radii.
        within_B: The distances, with what the slack of keys may add to them; None: the balls.
    """

    slack_B: np.ndarray
    within_B: np.ndarray | None

    def rows(self, kept: list[int]) -> "_Asked":
        """What is asked about some of them."""
        return _Asked(self.slack_B[kept], None if self.within_B is None else self.within_B[kept])


@dataclass(frozen=True, slots=True)
class _Level:
    """Points of all slots.

    Attributes:
        numbers: Of each slot a column of numbers: its point's, and `BESIDE` more. One array (P + 3, N), for one
            product, or two, where the points lie elsewhere.
    """

    numbers: Sequence[torch.Tensor]

    def reaching(self, points_BP: np.ndarray, asked: _Asked) -> list[np.ndarray]:
        """For each query, in ascending order, the slots that cannot be ruled out by these points."""
        rounding = _rounding(points_BP.shape[1] + BESIDE)
        factors_B3 = np.zeros((len(points_BP), BESIDE), np.float32)
        factors_B3[:, 0] = 1
        reach_B = asked.slack_B
        if asked.within_B is None:
            factors_B3[:, 1], factors_B3[:, 2] = 1, asked.slack_B
        else:
            reach_B = reach_B + asked.within_B
        squares_B = np.einsum("bp,bp->b", points_BP, points_BP)
        least_B1 = torch.from_numpy(
            _finite((1 - rounding) / 2 * squares_B - (1 + rounding) / 2 * reach_B * reach_B - _TINY)
        )[:, None]
        asking = torch.from_numpy(np.column_stack([points_BP, factors_B3]))
        parts = torch.split(asking, [len(numbers) for numbers in self.numbers], dim=1)
        found: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        count = self.numbers[0].shape[1]
        step = max(SHORTEST, PRODUCT // max(1, len(points_BP)))
        for start in range(0, count, step):
            chunk = slice(start, min(start + step, count))
            closeness_BM = parts[0] @ self.numbers[0][:, chunk]
            for part, numbers in zip(parts[1:], self.numbers[1:], strict=True):
                closeness_BM += part @ numbers[:, chunk]
            left_BM = (~(closeness_BM < least_B1)).numpy()
            rows, slots = np.divmod(_places(left_BM.ravel()), left_BM.shape[1])
            found.append((rows, slots + start))
        rows, slots = (np.concatenate(some) for some in zip(*found, strict=True))
        order = np.argsort(rows, kind="stable")
        return np.split(slots[order], np.searchsorted(rows[order], np.arange(1, len(points_BP))))


class Sieve:
    """A sieve over keys. Call `changed` with the slots that hold something new; the work is done at the next query.

    Args:
        held: Gives the keys (N, D) and their radii (N), float32, as they are now.
    """

    def __init__(self, held: Callable[[], tuple[np.ndarray, np.ndarray]]) -> None:
        self._held = held
        self._directions = Directions(np.empty((0, 1)))
        self._fitted = 0
        self._coarse = np.empty((BESIDE, 0), np.float32)
        """Of each slot, in a column: its coarse point, and what goes beside."""
        self._all = np.empty((0, 0), np.float32)
        """Its point, in a row, to be looked at alone."""
        self._beside = np.empty((2, BESIDE, 0), np.float32)
        """What goes beside that point, and beside the key."""
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

    def within(self, queries_BD: np.ndarray, distances_B: np.ndarray) -> list[np.ndarray]:
        """For each query, in ascending order, slots of which every one whose key lies within its distance is one."""
        return self._left(queries_BD, distances_B.astype(np.float32), 0.0)

    def close(self, query_D: np.ndarray, count: int) -> np.ndarray:
        """So many slots, or all, whose keys look nearest in a few directions; nothing is said of the others."""
        self.settle()
        held = len(self._held()[0])
        if held <= count:
            return np.arange(held)
        with np.errstate(all="ignore"):
            point_1P = Directions.coarse(self._directions.project(query_D[None])[0])
            numbers_PN = self._coarse[: point_1P.shape[1] + 1, :held]  # the first beside is -|y|^2 / 2
            closeness_N = _product(np.column_stack([point_1P, np.ones(1, np.float32)]), numbers_PN)[0]
        nearest: np.ndarray = np.argpartition(-closeness_N, count - 1)[:count]
        return nearest

    def _fit(self) -> None:
        """Choose directions, and map every key."""
        keys_ND = self._held()[0]
        self._fitted = count = len(keys_ND)
        if count:
            self._directions = Directions(keys_ND[:: -(-count // SAMPLE)])
            for start in range(0, count, CHUNK):
                self._write(np.arange(start, min(start + CHUNK, count)))

    def _write(self, slots_M: np.ndarray) -> None:
        keys_ND, radii_N = self._held()
        keys_MD = keys_ND[slots_M]
        mapped_MP, slack_M = self._directions.project(keys_MD)
        coarse_MC = Directions.coarse(mapped_MP)
        count, few = len(keys_ND), coarse_MC.shape[1]
        if count > len(self._slack) or self._all.shape[1] != mapped_MP.shape[1]:
            room = max(64, 2 * count)
            self._coarse = _grown(self._coarse, (few + BESIDE, room))
            self._all = _grown(self._all, (room, mapped_MP.shape[1]))
            self._beside = _grown(self._beside, (2, BESIDE, room))
            self._slack = _grown(self._slack, (room,))
        self._coarse[:few, slots_M] = coarse_MC.T
        self._all[slots_M] = mapped_MP
        self._slack[slots_M] = slack_M
        radii_M = radii_N[slots_M] * np.float32(_MORE)
        for beside_3N, points_MP, slack in (
            (self._coarse[few:], coarse_MC, slack_M),
            (self._beside[0], mapped_MP, slack_M),
            (self._beside[1], keys_MD, 0),
        ):
            rounding, reach_M = _rounding(points_MP.shape[1] + BESIDE), radii_M + slack
            squares_M = np.einsum("mp,mp->m", points_MP, points_MP)
            beside_3N[0, slots_M] = _finite(squares_M * np.float32(-(1 - rounding) / 2))
            beside_3N[1, slots_M] = reach_M * reach_M * np.float32((1 + rounding) / 2)
            beside_3N[2, slots_M] = reach_M

    def _left(self, queries_BD: np.ndarray, distances_B: np.ndarray | None, slack: float) -> list[np.ndarray]:
        self.settle()
        keys_ND = self._held()[0]
        count = len(keys_ND)
        if not count or not len(queries_BD):
            return [np.empty(0, np.int64) for _ in queries_BD]
        with np.errstate(all="ignore"):
            points_BP, slack_B = self._directions.project(queries_BD)
            own_slack_B = np.full_like(slack_B, slack * _MORE)
            slack_B += own_slack_B
            reach_B = None if distances_B is None else distances_B * np.float32(_MORE)
            far_B = None if reach_B is None else reach_B + self._slack[:count].max()
            level = _Level([torch.from_numpy(self._coarse[:, :count])])
            found = level.reaching(Directions.coarse(points_BP), _Asked(slack_B, far_B))
            arrays = self._all[:count].T, self._beside[0, :, :count]
            self._again(found, arrays, points_BP, _Asked(slack_B, far_B))
            self._again(found, (keys_ND.T, self._beside[1, :, :count]), queries_BD, _Asked(own_slack_B, reach_B))
            for row, slots in enumerate(found):
                if len(slots):
                    distance = None if reach_B is None else float(reach_B[row])
                    found[row] = self._finely(slots, points_BP[row], float(slack_B[row]), distance)
        return found

    def _again(
        self, found: list[np.ndarray], arrays: Sequence[np.ndarray], points_BP: np.ndarray, asked: _Asked
    ) -> None:
        """Ask a finer level about the queries of which too many slots are left."""
        count = arrays[0].shape[1]
        if many := [row for row, slots in enumerate(found) if len(slots) * FEW > max(count, FEW * FEW)]:
            level = _Level([torch.from_numpy(array) for array in arrays])
            for row, slots in zip(many, level.reaching(points_BP[many], asked.rows(many)), strict=True):
                found[row] = slots

    def _finely(self, slots_M: np.ndarray, point_P: np.ndarray, slack: float, reach: float | None) -> np.ndarray:
        """Those that all directions leave, by direct differences."""
        apart_MP = self._all[slots_M] - point_P
        squares_M = np.einsum("mp,mp->m", apart_MP, apart_MP)
        if reach is None:
            limit_M = self._beside[0, 2, slots_M] + np.float32(slack)
        else:
            limit_M = self._slack[slots_M] + np.float32(reach + slack)
        ruled_out_M: np.ndarray = squares_M * np.float32(1 - 1e-4) > limit_M * limit_M + _TINY
        left_M: np.ndarray = slots_M[~ruled_out_M]
        return left_M


def _product(left_MP: np.ndarray, right_PB: np.ndarray) -> np.ndarray:
    """By torch, in as many threads as a worker is given; those of numpy's products cannot be set at run time."""
    product_MB: np.ndarray = (torch.from_numpy(left_MP) @ torch.from_numpy(right_PB)).numpy()
    return product_MB


def _lengths(points_MP: np.ndarray) -> np.ndarray:
    lengths_M: np.ndarray = np.sqrt(np.einsum("mp,mp->m", points_MP, points_MP))
    return lengths_M


def _places(true_M: np.ndarray) -> np.ndarray:
    """The places of the few that are true: eight are looked at at once."""
    whole = len(true_M) // 8 * 8
    eights = np.flatnonzero(true_M[:whole].view(np.uint64))
    places = np.append((8 * eights[:, None] + np.arange(8)).ravel(), np.arange(whole, len(true_M)))
    found: np.ndarray = places[true_M[places]]
    return found


def _rounding(width: int) -> float:
    return 8 * (width + 8) * _EPS


def _finite(numbers_M: np.ndarray) -> np.ndarray:
    """Where a number overflowed, what rules nothing out."""
    return np.where(np.isfinite(numbers_M), numbers_M, np.float32(np.nan))


def _grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Larger in one dimension, with what it held; or of another shape, and empty."""
    grown = np.zeros(shape, np.float32)
    if sum(old != new for old, new in zip(array.shape, shape, strict=True)) == 1:
        grown[tuple(slice(length) for length in array.shape)] = array
    return grown
