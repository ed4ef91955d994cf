"""The plot of the report: positives captured against negatives captured, for each method over its thresholds."""

from collections.abc import Sequence
from pathlib import Path

from tests.bench.framework import Row

PANELS = (
    ("zsre paraphrase", "knowedit relation"),
    ("counterfact paraphrase", "counterfact neighbour"),
    ("zsre surface form", "pairs pair"),
)
"""The panels: a positive kind, and a negative kind."""


def curves(rows: Sequence[Row], kind: str) -> dict[str, dict[str, Row]]:
    """The curves of a kind: rows by method and threshold."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        group, _, rest = row.name.partition("/")
        if group == f"curve {kind}":
            method, threshold, _ = rest.split("/")
            found.setdefault(method, {})[threshold] = row
    return found


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the panels with measured kinds. Bars are confidence intervals."""
    panels = [
        (positive_kind, negative_kind)
        for positive_kind, negative_kind in PANELS
        if curves(rows, positive_kind) and curves(rows, negative_kind)
    ]
    if not panels:
        return
    import matplotlib as mpl  # noqa: PLC0415  (only plots need it)
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": "gracestream", "svg.fonttype": "none"}):
        figure = Figure(figsize=(5 * len(panels), 4.5), layout="constrained")
        for panel, (positive_kind, negative_kind) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            negatives = curves(rows, negative_kind)
            for method, curve in curves(rows, positive_kind).items():
                pairs = [
                    (negatives[method][threshold], positive)
                    for threshold, positive in curve.items()
                    if threshold in negatives.get(method, {})
                ]
                panel.errorbar(
                    [negative.value for negative, _ in pairs],
                    [positive.value for _, positive in pairs],
                    xerr=_bars([negative for negative, _ in pairs]),
                    yerr=_bars([positive for _, positive in pairs]),
                    label=method,
                    marker="o",
                    markersize=3,
                    linewidth=1.2,
                    elinewidth=0.5,
                )
            panel.set(
                xlabel=f"captured: {negative_kind}",
                ylabel=f"captured: {positive_kind}",
                xlim=(-0.03, 1.03),
                ylim=(-0.03, 1.03),
            )
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small")
        figure.savefig(path, metadata={"Date": None})


def _bars(rows: Sequence[Row]) -> list[list[float]]:
    """The lengths of the intervals below and above each value."""
    bounds = [row.interval or (row.value, row.value) for row in rows]
    below = [max(0.0, row.value - low) for row, (low, _) in zip(rows, bounds, strict=True)]
    above = [max(0.0, high - row.value) for row, (_, high) in zip(rows, bounds, strict=True)]
    return [below, above]
