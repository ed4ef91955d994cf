"""Rendering long tables as lines of text, in the style of rich.

Rich itself takes one to four milliseconds per row, which would be most of the time of `inspect` on a long history.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.cells import cell_len, chop_cells, set_cell_size

GridRow = Sequence[Sequence[str]]
"""The lines of each cell, which must have printable characters only."""


def render_table(header: Sequence[str], rows: Sequence[GridRow], width: int) -> Iterator[str]:
    """The lines of a table that is at most `width` characters wide.

    Each column has at least one character, so a table of many columns may be wider. Text that is too long for its
    column continues on the next line of its cell; the widest columns shrink first.
    """
    widths = [cell_len(name) for name in header]
    for row in rows:
        for column, lines in enumerate(row):
            widths[column] = max(widths[column], *map(cell_len, lines), 1)
    # Each column has a border and a space before it and a space after it, and the table ends with a border.
    widths = _fit_widths(widths, width - 3 * len(header) - 1)
    yield _border_line("┏", "━", "┳", "┓", widths)
    yield from _row_lines("┃", [[name] for name in header], widths)
    yield _border_line("┡", "━", "╇", "┩", widths)
    for row in rows:
        yield from _row_lines("│", row, widths)
    yield _border_line("└", "─", "┴", "┘", widths)


def _fit_widths(widths: Sequence[int], max_total: int) -> list[int]:
    """The widths, cut at the largest common bound with which their sum is at most `max_total`, if there is one.

    Columns narrower than an equal share of the remaining width keep their width, from the narrowest on.
    """
    remaining, bound = max_total, 1
    ascending = sorted(widths)
    for index, narrow in enumerate(ascending):
        bound = max(1, remaining // (len(ascending) - index))
        if narrow > bound:
            break
        remaining -= narrow
    else:
        return list(widths)
    return [min(width, bound) for width in widths]


def _border_line(start: str, line: str, junction: str, end: str, widths: Sequence[int]) -> str:
    return start + junction.join(line * (width + 2) for width in widths) + end


def _row_lines(border: str, row: GridRow, widths: Sequence[int]) -> Iterator[str]:
    """The lines of one row, with borders."""
    cells = [
        [part for line in lines for part in _wrap_line(line, width)] for lines, width in zip(row, widths, strict=True)
    ]
    for line_parts in zip_longest(*cells, fillvalue=""):
        padded = (set_cell_size(part, width) for part, width in zip(line_parts, widths, strict=True))
        yield f"{border} " + f" {border} ".join(padded) + f" {border}"


def _wrap_line(line: str, width: int) -> list[str]:
    return [line] if cell_len(line) <= width else chop_cells(line, width)
