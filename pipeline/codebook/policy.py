"""Maintenance policies: the effect of an edit on keys and radii (GRACE, Algorithm 1; docs/explanation/method.md).

Guarantee: all functions depend only on distances, radii and labels. They use no model, no random numbers and no clock,
so the same history gives the same decisions everywhere.
"""

import math
from dataclasses import dataclass
from typing import Literal

PolicyAction = Literal["add", "expand", "split", "replace"]

MAX_TRAFFIC_FRACTION = 0.8
"""A radius is at most this fraction of the distance to the nearest unflagged query."""


DTYPE_TOLERANCES = {
    "float32": 6e-6,
    "float16": 2.0**-7,
    "bfloat16": 2.0**-5,
}
"""How far a query may move with its batch, its padding and the device, relative to its norm; by its dtype.

Measured by `pipeline.editing.tolerance` with queries of layers, on CPUs, on an H200, and between an H200 and a CPU.
The maxima were 2.8e-6 in float32, 0.0076 in float16, and 0.029 in bfloat16. The value for float32 is twice its
maximum, since other inputs, threads and processors may move a query farther. The values for halves exceed their maxima
by little. But the smallest radius of a new entry is twice the tolerance.
"""


def match_tolerance(norm: float, dtype: str) -> float:
    """The distance up to which two queries count as the same input in different batches. `norm` is the query's."""
    return max(2e-4, DTYPE_TOLERANCES[dtype] * norm)


@dataclass(frozen=True, slots=True)
class MaintenancePolicy:
    """The rules for maintaining a codebook.

    Attributes:
        kind: `nearest` or `paper`.
        initial_radius: The initial radius (epsilon_init in the paper), an absolute distance.
        expand: Expansion under `paper`: by the initial radius (`paper`), or just to contain the query (`cover`).
        tolerance: Distances up to this count as 0. A radius that must contain a query exceeds its distance by twice
            this.
        max_radius: Largest radius that is set, an absolute distance. A radius that is larger already stays.
    """

    kind: Literal["nearest", "paper"]
    initial_radius: float
    expand: Literal["cover", "paper"] = "cover"
    tolerance: float = 2e-4
    max_radius: float = math.inf

    def max_allowed_radius(self, protected_distance: float) -> float:
        """The largest radius of a key whose nearest unflagged query is `protected_distance` away (may be infinite)."""
        return min(MAX_TRAFFIC_FRACTION * protected_distance, self.max_radius)

    def covering_radius(self, distance: float) -> float:
        """The smallest radius that contains a query at `distance` in any batch: twice the tolerance more."""
        return distance + 2 * self.tolerance

    def new_entry_radius(self, protected_distance: float) -> float:
        """The radius of a new key: the initial radius as far as allowed, but at least `covering_radius(0)`.

        The lower limit ensures that the edited input matches in every batch.
        """
        return max(min(self.initial_radius, self.max_allowed_radius(protected_distance)), self.covering_radius(0.0))


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The nearest entry, relative to the query.

    Attributes:
        distance: From the query to the entry's key.
        radius: The entry's radius.
        same_label: True if the entry has the label of the correction.
        protected_distance: From the entry's key to the nearest unflagged query.
    """

    distance: float
    radius: float
    same_label: bool
    protected_distance: float = math.inf


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """The decision of a policy on one correction.

    Attributes:
        action: `add` or `split`: a new entry with the query as key. `expand`: the nearest entry gets a larger radius.
            `replace`: the nearest entry keeps its key and gets a new value and label.
        radius: The radius of the new entry; None: there is no new entry.
        neighbour_radius: The new radius of the nearest entry; None: it is unchanged.
    """

    action: PolicyAction
    radius: float | None = None
    neighbour_radius: float | None = None


def decide_action(
    policy: MaintenancePolicy, neighbour: Neighbour | None, protected_distance: float = math.inf
) -> PolicyDecision:
    """Apply Algorithm 1 to one correction.

    Args:
        policy: The policy.
        neighbour: The nearest entry; None: the codebook is empty.
        protected_distance: From the query to the nearest unflagged query.
    """
    if neighbour is None or neighbour.distance > neighbour.radius + policy.initial_radius:
        return PolicyDecision("add", radius=policy.new_entry_radius(protected_distance))
    if neighbour.same_label:
        return _expand(policy, neighbour, protected_distance)
    if policy.kind == "nearest":
        if neighbour.distance <= policy.tolerance:
            return _replace(policy, neighbour)
        return PolicyDecision("split", radius=policy.new_entry_radius(protected_distance))
    half_distance = neighbour.distance / 2
    # The paper sets the neighbour's radius to half the distance, in order to decrease it. But an entry up to its radius
    # plus the initial radius away is split. Half that distance may exceed the radius, which then stays as it is.
    return PolicyDecision(
        "split",
        radius=min(half_distance, policy.max_allowed_radius(protected_distance)),
        neighbour_radius=min(neighbour.radius, half_distance),
    )


def fallback_to_own_entry(policy: MaintenancePolicy, neighbour: Neighbour, protected_distance: float) -> PolicyDecision:
    """The decision in place of an `expand` if its value fails on the new input: the input gets its own value."""
    if policy.kind == "nearest" and neighbour.distance <= policy.tolerance:
        return _replace(policy, neighbour)
    return PolicyDecision("add", radius=policy.new_entry_radius(protected_distance))


def _replace(policy: MaintenancePolicy, neighbour: Neighbour) -> PolicyDecision:
    """The decision for the same input again. Its entry's radius may not contain it: `paper` splits down to radius 0."""
    needed_radius = policy.covering_radius(neighbour.distance)
    return PolicyDecision("replace", neighbour_radius=needed_radius if needed_radius > neighbour.radius else None)


def _expand(policy: MaintenancePolicy, neighbour: Neighbour, protected_distance: float) -> PolicyDecision:
    """The decision for an equal label: a larger radius that contains the query, or a new key if that is not allowed."""
    needed_radius = max(neighbour.radius, policy.covering_radius(neighbour.distance))
    allowed_radius = max(neighbour.radius, policy.max_allowed_radius(neighbour.protected_distance))
    if needed_radius > allowed_radius:
        return fallback_to_own_entry(policy, neighbour, protected_distance)
    grows_by_initial = policy.kind == "paper" and policy.expand == "paper"
    wanted_radius = max(needed_radius, neighbour.radius + policy.initial_radius) if grows_by_initial else needed_radius
    return PolicyDecision("expand", neighbour_radius=min(wanted_radius, allowed_radius))
