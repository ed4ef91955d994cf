"""Codebook maintenance: what an edit does to keys and radii (paper, Algorithm 1; design, section 4).

Pure functions of distances, radii and labels: they see no model, no random numbers and no clock, so the same history
gives the same decisions everywhere.
"""

import math
from dataclasses import dataclass
from typing import Literal

PolicyAction = Literal["add", "expand", "split", "replace"]

MAX_TRAFFIC_FRACTION = 0.8
"""A radius reaches at most this share of the way to the nearest traffic that nobody flagged."""


@dataclass(frozen=True, slots=True)
class RelativeTolerance:
    """How far batch composition and padding move an activation, relative to its norm, and where that was measured.

    `measured_on` are kinds of devices (`cpu`, `cuda`), of one or of several together, as
    `pipeline.editing.tolerance` measures them. Elsewhere the share is an assumption.
    """

    relative: float
    measured_on: tuple[str, ...]


DTYPE_TOLERANCES = {
    "float32": RelativeTolerance(6e-6, measured_on=("cpu",)),
    "float16": RelativeTolerance(2.0**-9, measured_on=("cpu",)),
    "bfloat16": RelativeTolerance(2.0**-6, measured_on=("cpu",)),
}
"""By the model's dtype. Nothing was measured on a GPU, or between a GPU and a CPU.

SmolLM2 on a CPU: at most 2.8e-6 in float32 (2.8e-5 absolute), 0 in float16, and 0.022 in bfloat16. The share of
float32 is twice that maximum, since other inputs, threads and processors may move a query farther. The maximum of
bfloat16 is above its share, and below the radius that every new entry has at least, which is twice the tolerance.
"""


def match_tolerance(norm: float, dtype: str) -> float:
    """Distances up to this are the same input, seen in another batch. `norm` is the query's."""
    return max(2e-4, DTYPE_TOLERANCES[dtype].relative * norm)


@dataclass(frozen=True, slots=True)
class MaintenancePolicy:
    """How a codebook is maintained.

    Attributes:
        kind: `nearest` or `paper`.
        initial_radius: The initial radius (epsilon_init), absolute.
        expand: How `paper` expands: by the initial radius (`paper`) or just to cover the query (`covering_radius`).
        tolerance: Distances up to this count as 0, and every ball that must hold a query holds it by twice this.
        max_radius: No radius is made larger, absolute; but a ball that is larger already stays.
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
        """The radius that just holds a query at `distance`, in any batch."""
        return distance + 2 * self.tolerance

    def new_entry_radius(self, protected_distance: float) -> float:
        """The radius of a new key: never below what batch noise needs, so that the edited input is always reached."""
        return max(min(self.initial_radius, self.max_allowed_radius(protected_distance)), self.covering_radius(0.0))


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The nearest entry, as seen from the query."""

    distance: float
    radius: float
    same_label: bool
    protected_distance: float = math.inf
    """From the entry's key to the nearest unflagged traffic."""


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """What happens to the nearest entry (`neighbour_radius`) and to a new one with the query as key (`radius`).

    `replace` gives the nearest entry a new value and label, and leaves its key; its radius grows to reach the query.
    """

    action: PolicyAction
    radius: float | None = None
    neighbour_radius: float | None = None


def decide_action(
    policy: MaintenancePolicy, neighbour: Neighbour | None, protected_distance: float = math.inf
) -> PolicyDecision:
    """Algorithm 1 for one edit: the policy, the nearest entry (None: the codebook is empty), the query's clearance."""
    if neighbour is None or neighbour.distance > neighbour.radius + policy.initial_radius:
        return PolicyDecision("add", radius=policy.new_entry_radius(protected_distance))
    if neighbour.same_label:
        return _expand(policy, neighbour, protected_distance)
    if policy.kind == "nearest":
        if neighbour.distance <= policy.tolerance:
            return _replace(policy, neighbour)
        return PolicyDecision("split", radius=policy.new_entry_radius(protected_distance))
    half = neighbour.distance / 2
    # The paper speaks of decreasing the radius; half the distance would enlarge it where the balls only touch.
    return PolicyDecision(
        "split",
        radius=min(half, policy.max_allowed_radius(protected_distance)),
        neighbour_radius=min(neighbour.radius, half),
    )


def fallback_to_own_entry(policy: MaintenancePolicy, neighbour: Neighbour, protected_distance: float) -> PolicyDecision:
    """What to do instead of an expand whose value fails on the new input: the input gets a value of its own."""
    if policy.kind == "nearest" and neighbour.distance <= policy.tolerance:
        return _replace(policy, neighbour)
    return PolicyDecision("add", radius=policy.new_entry_radius(protected_distance))


def _replace(policy: MaintenancePolicy, neighbour: Neighbour) -> PolicyDecision:
    """The same input again. Its entry's ball may be too small for it: `paper` splits down to a radius of 0."""
    reach = policy.covering_radius(neighbour.distance)
    return PolicyDecision("replace", neighbour_radius=reach if reach > neighbour.radius else None)


def _expand(policy: MaintenancePolicy, neighbour: Neighbour, protected_distance: float) -> PolicyDecision:
    """To cover the query, or by the initial radius; where that is not allowed, the query gets a key of its own."""
    needed = max(neighbour.radius, policy.covering_radius(neighbour.distance))
    allowed = max(neighbour.radius, policy.max_allowed_radius(neighbour.protected_distance))
    if needed > allowed:
        return fallback_to_own_entry(policy, neighbour, protected_distance)
    by_initial = policy.kind == "paper" and policy.expand == "paper"
    wanted = max(needed, neighbour.radius + policy.initial_radius) if by_initial else needed
    return PolicyDecision("expand", neighbour_radius=min(wanted, allowed))
