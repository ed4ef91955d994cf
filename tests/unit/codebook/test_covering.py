"""What covers a query is found as brute force finds it, and nearly all keys are ruled out without a look at them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.search.distance import exact_distances
from gracestream.pipeline.search.key_search import NO_SLOT, TorchSearch
from gracestream.pipeline.search.prefilter import Prefilter
from gracestream.schemas.deltas import EntryChange
from tests.support.examples import examples
from tests.support.tiny_models import added, changed, filled, index_of, new_codebook, sealed

MANY = examples(0.6)


def oracle(queries_BD: np.ndarray, codebook: Codebook) -> tuple[list[int], list[float]]:
    """Brute force, by the routine that defines a distance: the nearest key, where its ball holds the query."""
    distances_BN = exact_distances(torch.from_numpy(queries_BD), torch.from_numpy(codebook.keys_ND)[None])
    slots, distances = [], []
    for distances_N in distances_BN.nan_to_num(nan=math.inf).numpy():
        slot = min(range(len(codebook)), key=lambda slot: (distances_N[slot], codebook.entry_ids[slot]))
        inside = bool(distances_N[slot] < codebook.radii_N[slot])
        slots.append(slot if inside else NO_SLOT)
        distances.append(float(distances_N[slot]) if inside else math.inf)
    return slots, distances


def agrees(index: KeyIndex, queries_BD: np.ndarray, codebook: Codebook) -> list[int]:
    """What covers each query: as the index finds it, and as a GPU's search of all keys does."""
    found = index.nearest_within_radius(torch.from_numpy(queries_BD))
    scanned = KeyIndex(codebook, torch.device("cpu"), TorchSearch).nearest_within_radius(torch.from_numpy(queries_BD))
    assert (scanned.slots_B.tolist(), scanned.distances_B.tolist()) == oracle(queries_BD, codebook)
    assert (found.slots_B.tolist(), found.distances_B.tolist()) == oracle(queries_BD, codebook)
    for row, query_D in enumerate(queries_BD):
        alone = index.nearest_within_radius(torch.from_numpy(query_D)[None])
        assert alone.slots_B.tolist() == [found.slots_B[row]]
    return found.slots_B.tolist()


@st.composite
def scenes(draw: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and radii: clusters of any width, near the origin or far; balls that hold none, some or all."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    width, count = draw(st.integers(1, 100)), draw(st.integers(1, 300))
    norm = draw(st.sampled_from([0.0, 1.0, 1e3, 1e6, 1e20, 1e30]))
    spread = draw(st.sampled_from([1e-20, 1e-3, 0.1, 1.0, 100.0]))
    centers = norm * generator.standard_normal((draw(st.integers(1, 5)), width))
    keys_ND = centers[generator.integers(0, len(centers), count)] + spread * generator.standard_normal((count, width))
    keys_ND = keys_ND[generator.integers(0, count, count)].astype(np.float32)
    near_BD = keys_ND[generator.integers(0, count, 12)] + spread * generator.standard_normal((12, width))
    queries_BD = np.concatenate([near_BD, keys_ND[:4], centers]).astype(np.float32)
    reach = spread * width**0.5 * draw(st.sampled_from([0.0, 0.1, 1.0, 1.5, 3.0]))
    radii_N = (reach * generator.random(count) ** draw(st.sampled_from([0.1, 1.0, 8.0]))).astype(np.float32)
    return queries_BD, keys_ND, radii_N


@examples(0.3)
@given(scenes(), st.integers(1, 20))
def test_the_nearest_of_those_that_hold_a_query_are_brute_forces(
    scene: tuple[np.ndarray, np.ndarray, np.ndarray], count: int
) -> None:
    """By the sieve and by a look at all keys, and whatever the order of the slots."""
    queries_BD, keys_ND, radii_N = scene
    codebook = filled(keys_ND, radii_N)
    turned = new_codebook()
    turned.apply(
        sealed(turned, *(added(f"e{row}", keys_ND[row], float(radii_N[row])) for row in reversed(range(len(keys_ND)))))
    )
    distances_BN = exact_distances(torch.from_numpy(queries_BD), torch.from_numpy(keys_ND)[None]).numpy()
    indices = [index_of(codebook), KeyIndex(codebook, torch.device("cpu"), TorchSearch)]
    for query_D, distances_N in zip(queries_BD, distances_BN, strict=True):
        held = [(float(distances_N[row]), f"e{row}") for row in np.flatnonzero(distances_N < radii_N)]
        expected = sorted(held)[:count]
        for index in (*indices, index_of(turned)):
            entry_ids = index._codebook.entry_ids
            found = index.entries_containing(torch.from_numpy(query_D), count)
            assert [(distance, entry_ids[slot]) for slot, distance in found] == expected


def test_no_entry_holds_a_query_in_an_empty_codebook_or_one_that_is_not_finite() -> None:
    assert index_of(new_codebook()).entries_containing(torch.zeros(3), 4) == []
    full = index_of(filled(np.zeros((3, 3), np.float32)))
    assert full.entries_containing(torch.tensor([0.0, math.nan, 0.0]), 4) == []
    assert len(full.entries_containing(torch.zeros(3), 4)) == 3


@MANY
@given(scenes())
def test_what_covers_a_query_is_what_brute_force_finds(scene: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    queries_BD, keys_ND, radii_N = scene
    codebook = filled(keys_ND, radii_N)
    agrees(index_of(codebook), queries_BD, codebook)


@pytest.mark.parametrize("rank", [4, 32, 256], ids=["coarse", "fine", "beyond"])
def test_balls_are_found_whatever_their_directions(rank: int) -> None:
    """Differences in few directions, in more than are looked at first, and in more than are looked at at all."""
    generator = np.random.default_rng(7)
    keys_ND = generator.standard_normal((3000, rank)) @ generator.standard_normal((rank, 300)) + 5
    keys_ND = keys_ND.astype(np.float32)
    away_BD = generator.standard_normal((200, 300)) * generator.uniform(0.1, 2, (200, 1))
    near_BD = keys_ND[:200] + away_BD
    codebook = filled(keys_ND, 300**0.5)
    found = agrees(index_of(codebook), near_BD.astype(np.float32), codebook)
    assert 20 < sum(slot != NO_SLOT for slot in found) < 200


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 3e38])
def test_a_query_that_is_not_finite_is_in_no_ball_and_leaves_the_others_theirs(odd: float) -> None:
    queries_BD = np.zeros((3, 4), np.float32)
    queries_BD[1, 2] = odd
    for count in (1, 5, 50):
        index = index_of(filled(np.ones((count, 4)), np.full(count, 3.0)))
        assert index.nearest_within_radius(torch.from_numpy(queries_BD)).slots_B.tolist() == [0, NO_SLOT, 0]


