"""A bounded sample of recent unflagged requests; new radii keep clear of their queries (docs/explanation/method.md).

The sampling is weighted and without replacement, by the keys of Efraimidis and Spirakis (algorithm A-Res, 2006), with
weights that decay exponentially. With the weight w = exp(t / decay) of a request at time t, their key u^(1/w) ranks
requests like log(w) - log(-log(u)): the time in units of the decay plus a Gumbel variable. The highest scores stay.

1. A score depends only on the partition, offset, timestamp and seed. Whoever reads the same requests draws the same
   sample.
2. The odds that a request is in the sample fall by a factor of e every `DECAY_SECONDS`.

Not promised: one row for each request. Equal inputs share a row, and an input that is flagged is removed.
"""

import hashlib
import math
from functools import partial

import numpy as np
import torch

from gracestream.pipeline.search import PointSet, exact_distances
from gracestream.pipeline.wording import limits_radius

DECAY_SECONDS = 3600.0
"""Seconds in which the odds that a request is in the sample fall by a factor of e."""

MIN_SAMPLE = 32
"""Queries that the sample must hold before its median distance serves as the unit of radii."""


def sample_score(partition: int, offset: int, timestamp: float, seed: int) -> float:
    """The sampling score of one request record; `timestamp` in seconds. See the module for the derivation."""
    digest = hashlib.blake2b(f"{seed}/{partition}/{offset}".encode(), digest_size=8).digest()
    # The half step keeps `uniform` strictly between 0 and 1, so that both logarithms are finite.
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2.0**64
    return timestamp / DECAY_SECONDS - math.log(-math.log(uniform))


def median_nearest_distance(queries_RD: np.ndarray) -> float:
    """The median distance from a query to the nearest other one, over two or more queries (R, D): the unit of radii."""
    queries = torch.from_numpy(queries_RD)
    distances_RR = torch.cat([exact_distances(query_D[None], queries[None]) for query_D in queries])
    distances_RR.fill_diagonal_(torch.inf)
    return float(np.median(distances_RR.amin(dim=1).numpy()))


class TrafficSample:
    """A sample of at most `capacity` unflagged queries, with their scores and wordings.

    Attributes:
        positions: By partition of `requests`: the offset after the last record that was offered.
    """

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
        """The score of a record if the sample would take its query, else None; moves the partition's position past it.

        Callers compute the query, which takes a pass of the model, only for records with a score.
        """
        self.positions[partition] = max(offset + 1, self.positions.get(partition, 0))
        score = sample_score(partition, offset, timestamp, self._seed)
        if self._capacity == 0 or (len(self) == self._capacity and score <= min(self._scores)):
            return None
        return score

    def add(self, score: float, query_D: np.ndarray, tolerance: float, wording: str = "") -> None:
        """Add a query (D) with its score from `offer`.

        A query within `tolerance` of one in the sample only raises its score. A query that is not finite is ignored.
        """
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
        """The distance from a key to the nearest query of the sample that counts; infinite without any.

        Args:
            key_D: The key.
            tolerance: Queries within this distance of `key_D` or `excluded_D` are the same input and do not count.
            excluded_D: The query of the correction under decision, if any.
            wording: The wording of the key's entry. A query counts if its wording agrees with this one, but does not
                have the same words.
            ignored_share: This share of the sample may be nearer: as many of the nearest queries are skipped.
        """
        is_counted = partial(self._bounds_radius, wording)
        return self._queries.nearest_distance(
            key_D, tolerance, excluded_D, is_counted, skip_count=int(ignored_share * len(self))
        )

    def _bounds_radius(self, wording: str, name: str) -> bool:
        """Whether an entry with this wording must keep clear of the query under this name."""
        return limits_radius(wording, self._wordings[name])

    def remove(self, query_D: np.ndarray, tolerance: float) -> None:
        """Remove the queries within `tolerance` of `query_D`: feedback has flagged this input."""
        # In descending order: a removal moves the last row into the gap, which must not move a row still to be removed.
        for row in sorted(self._queries.within(query_D, tolerance).tolist(), reverse=True):
            self._wordings.pop(self._queries.names[row])
            self._queries.remove(self._queries.names[row])
            self._scores[row] = self._scores[-1]
            self._scores.pop()
            self._median_distance = None

    def median_distance(self) -> float | None:
        """The median nearest-neighbour distance of the sample; None while it holds fewer than `MIN_SAMPLE` queries."""
        if self._median_distance is None and len(self) >= MIN_SAMPLE:
            self._median_distance = median_nearest_distance(self._queries.points_ND)
        return self._median_distance
