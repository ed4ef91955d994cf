"""The plot of trial edits: what each candidate reaches against its false positives."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.tuning.trials import TrialResult


class PlotError(UserError):
    """Nothing can be drawn here; the text says what to do."""


def require_plot(path: Path) -> None:
    """Check that a plot can be drawn into this file, before minutes of work.

    Raises:
        PlotError: matplotlib is not installed, or the file cannot be written or has another ending.
    """
    if find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: `pip install 'gracestream[experiments]'`, or leave --plot out")
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise PlotError(f"--plot: {str(path)!r} must end in .svg, .png or .pdf")
    if not path.absolute().parent.is_dir():
        raise PlotError(f"--plot: there is no folder {str(path.absolute().parent)!r}; make it first")


def draw(results: Sequence[TrialResult], chosen: TrialResult | None, max_false_positives: float, path: Path) -> None:
    """Draw one line for each layer and kind of query over its radii; bars are the intervals of false positives."""
    import matplotlib as mpl  # noqa: PLC0415  (only who draws needs it)
    from matplotlib.figure import Figure  # noqa: PLC0415

    lines: dict[tuple[str, str], list[TrialResult]] = {}
    for one in results:
        lines.setdefault((one.query, one.layer), []).append(one)
    with mpl.rc_context({"svg.hashsalt": "gracestream", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        panel = figure.subplots()
        for (query, layer), points in sorted(lines.items()):
            points.sort(key=lambda one: (one.false_positives, one.reach))
            panel.errorbar(
                [one.false_positives for one in points],
                [one.reach for one in points],
                xerr=_error_bars(points),
                label=f"{query}, {layer}",
                marker="o",
                markersize=4,
                linewidth=1.2,
                elinewidth=0.4,
            )
        if chosen is not None:
            panel.plot(chosen.false_positives, chosen.reach, "k*", markersize=14, label="chosen")
        panel.axvline(max_false_positives, color="gray", linestyle=":", label=f"allowed: {max_false_positives:g}")
        panel.set(xlabel="false positives", ylabel="reach", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
        panel.grid(alpha=0.3)
        figure.legend(*panel.get_legend_handles_labels(), fontsize="small", loc="outside right upper")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _error_bars(points: Sequence[TrialResult]) -> list[list[float]]:
    """How far the intervals of false positives reach below and above."""
    worst = [max(one.others, one.about, key=lambda share: share.value) for one in points]
    low = [max(0.0, share.value - share.interval[0]) for share in worst]
    high = [max(0.0, share.interval[1] - share.value) for share in worst]
    return [low, high]
