"""The key index answers exactly as brute force does, whatever the norms, the duplicates and the removals."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from gracestream.pipeline.codebook.key_index import INITIAL_CANDIDATES, KeyIndex, NearestKeys
from gracestream.pipeline.search.distance import exact_distances
from gracestream.pipeline.search.key_search import NO_SLOT, KeySearchResult, TorchSearch
from gracestream.pipeline.search.quantized_bounds import InnerProducts
from gracestream.schemas.deltas import EntryChange
from tests.support.examples import examples
from tests.support.tiny_models import added, changed, filled, index_of, new_codebook

MANY = examples(0.6)
ULP = float(np.finfo(np.float32).eps)


def oracle(queries_BD: np.ndarray, keys_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Brute force: float32 differences, everything after in float64; of equals any."""
    differences_BND = (queries_BD[:, None] - keys_ND[None]).astype(np.float64)
    distances_BN = np.sqrt((differences_BND**2).sum(-1)).astype(np.float32)
    slots_B = distances_BN.argmin(axis=1)
    return slots_B, distances_BN[np.arange(len(queries_BD)), slots_B]


def both_ways(index: KeyIndex, queries_BD: torch.Tensor) -> NearestKeys:
    """The nearest keys, by the sieve and by a look at all of them, with FAISS and without: they must say the same."""
    found, without_faiss = index.nearest(queries_BD), KeyIndex(index._codebook, torch.device("cpu"), TorchSearch)
    for scanned in (index._scan_all(queries_BD), without_faiss.nearest(queries_BD)):
        assert found.slots_B.tolist() == scanned.slots_B.tolist()
        assert found.distances_B.tolist() == scanned.distances_B.tolist()
    return found


def agrees(index: KeyIndex, queries_BD: np.ndarray, keys_ND: np.ndarray) -> None:
    found = both_ways(index, torch.from_numpy(queries_BD))
    slots_B, distances_B = oracle(queries_BD, keys_ND)
    np.testing.assert_allclose(found.distances_B.numpy(), distances_B, rtol=ULP)
    same_B = found.slots_B.numpy() == slots_B
    # Sums in another order may round two nearly equal distances the other way.
    chosen = np.linalg.norm((queries_BD - keys_ND[found.slots_B.numpy()]).astype(np.float64), axis=1)
    assert np.all(same_B | (np.abs(chosen - distances_B) <= 2 * ULP * distances_B))


