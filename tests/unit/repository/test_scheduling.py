"""The pieces of work that `pytest -n` hands out, and the part of the long runs that a commit has."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.support.rotation import PARTS, part_of_commit, parts
from tests.support.scheduling import LONG_FILES, arrange, piece_of


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def test_every_long_file_is_there() -> None:
    assert [file for file in LONG_FILES if not (ROOT / file).is_file()] == []


def test_tests_of_a_file_stay_together_and_those_of_a_long_file_do_not() -> None:
    (long, *_) = LONG_FILES
    assert piece_of(f"{long}::test_a[1]") != piece_of(f"{long}::test_a[2]")
    assert piece_of("tests/unit/a/test_a.py::TestA::test_a") == piece_of("tests/unit/a/test_a.py::test_b")


def test_waiting_and_computing_pieces_alternate_and_long_files_begin() -> None:
    (long, *_) = LONG_FILES
    waiting = [f"tests/system/test_{number}.py::test_{name}" for number in range(3) for name in "ab"]
    computing = [f"tests/unit/test_{number}.py::test_{name}" for number in range(4) for name in "ab"]
    items = [Item(nodeid) for nodeid in (*waiting, f"{long}::test_a", *computing)]
    arrange(items)  # type: ignore[arg-type]
    files = [item.nodeid.split("::", maxsplit=1)[0] for item in items]
    order = list(dict.fromkeys(files))
    assert order[0] == long
    assert [file.split("/")[1] == "unit" for file in order[1::2]] == [True] * 4
    assert sorted(files) == sorted(nodeid.split("::", maxsplit=1)[0] for nodeid in (*waiting, long, *computing))
    assert files == sorted(files, key=order.index), "a file is not torn"


def test_a_commit_always_has_the_same_part(request: pytest.FixtureRequest) -> None:
    assert part_of_commit() == part_of_commit()
    assert len(parts(request.config)) in {1, PARTS}


def test_without_git_the_day_chooses_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.rotation.ROOT", tmp_path)
    assert part_of_commit() in range(PARTS)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert part_of_commit() in range(PARTS)


def test_the_report_says_how_to_run_the_same_part_again() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "--part", "7"]
    ran = subprocess.run([*command, "tests/unit/wording"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.search("^long runs: part 7 of 10; --part 7 runs it again$", ran.stdout, re.MULTILINE), ran
