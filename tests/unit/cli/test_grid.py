"""The table of many rows: no line is longer than allowed, and no character of a cell is lost."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gracestream.workers.cli.grid import render_table

COLUMNS = ("seq", "inputs", "entries")
WORDS = st.text("ab ü漢", min_size=1, max_size=30)
ROWS = st.lists(st.tuples(st.just(["7"]), st.lists(WORDS, min_size=1, max_size=1), st.lists(WORDS, max_size=3)))


def test_it_shows_columns_and_rows() -> None:
    rows = [[["1"], ["who?"], ["a new", "b removed"]], [["12"], [""], []]]
    assert list(render_table(COLUMNS, rows, 80)) == [
        "┏━━━━━┳━━━━━━━━┳━━━━━━━━━━━┓",
        "┃ seq ┃ inputs ┃ entries   ┃",
        "┡━━━━━╇━━━━━━━━╇━━━━━━━━━━━┩",
        "│ 1   │ who?   │ a new     │",
        "│     │        │ b removed │",
        "│ 12  │        │           │",
        "└─────┴────────┴───────────┘",
    ]


def test_the_widest_column_gives_way_first() -> None:
    rows = [[["1"], ["abcdefghijkl"], ["xy"]]]
    assert list(render_table(("s", "in", "en"), rows, 17))[3:] == [
        "│ 1 │ abcd │ xy │",
        "│   │ efgh │    │",
        "│   │ ijkl │    │",
        "└───┴──────┴────┘",
    ]


@given(ROWS, st.integers(20, 120))
def test_every_line_fits_and_every_character_is_there(rows: list[list[list[str]]], width: int) -> None:
    shown = list(render_table(COLUMNS, rows, width))
    assert len(set(map(cell_len, shown))) == 1
    assert cell_len(shown[0]) <= width
    cells = [line.strip("│").split("│") for line in shown if line.startswith("│")]
    for column in range(len(COLUMNS)):
        given_texts = "".join(text for row in rows for text in row[column])
        assert "".join(row[column] for row in cells).replace(" ", "") == given_texts.replace(" ", "")
