"""The index finds the same matching entry as brute force, and excludes nearly all keys without computing a distance."""

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


def brute_force(queries_BD: np.ndarray, codebook: Codebook) -> tuple[list[int], list[float]]:
    """Brute force with the routine that defines a distance: the nearest key, if the query is within its radius."""
    distances_BN = exact_distances(torch.from_numpy(queries_BD), torch.from_numpy(codebook.keys_ND)[None])
    slots, distances = [], []
    for distances_N in distances_BN.nan_to_num(nan=math.inf).numpy():
        slot = min(range(len(codebook)), key=lambda slot: (distances_N[slot], codebook.entry_ids[slot]))
        inside = bool(distances_N[slot] < codebook.radii_N[slot])
        slots.append(slot if inside else NO_SLOT)
        distances.append(float(distances_N[slot]) if inside else math.inf)
    return slots, distances


def agrees(index: KeyIndex, queries_BD: np.ndarray, codebook: Codebook) -> list[int]:
    """Compare index, a GPU's search of all keys and brute force; returns the slot of the matching entry per query."""
    found = index.nearest_within_radius(torch.from_numpy(queries_BD))
    scanned = KeyIndex(codebook, torch.device("cpu"), TorchSearch).nearest_within_radius(torch.from_numpy(queries_BD))
    assert (scanned.slots_B.tolist(), scanned.distances_B.tolist()) == brute_force(queries_BD, codebook)
    assert (found.slots_B.tolist(), found.distances_B.tolist()) == brute_force(queries_BD, codebook)
    for row, query_D in enumerate(queries_BD):
        alone = index.nearest_within_radius(torch.from_numpy(query_D)[None])
        assert alone.slots_B.tolist() == [found.slots_B[row]]
    return found.slots_B.tolist()


