"""Points under names, and which of them lie near a query, without a look at each in full.

A matrix product tells the distance to every point up to rounding; exact distances are computed only where that leaves
the answer open. So a search over thousands of points costs about what reading them costs.
"""

import numpy as np
import torch

from pipeline.index import exact_distances

ROUNDING = float(np.finfo(np.float32).eps)

NARROWED = 1e-6
"""Exact distances are rounded to float32 in the end."""


class Points:
    """Points of one width, each with a name and a reach, in rows 0 to N-1: the last row fills a gap."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._rows: dict[str, int] = {}
        self._points = np.empty((0, 0), np.float32)
        self._squares = np.empty(0, np.float64)
        self._reach = np.empty(0, np.float32)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    @property
    def points_ND(self) -> np.ndarray:
        """A view; float32."""
        return self._points[: len(self)]

    @property
    def reach_N(self) -> np.ndarray:
        """A view; float32."""
        return self._reach[: len(self)]

    def row(self, name: str) -> int:
        """Raises KeyError for a point that is not there."""
        return self._rows[name]

    def put(self, name: str, point_D: np.ndarray, reach: float = 0.0) -> int:
        """Add a point, or move one that is there; its row."""
        row = self._rows.get(name)
        if row is None:
            row = len(self)
            if row == len(self._reach):
                room = max(64, 2 * row)
                grown = np.zeros((room, len(point_D)), np.float32)
                grown[:row] = self._points[:row] if row else 0
                self._points = grown
                self._squares, self._reach = np.resize(self._squares, room), np.resize(self._reach, room)
            self.names.append(name)
            self._rows[name] = row
        self._points[row], self._reach[row] = point_D, reach
        self._squares[row] = np.square(self._points[row], dtype=np.float64).sum()
        return row

    def drop(self, name: str) -> int:
        """Take a point away; the row that the last point has taken over. KeyError where it is not there."""
        row, last = self._rows.pop(name), len(self) - 1
        if row != last:
            for array in (self._points, self._squares, self._reach):
                array[row] = array[last]
            self.names[row] = self.names[last]
            self._rows[self.names[row]] = row
        self.names.pop()
        return row

    def possible(self, query_D: np.ndarray, reach: float | np.ndarray) -> np.ndarray:
        """Rows of the points that may lie within `reach` (one number, or one a row): all that do, and hardly more."""
        if not len(self):
            return np.empty(0, np.int64)
        return np.flatnonzero(self._bounds(query_D)[0] <= reach)

    def within(self, query_D: np.ndarray, reach: float | np.ndarray) -> np.ndarray:
        """Rows of the points whose exact distance is at most `reach`."""
        rows = self.possible(query_D, reach)
        if not len(rows):
            return rows
        limits = reach[rows] if isinstance(reach, np.ndarray) else reach
        return rows[self._exact(query_D, rows) <= limits]

    def nearest(self, query_D: np.ndarray, reach: float) -> int | None:
        """The row of the point at the least exact distance, if that is at most `reach`."""
        rows = self.possible(query_D, reach)
        if not len(rows):
            return None
        distances = self._exact(query_D, rows)
        return int(rows[distances.argmin()]) if distances.min() <= reach else None

    def clearance(self, query_D: np.ndarray, noise: float, but_not: np.ndarray | None = None) -> float:
        """The exact distance to the nearest point that is farther than `noise` from the query and from `but_not`."""
        if not len(self):
            return float("inf")
        least_N, most_N = self._bounds(query_D)
        open_N, sure_N = most_N > noise, least_N > noise
        if but_not is not None:
            least, most = self._bounds(but_not)
            open_N, sure_N = open_N & (most > noise), sure_N & (least > noise)
        rows = np.flatnonzero(open_N & (least_N <= most_N[sure_N].min(initial=np.inf)))
        distances = self._exact(query_D, rows)
        others = distances > noise
        if but_not is not None:
            others &= self._exact(but_not, rows) > noise
        return float(distances[others].min(initial=np.inf))

    def _bounds(self, query_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """No distance is below the first or above the second: a product of D terms is off by D roundings at most.

        Where the product overflows nothing is known: 0 and infinity.
        """
        square, squares_N = float(np.square(query_D, dtype=np.float64).sum()), self._squares[: len(self)]
        with np.errstate(over="ignore", invalid="ignore"):
            found_N = squares_N + square - 2.0 * (self.points_ND @ query_D).astype(np.float64)
            error_N = len(query_D) * ROUNDING * np.square(np.sqrt(squares_N) + np.sqrt(square))
            least_N, most_N = found_N - error_N, found_N + error_N
        known_N = np.isfinite(found_N)
        least_N = np.sqrt(np.where(known_N, least_N, 0.0).clip(min=0.0)) * (1 - NARROWED)
        return least_N, np.sqrt(np.where(known_N, most_N, np.inf).clip(min=0.0)) * (1 + NARROWED)

    def _exact(self, query_D: np.ndarray, rows: np.ndarray) -> np.ndarray:
        points = torch.from_numpy(self.points_ND[rows])
        return exact_distances(torch.tensor(query_D)[None], points[None])[0].numpy()
