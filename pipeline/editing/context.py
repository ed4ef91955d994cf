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

from gracestream.pipeline.editing.traffic_reservoir import Traffic
from gracestream.schemas.deltas import Seen


class Sight:
    """The traffic, as seen by one decision; `before` is what it saw when it was made the first time.

    A `share` of the traffic may lie within a radius.
    """

    def __init__(
        self, traffic: Traffic, initial_radius: Callable[[], float], before: Seen | None = None, share: float = 0.0
    ) -> None:
        self._traffic, self._before, self._share = traffic, before, share
        self.radius = initial_radius() if before is None else before.radius
        """Epsilon_init, absolute."""
        self.start: str | UnsetType = UNSET
        """The entry whose value the new one starts from."""
        self._clearance: dict[str, float | None] = {}

    def clearance(self, name: str, key_D: np.ndarray, noise: float, but_not: np.ndarray, wording: str) -> float:
        """From a key, known as `name`, to the nearest unflagged query but for `but_not`; infinite: there is none.

        Only those count whose wording agrees in other words, after the share that may be nearer.
        """
        if self._before is not None and name in self._before.clearance:
            self._clearance[name] = self._before.clearance[name]
        else:
            found = self._traffic.clearance(key_D, noise, but_not, wording, self._share)
            self._clearance[name] = found if math.isfinite(found) else None
        known = self._clearance[name]
        return math.inf if known is None else known

    def seen(self, nearest: str | None, distance: float) -> Seen:
        """All that was asked for, and the entries that counted: what the delta says."""
        seen = Seen(radius=self.radius, clearance=self._clearance, start=self.start)
        return seen if nearest is None else msgspec.structs.replace(seen, nearest=nearest, distance=distance)

    def deciding(self, *names: str) -> Seen:
        """As much of it as the kind of a decision rests on: the initial radius, and the clearance of these keys."""
        asked = {name: self._clearance[name] for name in names if name in self._clearance}
        return Seen(radius=self.radius, clearance=asked)
