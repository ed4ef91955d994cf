"""The benchmark of the lookup, on few random keys."""

import numpy as np
import pytest

pytest.importorskip("tests.bench.lookup", exc_type=ImportError)  # needs more than the engine does

from gracestream.pipeline.search.key_search import NO_SLOT
from tests.bench import lookup
from tests.bench.codebooks import filled, radii_of
from tests.bench.framework import BenchError

KEYS_ND = np.random.default_rng(1).standard_normal((600, 200)).astype(np.float32)
QUERIES_QD = (KEYS_ND[:64] + 0.1 * np.random.default_rng(2).standard_normal((64, 200))).astype(np.float32)
CODEBOOK = filled("model", "layer", KEYS_ND, radii_of(KEYS_ND, -KEYS_ND[:50]), 1)


@pytest.mark.parametrize("batch", [1, 32])
def test_every_variant_finds_the_same_entries(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "REPEATS", {1: 4, 32: 2})
    rows = list(lookup.lookup_rows("lookup/keys", QUERIES_QD, CODEBOOK, batch))
    names = {"lookup", "pca-range", "faiss-knn", *(variant.name for variant in lookup.ABLATIONS)}
    assert {row.metric for row in rows} == names
    assert all(row.value > 0 for row in rows)


def test_a_variant_that_finds_another_entry_is_an_error() -> None:
    searches = {"lookup": lambda queries_BD: np.zeros(len(queries_BD), int)}
    wrong = {**searches, "wrong": lambda queries_BD: np.full(len(queries_BD), NO_SLOT)}
    lookup._take_turns(CODEBOOK, searches, [QUERIES_QD[:1]])
    with pytest.raises(BenchError, match="wrong found other entries"):
        lookup._take_turns(CODEBOOK, wrong, [QUERIES_QD[:1]])
