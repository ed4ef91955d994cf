"""A bounded reservoir of recent queries that nobody flagged, which new radii keep clear of (design, section 4).

Which requests are held depends on nothing but their place in the log: a request's score is the time of its record plus
a Gumbel number drawn from a hash of (partition, offset), and the highest scores stay. That is a uniform sample that
forgets with a half-life, and whoever reads the same requests holds the same sample.
"""

import hashlib
import math
from functools import partial

import numpy as np
import torch

from gracestream.pipeline.search import PointSet, exact_distances
from gracestream.pipeline.wording import limits_radius

DECAY_SECONDS = 3600.0
"""A request's odds of being held fall by e in this time."""

MIN_SAMPLE = 32
"""Queries from which the reservoir's median distance is used."""


def reservoir_score(partition: int, offset: int, timestamp: float, seed: int) -> float:
    """The rank of one request record; `timestamp` in seconds. A pure function."""
    digest = hashlib.blake2b(f"{seed}/{partition}/{offset}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2.0**64
    return timestamp / DECAY_SECONDS - math.log(-math.log(uniform))


def median_nearest_distance(queries_RD: np.ndarray) -> float:
    """The median over queries of the distance to the nearest other one: the unit of radii. Needs two queries."""
    queries = torch.from_numpy(queries_RD)
    distances_RR = torch.cat([exact_distances(query_D[None], queries[None]) for query_D in queries])
    distances_RR.fill_diagonal_(torch.inf)
    return float(np.median(distances_RR.amin(dim=1).numpy()))


class TrafficReservoir:
    """At most `capacity` queries; `positions` says how far into each partition of `requests` they were taken."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.positions: dict[int, int] = {}
        self._capacity, self._seed = capacity, seed
        self._scores: list[float] = []
        self._wordings: dict[str, str] = {}
        self._queries = PointSet()
        self._name_count = 0
        self._median_distance: float | None = None

    def __len__(self) -> int:
        return len(self._queries)

    def offer(self, partition: int, offset: int, timestamp: float) -> float | None:
        """The record's score, if its query would be held; also moves the partition's position past it."""
        self.positions[partition] = max(offset + 1, self.positions.get(partition, 0))
        rank = reservoir_score(partition, offset, timestamp, self._seed)
        if self._capacity == 0 or (len(self) == self._capacity and rank <= min(self._scores)):
            return None
        return rank

    def add(self, score: float, query_D: np.ndarray, tolerance: float, wording: str = "") -> None:
        """Hold a query that `offer` asked for. The same input again (within `tolerance`) only renews the one held."""
        if not np.isfinite(query_D).all():
            return
        self._median_distance = None
        if (row := self._queries.nearest(query_D, tolerance)) is not None:
            self._scores[row] = max(score, self._scores[row])
        elif len(self) < self._capacity:
            self._name_count += 1
            self._upsert(str(self._name_count), query_D, wording)
            self._scores.append(score)
        elif score > min(self._scores):
            row = self._scores.index(min(self._scores))
            self._upsert(self._queries.names[row], query_D, wording)
            self._scores[row] = score

    def _upsert(self, name: str, query_D: np.ndarray, wording: str) -> None:
        self._queries.upsert(name, query_D)
        self._wordings[name] = wording

    def nearest_distance(
        self,
        key_D: np.ndarray,
        tolerance: float,
        excluded_D: np.ndarray | None = None,
        wording: str = "",
        ignored_share: float = 0.0,
    ) -> float:
        """The distance to the nearest query held, other than the key's own and `excluded_D` (within `tolerance`).

        Only those count whose wording agrees in other words. A share of all that are held may be nearer.
        """
        counts = partial(self._bounds_radius, wording)
        return self._queries.nearest_distance(
            key_D, tolerance, excluded_D, counts, skip_count=int(ignored_share * len(self))
        )

    def _bounds_radius(self, wording: str, name: str) -> bool:
        return limits_radius(wording, self._wordings[name])

    def remove(self, query_D: np.ndarray, tolerance: float) -> None:
        """Drop an input that turned out to be wrong: it was flagged."""
        for row in sorted(self._queries.within(query_D, tolerance).tolist(), reverse=True):
            self._wordings.pop(self._queries.names[row])
            self._queries.remove(self._queries.names[row])
            self._scores[row] = self._scores[-1]
            self._scores.pop()
            self._median_distance = None

    def median_distance(self) -> float | None:
        """The median nearest-neighbour distance of what is held; None while that is too little to tell."""
        if self._median_distance is None and len(self) >= MIN_SAMPLE:
            self._median_distance = median_nearest_distance(self._queries.points_ND)
        return self._median_distance
