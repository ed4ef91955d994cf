"""Run the parts of `make gpu`: `python -m tests.gpu [--part NAME] [--budget SECONDS] [--device cpu]`.

This process runs no model. It starts `tests.gpu.worker`. If a worker dies, for example by an assertion of FAISS, it
starts another one for the remaining parts. So a failed part does not affect the others. This module needs only the
standard library; it checks the packages of the worker first.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.gpu.report import PARTS, PartReport, Report
from tests.support.repository import ROOT

REQUIRED_PACKAGES = ("torch", "transformers", "msgspec", "numpy", "safetensors")
MIN_PYTHON = (3, 11)
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""One thread for a rehearsal on the CPU, because CPU seconds of several threads would add up."""

GRACE_SECONDS = 60
"""Time after the budget for the running case of a worker."""

OUTPUT_LINES = 15
"""Last lines of a dead worker's output, for the report."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 1 if a part failed, 2 if nothing could run."""
    args = _arguments(arguments)
    if error := cannot_run_reason() or _commit_error(args):
        sys.stderr.write(f"{error}\n")
        return 2
    path: Path = args.report.resolve() if args.report else ROOT / "results" / f"gpu-report-{args.device}.json"
    path.unlink(missing_ok=True)
    parts = [name for name in PARTS if not args.part or name in args.part]
    options = ["--report", str(path), "--device", args.device]
    options += ["--real"] if args.real or args.device == "cuda" else []

    def worker(remaining: Sequence[str], seconds: float) -> list[str]:
        part_options = [word for name in remaining for word in ("--part", name)]
        return [sys.executable, "-m", "tests.gpu.worker", *options, "--seconds", str(seconds), *part_options]

    environment = OFFLINE | (ONE_THREAD if args.device == "cpu" else {})
    report = supervise(parts, worker, path, args.budget, environment)
    print("\n".join(summary(report)))
    print(f"the full report is in {path}")
    failed = any(part.status == "failed" for part in report.parts.values())
    if args.commit and failed:
        print("the results were not written to tests/bench/results, because a part failed")
    elif args.commit:
        print(f"the results are in {_commit(report, keep_others=bool(args.part))}")
    if not any(part.status == "passed" for part in report.parts.values()):
        return 1 if failed else 2
    return int(failed)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.gpu", description="Check and measure gracestream on this GPU.")
    parser.add_argument("--part", action="append", choices=PARTS, help="run only this part; may be repeated")
    parser.add_argument(
        "--budget", type=_seconds, default=float("inf"), help="seconds; cases that no longer fit are skipped"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal with tiny models")
    parser.add_argument("--real", action="store_true", help="use real widths in the rehearsal too")
    parser.add_argument(
        "--commit", action="store_true", help="write the results and their pages to tests/bench/results"
    )
    parser.add_argument("--report", type=Path, help="the file of the report; default: results/gpu-report-DEVICE.json")
    return parser.parse_args(arguments)


def _seconds(text: str) -> float:
    """Parse a number of seconds above 0; ValueError otherwise."""
    seconds = float(text)
    if not seconds > 0:
        raise ValueError(text)
    return seconds


def cannot_run_reason() -> str:
    """The reason why this Python cannot run the parts; empty if it can."""
    if sys.version_info < MIN_PYTHON:
        return f"gracestream needs Python 3.11 or newer; this is {sys.version.split()[0]}: set PYTHON=..."
    missing = [name for name in REQUIRED_PACKAGES if find_spec(name) is None]
    if not missing:
        return ""
    return f"{sys.executable} lacks {', '.join(missing)}: install them, or set PYTHON=... to another Python"


def _commit_error(args: argparse.Namespace) -> str:
    if args.commit and args.device == "cpu":
        return "a rehearsal on the CPU gives no results to commit; drop --commit or --device cpu"
    return ""


def supervise(
    parts: Sequence[str],
    worker: Callable[[Sequence[str], float], list[str]],
    path: Path,
    budget: float,
    environment: Mapping[str, str] = OFFLINE,
) -> Report:
    """Run workers until each part has a status. `worker` makes the command line for some parts and seconds."""
    deadline = time.monotonic() + budget
    remaining = list(parts)
    while remaining:
        report = Report.load(path)
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            report.parts |= {name: PartReport("skipped", "the budget is spent") for name in remaining}
            report.save()
            break
        ending = _run(worker(remaining, seconds), environment, seconds + GRACE_SECONDS)
        report = Report.load(path)
        running = [name for name in remaining if name in report.parts and report.parts[name].status == "running"]
        done = [name for name in remaining if name in report.parts]
        for name in running or ([] if done else remaining):
            report.fail(name, ending)
        report.save()
        remaining = [name for name in remaining if name not in report.parts]
    return Report.load(path)


def _run(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """Run a worker and pass on its output. Returns a description of its end."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timed_out = threading.Event()

    def kill() -> None:
        timed_out.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), kill)
    timer.daemon = True
    timer.start()
    last_lines: deque[str] = deque(maxlen=OUTPUT_LINES)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            last_lines.append(line)
        status = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:  # this process was interrupted
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if timed_out.is_set():
        return f"it did not end within {GRACE_SECONDS} s after the budget and was killed; raise --budget if it is slow"
    name = f" ({signal.Signals(-status).name})" if status < 0 else ""
    return f"its process ended with status {status}{name}: {''.join(last_lines).strip()}"


def summary(report: Report) -> list[str]:
    """Lines for the terminal: device and versions, one line per part, and the reasons of failures and skips."""
    machine = report.machine
    names = ("driver", "cuda", "torch", "transformers", "faiss", "faiss_gpu")
    versions = ", ".join(f"{name} {machine[name]}" for name in names if name in machine)
    lines = [f"gracestream on {machine['device']}: {versions}"] if machine else []
    for name, part in report.parts.items():
        lines.append(f"{name:<12} {part.status:<8} {part.seconds:6.1f} s")
        lines += [
            f"    {status}: {reason}" for status in ("failed", "skipped") for reason in _first_lines(part, status)
        ]
    failed = [name for name, part in report.parts.items() if part.status == "failed"]
    lines.append(f"failed parts: {', '.join(failed)}" if failed else "no part failed")
    return lines


def _first_lines(part: PartReport, status: str) -> list[str]:
    """The first line of each reason."""
    return [reason.strip().splitlines()[0] for reason in part.reasons(status)]  # type: ignore[arg-type]


def _commit(report: Report, *, keep_others: bool) -> Path:
    """Write the results and all pages. `keep_others` keeps the results of parts that did not run."""
    from tests.bench.framework import COMMITTED, Row, write_results  # noqa: PLC0415 - imports torch, which otherwise only workers need
    from tests.bench.page import write_pages  # noqa: PLC0415 - likewise

    path = write_results(
        "gpu", [Row(**row) for row in report.rows()], report.machine, COMMITTED, keep_others=keep_others
    )
    write_pages(COMMITTED)
    return path


if __name__ == "__main__":
    sys.exit(main())
