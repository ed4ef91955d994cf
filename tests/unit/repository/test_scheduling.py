"""The pieces of work that `pytest -n` hands out, and the part of the long runs that a commit has."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT
from tests.support.rotation import COMBINATIONS, PARTS, part_of_commit, parts, rotate
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
    assert part_of_commit() in range(COMBINATIONS)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert part_of_commit() in range(COMBINATIONS)


def collect(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_the_report_says_how_to_run_the_same_part_again() -> None:
    rotated = "long runs: part 7 of 10; slow tests: quarter 3 of 4; --rotate --part 37 runs the same again"
    assert f"\n{rotated}\n" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for arguments, line in (
        ([], "long runs: part 7 of 10; slow tests: all; --part 37 runs the same again"),
        (["--rotate"], rotated),
        (["--chaos", "2"], "long runs: all; slow tests: all"),
    ):
        report = collect("-v", "--part", "37", "tests/unit/wording", *arguments)
        assert line in report.splitlines(), report


def test_the_id_of_a_chaotic_story_runs_the_same_story_again() -> None:
    """The short stories have no seed, since no seed makes them."""
    files = ("test_chaos.py::test_no_fault_loses_or_doubles_anything", "test_network.py::test_no_correction_is_lost")
    for options, name in (((), "short"), (("--chaos", "4", "-k", "seed-3"), "seed-3")):
        ids = [line for line in collect("tests/chaos", *options).splitlines() if "::" in line]
        assert [(file in one, one.endswith(f"[{name}]")) for file, one in zip(files, ids, strict=True)] == [
            (True, True)
        ] * 2


def options_of(target: str) -> list[str]:
    """The options that a target of the Makefile gives to pytest for its tests."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    (command,) = (line for line in done.stdout.splitlines() if line.startswith(".venv/bin/pytest "))
    return shlex.split(command)[1:]


def test_make_nightly_runs_every_slow_test_and_many_random_examples_with_time_for_them() -> None:
    report = collect("-vv", *options_of("nightly"), "tests/unit/wording")
    (profile,) = (line for line in report.splitlines() if line.startswith("hypothesis profile"))
    assert "'nightly'" in profile
    assert "max_examples=1000" in profile
    assert "derandomize" not in profile
    assert "slow tests: all;" in report
    assert "timeout: 3600.0s" in report
    assert "slow tests: quarter" in collect("-v", *options_of("test"), "tests/unit/wording")


def test_make_quick_checks_settings_and_the_reference() -> None:
    assert {"tests/unit/settings", "tests/unit/repository/test_reference.py"} <= {*options_of("quick")}


class Marked:
    """A test in a file; `slow` says what is marked: the test, its file, or nothing."""

    def __init__(self, nodeid: str, slow: str = "") -> None:
        self.nodeid = nodeid
        self._marker = pytest.mark.slow.mark if slow else None
        self.own_markers = [pytest.mark.slow.mark] if slow == "file" else []

    def get_closest_marker(self, _name: str) -> pytest.Mark | None:
        return self._marker

    def getparent(self, _kind: type) -> "Marked":
        return self


def test_each_slow_test_runs_in_one_quarter_and_all_others_in_each() -> None:
    slow = [Marked(f"test_a.py::test_slow[{number}]", "test") for number in range(60)]
    together = [Marked(f"test_b.py::test_{name}", "file") for name in "xyz"]
    fast = [Marked("test_a.py::test_fast")]
    everything: Any = [*slow, *fast, *together]
    quarters: list[set[Any]] = []
    for part in range(COMBINATIONS):
        kept, left_out = rotate(everything, part)
        assert {*kept, *left_out} == {*everything}
        quarters.append({*kept})
    assert all(kept == quarters[part // PARTS * PARTS] for part, kept in enumerate(quarters))
    assert all(kept & {*slow} for kept in quarters)
    assert all(sum(item in kept for kept in quarters[::PARTS]) == 1 for item in [*slow, *together])
    assert sorted(len(kept & {*together}) for kept in quarters[::PARTS]) == [0, 0, 0, 3]
    assert all(fast[0] in kept for kept in quarters)
