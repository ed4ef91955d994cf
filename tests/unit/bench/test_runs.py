"""Benchmarks of the engine on tiny models, on the selected device."""

import time
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("tests.bench.overhead", exc_type=ImportError)  # needs more packages than the engine

from tests.bench import edit, lookup, memory, overhead, undo
from tests.bench.codebooks import value_width
from tests.bench.device import copy_rate, memory_in_use, peak_memory_added, timed
from tests.bench.framework import BenchError, Options, Row
from tests.bench.models import BenchModel
from tests.bench.random_models import TINY

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class LoadedError(Exception):
    """Raised instead of loading a model."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the real models by tiny ones, and use few entries."""
    models = tuple(BenchModel(name, model.load, model) for name, model in zip(edit.TOKENS, TINY, strict=True))
    for bench in (edit, overhead):
        monkeypatch.setattr(bench, "MODELS", models)
    monkeypatch.setattr(edit, "STORED_ENTRIES", 2000)
    monkeypatch.setattr(overhead, "COUNTS", {"1k": 1000})
    monkeypatch.setattr(lookup, "MODELS", ())  # test_lookup.py measures on random keys
    monkeypatch.setattr(memory, "QUICK_ENTRIES", 2000)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bench", [edit, memory, overhead], ids=lambda bench: bench.__name__.rpartition(".")[2])
def test_a_benchmark_runs_on_the_selected_device(bench: Any, device: str) -> None:
    rows: list[Row] = list(bench.run(Options(quick=True, device=device)))
    assert {row.metric for row in rows} >= {
        edit: {"textbook-of-ours", "loss-apart", "stored-of-none"},
        memory: {"of-floor"} | ({"device-of-floor"} if device == "cuda" else set()),
        overhead: {"edited-of-unedited", "textbook-of-unedited", "lookup", "recall"},
    }[bench]
    assert all(row.value == 1 for row in rows if row.metric == "recall")


@pytest.mark.parametrize("bench", [edit, overhead], ids=["edit", "overhead"])
def test_models_are_loaded_onto_the_selected_device(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(device: str) -> Any:
        raise LoadedError(device)

    monkeypatch.setattr(bench, "MODELS", (BenchModel("bert-base", load),))
    with pytest.raises(LoadedError, match=r"^cuda$"):
        next(bench.run(Options(quick=True, device="cuda")))


def test_undo_has_no_model_and_rejects_a_gpu() -> None:
    with pytest.raises(BenchError, match="use --device cpu"):
        next(undo.run(Options(device="cuda")))


def test_the_width_of_a_value_is_computed_on_the_device_of_the_module() -> None:
    module = torch.nn.Linear(3, 5, dtype=torch.bfloat16, device="meta")  # a module on it accepts no tensor of the host
    assert value_width(module, 3) == 5


def test_time_on_a_cpu_counts_only_this_process() -> None:
    seconds, result = timed(CPU, partial(_sleep, 0.5))
    assert result == "slept"
    assert seconds < 0.5


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def test_a_copy_rate_is_in_bytes_per_second() -> None:
    assert copy_rate(CPU) > 2**20


def test_allocated_memory_counts_and_freed_memory_does_not() -> None:
    before = memory_in_use(CPU)
    tensors: list[torch.Tensor] = []
    assert peak_memory_added(CPU, partial(_allocate, tensors, 2**26)) > 2**26 - 2**20
    tensors.clear()
    assert memory_in_use(CPU) - before < 2**25


def _allocate(tensors: list[torch.Tensor], size: int) -> None:
    tensors.append(torch.ones(size, dtype=torch.uint8))
