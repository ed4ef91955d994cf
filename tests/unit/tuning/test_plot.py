"""The plot of trial edits."""

from pathlib import Path

import pytest

from gracestream.pipeline.errors import PlotError
from gracestream.pipeline.tuning import plot
from gracestream.pipeline.tuning.plot import draw, require_plot
from gracestream.pipeline.tuning.trials import Share
from tests.unit.tuning.test_advice import GOOD, like


def test_each_layer_and_query_has_a_line_and_the_same_trials_have_the_same_file(tmp_path: Path) -> None:
    tried = [GOOD, like(query="mean"), like(radius="2", others=Share(20, 200)), like(forms=Share(0, 72), layer="b.2")]
    for name in ("one.svg", "two.svg"):
        draw(tried, GOOD, 0.05, tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text()
    assert all(text in drawn for text in ("last, layers.1", "mean, layers.1", "last, b.2", "chosen", "allowed: 0.05"))
    assert drawn == (tmp_path / "two.svg").read_text()
    draw(tried, None, 0.05, tmp_path / "three.svg")
    assert "chosen" not in (tmp_path / "three.svg").read_text()


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_plot(tmp_path / "plot.svg")
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    with pytest.raises(PlotError, match=r"pip install 'gracestream\[experiments\]'"):
        require_plot(tmp_path / "plot.svg")
