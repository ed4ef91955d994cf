"""Rows as tables on the terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tests.bench.framework import Row, format_value, group_rows


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """Print one table per group of rows (the first part of the name), with one line per setting."""
    for group, group_of_rows in group_rows(rows).items():
        metrics = list(dict.fromkeys(row.metric for row in group_of_rows))
        table = Table(title=group, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("setting", overflow="fold")
        for metric in metrics:
            table.add_column(metric, justify="right", no_wrap=True)
        for setting in dict.fromkeys(row.setting for row in group_of_rows):
            values = {row.metric: format_value(row) for row in group_of_rows if row.setting == setting}
            table.add_row(setting.partition("/")[2] or setting, *(values.get(metric, "") for metric in metrics))
        console.print(table)
