"""What one decision sees of the traffic around it (design, section 4).

A decision follows from keys, radii, labels and its query, and from distances to traffic that nobody flagged. Those come
from a reservoir that nobody can fill again once the requests are gone. So each distance that a decision asked for is
written into its delta, and a decision that is made again gets the same ones; what it did not ask for then, it sees as
traffic is now.
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from gracestream.pipeline.editing.traffic_reservoir import TrafficReservoir
from gracestream.schemas.deltas import Seen


class DecisionContext:
    """The traffic, as seen by one decision; `recorded` is what it saw when it was made the first time.

    A `ignored_share` of the traffic may lie within a radius.
    """

    def __init__(
        self,
        reservoir: TrafficReservoir,
        initial_radius: Callable[[], float],
        recorded: Seen | None = None,
        ignored_share: float = 0.0,
    ) -> None:
        self._reservoir, self._recorded, self._ignored_share = reservoir, recorded, ignored_share
        self.initial_radius = initial_radius() if recorded is None else recorded.radius
        """Epsilon_init, absolute."""
        self.start_entry: str | UnsetType = UNSET
        """The entry whose value the new one starts from."""
        self._traffic_distances: dict[str, float | None] = {}

    def traffic_distance(
        self, name: str, key_D: np.ndarray, tolerance: float, excluded_D: np.ndarray, wording: str
    ) -> float:
        """From a key, known as `name`, to the nearest unflagged query but for `excluded_D`; infinite: there is none.

        Only those count whose wording agrees in other words, after the share that may be nearer.
        """
        if self._recorded is not None and name in self._recorded.clearance:
            self._traffic_distances[name] = self._recorded.clearance[name]
        else:
            found = self._reservoir.nearest_distance(key_D, tolerance, excluded_D, wording, self._ignored_share)
            self._traffic_distances[name] = found if math.isfinite(found) else None
        known = self._traffic_distances[name]
        return math.inf if known is None else known

    def record(self, nearest: str | None, distance: float) -> Seen:
        """All that was asked for, and the entries that counted: what the delta says."""
        seen = Seen(radius=self.initial_radius, clearance=self._traffic_distances, start=self.start_entry)
        return seen if nearest is None else msgspec.structs.replace(seen, nearest=nearest, distance=distance)

    def record_for_status(self, *names: str) -> Seen:
        """As much of it as the kind of a decision rests on: the initial radius, and the clearance of these keys."""
        asked = {name: self._traffic_distances[name] for name in names if name in self._traffic_distances}
        return Seen(radius=self.initial_radius, clearance=asked)
