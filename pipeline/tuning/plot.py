"""The plot of trial edits: reach of each combination against its false positives."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gracestream.pipeline.errors import PlotError
from gracestream.pipeline.tuning.trials import TrialResult


def require_plot(path: Path) -> None:
    """Check that a plot can be written to this file; called before the trial edits, which take minutes.

    Raises:
        PlotError: matplotlib is not installed, the folder does not exist, or the suffix is not supported.
    """
    if find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: `pip install 'gracestream[experiments]'`, or leave --plot out")
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise PlotError(f"--plot: {str(path)!r} must end in .svg, .png or .pdf")
    if not path.absolute().parent.is_dir():
        raise PlotError(f"--plot: there is no folder {str(path.absolute().parent)!r}; make it first")


def draw(results: Sequence[TrialResult], chosen: TrialResult | None, max_false_positives: float, path: Path) -> None:
    """Draw one line over the radii for each layer and kind of query; error bars are 95 % intervals."""
    import matplotlib as mpl  # noqa: PLC0415  (an optional dependency)
    from matplotlib.figure import Figure  # noqa: PLC0415

    lines: dict[tuple[str, str], list[TrialResult]] = {}
    for result in results:
        lines.setdefault((result.query, result.layer), []).append(result)
    # A fixed salt and no date make two runs write the same SVG; text stays text.
    with mpl.rc_context({"svg.hashsalt": "gracestream", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        panel = figure.subplots()
        for (query, layer), points in sorted(lines.items()):
            points.sort(key=lambda result: (result.false_positives, result.reach))
            panel.errorbar(
                [result.false_positives for result in points],
                [result.reach for result in points],
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
    """Lengths of the error bars to the left and to the right of each point's false positives."""
    shares = [max(point.others, point.about, key=lambda share: share.value) for point in points]
    low = [max(0.0, share.value - share.interval[0]) for share in shares]
    high = [max(0.0, share.interval[1] - share.value) for share in shares]
    return [low, high]
