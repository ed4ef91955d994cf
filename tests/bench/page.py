"""The pages of committed results: one per device, and an index.

They are generated from the JSON files beside them and from the docstring of each benchmark. `python -m
tests.bench.page` writes them. It imports no benchmark.
"""

import ast
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.framework import BENCHMARKS, COMMITTED, Row, format_value, group_rows, to_row
from tests.support.repository import ROOT

INDEX = "README.md"

SECTIONS = {"gpu": "tests.gpu", **BENCHMARKS}
"""The sections of a page, and the module with the description of each."""

INTRODUCTION = """\
# Results

These pages are generated from the JSON files beside them. `make bench NAME=... ARGS=--commit` measures a benchmark and
writes its file and the pages. `make gpu ARGS=--commit` does so for the section `gpu`. Each section begins with the
benchmark's own description: what it measures, how, and in which units. All numbers of one model come from one run.

A number in parentheses is the baseline of the number before it: a goal, a lower bound (floor), or the same metric of
another method. The description of the benchmark says which. Brackets hold a 95 % confidence interval.

## Limits

- Other work ran on the same machine. Ratios and medians of methods that take turns carry over to other machines better
  than seconds do. Where a lookup is cheap beside the model, slower memory or a faster core changes its ratio.
- Models with random weights take as long as trained ones, but their activations differ: keys spread over all
  directions, so the lookup can exclude few of them. They are its worst case. The demo's two models have trained
  weights.
- Beyond some thousand keys, stored keys are synthetic: points between real keys. They lie closer together than the keys
  of edits do.
- Only devices with a page were measured.
- Networks and disks were not measured: Kafka and Redis run on the same machine.

## Devices
"""


def write_pages(folder: Path) -> None:
    """Write the page of each device and the index."""
    for name, text in pages(folder).items():
        (folder / name).write_text(text, encoding="utf-8")


def pages(folder: Path) -> dict[str, str]:
    """The pages of all results in a folder: Markdown text by file name."""
    files_by_device: dict[str, list[Path]] = {}
    for name in SECTIONS:
        for path in sorted(folder.glob(f"{name}-*.json")):
            files_by_device.setdefault(path.stem.partition("-")[2], []).append(path)
    links = []
    result = {}
    for slug, files in sorted(files_by_device.items()):
        device = _records(files[0])[0]["machine"]["device"]
        result[f"{slug}.md"] = "\n".join(
            [f"# Results, {device}\n\n[The index]({INDEX}) lists the limits of these results.\n", *map(_section, files)]
        )
        links.append(f"- [{device}]({slug}.md): {', '.join(path.stem.partition('-')[0] for path in files)}\n")
    return {INDEX: "\n".join([INTRODUCTION, "".join(links)]), **result}


def _records(path: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return records


def _section(path: Path) -> str:
    name = path.stem.partition("-")[0]
    records = _records(path)
    machine = records[0]["machine"]
    versions = [f"{part} {machine[part]}" for part in ("python", "torch", "transformers", "faiss")]
    if "driver" in machine:
        versions = [f"driver {machine['driver']}", f"CUDA {machine['cuda']}", *versions]
    machine_text = (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['threads']} thread, {machine['ram_gib']} GiB"
    )
    rows = list(map(to_row, records))
    plot = path.with_suffix(".svg")
    drawn = [f"![{name}]({plot.name})"] if plot.exists() else []
    tables = [f"### {group}\n\n{_table(group_of_rows)}" for group, group_of_rows in group_rows(rows).items()]
    measured_on = f"Machine: {machine_text}; {', '.join(versions)}."
    return (
        "\n\n".join([f"## {name}, {machine['device']}", _docstring(SECTIONS[name]), measured_on, *drawn, *tables])
        + "\n"
    )


def _docstring(module: str) -> str:
    """The docstring of a module, read without an import: a machine with a GPU may lack packages that it imports."""
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return inspect.cleandoc(ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "")


def _table(rows: Sequence[Row]) -> str:
    metrics = list(dict.fromkeys(row.metric for row in rows))
    lines = [["setting", *metrics], ["---", *("---:" for _ in metrics)]]
    for setting in dict.fromkeys(row.setting for row in rows):
        cells = {row.metric: _cell(row) for row in rows if row.setting == setting}
        lines.append([setting.partition("/")[2] or setting, *(cells.get(metric, "") for metric in metrics)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Row) -> str:
    unit = "" if row.unit in ("share", "count", "x", "relative") else f" {row.unit}"
    interval = "" if row.interval is None else " [{}]".format(", ".join(f"{bound:.2f}" for bound in row.interval))
    return f"{format_value(row)}{unit}{interval}" + (
        "" if row.baseline is None else f" ({format_value(Row('', row.baseline, row.unit))})"
    )


if __name__ == "__main__":
    write_pages(COMMITTED)
