"""What lies just within a radius, or a distance, is never ruled out; most of what does not is."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.search import quantized_bounds as bounds
from gracestream.pipeline.search.distance import exact_distances
from gracestream.pipeline.search.quantized_bounds import (
    BoundQuery,
    InnerProducts,
    Int8Codes,
    KeyNorms,
)
from tests.support.examples import examples

Scene = tuple[np.ndarray, np.ndarray]
Left = Callable[[np.ndarray, np.ndarray, np.ndarray, BoundQuery], list[np.ndarray | None]]
"""What a bound leaves of keys (N, D) with radii (N) for queries (B, D)."""

EDGE = np.float32(1 + 1e-5)
QUERIES = 9


def by_codes(
    keys_ND: np.ndarray, radii_N: np.ndarray, queries_BD: np.ndarray, asked: BoundQuery
) -> list[np.ndarray | None]:
    return codes_of(keys_ND, radii_N).find_survivors(queries_BD, asked, len(keys_ND), len(keys_ND))


def by_each_code(
    keys_ND: np.ndarray, radii_N: np.ndarray, queries_BD: np.ndarray, asked: BoundQuery
) -> list[np.ndarray | None]:
    every_N = np.arange(len(keys_ND))
    return [*codes_of(keys_ND, radii_N).filter_slots([every_N] * len(queries_BD), queries_BD, asked)]


def by_keys(
    keys_ND: np.ndarray, radii_N: np.ndarray, queries_BD: np.ndarray, asked: BoundQuery
) -> list[np.ndarray | None]:
    center_D = np.median(keys_ND, axis=0)
    keys = KeyNorms()
    keys.write(np.arange(len(keys_ND)), keys_ND, center_D)
    return keys.find_survivors(InnerProducts(keys_ND, center_D, queries_BD), radii_N, asked, len(keys_ND))


def by_keys_alone(
    keys_ND: np.ndarray, radii_N: np.ndarray, queries_BD: np.ndarray, asked: BoundQuery
) -> list[np.ndarray | None]:
    """So few at once that their product is one in float32."""
    return [by_keys(keys_ND, radii_N, queries_BD[[row]], asked.select_rows([row]))[0] for row in range(len(queries_BD))]


WAYS: list[Left] = [by_codes, by_each_code, by_keys, by_keys_alone]


def codes_of(keys_ND: np.ndarray, radii_N: np.ndarray) -> Int8Codes:
    codes = Int8Codes()
    codes.fit(keys_ND)
    codes.write(np.arange(len(keys_ND)), keys_ND, np.zeros(len(keys_ND), np.float32), radii_N)
    return codes


def distances(queries_BD: np.ndarray, keys_ND: np.ndarray) -> np.ndarray:
    apart_BND = queries_BD.astype(np.float64)[:, None] - keys_ND
    return np.asarray(np.linalg.norm(apart_BND, axis=2))


def asked(within_B: np.ndarray | None) -> BoundQuery:
    return BoundQuery(np.zeros(QUERIES, np.float32), within_B)


@st.composite
def scenes(draw: Callable[..., int]) -> Scene:
    """Queries among keys, in few numbers or many, around the origin or away from it, some of them far from all."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    width, count = draw(st.sampled_from([1, 2, 3, 16, 64])), draw(st.integers(1, 80))
    place_D = draw(st.sampled_from([0, 1, 100])) * generator.standard_normal(width)
    spread_D = generator.random(width) ** draw(st.sampled_from([0, 1, 4]))
    points = place_D + spread_D * generator.standard_normal((count + QUERIES, width))
    points[:: draw(st.integers(2, 40))] *= draw(st.sampled_from([1, 3, 1000]))
    points = points.astype(np.float32)
    return points[QUERIES:], points[:QUERIES]


