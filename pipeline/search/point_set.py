"""Points under names, and which of them lie near a query, without a look at each in full.

A sieve rules nearly all of them out; of those that it leaves the exact distances decide.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import islice

import numpy as np
import torch

from gracestream.pipeline.search.distance import exact_distances
from gracestream.pipeline.search.prefilter import Sieve

Counts = Callable[[str], bool]
"""Whether the point of a name counts."""

SOME = 8
"""Points that are looked at first where the nearest is wanted."""


class Points:
    """Points of one width, each with a name and a reach, in rows 0 to N-1: the last row fills a gap."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._rows: dict[str, int] = {}
        self._points = np.empty((0, 0), np.float32)
        self._reach = np.empty(0, np.float32)
        self._sieve = Sieve(self._held)

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
                self._reach = np.resize(self._reach, room)
            self.names.append(name)
            self._rows[name] = row
        self._points[row], self._reach[row] = point_D, reach
        self._sieve.changed([row])
        return row

    def drop(self, name: str) -> int:
        """Take a point away; the row that the last point has taken over. KeyError where it is not there."""
        row, last = self._rows.pop(name), len(self) - 1
        if row != last:
            for array in (self._points, self._reach):
                array[row] = array[last]
            self._sieve.changed([row])
            self.names[row] = self.names[last]
            self._rows[self.names[row]] = row
        self.names.pop()
        return row

    def within(self, query_D: np.ndarray, reach: float) -> np.ndarray:
        """Rows of the points whose exact distance is at most `reach`."""
        rows = self._within(query_D, reach)
        return rows[self._exact(query_D, rows) <= reach]

    def reaching(self, query_D: np.ndarray, slack: float) -> np.ndarray:
        """Rows of the points whose exact distance is at most their own reach and `slack`."""
        rows = self._sieve.covering(query_D[None], slack)[0]
        reached: np.ndarray = rows[self._exact(query_D, rows) <= self.reach_N[rows] + slack]
        return reached

    def nearest(self, query_D: np.ndarray, reach: float) -> int | None:
        """The row of the point at the least exact distance, if that is at most `reach`."""
        rows = self.within(query_D, reach)
        return int(rows[self._exact(query_D, rows).argmin()]) if len(rows) else None

    def clearance(
        self,
        query_D: np.ndarray,
        noise: float,
        but_not: np.ndarray | None = None,
        counts: Counts = lambda _name: True,
        nearer: int = 0,
    ) -> float:
        """The exact distance to the nearest point that is farther than `noise` from the query and from `but_not`.

        Points whose name does not count are passed over, and then as many as may be `nearer`.
        """
        others = partial(self._clearance, query_D, noise, but_not, counts, nearer)
        count = SOME * (1 + nearer)
        known = others(self._sieve.close(query_D, count))
        while count < len(self):  # else all were looked at
            if math.isfinite(known):
                return others(self._within(query_D, known))
            count *= SOME
            known = others(self._sieve.close(query_D, count))
        return known

    def _within(self, query_D: np.ndarray, reach: float) -> np.ndarray:
        """Of these every row of a point at most `reach` away is one."""
        return self._sieve.within(query_D[None], np.array([reach]))[0]

    def _held(self) -> tuple[np.ndarray, np.ndarray]:
        return self.points_ND, self.reach_N

    def _clearance(
        self,
        query_D: np.ndarray,
        noise: float,
        but_not: np.ndarray | None,
        counts: Counts,
        nearer: int,
        rows: np.ndarray,
    ) -> float:
        """The same, of these points alone."""
        distances = self._exact(query_D, rows)
        others = distances > noise
        if but_not is not None:
            others &= self._exact(but_not, rows) > noise
        in_order = np.flatnonzero(others)[np.argsort(distances[others], kind="stable")].tolist()
        counting = (place for place in in_order if counts(self.names[rows[place]]))
        found = next(islice(counting, nearer, None), None)
        return math.inf if found is None else float(distances[found])

    def _exact(self, query_D: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if not len(rows):
            return np.empty(0, np.float32)
        points = torch.from_numpy(self.points_ND[rows])
        return exact_distances(torch.tensor(query_D)[None], points[None])[0].numpy()
