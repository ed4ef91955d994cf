"""The frame of all benchmarks: options, rows, the description of the machine, and the file of results.

A benchmark is a function from `Options` to rows, registered in `BENCHMARKS`. A row is one measured number. Its name is
a path with the metric last, as in `zsre/nearest/exact`. Rows that differ only in the metric belong to one setting, and
form one line of a table. This module needs only the packages of the engine.
"""

import importlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gracestream.pipeline.errors import UserError
from tests.bench.device import gpu_facts, version

COMMITTED = Path(__file__).parent / "results"
"""The folder that `--commit` writes to. Other results go to `results/` in the root, which git ignores."""

BENCHMARKS = {
    "quality": "tests.bench.quality",
    "scope": "tests.bench.scope",
    "stream": "tests.bench.stream",
    "backpressure": "tests.bench.backpressure",
    "replay": "tests.bench.replay",
    "start": "tests.bench.start",
    "lag": "tests.bench.lag",
    "memory": "tests.bench.memory",
    "serving": "tests.bench.serving",
    "console": "tests.bench.console",
    "engines": "tests.bench.engines",
    "throughput": "tests.bench.throughput",
    "undo": "tests.bench.undo",
    "overhead": "tests.bench.overhead",
    "edit": "tests.bench.edit",
    "keyspaces": "tests.bench.keyspaces",
}
"""The module of each benchmark. Its function `run` takes `Options` and yields rows."""

Machine = dict[str, str | int]


class BenchError(UserError):
    """A benchmark cannot run. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run.

    Attributes:
        quick: Measure fewer cases.
        only: The one model or stream to measure; empty for all.
        development: Use the rows on which settings may be chosen, if the benchmark separates them.
        device: The device of the model: `cpu` or `cuda`.
        report: Called with each line of progress.
    """

    quick: bool = False
    only: str = ""
    development: bool = False
    device: str = "cpu"
    report: Callable[[str], None] = field(default=lambda _line: None)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number.

    Attributes:
        name: A path that ends in the metric.
        value: The number.
        unit: Its unit, for example `s`, `share` or `count`.
        baseline: The number to compare it with: a goal, a floor, or the same metric of another method.
        interval: Its 95 % confidence interval, if the benchmark computes one.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def setting(self) -> str:
        """The name without the metric."""
        return self.name.rpartition("/")[0]

    @property
    def metric(self) -> str:
        """The last part of the name."""
        return self.name.rpartition("/")[2]


def load_plot(name: str) -> Callable[[Sequence[Row], Path], None] | None:
    """The function that plots the rows of a benchmark into a file, or None if the benchmark has no plot."""
    found: Callable[[Sequence[Row], Path], None] | None = getattr(
        importlib.import_module(BENCHMARKS[name]), "draw", None
    )
    return found


def load_benchmark(name: str) -> Callable[[Options], Iterator[Row]]:
    """The benchmark with this name.

    Raises:
        BenchError: No benchmark has this name.
    """
    if name not in BENCHMARKS:
        raise BenchError(f"no benchmark is named {name!r}; the names are {', '.join(BENCHMARKS)}")
    found: Callable[[Options], Iterator[Row]] = importlib.import_module(BENCHMARKS[name]).run
    return found


def machine(device: str) -> Machine:
    """The machine and the versions that the numbers depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "faiss")},
        **(gpu_facts() if device == "cuda" else {}),
    }


def slug(device: str) -> str:
    """The name of a device in file names, such as `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def to_records(rows: Iterable[Row], measured_on: Machine) -> list[dict[str, Any]]:
    """The JSON objects of rows: `name, value, unit, baseline, machine`, and `interval` if a row has one."""
    return [
        {name: value for name, value in asdict(row).items() if name != "interval" or value is not None}
        | {"machine": measured_on}
        for row in rows
    ]


def to_row(record: dict[str, Any]) -> Row:
    """The row in a JSON object of `to_records`."""
    interval = record.get("interval")
    bounds = None if interval is None else (interval[0], interval[1])
    return Row(record["name"], record["value"], record["unit"], record["baseline"], bounds)


def read_results(path: Path) -> list[Row]:
    """The rows in a file of results."""
    return [to_row(record) for record in json.loads(path.read_text(encoding="utf-8"))]


def write_results(
    name: str, rows: Sequence[Row], measured_on: Machine, folder: Path, *, keep_others: bool = False
) -> Path:
    """Write rows to `<name>-<device>.json` in `folder`, one per line. Returns the path.

    With `keep_others`, rows of the existing file stay unless a new row has their name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{slug(str(measured_on['device']))}.json"
    found = {
        record["name"]: record
        for record in (json.loads(path.read_text("utf-8")) if keep_others and path.exists() else [])
    }
    found |= {record["name"]: record for record in to_records(rows, measured_on)}
    lines = ",\n".join(map(json.dumps, found.values()))
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return path


def group_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the first part of their name."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.name.partition("/")[0], []).append(row)
    return found


def format_value(row: Row) -> str:
    """The value as text: shares with three decimals, counts in full, other values with three digits."""
    if row.unit == "share":
        return f"{row.value:.3f}"
    if row.unit == "count":
        return f"{row.value:,.0f}"
    rounded = float(f"{row.value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:.3g}"


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
