"""Codebook maintenance decides as Algorithm 1 does, keeps clear of traffic, and always reaches the edited input."""

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.codebook.policy import (
    MAX_TRAFFIC_FRACTION,
    MaintenancePolicy,
    Neighbour,
    PolicyDecision,
    decide_action,
    fallback_to_own_entry,
    match_tolerance,
)
from tests.support.examples import examples

MANY = examples(2)
NOISE = 2e-4
PAPER = MaintenancePolicy("paper", initial_radius=1.0, expand="paper")
COVER = MaintenancePolicy("paper", initial_radius=1.0, expand="cover")
NEAREST = MaintenancePolicy("nearest", initial_radius=1.0)

distances = st.floats(0, 20, allow_subnormal=False)
radii = st.floats(0, 10, allow_subnormal=False)
clearances = st.one_of(st.just(math.inf), st.floats(2 * NOISE, 40))
caps = st.one_of(st.just(math.inf), st.floats(0.01, 10))
policies = st.builds(
    MaintenancePolicy,
    st.sampled_from(["nearest", "paper"]),
    st.floats(0.01, 5),
    st.sampled_from(["cover", "paper"]),
    max_radius=caps,
)
neighbours = st.builds(Neighbour, distances, radii, st.booleans(), clearances)


@pytest.mark.parametrize(
    ("policy", "neighbour", "decision"),
    [
        (PAPER, None, PolicyDecision("add", radius=1.0)),
        (PAPER, Neighbour(2.1, 1.0, same_label=True), PolicyDecision("add", radius=1.0)),
        (PAPER, Neighbour(2.1, 1.0, same_label=False), PolicyDecision("add", radius=1.0)),
        (PAPER, Neighbour(2.0, 1.0, same_label=True), PolicyDecision("expand", neighbour_radius=2.0 + 2 * NOISE)),
        (PAPER, Neighbour(1.5, 1.0, same_label=True), PolicyDecision("expand", neighbour_radius=2.0)),
        (PAPER, Neighbour(0.5, 1.0, same_label=True), PolicyDecision("expand", neighbour_radius=2.0)),
        (COVER, Neighbour(1.5, 1.0, same_label=True), PolicyDecision("expand", neighbour_radius=1.5 + 2 * NOISE)),
        (COVER, Neighbour(0.5, 1.0, same_label=True), PolicyDecision("expand", neighbour_radius=1.0)),
        (PAPER, Neighbour(1.0, 1.0, same_label=False), PolicyDecision("split", radius=0.5, neighbour_radius=0.5)),
        (PAPER, Neighbour(1.8, 1.0, same_label=False), PolicyDecision("split", radius=0.9, neighbour_radius=0.9)),
        (NEAREST, None, PolicyDecision("add", radius=1.0)),
        (NEAREST, Neighbour(2.1, 1.0, same_label=True), PolicyDecision("add", radius=1.0)),
        (NEAREST, Neighbour(1.5, 1.0, same_label=True), PolicyDecision("expand", neighbour_radius=1.5 + 2 * NOISE)),
        (NEAREST, Neighbour(0.5, 1.0, same_label=True), PolicyDecision("expand", neighbour_radius=1.0)),
        (NEAREST, Neighbour(1.0, 1.0, same_label=False), PolicyDecision("split", radius=1.0)),
        (NEAREST, Neighbour(2 * NOISE, 1.0, same_label=False), PolicyDecision("split", radius=1.0)),
    ],
)
def test_each_case_of_the_algorithm_is_decided_as_the_design_says(
    policy: MaintenancePolicy, neighbour: Neighbour | None, decision: PolicyDecision
) -> None:
    assert decide_action(policy, neighbour) == decision


def test_an_entry_exactly_at_the_sum_of_both_radii_is_near_as_in_the_paper() -> None:
    """Algorithm 1 adds only where d is *greater* than the sum."""
    assert decide_action(PAPER, Neighbour(2.0, 1.0, same_label=False)).action == "split"
    assert decide_action(PAPER, Neighbour(math.nextafter(2.0, 3), 1.0, same_label=False)).action == "add"