@pytest.mark.parametrize("way", WAYS)
class TestWays:
    @examples(1.5)
    @given(scene=scenes(), row=st.integers(0, QUERIES - 1))
    def test_no_key_with_a_query_just_within_its_radius_is_excluded(self, way: Left, scene: Scene, row: int) -> None:
        keys_ND, queries_BD = scene
        radii_N = distances(queries_BD, keys_ND)[row].astype(np.float32) * EDGE
        left = way(keys_ND, radii_N, queries_BD, asked(None))[row]
        assert left is not None
        assert left.tolist() == list(range(len(keys_ND)))

    @examples(1.5)
    @given(scene=scenes(), rank=st.floats(0, 1))
    def test_no_key_just_within_a_given_distance_is_excluded(self, way: Left, scene: Scene, rank: float) -> None:
        keys_ND, queries_BD = scene
        apart_BN = distances(queries_BD, keys_ND)
        within_B = np.quantile(apart_BN, rank, axis=1, method="nearest").astype(np.float32) * EDGE
        found = way(keys_ND, np.zeros(len(keys_ND), np.float32), queries_BD, asked(within_B))
        for left, apart_N, within in zip(found, apart_BN, within_B, strict=True):
            assert left is not None
            assert set((apart_N <= within / EDGE).nonzero()[0]) <= set(left.tolist())

    def test_few_candidates_are_left_where_no_query_is_within_a_radius(self, way: Left) -> None:
        points = np.random.default_rng(0).standard_normal((2000 + QUERIES, 64), np.float32)
        keys_ND, queries_BD = points[QUERIES:], points[:QUERIES]
        radii_N = np.full(len(keys_ND), 0.9 * distances(queries_BD, keys_ND).min(), np.float32)
        for left in way(keys_ND, radii_N, queries_BD, asked(None)):
            assert left is not None
            assert len(left) < 20


@pytest.mark.parametrize("together", [1, 4])
@examples(1.5)
@given(scene=scenes())
def test_the_nearest_key_is_never_excluded(together: int, scene: Scene) -> None:
    keys_ND, queries_BD = scene
    keys, center_D = KeyNorms(), np.median(keys_ND, axis=0)
    keys.write(np.arange(len(keys_ND)), keys_ND, center_D)
    nearest_B = distances(queries_BD, keys_ND).argmin(axis=1)
    for start in range(QUERIES - together + 1):
        rows = slice(start, start + together)
        found = keys.nearest_candidates(InnerProducts(keys_ND, center_D, queries_BD[rows]), len(keys_ND))
        for left, nearest in zip(found, nearest_B[rows], strict=True):
            assert left is not None
            assert nearest in left


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("apart", [1e-6, 1e-4, 1e-2])
def test_of_keys_whose_distances_are_the_same_in_float32_none_is_ruled_out(apart: float, together: int) -> None:
    generator = np.random.default_rng(0)
    keys_ND = (100 + apart * generator.standard_normal((500, 64))).astype(np.float32)
    queries_BD = (100 + 60 * generator.standard_normal((together, 64))).astype(np.float32)
    keys, center_D = KeyNorms(), np.median(keys_ND, axis=0)
    keys.write(np.arange(len(keys_ND)), keys_ND, center_D)
    found = keys.nearest_candidates(InnerProducts(keys_ND, center_D, queries_BD), len(keys_ND))
    for left, query_D in zip(found, torch.from_numpy(queries_BD), strict=True):
        far_N = exact_distances(query_D[None], torch.from_numpy(keys_ND)[None])[0].numpy()
        assert left is not None
        assert set((far_N == far_N.min()).nonzero()[0]) <= set(left.tolist())


@pytest.mark.parametrize("together", [1, 4])
def test_of_the_keys_that_may_be_nearest_there_are_few(together: int) -> None:
    points = np.random.default_rng(0).standard_normal((20_000 + together, 64), np.float32)
    keys_ND, queries_BD = points[together:], points[:together]
    keys, center_D = KeyNorms(), np.median(keys_ND, axis=0)
    keys.write(np.arange(len(keys_ND)), keys_ND, center_D)
    for left in keys.nearest_candidates(InnerProducts(keys_ND, center_D, queries_BD), len(keys_ND)):
        assert left is not None
        assert len(left) < 100


def test_where_more_are_left_than_are_wanted_they_are_not_told() -> None:
    keys_ND = np.random.default_rng(0).standard_normal((5000, 8), np.float32)
    radii_N = np.full(len(keys_ND), 100, np.float32)
    queries_BD = np.stack([keys_ND[0], keys_ND[0] + 1000])
    far = BoundQuery(np.zeros(2, np.float32))
    survivors = codes_of(keys_ND, radii_N).find_survivors(queries_BD, far, len(keys_ND), 4999)
    assert survivors[0] is None
    assert survivors[1] is not None
    assert survivors[1].tolist() == []


def test_a_processor_without_products_of_bytes_leaves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.random.default_rng(1).standard_normal((500 + QUERIES, 64), np.float32)
    keys_ND, queries_BD = points[QUERIES:], points[:QUERIES]
    radii_N = np.full(len(keys_ND), np.median(distances(queries_BD, keys_ND)), np.float32)
    here = by_codes(keys_ND, radii_N, queries_BD, asked(None))
    monkeypatch.setattr(bounds, "_HAS_INT8_MATMUL", False)
    assert_same(by_codes(keys_ND, radii_N, queries_BD, asked(None)), here)


def assert_same(found: list[np.ndarray | None], expected: list[np.ndarray | None]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.tolist() == theirs.tolist()