@st.composite
def scenes(draw: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and radii: clusters near the origin or far, and radii with no, some or all queries inside."""
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
def test_the_nearest_matching_entries_are_those_of_brute_force(
    scene: tuple[np.ndarray, np.ndarray, np.ndarray], count: int
) -> None:
    """With the prefilter and with distances to all keys, in any order of the slots."""
    queries_BD, keys_ND, radii_N = scene
    codebook = filled(keys_ND, radii_N)
    reversed_codebook = new_codebook()
    reversed_codebook.apply(
        sealed(
            reversed_codebook,
            *(added(f"e{row}", keys_ND[row], float(radii_N[row])) for row in reversed(range(len(keys_ND)))),
        )
    )
    distances_BN = exact_distances(torch.from_numpy(queries_BD), torch.from_numpy(keys_ND)[None]).numpy()
    indices = [index_of(codebook), KeyIndex(codebook, torch.device("cpu"), TorchSearch)]
    for query_D, distances_N in zip(queries_BD, distances_BN, strict=True):
        held = [(float(distances_N[row]), f"e{row}") for row in np.flatnonzero(distances_N < radii_N)]
        expected = sorted(held)[:count]
        for index in (*indices, index_of(reversed_codebook)):
            entry_ids = index._codebook.entry_ids
            found = index.entries_containing(torch.from_numpy(query_D), count)
            assert [(distance, entry_ids[slot]) for slot, distance in found] == expected


def test_an_empty_codebook_and_a_query_that_is_not_finite_have_no_match() -> None:
    assert index_of(new_codebook()).entries_containing(torch.zeros(3), 4) == []
    full = index_of(filled(np.zeros((3, 3), np.float32)))
    assert full.entries_containing(torch.tensor([0.0, math.nan, 0.0]), 4) == []
    assert len(full.entries_containing(torch.zeros(3), 4)) == 3


@MANY
@given(scenes())
def test_the_matching_entry_is_that_of_brute_force(scene: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    queries_BD, keys_ND, radii_N = scene
    codebook = filled(keys_ND, radii_N)
    agrees(index_of(codebook), queries_BD, codebook)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 32, 256], ids=["coarse", "fine", "beyond"])
def test_matches_are_found_in_any_direction_from_the_key(rank: int) -> None:
    """Keys differ in fewer directions than the first codes hold, in more, and in more than any codes hold."""
    generator = np.random.default_rng(7)
    keys_ND = generator.standard_normal((3000, rank)) @ generator.standard_normal((rank, 300)) + 5
    keys_ND = keys_ND.astype(np.float32)
    away_BD = generator.standard_normal((200, 300)) * generator.uniform(0.1, 2, (200, 1))
    near_BD = keys_ND[:200] + away_BD
    codebook = filled(keys_ND, 300**0.5)
    found = agrees(index_of(codebook), near_BD.astype(np.float32), codebook)
    assert 20 < sum(slot != NO_SLOT for slot in found) < 200


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 3e38])
def test_a_query_that_is_not_finite_has_no_match_and_others_keep_theirs(odd: float) -> None:
    queries_BD = np.zeros((3, 4), np.float32)
    queries_BD[1, 2] = odd
    for count in (1, 5, 50):
        index = index_of(filled(np.ones((count, 4)), np.full(count, 3.0)))
        assert index.nearest_within_radius(torch.from_numpy(queries_BD)).slots_B.tolist() == [0, NO_SLOT, 0]


@pytest.mark.parametrize(("key", "query"), [(1e19, 2e19), (2e19, 1e19)])
def test_a_match_is_found_although_the_square_of_a_norm_overflows(key: float, query: float) -> None:
    """The distance does not overflow, and too many candidates are left for their projections to decide."""
    keys_ND = np.full((100, 1), key, np.float32)
    codebook = filled(keys_ND, 1.5e19)
    agrees(index_of(codebook), np.full((1, 1), query, np.float32), codebook)


def test_without_keys_there_is_no_match_and_without_queries_no_result() -> None:
    assert index_of(new_codebook()).nearest_within_radius(torch.zeros(2, 8)).slots_B.tolist() == [NO_SLOT] * 2
    for count, width in ((2, 3), (100, 200)):
        full = index_of(filled(np.ones((count, width))))
        assert len(full.nearest_within_radius(torch.empty(0, width)).slots_B) == 0


@pytest.mark.slow
@examples(0.4)
@given(st.integers(0, 2**32))
def test_an_index_refreshed_by_deltas_finds_the_matches_of_the_codebook(seed: int) -> None:
    """Entries are added, removed and changed; the index applies several deltas at a time."""
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


def test_a_query_within_no_radius_is_answered_without_any_exact_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(4)
    keys_ND = generator.standard_normal((5000, 64)).astype(np.float32)
    index = index_of(filled(keys_ND, np.full(5000, 0.5)))
    monkeypatch.setattr(
        "gracestream.pipeline.codebook.key_index.exact_distances",
        lambda *_: pytest.fail("an exact distance was computed"),
    )
    queries_BD = torch.from_numpy(generator.standard_normal((40, 64)).astype(np.float32))
    assert set(index.nearest_within_radius(queries_BD).slots_B.tolist()) == {NO_SLOT}


def test_few_keys_are_candidates_for_a_match() -> None:
    generator = np.random.default_rng(5)
    keys_ND = generator.standard_normal((5000, 64)).astype(np.float32)
    radii_N = np.full(5000, np.float32(4.0))
    prefilter = Prefilter(lambda: (keys_ND, radii_N))
    candidates = prefilter.candidates_containing(keys_ND[:20] + np.float32(0.01))
    assert all(row in slots for row, slots in enumerate(candidates))
    assert max(len(slots) for slots in candidates) < 100


def test_the_first_id_wins_among_equal_distances_in_any_slot() -> None:
    keys_ND = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    codebook = new_codebook()
    names = ["far", "b", "a", *(f"x{row}" for row in range(37))]
    places = [keys_ND[0] + 50, keys_ND[1], keys_ND[1], *(keys_ND[3:] + 50)]
    codebook.apply(sealed(codebook, *(added(name, key_D, 1.0) for name, key_D in zip(names, places, strict=True))))
    found = index_of(codebook).nearest_within_radius(torch.from_numpy(keys_ND[1:2]))
    assert found.slots_B.tolist() == [2]


@pytest.mark.parametrize("spread", [1e-20, 3e-21, 1e-21])
def test_matches_are_found_where_the_squares_of_distances_underflow(spread: float) -> None:
    """A norm in float32 loses such differences, so the bounds allow for them."""
    generator = np.random.default_rng(3)
    for width in (1, 20):
        keys_ND = (spread * generator.standard_normal((200, width))).astype(np.float32)
        queries_BD = (keys_ND[:50] + spread / 4 * generator.standard_normal((50, width))).astype(np.float32)
        found = agrees(index_of(filled(keys_ND, spread)), queries_BD, filled(keys_ND, spread))
        assert NO_SLOT not in found or width > 1
