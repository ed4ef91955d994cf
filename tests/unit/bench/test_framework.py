"""The frame of the benchmarks: rows, the file of results, the pages, and errors in one sentence."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import faiss
import pytest
import torch
from rich.console import Console

from gracestream.pipeline.device import CUDA_ENVIRONMENT_DEFAULTS
from tests.bench import __main__ as command
from tests.bench import framework
from tests.bench.framework import (
    BENCHMARKS,
    BenchError,
    Options,
    Row,
    load_benchmark,
    machine,
    to_records,
    write_results,
)
from tests.bench.models import MODELS, select_models
from tests.bench.page import INDEX, pages
from tests.bench.table import print_tables

ROWS = [
    Row("zsre/paper/exact", 0.5, "share", 0.5),
    Row("zsre/paper/entries", 7, "count"),
    Row("zsre/nearest/exact", 1.0, "share", 0.5),
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A benchmark `small` that yields `ROWS`. Returns the folder that replaces the root of the repository."""

    def run(options: Options) -> Iterator[Row]:
        options.report("measuring")
        yield from ROWS

    monkeypatch.setattr(command, "load_benchmark", lambda name: run if name == "small" else load_benchmark(name))
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "COMMITTED", tmp_path / "committed")
    threads = torch.get_num_threads(), faiss.omp_get_max_threads()
    yield tmp_path
    torch.set_num_threads(threads[0])
    faiss.omp_set_num_threads(threads[1])


def test_a_record_has_the_row_its_baseline_and_the_machine() -> None:
    here = machine("cpu")
    first, second, _ = to_records(ROWS, here)
    assert first == {"name": "zsre/paper/exact", "value": 0.5, "unit": "share", "baseline": 0.5, "machine": here}
    assert second["baseline"] is None
    assert {"cpu", "cores", "ram_gib", "device", "python", "torch", "transformers", "faiss"} <= set(here)


def test_the_file_of_results_is_named_for_benchmark_and_device(tmp_path: Path) -> None:
    path = write_results("small", ROWS, {**machine("cpu"), "device": "NVIDIA H200"}, tmp_path / "new")
    assert path == tmp_path / "new" / "small-nvidia-h200.json"
    assert [record["value"] for record in json.loads(path.read_text())] == [0.5, 7, 1.0]


def test_one_model_can_be_measured_again_while_other_results_stay(tmp_path: Path) -> None:
    write_results("small", ROWS, machine("cpu"), tmp_path)
    path = write_results(
        "small",
        [Row("zsre/paper/exact", 0.7, "share"), Row("zsre/new/exact", 0.1, "share")],
        machine("cpu"),
        tmp_path,
        keep_others=True,
    )
    found = {record["name"]: record["value"] for record in json.loads(path.read_text())}
    assert found == {"zsre/paper/exact": 0.7, "zsre/paper/entries": 7, "zsre/nearest/exact": 1.0, "zsre/new/exact": 0.1}
    assert [one.name for one in select_models(Options(only="minilm"), MODELS)] == ["minilm"]
    with pytest.raises(BenchError, match=r"^'other' is not a model of this benchmark; use bert-base, .*minilm$"):
        select_models(Options(only="other"), MODELS)


def test_the_table_has_one_line_for_each_setting() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    print_tables(ROWS, console)
    lines = console.export_text().splitlines()
    assert sum("paper" in line for line in lines) == 1
    assert next(line for line in lines if "paper" in line).replace("│", " ").split() == ["paper", "0.500", "7"]
    assert next(line for line in lines if "nearest" in line).replace("│", " ").split() == ["nearest", "1.000"]


@pytest.mark.parametrize(("arguments", "folder"), [(["small"], "results"), (["small", "--commit"], "committed")])
def test_only_committed_results_go_to_the_repository(small: Path, arguments: list[str], folder: str) -> None:
    assert command.main(arguments) == 0
    assert json.loads((small / folder / "small-cpu.json").read_text()) == to_records(ROWS, machine("cpu"))


def test_the_pages_of_results_are_current() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in framework.COMMITTED.glob("*.md")}
    assert written == pages(framework.COMMITTED), "run: python -m tests.bench.page"


def test_each_device_has_a_page_with_each_number_and_its_baseline(tmp_path: Path) -> None:
    write_results("edit", ROWS, machine("cpu"), tmp_path)
    gpu: framework.Machine = {"device": "NVIDIA H200", "driver": "580.65.06", "cuda": "13.2"}
    write_results("edit", [Row("edit/other/seconds", 0.25, "s")], machine("cpu") | gpu, tmp_path)
    found = pages(tmp_path)
    assert list(found) == [INDEX, "cpu.md", "nvidia-h200.md"]
    assert "- [NVIDIA H200](nvidia-h200.md): edit\n" in found[INDEX]
    assert "| paper | 0.500 (0.500) | 7 |" in found["cpu.md"]
    assert "| nearest | 1.000 (0.500) |  |" in found["cpu.md"]
    assert "textbook GRACE" in found["cpu.md"]  # the description of the benchmark
    assert f"torch {torch.__version__}" in found["cpu.md"]
    assert "| other | 0.25 s |" in found["nvidia-h200.md"]
    assert "driver 580.65.06, CUDA 13.2" in found["nvidia-h200.md"]
    assert "paper" not in found["nvidia-h200.md"].partition("| setting")[2]


def test_an_unknown_name_gives_one_sentence_and_status_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["speed"]) == 2
    output = capfd.readouterr().err
    assert output == f"no benchmark is named 'speed'; the names are {', '.join(BENCHMARKS)}\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_runs_and_one_sentence_gives_the_reason(
    small: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CUDA_ENVIRONMENT_DEFAULTS.items():
        monkeypatch.setenv(name, value)  # a run on a GPU sets them in its process
    assert command.main(["small", "--device", "cuda"]) == 2
    assert re.fullmatch(r"torch \S+ cannot use a GPU: .+\n", capfd.readouterr().err)
    assert not (small / "results").exists()


def test_quick_results_are_not_committed(small: Path) -> None:
    assert command.main(["small", "--quick", "--commit"]) == 2
    assert not (small / "committed").exists()


def test_every_registered_benchmark_can_be_loaded() -> None:
    assert all(callable(load_benchmark(name)) for name in BENCHMARKS)
