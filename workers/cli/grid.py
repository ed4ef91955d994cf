"""A table of many rows as lines of text.

Rich takes one to four milliseconds for each row of such a table, most of the time of `inspect` on a long history.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.cells import cell_len, chop_cells, set_cell_size

GridRow = Sequence[Sequence[str]]
"""The lines of each cell; every character of them prints."""


def render_table(header: Sequence[str], rows: Sequence[GridRow], width: int) -> Iterator[str]:
    """The lines of a table of at most `width` characters, where each column can have one at least.

    What does not fit into its column goes on in the next line of its cell; the widest columns give way first.
    """
    widths = [cell_len(name) for name in header]
    for row in rows:
        for column, lines in enumerate(row):
            widths[column] = max(widths[column], *map(cell_len, lines), 1)
    widths = _fit_widths(widths, width - 3 * len(header) - 1)
    yield _border_line("┏", "━", "┳", "┓", widths)
    yield from _row_lines("┃", [[name] for name in header], widths)
    yield _border_line("┡", "━", "╇", "┩", widths)
    for row in rows:
        yield from _row_lines("│", row, widths)
    yield _border_line("└", "─", "┴", "┘", widths)


def _fit_widths(widths: Sequence[int], max_total: int) -> list[int]:
    """The widths, the largest ones reduced to a common bound, so that their sum is at most `max_total` if possible."""
    left, bound = max_total, 1
    ascending = sorted(widths)
    for place, narrow in enumerate(ascending):
        bound = max(1, left // (len(ascending) - place))
        if narrow > bound:
            break
        left -= narrow
    else:
        return list(widths)
    return [min(one, bound) for one in widths]


def _border_line(start: str, line: str, junction: str, end: str, widths: Sequence[int]) -> str:
    return start + junction.join(line * (one + 2) for one in widths) + end


def _row_lines(border: str, row: GridRow, widths: Sequence[int]) -> Iterator[str]:
    """The lines of one row."""
    cells = [[part for line in lines for part in _wrap_line(line, one)] for lines, one in zip(row, widths, strict=True)]
    for parts in zip_longest(*cells, fillvalue=""):
        padded = (set_cell_size(part, one) for part, one in zip(parts, widths, strict=True))
        yield f"{border} " + f" {border} ".join(padded) + f" {border}"


def _wrap_line(line: str, width: int) -> list[str]:
    return [line] if cell_len(line) <= width else chop_cells(line, width)
