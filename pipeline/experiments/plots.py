"""The paper's figures for an experiment: measures, entries and reach over edits, and rephrases by entry."""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gracestream.pipeline.errors import PlotError
from gracestream.pipeline.experiments.editors.serving import ServedCounts
from gracestream.pipeline.experiments.stream import MeanScore, Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORE_CURVES: dict[str, Callable[[Measurement], MeanScore]] = {
    "ES": lambda point: point.es,
    "ERR": lambda point: point.err,
    "TRR": lambda point: point.trr,
    "ARR": lambda point: point.arr,
    "rephrases": lambda point: point.rephrases,
    "coming": lambda point: point.coming,
}
"""Curves of the task's measure, by name."""

REACH_CURVES: dict[str, Callable[[Measurement], float]] = {
    "rephrases covered": lambda point: point.covered,
    "agreement": lambda point: point.agreement,
    "unrelated captured": lambda point: point.captured,
}
"""Curves of shares of texts, by name."""

Estimate = tuple[float, float]
"""A mean, and half the width of its confidence interval."""


def require_matplotlib() -> None:
    """Check that plots can be drawn; called before hours of work, so that a failure shows early.

    Raises:
        PlotError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise PlotError("plots need matplotlib: `pip install 'gracestream[experiments]'`, or --no-plots")


def draw_run(
    measurements: Sequence[Measurement], served_counts: Sequence[ServedCounts], measure: str, title: str, path: Path
) -> None:
    """Draw one run in four panels: measures, entries, shares of reached texts, and rephrases served by each entry."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an optional dependency)

    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(title)
    ((scores, counts), (reach, served)) = figure.subplots(2, 2)
    _draw_curves(
        scores, measurements, {name: _score_value(select_score) for name, select_score in SCORE_CURVES.items()}
    )
    if not math.isnan(measurements[0].trr.value):
        scores.axhline(measurements[0].trr.value, color="gray", linestyle=":", label="TRR, unedited")
    _format_panel(scores, measure, measure=measure)
    _draw_curves(counts, measurements, {"edits": lambda point: point.edits, "entries": lambda point: point.entries})
    _format_panel(counts, "count")
    _draw_curves(reach, measurements, REACH_CURVES)
    _format_panel(reach, "share", measure="share")
    if any(entry.rephrases for entry in served_counts):
        served.bar(range(1, len(served_counts) + 1), [entry.rephrases for entry in served_counts], width=0.9)
        served.set(xlabel="entry", ylabel="rephrases served")
        served.locator_params(integer=True)
    else:
        served.axis("off")
    figure.savefig(path, dpi=120)


def _score_value(select_score: Callable[[Measurement], MeanScore]) -> Callable[[Measurement], float]:
    return lambda point: select_score(point).value


def _draw_curves(
    panel: "Axes", measurements: Sequence[Measurement], curves: Mapping[str, Callable[[Measurement], float]]
) -> None:
    """Draw each curve thinner than the one before, so that none hides another; skip curves that are NaN throughout."""
    corrections = [point.corrections for point in measurements]
    for order, (name, value) in enumerate(curves.items()):
        values = [value(point) for point in measurements]
        if not all(map(math.isnan, values)):
            panel.plot(corrections, values, label=name, marker="o", linewidth=6 - order, markersize=10 - 1.5 * order)
    _set_corrections_axis(panel, corrections[-1])


def _set_corrections_axis(panel: "Axes", corrections: int) -> None:
    """Give the panel the range of all corrections, even if its curves end earlier."""
    margin = 0.04 * max(corrections, 1)
    panel.set_xlim(-margin, corrections + margin)


def draw_sweep(runs: Mapping[str, Mapping[int, Mapping[str, Estimate]]], measure: str, path: Path) -> None:
    """Draw several runs next to each other, one panel per curve.

    `runs` maps a run's name to its estimates, by number of corrections and then by the curve's name.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    available = {name for line in runs.values() for point in line.values() for name in point}
    names = [name for name in (*SCORE_CURVES, *REACH_CURVES, "entries") if name in available]
    figure = Figure(figsize=(5 * len(names), 5), layout="constrained")
    (panels,) = figure.subplots(1, len(names), squeeze=False)
    for panel, name in zip(panels, names, strict=True):
        for label, line in runs.items():
            corrections = [count for count, point in line.items() if name in point]
            estimates = [line[count][name] for count in corrections]
            panel.plot(corrections, [mean for mean, _ in estimates], label=label, marker=".")
            low, high = [mean - half for mean, half in estimates], [mean + half for mean, half in estimates]
            panel.fill_between(corrections, low, high, alpha=0.2)
        _set_corrections_axis(panel, max(max(line) for line in runs.values()))
        is_score = name in SCORE_CURVES
        kind = measure if is_score else "share" if name in REACH_CURVES else "count"
        _format_panel(panel, f"{name} ({measure})" if is_score else name, measure=kind)
    figure.savefig(path, dpi=120)


def _format_panel(panel: "Axes", ylabel: str, *, measure: str = "count") -> None:
    """Set a panel's axes: shares from 0 to 1, perplexities on a logarithmic scale, counts with integer ticks."""
    panel.set(xlabel="corrections", ylabel=ylabel)
    panel.locator_params(axis="x", integer=True)
    if measure == "perplexity":
        panel.set_yscale("log")
    elif measure == "count":
        panel.locator_params(axis="y", integer=True)
    else:
        panel.set_ylim(-0.03, 1.03)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize="small")
    panel.grid(alpha=0.3)