@st.composite
def scenes(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys: clusters of any width, far from the origin or near, with duplicates."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    width, count = draw(st.integers(1, 40)), draw(st.integers(1, 120))
    norm, spread = draw(st.sampled_from([0.0, 1.0, 1e3, 1e5])), draw(st.sampled_from([1e-3, 0.1, 1.0, 100.0]))
    centers = norm * generator.standard_normal((draw(st.integers(1, 4)), width))
    keys_ND = centers[generator.integers(0, len(centers), count)] + spread * generator.standard_normal((count, width))
    keys_ND = keys_ND[generator.integers(0, count, count)].astype(np.float32)
    near_BD = keys_ND[generator.integers(0, count, 12)] + spread * generator.standard_normal((12, width))
    queries_BD = np.concatenate([near_BD.astype(np.float32), keys_ND[:4], centers.astype(np.float32)])
    return queries_BD.astype(np.float32), keys_ND


@MANY
@given(scenes())
def test_the_nearest_key_is_brute_forces_at_any_norm(scene: tuple[np.ndarray, np.ndarray]) -> None:
    queries_BD, keys_ND = scene
    agrees(index_of(filled(keys_ND)), queries_BD, keys_ND)


@MANY
@given(scenes())
def test_a_batch_answers_as_its_rows_do_alone(scene: tuple[np.ndarray, np.ndarray]) -> None:
    queries_BD, keys_ND = scene
    index = index_of(filled(keys_ND))
    together = both_ways(index, torch.from_numpy(queries_BD))
    for row, query_D in enumerate(queries_BD):
        alone = both_ways(index, torch.from_numpy(query_D)[None])
        assert alone.slots_B[0] == together.slots_B[row]
        assert alone.distances_B[0] == together.distances_B[row]


def product(queries_BD: np.ndarray, keys_ND: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`faiss.knn` as GPUs and large batches compute it, by float32 products, and of equals the highest slot first."""
    products_BN = queries_BD @ keys_ND.T
    squares_BN = (queries_BD**2).sum(1)[:, None] - 2 * products_BN + (keys_ND**2).sum(1)[None]
    slots_BN = len(keys_ND) - 1 - squares_BN[:, ::-1].argsort(axis=1, kind="stable")
    return np.take_along_axis(squares_BN, slots_BN, 1)[:, :count], slots_BN[:, :count]


@MANY
@given(scenes())
def test_the_nearest_key_is_brute_forces_where_candidates_come_from_a_product(
    scene: tuple[np.ndarray, np.ndarray],
) -> None:
    queries_BD, keys_ND = scene
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("faiss.knn", product)
        agrees(index_of(filled(keys_ND)), queries_BD, keys_ND)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [1e2, 1e3, 1e4])
@pytest.mark.parametrize("knn", [faiss.knn, product], ids=["faiss", "product"])
def test_clusters_that_a_float32_matrix_product_misranks_are_ranked_right(
    norm: float, knn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 queries of width 576 are enough for FAISS to take the product too."""
    generator = np.random.default_rng(1)
    center_D = norm * generator.standard_normal(576) / 24
    keys_ND = (center_D + 0.02 * generator.standard_normal((100, 576))).astype(np.float32)
    queries_BD = (center_D + 0.02 * generator.standard_normal((300, 576))).astype(np.float32)
    slots_B, _ = oracle(queries_BD, keys_ND)
    if norm >= 1e3 and knn is product:
        assert (knn(queries_BD, keys_ND, INITIAL_CANDIDATES)[1][:, 0] != slots_B).mean() > 0.5
    monkeypatch.setattr("faiss.knn", knn)
    agrees(index_of(filled(keys_ND)), queries_BD, keys_ND)


@given(npst.arrays(np.float32, 16, elements=st.floats(-1e4, 1e4, width=32)))
@MANY
def test_a_key_is_at_distance_zero_from_itself(key_D: np.ndarray) -> None:
    keys_ND = np.stack([key_D, key_D + np.float32(1), key_D - np.float32(1)])
    found = both_ways(index_of(filled(keys_ND)), torch.from_numpy(key_D)[None])
    assert (found.slots_B.tolist(), found.distances_B.tolist()) == ([0], [0.0])


@pytest.mark.parametrize("copies", [2, INITIAL_CANDIDATES, INITIAL_CANDIDATES + 1, 100])
@pytest.mark.parametrize("knn", [faiss.knn, product], ids=["faiss", "product"])
def test_of_equal_distances_the_first_id_wins(copies: int, knn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its slot, which depends on entries that are there no more."""
    monkeypatch.setattr("faiss.knn", knn)
    generator = np.random.default_rng(2)
    far_ND = 1000 + generator.standard_normal((30, 8))
    keys_ND = np.concatenate([far_ND, np.tile(generator.standard_normal(8), (copies, 1))]).astype(np.float32)
    codebook = filled(keys_ND)
    first = min(range(30, 30 + copies), key=lambda slot: codebook.entry_ids[slot])
    assert (first == 30) == (copies < 100)
    assert both_ways(index_of(codebook), torch.zeros(2, 8)).slots_B.tolist() == [first, first]


@pytest.mark.parametrize("norm", [1e12, 1e25])
def test_keys_whose_squares_overflow_are_found_all_the_same(norm: float) -> None:
    keys_ND = (norm * np.random.default_rng(3).standard_normal((40, 8))).astype(np.float32)
    agrees(index_of(filled(keys_ND)), keys_ND[:5], keys_ND)
    agrees(index_of(filled(keys_ND)), keys_ND, keys_ND)


@pytest.mark.parametrize("queries", [1, 30])
@pytest.mark.parametrize("count", [1, 5, 300])
def test_a_query_so_far_that_squares_overflow_has_a_nearest_key_too(count: int, queries: int) -> None:
    keys_ND = np.random.default_rng(4).standard_normal((count, 8)).astype(np.float32)
    agrees(index_of(filled(keys_ND)), np.full((queries, 8), 1e30, np.float32), keys_ND)


def test_keys_whose_squares_underflow_are_distinguished() -> None:
    generator = np.random.default_rng(5)
    for _ in range(20):
        near_ND = generator.standard_normal(54) + 1e-4 * generator.standard_normal((300, 54))
        keys_ND = (3e-22 * near_ND).astype(np.float32)
        agrees(index_of(filled(keys_ND)), np.zeros((1, 54), np.float32), keys_ND)


def test_an_empty_codebook_has_no_nearest_key() -> None:
    found = both_ways(index_of(new_codebook()), torch.randn(3, 8, generator=torch.Generator().manual_seed(0)))
    assert found.slots_B.tolist() == [NO_SLOT] * 3
    assert found.distances_B.tolist() == [math.inf] * 3


def test_no_queries_have_no_answers() -> None:
    assert len(both_ways(index_of(filled(np.ones((2, 3)))), torch.empty(0, 3)).slots_B) == 0


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_query_that_is_not_finite_has_no_nearest_key_and_leaves_the_others_theirs(odd: float) -> None:
    queries_BD = torch.zeros(3, 4)
    queries_BD[1, 2] = odd
    found = both_ways(index_of(filled(np.ones((5, 4)))), queries_BD)
    assert found.slots_B.tolist() == [0, NO_SLOT, 0]
    assert found.distances_B.tolist() == [2.0, math.inf, 2.0]


def test_queries_of_half_precision_are_compared_in_float32() -> None:
    keys_ND = np.array([[1.0, 0.0], [1.001, 0.0]], np.float32)
    found = both_ways(index_of(filled(keys_ND)), torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16))
    assert found.distances_B.dtype == torch.float32
    assert found.slots_B.tolist() == [0]


@pytest.mark.slow
@MANY
@given(st.integers(0, 2**32), st.integers(2, 40))
def test_fault_a_removed_entry_never_hides_a_live_neighbour(seed: int, count: int) -> None:
    """Keys close together go one by one, from anywhere in the codebook; what is left is found each time."""
    generator = np.random.default_rng(seed)
    keys_ND = (100 + 0.1 * generator.standard_normal((count, 8))).astype(np.float32)
    codebook = filled(keys_ND)
    index = index_of(codebook)
    live = dict(enumerate(keys_ND))
    for row in generator.permutation(count)[:-1].tolist():
        applied = changed(codebook, EntryChange(entry_id=f"e{row}", removed=True), op="undo")
        index.refresh(applied)
        del live[row]
        agrees(index, keys_ND, codebook.keys_ND)
        found = both_ways(index, torch.from_numpy(keys_ND[list(live)]))
        assert {codebook.entry_ids[slot] for slot in found.slots_B.tolist()} == {f"e{row}" for row in live}


def test_after_the_last_entry_goes_nothing_is_found() -> None:
    codebook = filled(np.ones((1, 3)))
    index = index_of(codebook)
    index.refresh(changed(codebook, EntryChange(entry_id="e0", removed=True), op="undo"))
    assert both_ways(index, torch.ones(1, 3)).slots_B.tolist() == [NO_SLOT]


@examples(0.4)
@given(st.integers(0, 2**32))
def test_an_index_refreshed_by_deltas_stays_exact(seed: int) -> None:
    """Keys come, change and go, some of them far larger than those before."""
    generator = np.random.default_rng(seed)
    codebook = new_codebook()
    index = index_of(codebook)
    centers = np.array([[0.0], [1000.0]])
    queries_BD = (centers.repeat(4, axis=0) + 0.02 * generator.standard_normal((8, 8))).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("faiss.knn", product)
        for step in range(100):
            key_D = centers[int(step > 20 and generator.random() < 0.5)] + 0.02 * generator.standard_normal(8)
            entry = added(f"e{generator.integers(0, 90)}", key_D, 1.0)
            remove = seed % 2 == 0 and entry.entry_id in codebook and generator.random() < 0.3
            change = EntryChange(entry_id=entry.entry_id, removed=True) if remove else entry
            index.refresh(changed(codebook, change))
            if step % 10 == 0 and len(codebook):
                agrees(index, queries_BD, codebook.keys_ND)


def test_one_key_of_a_huge_norm_does_not_make_every_search_a_full_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a text often has a norm in the thousands; an edit there must not slow all others down."""
    generator = np.random.default_rng(4)
    keys_ND = generator.standard_normal((2000, 16)).astype(np.float32)
    keys_ND[7] *= 1e5
    index = index_of(filled(keys_ND))
    looked_at: list[int] = []

    def counting(queries_BD: torch.Tensor, keys_BKD: torch.Tensor) -> torch.Tensor:
        looked_at.append(keys_BKD.shape[1])
        return exact_distances(queries_BD, keys_BKD)

    monkeypatch.setattr("gracestream.pipeline.codebook.key_index.exact_distances", counting)
    monkeypatch.setattr("gracestream.pipeline.search.key_search.exact_distances", counting)
    found = both_ways(index, torch.from_numpy(keys_ND[20:30]))
    assert found.slots_B.tolist() == list(range(20, 30))
    assert max(looked_at) <= INITIAL_CANDIDATES * 8


def test_of_keys_that_are_all_compared_few_are_copied_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all lie within rounding of each other, and no search by products tells them apart."""
    index = index_of(filled(np.full((50, 4), 1e4)))
    monkeypatch.setattr("gracestream.pipeline.codebook.key_index.HOST_CHUNK_PAIRS", 10)
    copies: list[weakref.ref[torch.Tensor]] = []

    def watched(queries_BD: torch.Tensor, keys_BKD: torch.Tensor) -> torch.Tensor:
        if len(keys_BKD) == 10:
            copies.append(weakref.ref(keys_BKD))
            assert sum(copy() is not None for copy in copies) <= 2
        return exact_distances(queries_BD, keys_BKD)

    monkeypatch.setattr("gracestream.pipeline.codebook.key_index.exact_distances", watched)
    index._nearest_among(torch.full((1, 4), 1e4), {0: np.arange(50)})
    assert len(copies) == 5


class Away(TorchSearch):
    """Keeps keys of its own, as on a device with a memory of its own; here the device is the host."""

    def __init__(self, device: torch.device, get_keys: Callable[[], np.ndarray]) -> None:
        super().__init__(device, get_keys)
        self._has_key_copy = True
        self.fills = 0

    def _reload(self, keys_ND: np.ndarray) -> None:
        self.fills += 1
        super()._reload(keys_ND)


def test_keys_on_a_device_follow_by_the_slots_that_a_delta_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They outgrow their room there several times, and are else moved one by one."""
    monkeypatch.setattr("gracestream.pipeline.search.key_search.INITIAL_KEY_CAPACITY", 8)
    generator = np.random.default_rng(6)
    codebook = new_codebook()
    index = KeyIndex(codebook, torch.device("cpu"), Away)
    search = index._search
    assert isinstance(search, Away)
    moved = searched = 0
    for step in range(300):
        names = codebook.entry_ids[:: max(1, len(codebook) // 3)]
        gone = [EntryChange(entry_id=name, removed=True) for name in names if generator.random() < 0.2]
        new = [added(f"e{step}-{number}", generator.standard_normal(3), 1.0) for number in range(step % 3)]
        if not gone and not new:
            continue
        index.refresh(changed(codebook, *gone, *new, op="undo"))
        moved += bool(gone)
        if len(codebook) and step % 2:
            agrees(index, generator.standard_normal((4, 3)).astype(np.float32), codebook.keys_ND)
            assert torch.equal(search.keys_ND, torch.from_numpy(codebook.keys_ND))
            searched += 1
    assert moved > 50
    assert len(codebook) > 50
    assert 3 < search.fills < searched / 4


@pytest.mark.parametrize("norm", [1e2, 1e3, 1e4])
def test_keys_far_from_the_origin_need_few_candidates(norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of torch's search is from a centre: its error is that of the distances, and not of the norms."""
    generator = np.random.default_rng(9)
    center_D = norm * generator.standard_normal(576) / 24
    keys_ND = (center_D + 0.02 * generator.standard_normal((3000, 576))).astype(np.float32)
    keys_ND[7] *= 100
    queries_BD = (center_D + 0.02 * generator.standard_normal((40, 576))).astype(np.float32)
    index = KeyIndex(filled(keys_ND), torch.device("cpu"), TorchSearch)
    asked: list[tuple[int, int]] = []
    search = index._search.search

    def counting(queries_BD: torch.Tensor, count: int) -> KeySearchResult:
        asked.append((len(queries_BD), count))
        return search(queries_BD, count)

    monkeypatch.setattr(index._search, "search", counting)
    agrees(index, queries_BD, keys_ND)
    assert asked[0] == (40, INITIAL_CANDIDATES)
    assert sum(rows for rows, count in asked if count > INITIAL_CANDIDATES) <= 4


@pytest.mark.parametrize("count", [5, 100, 700])
def test_products_in_parts_find_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and queries by the few: each part proposes candidates, of which the best count."""
    monkeypatch.setattr("gracestream.pipeline.search.key_search.MIN_PRODUCT_KEYS", 16)
    monkeypatch.setattr("gracestream.pipeline.search.key_search.MAX_PRODUCT_ELEMENTS", 1)
    monkeypatch.setattr("gracestream.pipeline.search.key_search.CANDIDATE_CHUNK_ELEMENTS", 8)
    generator = np.random.default_rng(10)
    keys_ND = generator.standard_normal((count, 12)).astype(np.float32)
    keys_ND[count // 2 :] = keys_ND[: count - count // 2]  # each twice, and so never proven by distance alone
    queries_BD = generator.standard_normal((9, 12)).astype(np.float32)
    agrees(KeyIndex(filled(keys_ND), torch.device("cpu"), TorchSearch), queries_BD, keys_ND)


def test_keys_that_no_codes_tell_apart_are_looked_at_once_for_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """The editor asks what covers a correction, and then what is nearest to it."""
    keys_ND = np.random.default_rng(7).standard_normal((4000, 400), np.float32)
    codebook = filled(keys_ND, 26.0)
    index = index_of(codebook)
    looks: list[int] = []

    class Counted(InnerProducts):
        def __init__(self, keys_ND: np.ndarray, center_D: np.ndarray, queries_BD: np.ndarray) -> None:
            looks.append(len(queries_BD))
            super().__init__(keys_ND, center_D, queries_BD)

    monkeypatch.setattr("gracestream.pipeline.search.prefilter.InnerProducts", Counted)
    query_1D = torch.from_numpy(np.random.default_rng(8).standard_normal((1, 400), np.float32))
    for _ in range(2):
        index.nearest_within_radius(query_1D)
        assert looks == [1]
        slots_B, distances_B = oracle(query_1D.numpy(), codebook.keys_ND)
        found = index.nearest(query_1D)
        assert (found.slots_B.tolist(), found.distances_B.tolist()) == (slots_B.tolist(), distances_B.tolist())
        assert looks == [1]
        closer_D = query_1D[0].numpy() + np.float32(1)
        index.refresh(changed(codebook, added("new", closer_D, 26.0)))  # and what was known counts no more
        looks.clear()
