"""Points: what is near a query comes out as if each distance had been computed in full."""

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.search.point_set import PointSet
from tests.support.examples import examples

MANY = examples(0.8)


def distances(points_ND: np.ndarray, query_D: np.ndarray) -> np.ndarray:
    found_N: np.ndarray = np.sqrt(((points_ND - query_D).astype(np.float64) ** 2).sum(axis=1)).astype(np.float32)
    return found_N


@MANY
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 90),
    st.sampled_from([1, 3, 64]),
    st.sampled_from([0.0, 1e2, 1e6, 1e25]),
    st.sampled_from([1e-4, 0.5, 2.0]),
)
def test_a_search_finds_what_brute_force_finds(seed: int, count: int, width: int, norm: float, noise: float) -> None:
    """Also far from the origin, where a product's rounding is larger than the distances, or overflows."""
    generator = np.random.default_rng(seed)
    center_D = norm * generator.standard_normal(width)
    made = PointSet()
    held: dict[str, np.ndarray] = {}
    for number in range(count):
        name, point_D = f"p{generator.integers(60)}", (center_D + generator.integers(-2, 3, width)).astype(np.float32)
        if name in held and number % 3 == 0:
            made.remove(name)
            del held[name]
        else:
            made.upsert(name, point_D, float(number % 4))
            held[name] = point_D
    assert sorted(made.names) == sorted(held)
    assert all(made.points_ND[made.row(name)].tobytes() == point_D.tobytes() for name, point_D in held.items())
    points_ND = np.array([held[name] for name in made.names], np.float32).reshape(len(held), width)
    query_D, other_D = (center_D.astype(np.float32) + generator.integers(-1, 2, (2, width)).astype(np.float32)) + 0
    exact_N, others_N = distances(points_ND, query_D), distances(points_ND, other_D)
    for reach in (0.0, 1.0, 2.0):
        assert made.within(query_D, reach).tolist() == np.flatnonzero(exact_N <= reach).tolist()
    for slack in (0.0, 1.5):
        assert made.containing(query_D, slack).tolist() == np.flatnonzero(exact_N <= made.radii_N + slack).tolist()
    nearest = made.nearest(query_D, 2.0)
    assert (nearest is None) == (not (exact_N <= 2.0).any())
    assert nearest is None or exact_N[nearest] == exact_N.min()
    assert made.nearest_distance(query_D, noise) == exact_N[exact_N > noise].min(initial=np.inf)
    clear_N = (exact_N > noise) & (others_N > noise)
    assert made.nearest_distance(query_D, noise, other_D) == exact_N[clear_N].min(initial=np.inf)


def test_few_points_are_looked_at_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    made = PointSet()
    for number in range(500):
        made.upsert(str(number), generator.standard_normal(64).astype(np.float32))
    looked_at: list[int] = []
    exact = PointSet._exact_distances
    monkeypatch.setattr(
        PointSet,
        "_exact_distances",
        lambda self, q, rows: looked_at.append(len(rows)) or exact(self, q, rows),  # type: ignore[func-returns-value]
    )
    query_D = made.points_ND[7].copy()
    assert made.within(query_D, 0.1).tolist() == [7]
    made.nearest_distance(query_D, 0.1)
    assert sum(looked_at) < 50


def test_a_copy_is_searched_on_its_own() -> None:
    made = PointSet()
    made.upsert("a", np.zeros(3, np.float32))
    copy = deepcopy(made)
    copy.upsert("b", np.ones(3, np.float32))
    made.remove("a")
    assert copy.within(np.ones(3, np.float32), 0.0).tolist() == [1]
    assert made.within(np.zeros(3, np.float32), 9.0).tolist() == []


@MANY
@given(st.integers(0, 2**32 - 1), st.integers(0, 60), st.integers(0, 70))
def test_as_many_as_may_be_nearer_are_passed_over(seed: int, count: int, nearer: int) -> None:
    generator = np.random.default_rng(seed)
    points_ND = generator.integers(-3, 4, (count, 3)).astype(np.float32)
    made = PointSet()
    for number, point_D in enumerate(points_ND):
        made.upsert(str(number), point_D)
    query_D = np.zeros(3, np.float32)
    counting = sorted(d for n, d in enumerate(distances(points_ND, query_D)) if d > 0.5 and n % 3)
    found = made.nearest_distance(query_D, 0.5, None, lambda name: int(name) % 3 != 0, nearer)
    assert found == (counting[nearer] if nearer < len(counting) else np.inf)
