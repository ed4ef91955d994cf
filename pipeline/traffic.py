"""A bounded reservoir of recent queries that nobody flagged, which new radii keep clear of (design, section 4).

Which requests are held depends on nothing but their place in the log: a request's score is the time of its record plus
a Gumbel number drawn from a hash of (partition, offset), and the highest scores stay. That is a uniform sample that
forgets with a half-life, and whoever reads the same requests holds the same sample.
"""

import hashlib
import math

import numpy as np
import torch

from pipeline.index import exact_distances

FORGET_SECONDS = 3600.0
"""A request's odds of being held fall by e in this time."""

ENOUGH = 32
"""Queries from which the reservoir's median distance is used."""


def score(partition: int, offset: int, timestamp: float, seed: int) -> float:
    """The rank of one request record; `timestamp` in seconds. A pure function."""
    digest = hashlib.blake2b(f"{seed}/{partition}/{offset}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2.0**64
    return timestamp / FORGET_SECONDS - math.log(-math.log(uniform))


def median_nearest_distance(queries_RD: np.ndarray) -> float:
    """The median over queries of the distance to the nearest other one: the unit of radii. Needs two queries."""
    queries = torch.from_numpy(queries_RD)
    distances_RR = torch.cat([exact_distances(query_D[None], queries[None]) for query_D in queries])
    distances_RR.fill_diagonal_(torch.inf)
    return float(np.median(distances_RR.amin(dim=1).numpy()))


class Traffic:
    """At most `capacity` queries; `positions` says how far into each partition of `requests` they were taken."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.positions: dict[int, int] = {}
        self._capacity, self._seed = capacity, seed
        self._scores: list[float] = []
        self._queries: list[np.ndarray] = []
        self._unit: float | None = None

    def __len__(self) -> int:
        return len(self._queries)

    def wants(self, partition: int, offset: int, timestamp: float) -> float | None:
        """The record's score, if its query would be held; also moves the partition's position past it."""
        self.positions[partition] = max(offset + 1, self.positions.get(partition, 0))
        rank = score(partition, offset, timestamp, self._seed)
        if self._capacity == 0 or (len(self) == self._capacity and rank <= min(self._scores)):
            return None
        return rank

    def hold(self, rank: float, query_D: np.ndarray, noise: float) -> None:
        """Hold a query that `wants` asked for. The same input again (within `noise`) only renews the one held."""
        if not np.isfinite(query_D).all():
            return
        self._unit = None
        if len(self) and (distances_R := self._distances_to(query_D)).min() <= noise:
            row = int(distances_R.argmin())
            self._scores[row] = max(rank, self._scores[row])
            return
        if len(self) == self._capacity:
            if rank <= min(self._scores):
                return
            row = self._scores.index(min(self._scores))
            self._scores[row], self._queries[row] = rank, query_D
        else:
            self._scores.append(rank)
            self._queries.append(query_D)

    def clearance(self, key_D: np.ndarray, noise: float, but_not: np.ndarray | None = None) -> float:
        """The distance to the nearest query held, other than the key's own input and `but_not` (within `noise`)."""
        distances_R = self._distances_to(key_D)
        others_R = distances_R > noise
        if but_not is not None:
            others_R &= self._distances_to(but_not) > noise
        return float(distances_R[others_R].min(initial=np.inf))

    def forget(self, query_D: np.ndarray, noise: float) -> None:
        """Drop an input that turned out to be wrong: it was flagged."""
        kept = np.flatnonzero(self._distances_to(query_D) > noise)
        if len(kept) < len(self):
            self._scores = [self._scores[row] for row in kept]
            self._queries = [self._queries[row] for row in kept]
            self._unit = None

    def unit(self) -> float | None:
        """The median nearest-neighbour distance of what is held; None while that is too little to tell."""
        if self._unit is None and len(self) >= ENOUGH:
            self._unit = median_nearest_distance(np.stack(self._queries))
        return self._unit

    def _distances_to(self, key_D: np.ndarray) -> np.ndarray:
        if not len(self):
            return np.empty(0, np.float32)
        return exact_distances(torch.tensor(key_D)[None], torch.from_numpy(np.stack(self._queries))[None])[0].numpy()