def test_fault_a_split_can_enlarge_a_radius_is_not_ours() -> None:
    """Where the distance is the sum of both radii, half the distance is more than the smaller radius."""
    assert (
        decide_action(
            MaintenancePolicy("paper", initial_radius=3.0), Neighbour(3.0, 0.5, same_label=False)
        ).neighbour_radius
        == 0.5
    )


def test_fault_correcting_the_same_prompt_twice_loses_both_edits_stays_in_paper_mode_alone() -> None:
    again = Neighbour(0.0, 1.0, same_label=False)
    assert decide_action(PAPER, again) == PolicyDecision("split", radius=0.0, neighbour_radius=0.0)
    assert decide_action(NEAREST, again).action == "replace"


@pytest.mark.parametrize("distance", [0.0, NOISE / 2, NOISE])
def test_the_same_input_with_another_label_replaces_within_batch_noise(distance: float) -> None:
    assert decide_action(NEAREST, Neighbour(distance, 1.0, same_label=False)).action == "replace"


@MANY
@given(policies, st.none() | neighbours, clearances)
def test_far_queries_are_added_near_ones_expand_or_split(
    policy: MaintenancePolicy, neighbour: Neighbour | None, clearance: float
) -> None:
    decision = decide_action(policy, neighbour, clearance)
    if neighbour is None or neighbour.distance > neighbour.radius + policy.initial_radius:
        assert decision.action == "add"
        assert decision.neighbour_radius is None
    elif not neighbour.same_label:
        same_input = policy.kind == "nearest" and neighbour.distance <= policy.tolerance
        assert decision.action == ("replace" if same_input else "split")
    elif math.isinf(policy.max_allowed_radius(neighbour.protected_distance)):
        assert decision.action == "expand"


@MANY
@given(policies, neighbours, clearances)
def test_a_split_never_enlarges_the_neighbours_radius_and_nearest_leaves_it(
    policy: MaintenancePolicy, neighbour: Neighbour, clearance: float
) -> None:
    decision = decide_action(policy, neighbour, clearance)
    if decision.action == "split" and policy.kind == "paper":
        assert decision.neighbour_radius is not None
        assert decision.neighbour_radius <= neighbour.radius
        assert decision.neighbour_radius <= neighbour.distance / 2
    elif decision.action == "split":
        assert decision.neighbour_radius is None


@MANY
@given(policies, st.none() | neighbours, clearances)
def test_new_radii_heed_the_traffic_except_for_the_noise_floor(
    policy: MaintenancePolicy, neighbour: Neighbour | None, clearance: float
) -> None:
    for decision in (
        decide_action(policy, neighbour, clearance),
        *([fallback_to_own_entry(policy, neighbour, clearance)] if neighbour else []),
    ):
        if decision.radius is not None:
            assert decision.radius <= max(MAX_TRAFFIC_FRACTION * clearance, policy.covering_radius(0.0))
        if decision.neighbour_radius is not None:
            assert neighbour is not None
            floor = max(
                neighbour.radius, policy.covering_radius(neighbour.distance) if decision.action == "replace" else 0
            )
            assert decision.neighbour_radius <= max(MAX_TRAFFIC_FRACTION * neighbour.protected_distance, floor)


@MANY
@given(policies, st.none() | neighbours, clearances)
def test_no_radius_is_made_larger_than_the_limit_except_for_the_noise_floor(
    policy: MaintenancePolicy, neighbour: Neighbour | None, clearance: float
) -> None:
    for decision in (
        decide_action(policy, neighbour, clearance),
        *([fallback_to_own_entry(policy, neighbour, clearance)] if neighbour else []),
    ):
        if decision.radius is not None:
            assert decision.radius <= max(policy.max_radius, policy.covering_radius(0.0))
        if decision.neighbour_radius is not None:
            assert neighbour is not None
            floor = max(
                neighbour.radius, policy.covering_radius(policy.tolerance) if decision.action == "replace" else 0
            )
            assert decision.neighbour_radius <= max(policy.max_radius, floor)


@pytest.mark.parametrize("kind", ["nearest", "paper"])
def test_a_query_gets_its_own_key_where_the_radius_would_exceed_the_limit(
    kind: Literal["nearest", "paper"],
) -> None:
    policy = MaintenancePolicy(kind, initial_radius=1.0, max_radius=1.2)
    assert decide_action(policy, Neighbour(1.1, 1.0, same_label=True)).action == "expand"
    assert decide_action(policy, Neighbour(1.5, 1.0, same_label=True)) == PolicyDecision("add", radius=1.0)


