"""The parts of the long runs: one part with each push, all of them with `make chaos`.

1. A long run has `PARTS` parts, and each part has seeds of its own. Together they are the whole run.
2. `pytest` runs the part that the commit's hash chooses. The same commit runs the same part anywhere.
3. The first lines of the report name the part. `--part N` runs that one again; `--chaos N` runs all of them.
"""

import subprocess
import time

import pytest

from tests.support.repository import ROOT

PARTS = 10
"""Number of parts. Each push runs one of them, a tenth of each long run."""

SECONDS_OF_A_DAY = 86_400


def part_of_commit() -> int:
    """The part for the commit that is checked out; without git, the part for the day."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        found = ""
    return int(found, 16) % PARTS if found else int(time.time() // SECONDS_OF_A_DAY) % PARTS


def parts(config: pytest.Config) -> range:
    """The parts that this run has: all with `--chaos`, else one."""
    if config.getoption("--chaos"):
        return range(PARTS)
    part = config.getoption("--part")
    return range(part, part + 1)
