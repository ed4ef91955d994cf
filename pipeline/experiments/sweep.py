"""Grids of settings: the runs of a grid, and tables and plots of their results.

Runs that differ in the seed alone are combined: their results become means with 95 % confidence intervals.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from urllib.parse import quote

import numpy as np

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.experiments.plots import REACH_CURVES, SCORE_CURVES, Estimate, draw_sweep
from gracestream.pipeline.experiments.report import RunReport, format_number, markdown_table, translate_write_errors
from gracestream.pipeline.experiments.stream import Measurement

T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t, for 1, 2, ... degrees of freedom.

The last one also serves for more degrees of freedom. It is larger than their quantiles, so the intervals are wider than
needed, never narrower.
"""

SAFE_CHARACTERS = " []+:@"
"""Characters that a folder's name keeps unescaped, besides letters, digits and `_.-~`."""

SEED_NAME = "seed"
"""The name in a grid over which means and intervals are computed."""

COST_CURVES: dict[str, Callable[[Measurement], float]] = {
    "edits": lambda point: point.edits,
    "failed": lambda point: point.failed,
    "entries": lambda point: point.entries,
    "edits an entry": lambda point: point.edits_per_entry,
    "seconds an edit": lambda point: point.seconds,
}
"""Numbers and costs of edits, by name."""

COUNT_COLUMNS = ("edits", "failed", "entries")
"""Columns that show an integer when they are not a mean over seeds."""

EXACT_SUFFIX = ", exact"
"""Suffix of the name of a measure's exact share, which is listed only if it differs from the measure."""


class SweepError(UserError):
    """A grid is malformed; the message names the option."""


def expand_grid(options: Sequence[str], allowed_names: Iterable[str]) -> list[dict[str, str]]:
    """All combinations of the options `NAME=VALUE,VALUE`; the first name varies slowest.

    Raises:
        SweepError: an option has no values, an unknown name, or a repeated value.
    """
    allowed_names = sorted(allowed_names)
    axes: dict[str, list[str]] = {}
    for option in options:
        name, _, values = (part.strip() for part in option.partition("="))
        if name not in allowed_names:
            raise SweepError(f"--sweep {option!r}: {name!r} cannot be swept, only {', '.join(allowed_names)}")
        axes[name] = [*axes.get(name, []), *(value.strip() for value in values.split(",") if value.strip())]
        if len(set(axes[name])) < len(axes[name]) or not axes[name]:
            raise SweepError(f"--sweep {option!r}: it takes one or more values of {name}, each once")
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def combination_name(combination: dict[str, str]) -> str:
    """The combination as a text that can name a folder."""
    return ", ".join(f"{name}={quote(value, safe=SAFE_CHARACTERS)}" for name, value in combination.items())


def estimate_mean(values: Sequence[float]) -> Estimate:
    """The mean of the values that are not NaN, and half the width of its 95 % interval.

    The half width is NaN for fewer than two values, or if a value is infinite.
    """
    values = [value for value in values if not math.isnan(value)]
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    quantile = T_QUANTILES[min(len(values) - 2, len(T_QUANTILES) - 1)]
    half_width = quantile * np.std(values, ddof=1) / math.sqrt(len(values)) if np.isfinite(values).all() else math.nan
    return float(np.mean(values)), float(half_width)


class Sweep:
    """The finished runs of a grid of `num_runs` runs."""

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._reports: dict[str, list[RunReport]] = {}

    def add(self, combination: dict[str, str], report: RunReport) -> None:
        """Add a finished run; runs whose combinations differ in the seed alone are combined."""
        name = combination_name({name: value for name, value in combination.items() if name != SEED_NAME}) or "all"
        self._reports.setdefault(name, []).append(report)

    def curves(self) -> dict[str, dict[int, dict[str, Estimate]]]:
        """The estimates by combination, number of corrections, and name; NaN estimates are left out."""
        return {
            name: {
                # Runs of other seeds may have fewer corrections: only their common measurements are combined.
                points[0].corrections: _estimate_curves(points)
                for points in zip(*(run.points for run in runs), strict=False)
            }
            for name, runs in self._reports.items()
        }

    @property
    def columns(self) -> list[str]:
        """The columns of `rows`."""
        names = dict.fromkeys(name for estimates in self._final_estimates().values() for name in estimates)
        return ["settings", *(name for name in names if not name.endswith(EXACT_SUFFIX))]

    @property
    def rows(self) -> list[list[str]]:
        """The final estimates of each combination; an exact share that differs follows in parentheses."""
        columns = self.columns[1:]
        return [
            [name, *(_format_cell(estimates, column) for column in columns)]
            for name, estimates in self._final_estimates().items()
        ]

    def write(self, folder: Path, *, plots: bool) -> None:
        """Write `sweep.md` and `sweep.png` of the finished runs into an existing folder; there must be a run.

        Raises:
            ReportError: the folder cannot be written to.
        """
        measure = next(iter(self._reports.values()))[0].measure
        run_count = sum(map(len, self._reports.values()))
        note = "" if run_count == self._num_runs else f"\n{run_count} of {self._num_runs} runs are done.\n"
        with translate_write_errors(folder):
            (folder / "sweep.md").write_text(markdown_table(self.columns, self.rows) + note, encoding="utf-8")
            if plots:
                draw_sweep(self.curves(), measure, folder / "sweep.png")

    def _final_estimates(self) -> dict[str, dict[str, Estimate]]:
        return {name: curve[max(curve)] for name, curve in self.curves().items()}


def _estimate_curves(measurements: Sequence[Measurement]) -> dict[str, Estimate]:
    estimates: dict[str, Estimate] = {}
    for name, select_score in SCORE_CURVES.items():
        scores = [select_score(point) for point in measurements]
        estimates[name] = estimate_mean([score.value for score in scores])
        if any(score.exact != score.value for score in scores):
            estimates[name + EXACT_SUFFIX] = estimate_mean([score.exact for score in scores])
    for name, value in (REACH_CURVES | COST_CURVES).items():
        estimates[name] = estimate_mean([value(point) for point in measurements])
    return {name: estimate for name, estimate in estimates.items() if not math.isnan(estimate[0])}


def _format_cell(estimates: Mapping[str, Estimate], column: str) -> str:
    """A cell of the table; empty if there is no estimate."""
    if column not in estimates:
        return ""
    if column in COUNT_COLUMNS and math.isnan(estimates[column][1]):
        return f"{estimates[column][0]:.0f}"
    exact = f" ({_format_estimate(estimates[column + EXACT_SUFFIX])})" if column + EXACT_SUFFIX in estimates else ""
    return _format_estimate(estimates[column]) + exact


def _format_estimate(mean_and_half_width: Estimate) -> str:
    mean, half_width = mean_and_half_width
    return format_number(mean) if math.isnan(half_width) else f"{format_number(mean)} ± {format_number(half_width)}"
