"""The process of `make gpu` that runs parts: `python -m tests.gpu.worker`. `make gpu` starts it.

An error in a case is recorded, and the next case runs. Most CUDA errors leave the device unusable. The process then
records the error and exits, and `tests.gpu` starts another one for the remaining parts.
"""

import argparse
import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from gracestream.pipeline.search.key_search import search_class_for
from tests.bench.device import available_memory, gpu_unavailable_reason, version
from tests.bench.framework import Row, format_value, machine
from tests.gpu.report import PARTS, CaseReport, PartReport, Report
from tests.gpu.rig import Case, Rig, SkipError

MODULES = {name: f"tests.gpu.{'suite' if name == 'tests' else name}" for name in PARTS}
ENVIRONMENT = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
"""Variables that change what a GPU computes or how fast."""

BROKEN, NO_DEVICE = 3, 4
"""Exit statuses: the device became unusable, and there is no usable device."""

Cases = Callable[[Rig], Iterator[Case]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and record their results in the report."""
    parser = argparse.ArgumentParser("python -m tests.gpu.worker")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--part", action="append", choices=PARTS, required=True)
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + args.seconds
    if args.device == "cuda" and (reason := gpu_unavailable_reason()):
        _log(reason)
        return NO_DEVICE
    report = Report.load(args.report)
    report.machine = describe_run(args.device)
    report.save()
    rig = Rig(torch.device(args.device), args.real, lambda: deadline - time.monotonic())
    parts = {name: importlib.import_module(MODULES[name]).cases for name in args.part}
    return 0 if run_parts(parts, rig, report) else BROKEN


def run_parts(parts: dict[str, Cases], rig: Rig, report: Report) -> bool:
    """Run the cases of each part. Returns False as soon as the device is unusable."""
    for name, cases in parts.items():
        part = report.parts[name] = PartReport("running")
        report.save()
        usable = _run_part(name, cases, rig, report)
        if part.status == "running":
            part.close()
        report.save()
        if not usable:
            return False
    return True


def _run_part(name: str, cases: Cases, rig: Rig, report: Report) -> bool:
    """Run the cases of one part; skip cases that would not end in time. Returns False if the device is unusable."""
    part = report.parts[name]
    longest, usable = 0.0, True
    try:
        for case in cases(rig):
            reason = "an earlier case left the device unusable" if not usable else _skip_reason(case, rig, longest)
            if reason:
                part.cases[case.name] = CaseReport("skipped", reason=reason)
                _log(f"{name}: {case.name} skipped: {reason}")
                continue
            _log(f"{name}: {case.name}")
            case_report = part.cases[case.name] = CaseReport("running")
            report.save()
            started = time.monotonic()
            _run_case(case, case_report)
            case_report.seconds = round(time.monotonic() - started, 3)
            longest = max(longest, case_report.seconds)
            usable = case_report.status != "failed" or _is_usable(rig.device)
            report.save()
            gc.collect()
            if rig.cuda and usable:
                torch.cuda.empty_cache()
    except Exception as error:  # noqa: BLE001 - a part that fails to list its cases must not stop the other parts
        part.status, part.reason = "failed", f"{type(error).__name__}: {error}"
        _log(traceback.format_exc())
    return usable


def _run_case(case: Case, case_report: CaseReport) -> None:
    """Run one case and record its result."""
    try:
        for row in case.run():
            case_report.rows.append(asdict(row))
            _log(f"    {row.name} {_format_row(row)}")
    except (SkipError, torch.OutOfMemoryError, MemoryError) as error:
        case_report.status, case_report.reason = "skipped", _first_line(error)
        _log(f"    skipped: {case_report.reason}")
    except Exception as error:  # noqa: BLE001 - the next case must run after any error
        case_report.status, case_report.reason, case_report.error = "failed", _first_line(error), traceback.format_exc()
        _log(case_report.error)
    else:
        case_report.status = "passed"


def _skip_reason(case: Case, rig: Rig, longest: float) -> str:
    """The reason to skip a case; empty if it may run. Cases grow, so one takes at least as long as earlier ones."""
    seconds_left = rig.seconds_left()
    if seconds_left <= 0:
        return "the budget is spent"
    if seconds_left <= longest:
        return f"the budget has {seconds_left:.0f} s left; an earlier case took {longest:.0f} s"
    needed, on_device = case.host_bytes + (0 if rig.cuda else case.device_bytes), available_memory(rig.device)
    if needed > (on_host := available_memory(torch.device("cpu"))):
        return f"it needs {needed / 1e9:.1f} GB of the host's memory, but {on_host / 1e9:.1f} GB are free"
    if case.device_bytes > on_device:
        return (
            f"it needs {case.device_bytes / 1e9:.1f} GB of the device's memory, but {on_device / 1e9:.1f} GB are free"
        )
    return ""


def _is_usable(device: torch.device) -> bool:
    """Whether the device still computes after an error."""
    try:
        return float(torch.ones(8, device=device).sum()) == 8
    except RuntimeError:
        return False


def describe_run(device: str) -> dict[str, str | int]:
    """The machine, the versions, and the environment variables that change what a GPU computes."""
    versions = {package: version(package) for package in ("numpy", "msgspec", "safetensors", "tokenizers")}
    search = {"search": search_class_for(torch.device(device)).__name__}
    return {
        **machine(device),
        **versions,
        **search,
        **{name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def _format_row(row: Row) -> str:
    baseline = "" if row.baseline is None else f" ({format_value(Row('', row.baseline, row.unit))})"
    return f"{format_value(row)}{baseline} {row.unit}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
