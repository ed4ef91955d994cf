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
from gracestream.pipeline.search.prefilter import Prefilter

NamePredicate = Callable[[str], bool]
"""Whether the point of a name counts."""

FIRST_CANDIDATES = 8
"""Points that are looked at first where the nearest is wanted."""


class PointSet:
    """Points of one width, each with a name and a reach, in rows 0 to N-1: the last row fills a gap."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._rows: dict[str, int] = {}
        self._points = np.empty((0, 0), np.float32)
        self._radii = np.empty(0, np.float32)
        self._prefilter = Prefilter(self._points_and_radii)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    @property
    def points_ND(self) -> np.ndarray:
        """A view; float32."""
        return self._points[: len(self)]

    @property
    def radii_N(self) -> np.ndarray:
        """A view; float32."""
        return self._radii[: len(self)]

    def row(self, name: str) -> int:
        """Raises KeyError for a point that is not there."""
        return self._rows[name]

    def upsert(self, name: str, point_D: np.ndarray, radius: float = 0.0) -> int:
        """Add a point, or move one that is there; its row."""
        row = self._rows.get(name)
        if row is None:
            row = len(self)
            if row == len(self._radii):
                room = max(64, 2 * row)
                grown = np.zeros((room, len(point_D)), np.float32)
                grown[:row] = self._points[:row] if row else 0
                self._points = grown
                self._radii = np.resize(self._radii, room)
            self.names.append(name)
            self._rows[name] = row
        self._points[row], self._radii[row] = point_D, radius
        self._prefilter.mark_stale([row])
        return row

    def remove(self, name: str) -> int:
        """Take a point away; the row that the last point has taken over. KeyError where it is not there."""
        row, last = self._rows.pop(name), len(self) - 1
        if row != last:
            for array in (self._points, self._radii):
                array[row] = array[last]
            self._prefilter.mark_stale([row])
            self.names[row] = self.names[last]
            self._rows[self.names[row]] = row
        self.names.pop()
        return row

    def within(self, query_D: np.ndarray, max_distance: float) -> np.ndarray:
        """Rows of the points whose exact distance is at most `max_distance`."""
        rows = self._candidates_within(query_D, max_distance)
        return rows[self._exact_distances(query_D, rows) <= max_distance]

    def containing(self, query_D: np.ndarray, slack: float) -> np.ndarray:
        """Rows of the points whose exact distance is at most their own reach and `slack`."""
        rows = self._prefilter.candidates_containing(query_D[None], slack)[0]
        reached: np.ndarray = rows[self._exact_distances(query_D, rows) <= self.radii_N[rows] + slack]
        return reached

    def nearest(self, query_D: np.ndarray, max_distance: float) -> int | None:
        """The row of the point at the least exact distance, if that is at most `max_distance`."""
        rows = self.within(query_D, max_distance)
        return int(rows[self._exact_distances(query_D, rows).argmin()]) if len(rows) else None

    def nearest_distance(
        self,
        query_D: np.ndarray,
        tolerance: float,
        excluded_D: np.ndarray | None = None,
        is_counted: NamePredicate = lambda _name: True,
        skip_count: int = 0,
    ) -> float:
        """The exact distance to the nearest point farther than `tolerance` from the query and from `excluded_D`.

        Points whose name does not count are passed over, and then as many as may be `skip_count`.
        """
        others = partial(self._nearest_distance_among, query_D, tolerance, excluded_D, is_counted, skip_count)
        count = FIRST_CANDIDATES * (1 + skip_count)
        known = others(self._prefilter.approximate_nearest(query_D, count))
        while count < len(self):  # else all were looked at
            if math.isfinite(known):
                return others(self._candidates_within(query_D, known))
            count *= FIRST_CANDIDATES
            known = others(self._prefilter.approximate_nearest(query_D, count))
        return known

    def _candidates_within(self, query_D: np.ndarray, max_distance: float) -> np.ndarray:
        """Of these every row of a point at most `max_distance` away is one."""
        return self._prefilter.candidates_within(query_D[None], np.array([max_distance]))[0]

    def _points_and_radii(self) -> tuple[np.ndarray, np.ndarray]:
        return self.points_ND, self.radii_N

    def _nearest_distance_among(
        self,
        query_D: np.ndarray,
        tolerance: float,
        excluded_D: np.ndarray | None,
        is_counted: NamePredicate,
        skip_count: int,
        rows: np.ndarray,
    ) -> float:
        """The same, of these points alone."""
        distances = self._exact_distances(query_D, rows)
        others = distances > tolerance
        if excluded_D is not None:
            others &= self._exact_distances(excluded_D, rows) > tolerance
        in_order = np.flatnonzero(others)[np.argsort(distances[others], kind="stable")].tolist()
        counting = (place for place in in_order if is_counted(self.names[rows[place]]))
        found = next(islice(counting, skip_count, None), None)
        return math.inf if found is None else float(distances[found])

    def _exact_distances(self, query_D: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if not len(rows):
            return np.empty(0, np.float32)
        points = torch.from_numpy(self.points_ND[rows])
        return exact_distances(torch.tensor(query_D)[None], points[None])[0].numpy()
