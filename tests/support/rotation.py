"""What runs with each push, and what runs in turns.

1. A long run has `PARTS` parts, and each part has seeds of its own. Together they are the whole run. `pytest` runs one
   part, and `--chaos N` all of them.
2. A test marked `slow` takes more than about four seconds of a core. With `--rotate`, as in `make test`, a quarter of
   these runs. Without it, as in `make nightly`, all do.
3. The commit's hash chooses one of `COMBINATIONS` of part and quarter. The same commit runs the same tests anywhere.
   The first lines of the report name the combination; `--part N` chooses it.
"""

import subprocess
import time
import zlib
from collections.abc import Iterable

import pytest

from tests.support.repository import ROOT

PARTS = 10
"""Number of parts. Each push runs one of them, a tenth of each long run."""

QUARTERS = 4
"""Each push runs one slow test in so many."""

COMBINATIONS = PARTS * QUARTERS
"""Part and quarter are chosen apart, so that each part of a long run that is slow has its turn."""

SECONDS_OF_A_DAY = 86_400


def part_of_commit() -> int:
    """The combination for the commit that is checked out; without git, the one for the day."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        found = ""
    return (int(found, 16) if found else int(time.time() // SECONDS_OF_A_DAY)) % COMBINATIONS


def parts(config: pytest.Config) -> range:
    """The parts that this run has: all with `--chaos`, else one."""
    if config.getoption("--chaos"):
        return range(PARTS)
    part = config.getoption("--part") % PARTS
    return range(part, part + 1)


def rotate(items: Iterable[pytest.Item], part: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of a part, and those left out. A part has all tests but the slow ones of other quarters."""
    chosen: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])
    for item in items:
        is_left_out = item.get_closest_marker("slow") is not None and quarter_of(item) != part // PARTS
        chosen[is_left_out].append(item)
    return chosen


def quarter_of(item: pytest.Item) -> int:
    """The quarter of a slow test, by its name alone.

    If a file is marked, its tests share what is slow, so they share one quarter.
    """
    module = item.getparent(pytest.Module)
    is_file = module is not None and any(mark.name == "slow" for mark in module.own_markers)
    name = item.nodeid.split("::", maxsplit=1)[0] if is_file else item.nodeid
    return zlib.adler32(name.encode()) % QUARTERS
