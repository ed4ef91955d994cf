"""Grids of settings: which runs they make, and what came of these, with intervals where only the seed differs."""

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
"""Of Student's t at 97.5 %, by degrees of freedom from 1; the last serves for more, and gives wider intervals then."""

SAFE_CHARACTERS = " []+:@"
"""Beside letters, digits and `_.-~`, what stands in a folder's name as it is."""

SEED_NAME = "seed"
"""Of a grid's names the one over which intervals are told."""


COST_CURVES: dict[str, Callable[[Measurement], float]] = {
    "edits": lambda point: point.edits,
    "failed": lambda point: point.failed,
    "entries": lambda point: point.entries,
    "edits an entry": lambda point: point.edits_per_entry,
    "seconds an edit": lambda point: point.seconds,
}
"""What edits take."""

COUNT_COLUMNS = ("edits", "failed", "entries")
"""Of what edits take, what is told in whole numbers where there are such."""

EXACT_SUFFIX = ", exact"
"""Ends the name of the exact share beside a measure's, where it says something else."""


class SweepError(UserError):
    """A grid that makes no sense; the text says where."""


def expand_grid(options: Sequence[str], allowed_names: Iterable[str]) -> list[dict[str, str]]:
    """Each combination of `NAME=VALUE,VALUE`; the first name changes slowest.

    Raises:
        SweepError: such a text has no `=` or no values, names what is not known, or the same twice.
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
    """One combination in a few words, which a folder can be called."""
    return ", ".join(f"{name}={quote(value, safe=SAFE_CHARACTERS)}" for name, value in combination.items())


def estimate_mean(values: Sequence[float]) -> Estimate:
    """The mean of the seeds that have a value, and how far its 95 % interval reaches to each side: NaN of one."""
    values = [value for value in values if not math.isnan(value)]
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    quantile = T_QUANTILES[min(len(values) - 2, len(T_QUANTILES) - 1)]
    half = quantile * np.std(values, ddof=1) / math.sqrt(len(values)) if np.isfinite(values).all() else math.nan
    return float(np.mean(values)), float(half)


class Sweep:
    """The runs of a grid that are done, of `num_runs` in all."""

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._reports: dict[str, list[RunReport]] = {}

    def add(self, combination: dict[str, str], report: RunReport) -> None:
        """One run. Those whose combinations differ in the seed alone are told of together."""
        name = combination_name({name: value for name, value in combination.items() if name != SEED_NAME}) or "all"
        self._reports.setdefault(name, []).append(report)

    def curves(self) -> dict[str, dict[int, dict[str, Estimate]]]:
        """Of each combination, by corrections, what plots and table show; without what is NaN."""
        return {
            name: {
                points[0].corrections: _estimate_curves(points)
                for points in zip(*(run.points for run in runs), strict=False)
            }
            for name, runs in self._reports.items()
        }

    @property
    def columns(self) -> list[str]:
        """Of `rows`."""
        told = dict.fromkeys(name for end in self._final_estimates().values() for name in end)
        return ["settings", *(name for name in told if not name.endswith(EXACT_SUFFIX))]

    @property
    def rows(self) -> list[list[str]]:
        """How each combination ended; in parentheses the share that is exact, where that says something else."""
        columns = self.columns[1:]
        return [
            [name, *(_format_cell(end, column) for column in columns)] for name, end in self._final_estimates().items()
        ]

    def write(self, folder: Path, *, plots: bool) -> None:
        """Write `sweep.md` and `sweep.png` over the runs so far into a folder that is there.

        Raises:
            ReportError: it cannot be written to.
        """
        measure = next(iter(self._reports.values()))[0].measure
        done = sum(map(len, self._reports.values()))
        missing = "" if done == self._num_runs else f"\n{done} of {self._num_runs} runs are done.\n"
        with translate_write_errors(folder):
            (folder / "sweep.md").write_text(markdown_table(self.columns, self.rows) + missing, encoding="utf-8")
            if plots:
                draw_sweep(self.curves(), measure, folder / "sweep.png")

    def _final_estimates(self) -> dict[str, dict[str, Estimate]]:
        return {name: line[max(line)] for name, line in self.curves().items()}


def _estimate_curves(measurements: Sequence[Measurement]) -> dict[str, Estimate]:
    found: dict[str, Estimate] = {}
    for name, of in SCORE_CURVES.items():
        qualities = [of(point) for point in measurements]
        found[name] = estimate_mean([quality.value for quality in qualities])
        if any(quality.exact != quality.value for quality in qualities):
            found[name + EXACT_SUFFIX] = estimate_mean([quality.exact for quality in qualities])
    for name, value in (REACH_CURVES | COST_CURVES).items():
        found[name] = estimate_mean([value(point) for point in measurements])
    return {name: told for name, told in found.items() if not math.isnan(told[0])}


def _format_cell(estimates: Mapping[str, Estimate], column: str) -> str:
    """One of a row; empty where there is nothing to tell."""
    if column not in estimates:
        return ""
    if column in COUNT_COLUMNS and math.isnan(estimates[column][1]):
        return f"{estimates[column][0]:.0f}"
    exact = f" ({_format_estimate(estimates[column + EXACT_SUFFIX])})" if column + EXACT_SUFFIX in estimates else ""
    return _format_estimate(estimates[column]) + exact


def _format_estimate(mean_and_half_width: Estimate) -> str:
    mean, half = mean_and_half_width
    return format_number(mean) if math.isnan(half) else f"{format_number(mean)} ± {format_number(half)}"
