"""The pages of committed results: one for each device, and one that leads to them.

They are made of the JSON files beside them and of what each benchmark says of itself. Write them anew with
`python -m tests.bench.page`; no benchmark is imported for that.
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
"""What a page has results of, and the module that says how they were measured."""

HEAD = """\
# Results

Made by `make bench NAME=... ARGS=--commit` (`gpu` by `make gpu ARGS=--commit`) from the files beside it: each number
was measured by the benchmark that it stands under, all numbers of a model in one run, and `make bench NAME=...`
measures it again. In parentheses stands what a number is to be held against: a goal, or the same of another way, as the
benchmark's own words say.

## What they do not show

- A machine that others use too. Ratios and medians of ways that take turns hold elsewhere more nearly than
  seconds do; where a lookup costs little beside a model, a slower memory or a faster core changes that.
- Random weights take as long as trained ones, but their activations are not alike: keys fill all directions, and little
  rules them out. Such models are the worst case of a lookup. Of trained models there are the two of the demo.
- Stored keys beyond some thousand are made: points between real ones. They lie closer together than those of edits do.
- A device that has no page.
- Networks and disks: Kafka and Redis run on the same machine.

## Devices
"""


def write_pages(folder: Path) -> None:
    """Write the page of each device, and the one that leads to them."""
    for name, text in pages(folder).items():
        (folder / name).write_text(text, encoding="utf-8")


def pages(folder: Path) -> dict[str, str]:
    """All committed results of a folder, in Markdown, by the name of the file that they go to."""
    files_by_device: dict[str, list[Path]] = {}
    for name in SECTIONS:
        for path in sorted(folder.glob(f"{name}-*.json")):
            files_by_device.setdefault(path.stem.partition("-")[2], []).append(path)
    links = []
    result = {}
    for slug, files in sorted(files_by_device.items()):
        device = _records(files[0])[0]["machine"]["device"]
        result[f"{slug}.md"] = "\n".join(
            [f"# Results, {device}\n\nSee [what they do not show]({INDEX}).\n", *map(_section, files)]
        )
        links.append(f"- [{device}]({slug}.md): {', '.join(path.stem.partition('-')[0] for path in files)}\n")
    return {INDEX: "\n".join([HEAD, "".join(links)]), **result}


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
    measured_on = f"On {machine_text}; {', '.join(versions)}."
    return (
        "\n\n".join([f"## {name}, {machine['device']}", _docstring(SECTIONS[name]), measured_on, *drawn, *tables])
        + "\n"
    )


def _docstring(module: str) -> str:
    """What a module says of itself, read without importing it: some need more than a GPU's machine may have."""
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
