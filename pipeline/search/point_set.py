"""A set of named points with radii, searched by exact distance.

A prefilter excludes nearly all points. Exact distances decide on the rest, so results equal a search of all points.
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
"""True if the point of this name counts."""

FIRST_CANDIDATES = 8
"""Candidates of the first round of a nearest-point search. Each further round has eight times as many."""


class PointSet:
    """Points (N, D) of one width, each with a name and a radius, in rows 0 to N-1. The last row fills a gap."""

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
        """The points; a view, float32."""
        return self._points[: len(self)]

    @property
    def radii_N(self) -> np.ndarray:
        """The radii; a view, float32."""
        return self._radii[: len(self)]

    def row(self, name: str) -> int:
        """The row of a point.

        Raises:
            KeyError: there is no point of this name.
        """
        return self._rows[name]

    def upsert(self, name: str, point_D: np.ndarray, radius: float = 0.0) -> int:
        """Add a point, or replace the point of this name. Returns its row."""
        row = self._rows.get(name)
        if row is None:
            row = len(self)
            if row == len(self._radii):
                capacity = max(64, 2 * row)
                enlarged = np.zeros((capacity, len(point_D)), np.float32)
                enlarged[:row] = self._points[:row] if row else 0
                self._points = enlarged
                self._radii = np.resize(self._radii, capacity)
            self.names.append(name)
            self._rows[name] = row
        self._points[row], self._radii[row] = point_D, radius
        self._prefilter.mark_stale([row])
        return row

    def remove(self, name: str) -> int:
        """Remove a point. Returns its row, which the last point now occupies.

        Raises:
            KeyError: there is no point of this name.
        """
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
        """Rows of the points at an exact distance of at most `max_distance`."""
        rows = self._candidates_within(query_D, max_distance)
        return rows[self._exact_distances(query_D, rows) <= max_distance]

    def containing(self, query_D: np.ndarray, slack: float) -> np.ndarray:
        """Rows of the points whose exact distance is at most their own radius plus `slack`."""
        rows = self._prefilter.candidates_containing(query_D[None], slack)[0]
        containing_rows: np.ndarray = rows[self._exact_distances(query_D, rows) <= self.radii_N[rows] + slack]
        return containing_rows

    def nearest(self, query_D: np.ndarray, max_distance: float) -> int | None:
        """The row of the nearest point by exact distance, if it is at most `max_distance` away, else None."""
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
        """The exact distance to the nearest eligible point; infinite if there is none.

        Args:
            query_D: The query.
            tolerance: Points at most this far from the query or from `excluded_D` are not eligible.
            excluded_D: A second point; see `tolerance`.
            is_counted: A point is eligible only if this returns true for its name.
            skip_count: So many of the nearest eligible points are skipped.
        """
        nearest_among = partial(self._nearest_distance_among, query_D, tolerance, excluded_D, is_counted, skip_count)
        candidate_count = FIRST_CANDIDATES * (1 + skip_count)
        distance = nearest_among(self._prefilter.approximate_nearest(query_D, candidate_count))
        while candidate_count < len(self):  # otherwise the candidates were all points, and the result is final
            if math.isfinite(distance):
                # Approximate candidates give an upper bound. The answer is among all points within it.
                return nearest_among(self._candidates_within(query_D, distance))
            candidate_count *= FIRST_CANDIDATES
            distance = nearest_among(self._prefilter.approximate_nearest(query_D, candidate_count))
        return distance

    def _candidates_within(self, query_D: np.ndarray, max_distance: float) -> np.ndarray:
        """Rows that include every point at most `max_distance` away."""
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
        """The result of `nearest_distance` among the points of these rows."""
        distances = self._exact_distances(query_D, rows)
        eligible = distances > tolerance
        if excluded_D is not None:
            eligible &= self._exact_distances(excluded_D, rows) > tolerance
        places_by_distance = np.flatnonzero(eligible)[np.argsort(distances[eligible], kind="stable")].tolist()
        counted_places = (place for place in places_by_distance if is_counted(self.names[rows[place]]))
        nearest_place = next(islice(counted_places, skip_count, None), None)
        return math.inf if nearest_place is None else float(distances[nearest_place])

    def _exact_distances(self, query_D: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if not len(rows):
            return np.empty(0, np.float32)
        points = torch.from_numpy(self.points_ND[rows])
        return exact_distances(torch.tensor(query_D)[None], points[None])[0].numpy()
