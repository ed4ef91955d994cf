"""The figures of an experiment, as in the paper: measures, entries and reach over edits, and rephrases by entry."""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gracestream.pipeline.errors import UserError
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
"""What is measured as answers are."""

REACH_CURVES: dict[str, Callable[[Measurement], float]] = {
    "rephrases covered": lambda point: point.covered,
    "agreement": lambda point: point.agreement,
    "unrelated captured": lambda point: point.captured,
}
"""Shares of texts."""

Estimate = tuple[float, float]
"""A mean, and how far its interval reaches to each side."""


class PlotError(UserError):
    """Nothing can be drawn here; the text says what to install."""


def require_matplotlib() -> None:
    """Whether anything can be drawn: before hours of work and not after them.

    Raises:
        PlotError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise PlotError("plots need matplotlib: `pip install 'gracestream[experiments]'`, or --no-plots")


def draw_run(
    measurements: Sequence[Measurement], served_counts: Sequence[ServedCounts], measure: str, title: str, path: Path
) -> None:
    """One run: what is measured, what is stored, what is reached, and how many rephrases each entry serves."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (only who draws needs it)

    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(title)
    ((top, stored), (reach, served)) = figure.subplots(2, 2)
    _draw_curves(top, measurements, {name: _score_value(of) for name, of in SCORE_CURVES.items()})
    if not math.isnan(measurements[0].trr.value):
        top.axhline(measurements[0].trr.value, color="gray", linestyle=":", label="TRR, unedited")
    _format_panel(top, measure, measure=measure)
    _draw_curves(stored, measurements, {"edits": lambda point: point.edits, "entries": lambda point: point.entries})
    _format_panel(stored, "count")
    _draw_curves(reach, measurements, REACH_CURVES)
    _format_panel(reach, "share", measure="share")
    if any(use.rephrases for use in served_counts):
        served.bar(range(1, len(served_counts) + 1), [use.rephrases for use in served_counts], width=0.9)
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
    """Each of what is told, thinner one after the other, so that none hides another; but for what is nothing."""
    corrections = [point.corrections for point in measurements]
    for place, (name, value) in enumerate(curves.items()):
        values = [value(point) for point in measurements]
        if not all(map(math.isnan, values)):
            panel.plot(corrections, values, label=name, marker="o", linewidth=6 - place, markersize=10 - 1.5 * place)
    _set_corrections_axis(panel, corrections[-1])


def _set_corrections_axis(panel: "Axes", corrections: int) -> None:
    """All panels tell of the same corrections, whatever they hold of them."""
    margin = 0.04 * max(corrections, 1)
    panel.set_xlim(-margin, corrections + margin)


def draw_sweep(runs: Mapping[str, Mapping[int, Mapping[str, Estimate]]], measure: str, path: Path) -> None:
    """Several runs beside each other: of each, by its name and corrections, estimates by the names of what is drawn."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    told = {name for line in runs.values() for told in line.values() for name in told}
    names = [name for name in (*SCORE_CURVES, *REACH_CURVES, "entries") if name in told]
    figure = Figure(figsize=(5 * len(names), 5), layout="constrained")
    (panels,) = figure.subplots(1, len(names), squeeze=False)
    for panel, name in zip(panels, names, strict=True):
        for label, line in runs.items():
            corrections = [count for count, told in line.items() if name in told]
            estimates = [line[count][name] for count in corrections]
            panel.plot(corrections, [mean for mean, _ in estimates], label=label, marker=".")
            low, high = [mean - half for mean, half in estimates], [mean + half for mean, half in estimates]
            panel.fill_between(corrections, low, high, alpha=0.2)
        _set_corrections_axis(panel, max(max(line) for line in runs.values()))
        of_answers = name in SCORE_CURVES
        kind = measure if of_answers else "share" if name in REACH_CURVES else "count"
        _format_panel(panel, f"{name} ({measure})" if of_answers else name, measure=kind)
    figure.savefig(path, dpi=120)


def _format_panel(panel: "Axes", ylabel: str, *, measure: str = "count") -> None:
    """Shares from 0 to 1, perplexities on a logarithmic scale, and what is counted in whole numbers."""
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
