"""Benchmarks of the engine, on tiny models: they run on the device that they are asked for."""

import time
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("tests.bench.overhead", exc_type=ImportError)  # needs more than the engine does

from tests.bench import edit, memory, overhead, undo
from tests.bench.codebooks import value_width
from tests.bench.device import copy_rate, memory_in_use, peak_memory_added, timed
from tests.bench.framework import BenchError, Options, Row
from tests.bench.models import BenchModel
from tests.bench.random_models import TINY

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class LoadedError(Exception):
    """Instead of a model."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models in place of the real ones, and few entries."""
    models = tuple(BenchModel(name, model.load, model) for name, model in zip(edit.TOKENS, TINY, strict=True))
    for bench in (edit, overhead):
        monkeypatch.setattr(bench, "MODELS", models)
    monkeypatch.setattr(edit, "STORED_ENTRIES", 2000)
    monkeypatch.setattr(overhead, "COUNTS", {"1k": 1000})
    monkeypatch.setattr(memory, "QUICK_ENTRIES", 2000)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bench", [edit, memory, overhead], ids=lambda bench: bench.__name__.rpartition(".")[2])
def test_a_benchmark_runs_on_the_device_that_it_is_asked_for(bench: Any, device: str) -> None:
    rows: list[Row] = list(bench.run(Options(quick=True, device=device)))
    assert {row.metric for row in rows} >= {
        edit: {"textbook-of-ours", "loss-apart", "stored-of-none"},
        memory: {"of-floor"} | ({"device-of-floor"} if device == "cuda" else set()),
        overhead: {"edited-of-unedited", "textbook-of-unedited", "lookup", "recall"},
    }[bench]
    assert all(row.value == 1 for row in rows if row.metric == "recall")


@pytest.mark.parametrize("bench", [edit, overhead], ids=["edit", "overhead"])
def test_models_are_loaded_onto_the_device_that_is_asked_for(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(device: str) -> Any:
        raise LoadedError(device)

    monkeypatch.setattr(bench, "MODELS", (BenchModel("bert-base", load),))
    with pytest.raises(LoadedError, match=r"^cuda$"):
        next(bench.run(Options(quick=True, device="cuda")))


def test_undo_which_has_no_model_refuses_a_gpu() -> None:
    with pytest.raises(BenchError, match="use --device cpu"):
        next(undo.run(Options(device="cuda")))


def test_the_width_of_a_value_is_found_on_the_device_of_the_module() -> None:
    module = torch.nn.Linear(3, 5, dtype=torch.bfloat16, device="meta")  # which takes no tensor of the host
    assert value_width(module, 3) == 5


def test_time_on_a_cpu_is_that_of_this_process_alone() -> None:
    seconds, result = timed(CPU, partial(_sleep, 0.5))
    assert result == "slept"
    assert seconds < 0.5


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def test_a_copy_rate_is_bytes_read_and_written_a_second() -> None:
    assert copy_rate(CPU) > 2**20


def test_memory_that_is_taken_counts_and_what_is_given_back_does_not() -> None:
    before = memory_in_use(CPU)
    tensors: list[torch.Tensor] = []
    assert peak_memory_added(CPU, partial(_allocate, tensors, 2**26)) > 2**26 - 2**20
    tensors.clear()
    assert memory_in_use(CPU) - before < 2**25


def _allocate(tensors: list[torch.Tensor], size: int) -> None:
    tensors.append(torch.ones(size, dtype=torch.uint8))
