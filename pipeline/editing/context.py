"""Records the decision context: what a decision reads beside the log.

A decision follows from keys, radii, labels and its query, all of which the log holds. Beside these it reads the initial
radius, distances to unflagged traffic, and the entry with which training starts. The traffic sample cannot be rebuilt
once the requests have expired. So a delta records these inputs (docs/explanation/method.md), and an undo or a
reproduction can repeat the decision.

1. When a decision is repeated, recorded distances are reused.
2. Distances that were not recorded are computed from the current traffic sample, and recorded in turn.

Not promised: that a decision repeated under other circumstances gets the traffic of its time (rule 2).
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from gracestream.pipeline.editing.traffic_sample import TrafficSample
from gracestream.schemas.deltas import DecisionContext


class ContextRecorder:
    """Computes the traffic distances of one decision, and records them.

    Args:
        traffic_sample: The current traffic sample.
        initial_radius: Computes the initial radius; not called in a repeated decision.
        recorded: In a repeated decision, the context that was recorded.
        ignored_share: The share of the traffic sample that may lie within a radius, between 0 and 1.
    """

    def __init__(
        self,
        traffic_sample: TrafficSample,
        initial_radius: Callable[[], float],
        recorded: DecisionContext | None = None,
        ignored_share: float = 0.0,
    ) -> None:
        self._traffic_sample, self._recorded, self._ignored_share = traffic_sample, recorded, ignored_share
        self.initial_radius = initial_radius() if recorded is None else recorded.radius
        """The initial radius (epsilon_init of the paper), as an absolute distance."""
        self.start_entry: str | UnsetType = UNSET
        """The entry whose value is the starting point of training, with `value_init=label`."""
        self._traffic_distances: dict[str, float | None] = {}

    def traffic_distance(
        self, name: str, key_D: np.ndarray, tolerance: float, excluded_D: np.ndarray, wording: str
    ) -> float:
        """The distance from a key to the nearest unflagged query that limits its radius; infinite without any.

        Args:
            name: The entry id of the key; the distance is recorded under it.
            key_D: The key.
            tolerance: The numerical tolerance: queries within it of the key or of `excluded_D` do not count.
            excluded_D: The query of the correction.
            wording: The wording of the entry; queries that such an entry would not serve do not count.
        """
        if self._recorded is not None and name in self._recorded.clearance:
            self._traffic_distances[name] = self._recorded.clearance[name]
        else:
            distance = self._traffic_sample.nearest_distance(key_D, tolerance, excluded_D, wording, self._ignored_share)
            self._traffic_distances[name] = distance if math.isfinite(distance) else None
        recorded_distance = self._traffic_distances[name]
        return math.inf if recorded_distance is None else recorded_distance

    def record(self, nearest: str | None, distance: float) -> DecisionContext:
        """The whole context, for the delta: all distances read, the starting entry, and the nearest entry if any."""
        context = DecisionContext(radius=self.initial_radius, clearance=self._traffic_distances, start=self.start_entry)
        return context if nearest is None else msgspec.structs.replace(context, nearest=nearest, distance=distance)

    def record_for_status(self, *names: str) -> DecisionContext:
        """The part that can change the status of an outcome: the initial radius, and the distances of these keys."""
        distances = {name: self._traffic_distances[name] for name in names if name in self._traffic_distances}
        return DecisionContext(radius=self.initial_radius, clearance=distances)
