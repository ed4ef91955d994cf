"""Tables and notes of the command line: as wide as a terminal, and as long as they are elsewhere."""

import sys

import pytest
from rich.table import Column, Table

from gracestream.workers.cli.common import pluralize, print_fields, print_table, stderr_console

WIDE = "w" * 300


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_is_broken_at_a_terminal_alone(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    table = Table(Column("id", overflow="fold"), "what")
    table.add_row(WIDE, "new")
    print_table(table)
    shown = capsys.readouterr().out
    print_fields({"id": WIDE}, as_json=False)
    out = capsys.readouterr().out
    for printed in (shown, out):
        assert (WIDE in printed) is not terminal
        assert printed.count("w") >= 300, "and nothing of it is left out"


def test_a_note_is_one_line_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    note = "waiting for Kafka at [::1]:9092 [bold]" + 40 * " and so on"
    stderr_console.print(note)
    assert capsys.readouterr().err == note + "\n"


def test_one_is_not_many() -> None:
    assert [pluralize(number, "entry", "entries") for number in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
