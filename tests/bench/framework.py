"""What the benchmarks share: rows, the machine they were measured on, and the file. It needs what the engine needs.

A benchmark is a function from `Options` to rows, named in `BENCHES`. A row is one number. Its name is a path whose last
part is the metric, as in `zsre/nearest/exact`; rows that share all but that part are one setting, and one line of the
table on the terminal.
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
"""Where `--commit` writes; other results go to `results/` in the root, which git ignores."""

BENCHMARKS = {
    "quality": "tests.bench.quality",
    "scope": "tests.bench.scope",
    "stream": "tests.bench.stream",
    "backpressure": "tests.bench.backpressure",
    "replay": "tests.bench.replay",
    "start": "tests.bench.start",
    "lag": "tests.bench.lag",
    "memory": "tests.bench.memory",
    "throughput": "tests.bench.throughput",
    "undo": "tests.bench.undo",
    "overhead": "tests.bench.overhead",
    "edit": "tests.bench.edit",
    "keyspaces": "tests.bench.keyspaces",
}
"""The module of each benchmark, whose `run` takes `Options` and yields rows."""

Machine = dict[str, str | int]


class BenchError(UserError):
    """A benchmark that cannot be run; the text says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a benchmark is told: to be quick, one model to measure alone, the device, and where to say how far it is.

    `development` asks for the rows on which settings may be chosen, where a benchmark separates them.
    """

    quick: bool = False
    only: str = ""
    development: bool = False
    device: str = "cpu"
    report: Callable[[str], None] = field(default=lambda _line: None)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number; `baseline` is what it is to be held against, None where there is nothing.

    `interval` is its 95 % confidence interval, where the benchmark gives one.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def setting(self) -> str:
        """All of the name but the metric."""
        return self.name.rpartition("/")[0]

    @property
    def metric(self) -> str:
        """The last part of the name."""
        return self.name.rpartition("/")[2]


def load_plot(name: str) -> Callable[[Sequence[Row], Path], None] | None:
    """What draws the rows of that benchmark into a file; None where it has no plot."""
    found: Callable[[Sequence[Row], Path], None] | None = getattr(
        importlib.import_module(BENCHMARKS[name]), "draw", None
    )
    return found


def load_benchmark(name: str) -> Callable[[Options], Iterator[Row]]:
    """The benchmark of that name.

    Raises:
        BenchError: there is none.
    """
    if name not in BENCHMARKS:
        raise BenchError(f"there is no benchmark named {name!r}; there is {', '.join(BENCHMARKS)}")
    found: Callable[[Options], Iterator[Row]] = importlib.import_module(BENCHMARKS[name]).run
    return found


def machine(device: str) -> Machine:
    """What the numbers were measured on."""
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
    """A device's name, as files are named for it: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def to_records(rows: Iterable[Row], measured_on: Machine) -> list[dict[str, Any]]:
    """Rows as they are written: `name, value, unit, baseline, machine`, and `interval` where there is one."""
    return [
        {name: value for name, value in asdict(row).items() if name != "interval" or value is not None}
        | {"machine": measured_on}
        for row in rows
    ]


def to_row(record: dict[str, Any]) -> Row:
    """The row of a record."""
    interval = record.get("interval")
    bounds = None if interval is None else (interval[0], interval[1])
    return Row(record["name"], record["value"], record["unit"], record["baseline"], bounds)


def read_results(path: Path) -> list[Row]:
    """The rows of a file of results."""
    return [to_row(record) for record in json.loads(path.read_text(encoding="utf-8"))]


def write_results(
    name: str, rows: Sequence[Row], measured_on: Machine, folder: Path, *, keep_others: bool = False
) -> Path:
    """Write rows to `<name>-<device>.json` in `folder`, one row a line, and say where; `keep` what else is there."""
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
    """Rows by the first part of their names."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.name.partition("/")[0], []).append(row)
    return found


def format_value(row: Row) -> str:
    """A value for a person: shares to a thousandth, counts as they are, the rest to three digits."""
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
