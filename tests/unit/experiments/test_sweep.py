"""Grids of settings, and the report of their runs."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.errors import PlotError
from gracestream.pipeline.experiments import plots
from gracestream.pipeline.experiments.editors.serving import ServedCounts
from gracestream.pipeline.experiments.plots import draw_run, require_matplotlib
from gracestream.pipeline.experiments.report import (
    METRICS_FILE,
    REPORT_VERSION,
    RunReport,
    RunSpec,
    read_report,
    write_report,
)
from gracestream.pipeline.experiments.stream import MeanScore, Measurement
from gracestream.pipeline.experiments.sweep import Sweep, SweepError, combination_name, estimate_mean, expand_grid

ASKED = RunSpec(
    experiment="zsre",
    data="d",
    editor="grace",
    edits=1,
    retention=1,
    every=1,
    seed=0,
    settings={},
    version=REPORT_VERSION,
)


def point(corrections: int, value: float) -> Measurement:
    quality, none = MeanScore(value, value), MeanScore(math.nan, math.nan)
    return Measurement(
        corrections=corrections, edits=corrections, failed=0, entries=2 * corrections, seconds=1.0, es=quality,
        err=quality if corrections else none, trr=quality, arr=none, rephrases=none, coming=none,
        agreement=1.0, covered=math.nan, captured=0.0,
    )  # fmt: skip


def report(*values: float) -> RunReport:
    return RunReport(
        asked=ASKED, measure="f1", model="m", layer="l", environment={}, left_out=0,
        points=[point(corrections, value) for corrections, value in enumerate(values)], made=[], uses=[],
    )  # fmt: skip


def test_a_grid_has_every_combination_and_the_first_name_changes_slowest() -> None:
    assert expand_grid([], ["radius"]) == [{}]
    found = expand_grid([" policy = paper, nearest", "seed=0,1", "seed=2"], ["policy", "seed"])
    assert [tuple(cell.values()) for cell in found] == [
        ("paper", "0"), ("paper", "1"), ("paper", "2"), ("nearest", "0"), ("nearest", "1"), ("nearest", "2"),
    ]  # fmt: skip


@pytest.mark.parametrize("option", ["", "=", "radius", "radius=", "radius=,", "radius=1,1", "other=1"])
def test_what_makes_no_grid_is_told(option: str) -> None:
    with pytest.raises(SweepError, match=r"^--sweep '"):
        expand_grid([option], ["radius"])


def test_a_title_names_one_folder() -> None:
    assert combination_name({"model": "a/b", "seed": "1"}) == "model=a%2Fb, seed=1"
    assert combination_name({"model": "a_b"}) != combination_name({"model": "a/b"})


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_an_interval_lies_around_the_mean_and_narrows_with_more_of_the_same(values: list[float]) -> None:
    mean, half = estimate_mean(values)
    assert mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert half >= 0
    assert estimate_mean(values * 2)[1] <= half + 1e-9


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    for seeds in (2, 3, 5, 10):
        drawn = generator.normal(size=(4000, seeds))
        held = [abs(mean) <= half for mean, half in map(estimate_mean, drawn.tolist())]
        assert np.mean(held) == pytest.approx(0.95, abs=0.015)
    assert math.isnan(estimate_mean([1.0])[1])


def test_runs_that_differ_in_the_seed_alone_are_told_of_together() -> None:
    sweep = Sweep(3)
    for seed, value in (("0", 0.4), ("1", 0.6)):
        sweep.add({"policy": "paper", "seed": seed}, report(0.0, value))
    sweep.add({"policy": "nearest", "seed": "0"}, report(0.0, 0.9))
    curves = sweep.curves()
    assert curves["policy=paper"][1]["ERR"] == pytest.approx((0.5, 12.706 * 0.1), rel=1e-3)
    assert "ERR" not in curves["policy=paper"][0], "nothing has come yet"
    assert "rephrases" not in sweep.columns
    counted = [row[sweep.columns.index("entries")] for row in sweep.rows]
    assert counted == ["2.000 ± 0.000", "2"]
    assert sweep.columns[:3] == ["settings", "ES", "ERR"]
    assert [row[:3] for row in sweep.rows] == [
        ["policy=paper", "0.500 ± 1.271", "0.500 ± 1.271"], ["policy=nearest", "0.900", "0.900"],
    ]  # fmt: skip


def test_exact_shares_stand_beside_measures_that_say_something_else() -> None:
    sweep = Sweep(3)
    for seed, exact in (("1", 0.4), ("2", 0.5)):
        run = report(0.0, 0.9)
        points = [run.points[0], replace(run.points[1], err=MeanScore(0.9, exact))]
        sweep.add({"radius": "1", "seed": seed}, msgspec.structs.replace(run, points=points))
    sweep.add({"radius": "2", "seed": "1"}, report(0.0, 0.9))
    assert sweep.columns[:4] == ["settings", "ES", "ERR", "TRR"]
    assert [row[:3] for row in sweep.rows] == [
        ["radius=1", "0.900 ± 0.000", "0.900 ± 0.000 (0.450 ± 0.635)"], ["radius=2", "0.900", "0.900"],
    ]  # fmt: skip


def test_what_is_drawn_is_a_picture(tmp_path: Path) -> None:
    sweep = Sweep(1)
    sweep.add({"policy": "paper"}, report(0.0, 0.5, 0.7))
    sweep.write(tmp_path, plots=True)
    points = [point(0, 0.1), point(3, 0.2), replace(point(5, math.inf), coming=MeanScore(math.inf, 0.0))]
    draw_run(points, [ServedCounts(2, 3), ServedCounts(1, 0)], "perplexity", "run", tmp_path / "run.png")
    draw_run(points[:1], [], "f1", "empty", tmp_path / "empty.png")
    for name in ("sweep", "run", "empty"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_says_what_of_a_grid_is_missing(tmp_path: Path) -> None:
    sweep = Sweep(2)
    sweep.add({"policy": "paper"}, report(0.0, 0.5))
    sweep.write(tmp_path, plots=False)
    assert (tmp_path / "sweep.md").read_text().endswith(" |\n\n1 of 2 runs are done.\n")
    sweep.add({"policy": "nearest"}, report(0.0, 0.5))
    sweep.write(tmp_path, plots=False)
    assert (tmp_path / "sweep.md").read_text().endswith(" |\n")


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_report(tmp_path) is None
    written = report(0.5, math.inf)
    write_report(written, None, tmp_path, plots=False)
    found = read_report(tmp_path)
    assert found is not None
    assert found.points[1].err == written.points[1].err == MeanScore(math.inf, math.inf)
    assert math.isnan(found.points[0].covered)
    assert found.asked == written.asked
    assert '"value":"inf"' in (tmp_path / METRICS_FILE).read_text().replace(" ", "")


@pytest.mark.parametrize("version", [0, 1, REPORT_VERSION + 1])
def test_a_report_of_other_editors_or_measures_is_none(tmp_path: Path, version: int) -> None:
    asked = msgspec.structs.replace(ASKED, version=version)
    write_report(msgspec.structs.replace(report(0.5), asked=asked), None, tmp_path, plots=False)
    assert read_report(tmp_path) is None
    kept = json.loads((tmp_path / METRICS_FILE).read_text())
    del kept["asked"]["version"], kept["points"]
    (tmp_path / METRICS_FILE).write_text(json.dumps(kept))
    assert read_report(tmp_path) is None, "one from before there were versions"


def test_a_seed_without_a_value_takes_none_from_the_others() -> None:
    assert estimate_mean([math.nan, 0.5, 0.7]) == estimate_mean([0.5, 0.7])
    assert estimate_mean([math.nan, 0.5])[0] == 0.5
    assert math.isnan(estimate_mean([math.nan])[0])


def test_where_nothing_can_be_drawn_that_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    require_matplotlib()
    monkeypatch.setattr(plots, "find_spec", lambda _name: None)
    with pytest.raises(PlotError, match=r"gracestream\[experiments\].*--no-plots"):
        require_matplotlib()
