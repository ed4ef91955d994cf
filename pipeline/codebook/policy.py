"""Codebook maintenance: what an edit does to keys and radii (paper, Algorithm 1; design, section 4).

Pure functions of distances, radii and labels: they see no model, no random numbers and no clock, so the same history
gives the same decisions everywhere.
"""

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["add", "expand", "split", "replace"]

TRAFFIC_SHARE = 0.8
"""A radius reaches at most this share of the way to the nearest traffic that nobody flagged."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far batch composition and padding move an activation, relative to its norm, and where that was measured.

    `measured` are kinds of devices (`cpu`, `cuda`), of one or of several together, as
    `pipeline.editing.tolerance` measures them. Elsewhere the share is an assumption.
    """

    share: float
    measured: tuple[str, ...]


ROUNDINGS = {
    "float32": Rounding(6e-6, measured=("cpu",)),
    "float16": Rounding(2.0**-9, measured=("cpu",)),
    "bfloat16": Rounding(2.0**-6, measured=("cpu",)),
}
"""By the model's dtype. Nothing was measured on a GPU, or between a GPU and a CPU.

SmolLM2 on a CPU: at most 2.8e-6 in float32 (2.8e-5 absolute), 0 in float16, and 0.022 in bfloat16. The share of
float32 is twice that maximum, since other inputs, threads and processors may move a query farther. The maximum of
bfloat16 is above its share, and below the radius that every new entry has at least, which is twice the tolerance.
"""


def batch_noise(norm: float, dtype: str) -> float:
    """Distances up to this are the same input, seen in another batch. `norm` is the query's."""
    return max(2e-4, ROUNDINGS[dtype].share * norm)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a codebook is maintained.

    Attributes:
        kind: `nearest` or `paper`.
        radius: The initial radius (epsilon_init), absolute.
        expand: How `paper` expands: by the initial radius (`paper`) or just to cover the query (`cover`).
        noise: Distances up to this count as 0, and every ball that must hold a query holds it by twice this.
        max_radius: No radius is made larger, absolute; but a ball that is larger already stays.
    """

    kind: Literal["nearest", "paper"]
    radius: float
    expand: Literal["cover", "paper"] = "cover"
    noise: float = 2e-4
    max_radius: float = math.inf

    def allowed(self, clearance: float) -> float:
        """The largest radius of a key whose nearest unflagged traffic is `clearance` away (infinite: there is none)."""
        return min(TRAFFIC_SHARE * clearance, self.max_radius)

    def cover(self, distance: float) -> float:
        """The radius that just holds a query at `distance`, in any batch."""
        return distance + 2 * self.noise

    def own_radius(self, clearance: float) -> float:
        """The radius of a new key: never below what batch noise needs, so that the edited input is always reached."""
        return max(min(self.radius, self.allowed(clearance)), self.cover(0.0))


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The nearest entry, as seen from the query."""

    distance: float
    radius: float
    same_label: bool
    clearance: float = math.inf
    """From the entry's key to the nearest unflagged traffic."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to the nearest entry (`neighbour_radius`) and to a new one with the query as key (`radius`).

    `replace` gives the nearest entry a new value and label, and leaves its key; its radius grows to reach the query.
    """

    kind: Kind
    radius: float | None = None
    neighbour_radius: float | None = None


def decide(policy: Policy, neighbour: Neighbour | None, clearance: float = math.inf) -> Decision:
    """Algorithm 1 for one edit: the policy, the nearest entry (None: the codebook is empty), the query's clearance."""
    if neighbour is None or neighbour.distance > neighbour.radius + policy.radius:
        return Decision("add", radius=policy.own_radius(clearance))
    if neighbour.same_label:
        return _expand(policy, neighbour, clearance)
    if policy.kind == "nearest":
        if neighbour.distance <= policy.noise:
            return _replace(policy, neighbour)
        return Decision("split", radius=policy.own_radius(clearance))
    half = neighbour.distance / 2
    # The paper speaks of decreasing the radius; half the distance would enlarge it where the balls only touch.
    return Decision("split", radius=min(half, policy.allowed(clearance)), neighbour_radius=min(neighbour.radius, half))


def without_expanding(policy: Policy, neighbour: Neighbour, clearance: float) -> Decision:
    """What to do instead of an expand whose value fails on the new input: the input gets a value of its own."""
    if policy.kind == "nearest" and neighbour.distance <= policy.noise:
        return _replace(policy, neighbour)
    return Decision("add", radius=policy.own_radius(clearance))


def _replace(policy: Policy, neighbour: Neighbour) -> Decision:
    """The same input again. Its entry's ball may be too small for it: `paper` splits down to a radius of 0."""
    reach = policy.cover(neighbour.distance)
    return Decision("replace", neighbour_radius=reach if reach > neighbour.radius else None)


def _expand(policy: Policy, neighbour: Neighbour, clearance: float) -> Decision:
    """To cover the query, or by the initial radius; where that is not allowed, the query gets a key of its own."""
    needed = max(neighbour.radius, policy.cover(neighbour.distance))
    allowed = max(neighbour.radius, policy.allowed(neighbour.clearance))
    if needed > allowed:
        return without_expanding(policy, neighbour, clearance)
    by_initial = policy.kind == "paper" and policy.expand == "paper"
    wanted = max(needed, neighbour.radius + policy.radius) if by_initial else needed
    return Decision("expand", neighbour_radius=min(wanted, allowed))