@pytest.mark.parametrize(("key", "query"), [(1e19, 2e19), (2e19, 1e19)])
def test_a_ball_holds_a_query_where_one_norm_overflows_when_it_is_squared(key: float, query: float) -> None:
    """The distance does not; and too many keys are left for their projections to decide."""
    keys_ND = np.full((100, 1), key, np.float32)
    codebook = filled(keys_ND, 1.5e19)
    agrees(index_of(codebook), np.full((1, 1), query, np.float32), codebook)


def test_no_keys_cover_nothing_and_no_queries_have_no_answers() -> None:
    assert index_of(new_codebook()).nearest_within_radius(torch.zeros(2, 8)).slots_B.tolist() == [NO_SLOT] * 2
    for count, width in ((2, 3), (100, 200)):
        full = index_of(filled(np.ones((count, width))))
        assert len(full.nearest_within_radius(torch.empty(0, width)).slots_B) == 0


@examples(0.4)
@given(st.integers(0, 2**32))
def test_an_index_refreshed_by_deltas_covers_what_the_codebook_covers(seed: int) -> None:
    """Entries come, go, move, and get other keys and radii; several are taken over at a time."""
    generator = np.random.default_rng(seed)
    codebook = new_codebook()
    index = index_of(codebook)
    queries_BD = generator.standard_normal((6, 8)).astype(np.float32)
    changes = []
    for step in range(200):
        entry = added(f"e{generator.integers(0, 60)}", generator.standard_normal(8), float(3 * generator.random()))
        remove = entry.entry_id in codebook and generator.random() < 0.4
        narrow = entry.entry_id in codebook and generator.random() < 0.5
        change = EntryChange(entry_id=entry.entry_id, removed=True) if remove else entry
        if narrow and not remove:
            change = EntryChange(entry_id=entry.entry_id, radius=entry.radius)
        changes.append(changed(codebook, change))
        if generator.random() < 0.4:
            index.refresh(*changes)
            changes.clear()
            if len(codebook) and generator.random() < 0.5:
                agrees(index, queries_BD, codebook)
        if step == 100:
            index.refresh()


def test_a_query_in_no_ball_is_told_so_without_a_look_at_any_key(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(4)
    keys_ND = generator.standard_normal((5000, 64)).astype(np.float32)
    index = index_of(filled(keys_ND, np.full(5000, 0.5)))
    monkeypatch.setattr(
        "gracestream.pipeline.codebook.key_index.exact_distances", lambda *_: pytest.fail("a key was looked at")
    )
    queries_BD = torch.from_numpy(generator.standard_normal((40, 64)).astype(np.float32))
    assert set(index.nearest_within_radius(queries_BD).slots_B.tolist()) == {NO_SLOT}


def test_of_the_keys_near_a_ball_few_are_looked_at() -> None:
    generator = np.random.default_rng(5)
    keys_ND = generator.standard_normal((5000, 64)).astype(np.float32)
    radii_N = np.full(5000, np.float32(4.0))
    sieve = Prefilter(lambda: (keys_ND, radii_N))
    left = sieve.candidates_containing(keys_ND[:20] + np.float32(0.01))
    assert all(row in slots for row, slots in enumerate(left))
    assert max(len(slots) for slots in left) < 100


def test_of_equal_distances_the_first_id_wins_whatever_its_slot() -> None:
    keys_ND = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    codebook = new_codebook()
    names = ["far", "b", "a", *(f"x{row}" for row in range(37))]
    places = [keys_ND[0] + 50, keys_ND[1], keys_ND[1], *(keys_ND[3:] + 50)]
    codebook.apply(sealed(codebook, *(added(name, key_D, 1.0) for name, key_D in zip(names, places, strict=True))))
    found = index_of(codebook).nearest_within_radius(torch.from_numpy(keys_ND[1:2]))
    assert found.slots_B.tolist() == [2]


@pytest.mark.parametrize("spread", [1e-20, 3e-21, 1e-21])
def test_balls_are_found_where_the_squares_of_distances_underflow(spread: float) -> None:
    """A norm in float32 loses such differences, so the bounds allow for them."""
    generator = np.random.default_rng(3)
    for width in (1, 20):
        keys_ND = (spread * generator.standard_normal((200, width))).astype(np.float32)
        queries_BD = (keys_ND[:50] + spread / 4 * generator.standard_normal((50, width))).astype(np.float32)
        found = agrees(index_of(filled(keys_ND, spread)), queries_BD, filled(keys_ND, spread))
        assert NO_SLOT not in found or width > 1