def test_a_radius_that_exceeded_a_new_limit_before_keeps_its_size() -> None:
    policy = MaintenancePolicy("nearest", initial_radius=1.0, max_radius=0.5)
    assert decide_action(policy, Neighbour(1.5, 3.0, same_label=True)) == PolicyDecision("expand", neighbour_radius=3.0)
    assert decide_action(policy, Neighbour(1.5, 3.0, same_label=False)) == PolicyDecision("split", radius=0.5)


@MANY
@given(policies, neighbours, clearances)
def test_an_expand_covers_the_query_strictly_and_never_shrinks(
    policy: MaintenancePolicy, neighbour: Neighbour, clearance: float
) -> None:
    decision = decide_action(policy, neighbour, clearance)
    if decision.action == "expand":
        assert decision.neighbour_radius is not None
        assert decision.neighbour_radius >= max(neighbour.radius, policy.covering_radius(neighbour.distance))
        assert decision.neighbour_radius > neighbour.distance
        assert decision.radius is None


@MANY
@given(policies, st.none() | neighbours, clearances)
def test_a_new_radius_contains_its_own_input_in_any_batch_in_nearest_mode(
    policy: MaintenancePolicy, neighbour: Neighbour | None, clearance: float
) -> None:
    decision = decide_action(policy, neighbour, clearance)
    if decision.radius is not None and not (policy.kind == "paper" and decision.action == "split"):
        assert decision.radius >= 2 * policy.tolerance


@pytest.mark.parametrize("policy", [NEAREST, PAPER, COVER])
def test_traffic_in_the_way_of_an_expand_gives_the_query_a_key_of_its_own(policy: MaintenancePolicy) -> None:
    blocked = Neighbour(1.5, 1.0, same_label=True, protected_distance=1.2)
    assert decide_action(policy, blocked, protected_distance=0.5) == PolicyDecision("add", radius=0.4)


def test_the_papers_expand_stops_short_of_traffic_but_still_covers() -> None:
    decision = decide_action(PAPER, Neighbour(1.5, 1.0, same_label=True, protected_distance=2.2))
    assert decision == PolicyDecision("expand", neighbour_radius=MAX_TRAFFIC_FRACTION * 2.2)


def test_the_same_input_never_gets_a_second_key_beside_its_first() -> None:
    """Traffic may block even the expand by noise; two keys for one input would leave the answer to chance."""
    blocked = Neighbour(NOISE, 2 * NOISE, same_label=True, protected_distance=2.1 * NOISE)
    assert decide_action(NEAREST, blocked).action == "replace"


@MANY
@given(neighbours, clearances)
def test_where_an_entrys_value_fails_the_input_gets_a_value_of_its_own(neighbour: Neighbour, clearance: float) -> None:
    for policy in (NEAREST, PAPER):
        decision = fallback_to_own_entry(policy, neighbour, clearance)
        same_input = policy.kind == "nearest" and neighbour.distance <= policy.tolerance
        assert decision.action == ("replace" if same_input else "add")


@given(st.floats(0, NOISE), st.floats(0, 1))
def test_a_replaced_entry_reaches_the_input_in_any_batch(distance: float, radius: float) -> None:
    """Also where the entry comes from paper mode, whose splits leave radii of 0."""
    decision = decide_action(NEAREST, Neighbour(distance, radius, same_label=False))
    held = radius if decision.neighbour_radius is None else decision.neighbour_radius
    assert held >= NEAREST.covering_radius(distance)
    assert held >= radius


def test_batch_noise_has_a_floor_and_grows_with_norm_and_roundings() -> None:
    assert match_tolerance(1.0, "float32") == 2e-4
    assert match_tolerance(30.0, "float32") == 2e-4
    assert match_tolerance(1000.0, "float32") == pytest.approx(6e-3)
    assert match_tolerance(100.0, "bfloat16") == pytest.approx(3.125)
    assert match_tolerance(50.0, "float32") < match_tolerance(50.0, "float16") < match_tolerance(50.0, "bfloat16")


def test_an_unknown_dtype_has_no_noise_level() -> None:
    with pytest.raises(KeyError):
        match_tolerance(1.0, "int8")
