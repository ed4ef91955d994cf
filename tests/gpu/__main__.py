"""Whether gracestream works on this GPU: `python -m tests.gpu [--part NAME] [--budget SECONDS] [--device cpu]`.

This process runs no model: it starts `tests.gpu.worker`, and another one for the parts that are left where a worker
dies, for example by an assertion of FAISS. One part's failure takes no other with it. It needs the standard
library; what the worker needs is checked first.
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

NEEDED = ("torch", "transformers", "msgspec", "numpy", "safetensors")
OLDEST = (3, 11)
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""For a rehearsal: CPU seconds of several threads add up."""

GRACE_SECONDS = 60
"""After the budget, for the case that a worker is at."""

TAIL = 15
"""Lines of a dead worker's output that the report keeps."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 if a part failed, 2 if nothing could be run."""
    given = _arguments(arguments)
    if fault := why_not() or _commit_fault(given):
        sys.stderr.write(f"{fault}\n")
        return 2
    path: Path = given.report.resolve() if given.report else ROOT / "results" / f"gpu-report-{given.device}.json"
    path.unlink(missing_ok=True)
    parts = [name for name in PARTS if not given.part or name in given.part]
    options = ["--report", str(path), "--device", given.device]
    options += ["--real"] if given.real or given.device == "cuda" else []

    def worker(left: Sequence[str], seconds: float) -> list[str]:
        chosen = [word for name in left for word in ("--part", name)]
        return [sys.executable, "-m", "tests.gpu.worker", *options, "--seconds", str(seconds), *chosen]

    environment = OFFLINE | (ONE_THREAD if given.device == "cpu" else {})
    report = supervise(parts, worker, path, given.budget, environment)
    print("\n".join(summary(report)))
    print(f"the whole report is in {path}")
    failed = any(part.status == "failed" for part in report.parts.values())
    if given.commit and failed:
        print("the numbers were not kept in tests/bench/results, since a part failed")
    elif given.commit:
        print(f"the numbers are in {_commit(report, keep=bool(given.part))}")
    if not any(part.status == "passed" for part in report.parts.values()):
        return 1 if failed else 2
    return int(failed)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.gpu", description="Does gracestream work on this GPU?")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--budget", type=_seconds, default=float("inf"), help="seconds; what no longer fits is skipped")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal on tiny models")
    parser.add_argument("--real", action="store_true", help="real widths in the rehearsal too")
    parser.add_argument("--commit", action="store_true", help="keep the numbers in tests/bench/results, and its pages")
    parser.add_argument("--report", type=Path, help="the file of the report; default: results/gpu-report-DEVICE.json")
    return parser.parse_args(arguments)


def _seconds(given: str) -> float:
    """Raises ValueError where it is no number above 0."""
    seconds = float(given)
    if not seconds > 0:
        raise ValueError(given)
    return seconds


def why_not() -> str:
    """Why this Python cannot run the parts; empty if it can."""
    if sys.version_info < OLDEST:
        return f"gracestream needs Python 3.11 or newer; this is {sys.version.split()[0]}: set PYTHON=..."
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return ""
    return f"{sys.executable} lacks {', '.join(missing)}: install it, or name another Python by PYTHON=..."


def _commit_fault(given: argparse.Namespace) -> str:
    if given.commit and given.device == "cpu":
        return "a rehearsal on the CPU measures nothing that is worth keeping; leave --commit or --device cpu out"
    return ""


def supervise(
    parts: Sequence[str],
    worker: Callable[[Sequence[str], float], list[str]],
    path: Path,
    budget: float,
    environment: Mapping[str, str] = OFFLINE,
) -> Report:
    """Run parts by workers until each has a status; `worker` gives the command for some parts and seconds."""
    ends = time.monotonic() + budget
    left = list(parts)
    while left:
        report = Report.load(path)
        seconds = ends - time.monotonic()
        if seconds <= 0:
            report.parts |= {name: PartReport("skipped", "the budget is spent") for name in left}
            report.save()
            break
        ended = _run(worker(left, seconds), environment, seconds + GRACE_SECONDS)
        report = Report.load(path)
        at_work = [name for name in left if name in report.parts and report.parts[name].status == "running"]
        done = [name for name in left if name in report.parts]
        for name in at_work or ([] if done else left):
            report.fail(name, ended)
        report.save()
        left = [name for name in left if name not in report.parts]
    return Report.load(path)


def _run(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """Run a worker, pass on what it says, and return how it ended."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    last: deque[str] = deque(maxlen=TAIL)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            last.append(line)
        status = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:  # this process was interrupted
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if late.is_set():
        return f"it did not end within {GRACE_SECONDS} s after the budget and was killed; if it is slow, raise --budget"
    name = f" ({signal.Signals(-status).name})" if status < 0 else ""
    return f"its process ended with status {status}{name}: {''.join(last).strip()}"


def summary(report: Report) -> list[str]:
    """One line for the device and its versions, one for each part, and the reasons of failures and skips."""
    machine = report.machine
    names = ("driver", "cuda", "torch", "transformers", "faiss", "faiss_gpu")
    versions = ", ".join(f"{name} {machine[name]}" for name in names if name in machine)
    lines = [f"gracestream on {machine['device']}: {versions}"] if machine else []
    for name, part in report.parts.items():
        lines.append(f"{name:<12} {part.status:<8} {part.seconds:6.1f} s")
        lines += [f"    {status}: {reason}" for status in ("failed", "skipped") for reason in _short(part, status)]
    failed = [name for name, part in report.parts.items() if part.status == "failed"]
    lines.append(f"it does not work: {', '.join(failed)} failed" if failed else "no part failed")
    return lines


def _short(part: PartReport, status: str) -> list[str]:
    """The first line of each reason."""
    return [reason.strip().splitlines()[0] for reason in part.reasons(status)]  # type: ignore[arg-type]


def _commit(report: Report, *, keep: bool) -> Path:
    """Write the numbers and the pages of all results; `keep` those of parts that did not run."""
    from tests.bench.framework import KEPT, Row, write  # noqa: PLC0415 - torch, which only workers need otherwise
    from tests.bench.page import write_pages  # noqa: PLC0415 - likewise

    path = write("gpu", [Row(**row) for row in report.rows()], report.machine, KEPT, keep=keep)
    write_pages(KEPT)
    return path


if __name__ == "__main__":
    sys.exit(main())
