"""The page of committed results, made of the JSON files beside it and of what each benchmark says of itself."""

import importlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.framework import BENCHES, Row, groups, shown

PAGE = "README.md"

HEAD = """\
# Results

Made by `make bench NAME=... ARGS=--commit` from the files beside it: each number was measured by the benchmark that it
stands under, all numbers of a model in one run, and `make bench NAME=...` measures it again. In parentheses stands what
a number is to be held against: a goal, or the same of another way, as the benchmark's own words say.

## What they do not show

- Two cores of a machine that others use too. Ratios and medians of ways that take turns hold elsewhere more nearly than
  seconds do; where a lookup costs little beside a model, a slower memory or a faster core changes that.
- Random weights take as long as trained ones, but their activations are not alike: keys fill all directions, and little
  rules them out. Such models are the worst case of a lookup. Of trained models there are the two of the demo.
- Stored keys beyond some thousand are made: points between real ones. They lie closer together than those of edits do.
- A GPU, unless a section names one.
- Networks and disks: Kafka and Redis run on the same machine.
"""


def page(folder: Path) -> str:
    """All committed results of a folder, in Markdown."""
    files = [path for name in BENCHES for path in sorted(folder.glob(f"{name}-*.json"))]
    return "\n".join([HEAD, *(_section(path) for path in files)])


def _section(path: Path) -> str:
    name = path.stem.split("-")[0]
    records: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    said = inspect.cleandoc(importlib.import_module(BENCHES[name]).__doc__ or "")
    machine = records[0]["machine"]
    versions = ", ".join(f"{part} {machine[part]}" for part in ("python", "torch", "transformers", "faiss"))
    where = f"{machine['cores']} cores of {machine['cpu']}, {machine['threads']} thread, {machine['ram_gib']} GiB"
    rows = [Row(record["name"], record["value"], record["unit"], record["baseline"]) for record in records]
    tables = [f"### {group}\n\n{_table(of_group)}" for group, of_group in groups(rows).items()]
    return "\n\n".join([f"## {name}, {machine['device']}", said, f"On {where}; {versions}.", *tables]) + "\n"


def _table(rows: Sequence[Row]) -> str:
    metrics = list(dict.fromkeys(row.metric for row in rows))
    lines = [["setting", *metrics], ["---", *("---:" for _ in metrics)]]
    for setting in dict.fromkeys(row.setting for row in rows):
        cells = {row.metric: _cell(row) for row in rows if row.setting == setting}
        lines.append([setting.partition("/")[2] or setting, *(cells.get(metric, "") for metric in metrics)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Row) -> str:
    unit = "" if row.unit in ("share", "count", "x", "relative") else f" {row.unit}"
    return f"{shown(row)}{unit}" + ("" if row.baseline is None else f" ({shown(Row('', row.baseline, row.unit))})")
