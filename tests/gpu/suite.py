"""The tests marked `gpu`, run by pytest in a separate process."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.bench.framework import Row
from tests.gpu.rig import Case, CheckError, Rig, SkipError
from tests.support.repository import ROOT

MARK = "mark.gpu"
MAX_WORKERS = 8
"""Processes of pytest at most. Each takes about 1 GB of the device's memory."""

OUTPUT_LINES = 40
"""Last lines of pytest's output in the message of a failure."""


def cases(rig: Rig) -> Iterator[Case]:
    """One case: pytest."""
    yield Case("pytest", partial(_case, rig))


def _case(rig: Rig) -> Iterator[Row]:
    if find_spec("pytest") is None:
        raise SkipError("pytest is not installed: pip install pytest")
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        # The options in pyproject.toml need plugins that may be missing here.
        command = [
            sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-ra", "-o", "addopts=--import-mode=importlib",
            "-p", "no:cacheprovider", "--junit-xml", str(results), *_workers(), *map(str, files),
        ]  # fmt: skip
        seconds_left = rig.seconds_left()
        seconds = None if seconds_left == float("inf") else seconds_left
        # Another pytest may have started this; its options and plugins must not apply here.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        log = Path(folder) / "log"
        try:
            with log.open("wb") as file:
                completed = subprocess.run(
                    command, cwd=ROOT, env=environment, timeout=seconds, check=False, stdout=file, stderr=file
                )
        except subprocess.TimeoutExpired as error:
            raise CheckError(
                f"pytest did not end within the remaining budget of {seconds:.0f} s:\n{_last_lines(log)}"
            ) from error
        output = _last_lines(log)
        if not results.exists():
            raise CheckError(f"pytest ended with status {completed.returncode}:\n{output}")
        (suite,) = ET.parse(results).getroot().iter("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    yield Row("tests/pytest/passed", passed, "count")
    yield Row("tests/pytest/skipped", counts["skipped"], "count")
    yield Row("tests/pytest/failed", failed, "count", 0)
    if completed.returncode or failed:
        raise CheckError(f"{failed} tests failed, pytest ended with status {completed.returncode}:\n{output}")
    if not passed and not rig.cuda:
        raise SkipError(f"all {counts['skipped']} tests need a GPU")
    if not passed:
        raise CheckError(f"all {counts['skipped']} tests were skipped:\n{output}")


def _workers() -> list[str]:
    """Options for several processes, where pytest-xdist is installed: small models leave a GPU idle."""
    return [] if find_spec("xdist") is None else ["-n", str(min(MAX_WORKERS, os.cpu_count() or 1))]


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-OUTPUT_LINES:])
