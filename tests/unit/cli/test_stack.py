"""`up` shows that it works while it loads the model."""

import io

import pytest
from rich.console import Console

from gracestream.pipeline.settings import load_settings
from gracestream.workers import bootstrap
from gracestream.workers.cli import stack
from tests.support.running import wait_until

CHECKING = "checking the model smollm2 and its layer model.layers.3: about a minute on two cores\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_a_spinner_while_the_model_loads(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=200, highlight=False)
    monkeypatch.setattr(stack, "stderr_console", console)
    shown_meanwhile = ""

    def load_slowly(*_: object) -> None:
        nonlocal shown_meanwhile
        if is_terminal:
            wait_until(lambda: "loading the model" in console.file.getvalue())  # type: ignore[attr-defined]
        shown_meanwhile = console.file.getvalue()  # type: ignore[attr-defined]

    monkeypatch.setattr(bootstrap, "load_model", load_slowly)
    stack._check_model(load_settings(model="smollm2", layer="model.layers.3", device="cpu"))
    assert shown_meanwhile.startswith(CHECKING)
    assert ("loading the model" in shown_meanwhile) is is_terminal
    if not is_terminal:
        assert console.file.getvalue() == CHECKING  # type: ignore[attr-defined]
