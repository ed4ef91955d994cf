"""The traffic sample: equal requests give equal samples, its size is bounded, and old requests leave it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.editing.traffic_sample import (
    DECAY_SECONDS,
    MIN_SAMPLE,
    TrafficSample,
    median_nearest_distance,
    sample_score,
)
from tests.support.chosen_queries import point
from tests.support.examples import examples

NOISE = 1e-3
MANY = examples(0.4)


def offer_and_add(traffic: TrafficSample, partition: int, offset: int, timestamp: float, *query: float) -> None:
    score = traffic.offer(partition, offset, timestamp)
    if score is not None:
        traffic.add(score, point(*query), NOISE)


def held(traffic: TrafficSample) -> set[tuple[float, ...]]:
    return {tuple(query_D.tolist()) for query_D in traffic._queries.points_ND}


@MANY
@given(st.randoms(use_true_random=False), st.integers(1, 20), st.integers(0, 5))
def test_the_sample_does_not_depend_on_the_order_of_arrival(order: object, capacity: int, seed: int) -> None:
    """Partitions may interleave in any order; equal inputs count once, with their best score."""
    requests = [
        (partition, offset, 60.0 * offset, (offset * 7 + partition) % 23)
        for partition in (0, 1)
        for offset in range(40)
    ]
    samples = []
    for _ in range(2):
        traffic = TrafficSample(capacity, seed)
        for partition, offset, timestamp, place in requests:
            offer_and_add(traffic, partition, offset, timestamp, place, 0)
        samples.append((held(traffic), sorted(traffic._scores), traffic.positions))
        order.shuffle(requests)  # type: ignore[attr-defined]
    assert samples[0] == samples[1]


def test_the_sample_is_bounded_and_holds_the_highest_scores() -> None:
    traffic = TrafficSample(10, seed=1)
    scores = {offset: sample_score(0, offset, 0.0, 1) for offset in range(300)}
    for offset in range(300):
        offer_and_add(traffic, 0, offset, 0.0, offset, 0)
        assert len(traffic) <= 10
    best = sorted(scores, key=lambda offset: scores[offset])[-10:]
    assert held(traffic) == {(float(offset), 0.0) for offset in best}


def test_old_requests_are_forgotten_with_time() -> None:
    traffic = TrafficSample(50, seed=0)
    for offset in range(500):
        offer_and_add(traffic, 0, offset, 0.0, offset, 0)
    for offset in range(500, 1000):
        offer_and_add(traffic, 0, offset, 20 * DECAY_SECONDS, offset, 0)
    assert all(query[0] >= 500 for query in held(traffic))


def test_requests_of_one_time_are_sampled_evenly() -> None:
    traffic = TrafficSample(200, seed=0)
    for offset in range(2000):
        offer_and_add(traffic, offset % 4, offset // 4, 0.0, offset, 0)
    places = sorted(query[0] for query in held(traffic))
    assert 800 < np.mean(places) < 1200


def test_the_score_is_a_pure_function_of_place_time_and_seed() -> None:
    assert sample_score(1, 2, 3.0, 4) == sample_score(1, 2, 3.0, 4)
    assert (
        len(
            {
                sample_score(0, 1, 0.0, 0),
                sample_score(1, 0, 0.0, 0),
                sample_score(0, 1, 0.0, 1),
                sample_score(0, 11, 0.0, 0),
            }
        )
        == 4
    )
    assert sample_score(0, 1, DECAY_SECONDS, 0) == pytest.approx(sample_score(0, 1, 0.0, 0) + 1)


def test_a_sample_without_capacity_takes_no_query_but_moves_positions() -> None:
    traffic = TrafficSample(0, seed=0)
    assert traffic.offer(3, 41, 0.0) is None
    assert (traffic.positions, len(traffic), traffic.median_distance()) == ({3: 42}, 0, None)
    assert traffic.nearest_distance(point(0, 0), NOISE) == np.inf


def test_positions_never_go_back() -> None:
    traffic = TrafficSample(1, seed=0)
    for offset in (5, 3, 9, 2):
        traffic.offer(0, offset, 0.0)
    assert traffic.positions == {0: 10}


def test_an_input_that_comes_again_is_held_once() -> None:
    traffic = TrafficSample(10, seed=0)
    for offset in range(20):
        offer_and_add(traffic, 0, offset, 0.0, 1, NOISE / 40 * offset)
    assert len(traffic) == 1


def test_a_query_that_is_not_finite_is_not_held() -> None:
    traffic = TrafficSample(10, seed=0)
    offer_and_add(traffic, 0, 0, 0.0, np.nan, 0)
    offer_and_add(traffic, 0, 1, 0.0, np.inf, 0)
    assert len(traffic) == 0


def test_clearance_is_the_distance_to_the_nearest_other_input() -> None:
    traffic = TrafficSample(10, seed=0)
    for offset, place in enumerate((0.0, 3.0, 5.0)):
        offer_and_add(traffic, 0, offset, 0.0, place, 0)
    assert traffic.nearest_distance(point(1, 0), NOISE) == 1.0
    assert traffic.nearest_distance(point(0, NOISE / 2), NOISE) == pytest.approx(3.0)
    assert traffic.nearest_distance(point(0, 0), NOISE, excluded_D=point(3, 0)) == 5.0


def test_a_flagged_input_is_forgotten() -> None:
    traffic = TrafficSample(10, seed=0)
    for offset, place in enumerate((0.0, 3.0)):
        offer_and_add(traffic, 0, offset, 0.0, place, 0)
    traffic.remove(point(3, NOISE / 2), NOISE)
    assert held(traffic) == {(0.0, 0.0)}
    traffic.remove(point(1, 0), NOISE)
    assert len(traffic) == 1


def test_the_unit_is_the_median_nearest_distance_once_there_is_enough() -> None:
    traffic = TrafficSample(100, seed=0)
    for offset in range(MIN_SAMPLE - 1):
        offer_and_add(traffic, 0, offset, 0.0, 2 * offset, 0)
    assert traffic.median_distance() is None
    offer_and_add(traffic, 0, MIN_SAMPLE, 0.0, 2 * MIN_SAMPLE, 0)
    assert traffic.median_distance() == 2.0
    for place in range(MIN_SAMPLE):
        offer_and_add(traffic, 1, place, 0.0, 2 * place, 0.5)
    assert traffic.median_distance() == 0.5


@MANY
@given(st.integers(2, 40), st.integers(0, 2**32))
def test_the_median_is_that_of_brute_force(count: int, seed: int) -> None:
    queries_RD = np.random.default_rng(seed).standard_normal((count, 5)).astype(np.float32)
    distances_RR = np.linalg.norm(queries_RD[:, None].astype(np.float64) - queries_RD[None], axis=-1)
    np.fill_diagonal(distances_RR, np.inf)
    assert median_nearest_distance(queries_RD) == pytest.approx(np.median(distances_RR.min(axis=1)), rel=1e-5)
