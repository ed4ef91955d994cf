"""The folder of an experiment's results: everything as JSON, a table, and the codebook."""

import fcntl
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from gracestream.pipeline.codebook import Codebook, save_codebook
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.experiments.editors.editor import EditOutcome
from gracestream.pipeline.experiments.editors.serving import ServedCounts
from gracestream.pipeline.experiments.plots import draw_run
from gracestream.pipeline.experiments.stream import MeanScore, Measurement

COLUMNS = (
    "corrections", "edits", "failed", "entries", "ES", "ERR", "TRR", "ARR", "rephrases", "coming", "edits an entry",
    "agreement", "covered", "captured", "seconds an edit",
)  # fmt: skip


METRICS_FILE, TABLE_FILE, PLOTS_FILE, CODEBOOK_FILE = "metrics.json", "table.md", "plots.png", "codebook.safetensors"
REPORT_VERSION = 2
"""Of the editors and measures; raised when one changes what comes of a run."""

LOCK_FILE = ".lock"
"""Stays where it is: who deleted it might delete another's."""


class ReportError(UserError):
    """Results that cannot be written."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was asked for. Where that is equal, so is what comes of it, times and rounding apart.

    Attributes:
        experiment: Its name.
        data: SHA-256 of its data.
        editor: Its name.
        edits: Corrections, at most; None: all.
        retention: Examples of which TRR tells, at most; None: all.
        every: Corrections between points.
        seed: Of the order in which corrections come, and of which examples are retained; 0: as the data have them.
        settings: Those of an editor that were set, as texts.
        through: `engine`: corrections are decided in this process; `kafka`: by an editor worker.
        version: `REPORT_VERSION` of those that ran it.
    """

    experiment: str
    data: str
    editor: str
    edits: int | None
    retention: int | None
    every: int
    seed: int
    settings: dict[str, str]
    through: Literal["engine", "kafka"] = "engine"
    version: int = 0


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, under which settings and versions, and what came of it.

    Attributes:
        asked: What was asked for.
        measure: Of answers.
        model: The model's fingerprint.
        layer: The layer that is edited.
        environment: Versions, device and settings.
        left_out: Examples and texts that the model cannot take.
        points: How things stood on the way.
        make_dir: What became of each correction.
        uses: Of what the editor has stored, at the end.
        agreeing: Of a run through Kafka the share of corrections that replicas answer as was measured here.
    """

    asked: RunSpec
    measure: str
    model: str
    layer: str
    environment: dict[str, str]
    left_out: int
    points: Annotated[list[Measurement], msgspec.Meta(min_length=1)]
    made: list[EditOutcome]
    uses: list[ServedCounts]
    agreeing: float | None = None


def make_dir(folder: Path) -> Path:
    """The folder, made if need be: before hours of work and not after them.

    Raises:
        ReportError: it cannot be made.
    """
    with translate_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder of results; the system frees that of a process which died.

    Raises:
        ReportError: another one is at work in it, or it cannot be written to.
    """
    with translate_write_errors(folder):
        lock = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ReportError(f"another process is at work in {folder}: name another folder with --out") from None
    try:
        yield
    finally:
        os.close(lock)


def write_report(report: RunReport, codebook: Codebook | None, folder: Path, *, plots: bool = True) -> None:
    """Write `table.md`, `plots.png`, of GRACE `codebook.safetensors`, and at last `metrics.json`.

    Those of a run before are taken away first, so that without `metrics.json` nothing is there that can be relied on.

    Raises:
        ReportError, FileError: the folder cannot be written to.
    """
    with translate_write_errors(folder):
        for name in (METRICS_FILE, TABLE_FILE, PLOTS_FILE, CODEBOOK_FILE):
            (folder / name).unlink(missing_ok=True)
    if codebook is not None:
        save_codebook(codebook, folder / CODEBOOK_FILE)
    with translate_write_errors(folder):
        _write_table(report, folder)
        if plots:
            _draw_plots(report, folder)
        half = folder / f".{METRICS_FILE}"
        half.write_bytes(msgspec.json.format(msgspec.json.encode(to_json(report)), indent=1) + b"\n")
        half.replace(folder / METRICS_FILE)


def refresh_outputs(report: RunReport, folder: Path, *, plots: bool) -> None:
    """Write `table.md` anew from a report that was read, and `plots.png` where there is none.

    Raises:
        ReportError: the folder cannot be written to.
    """
    with translate_write_errors(folder):
        _write_table(report, folder)
        if plots and not (folder / PLOTS_FILE).exists():
            _draw_plots(report, folder)


def _write_table(report: RunReport, folder: Path) -> None:
    (folder / TABLE_FILE).write_text(markdown_table(*table_columns(report.points)), encoding="utf-8")


def _draw_plots(report: RunReport, folder: Path) -> None:
    asked = report.asked
    title = f"{asked.experiment}, {asked.editor}, {report.layer}, seed {asked.seed}"
    draw_run(report.points, report.uses, report.measure, title, folder / PLOTS_FILE)


@contextmanager
def translate_write_errors(folder: Path) -> Iterator[None]:
    """Whatever is written inside to the folder, where it cannot be, is a `ReportError`."""
    try:
        yield
    except FileExistsError as error:
        raise ReportError(f"the results cannot be written to {folder}: it is no folder") from error
    except OSError as error:
        raise ReportError(f"the results cannot be written to {folder}: {error.strerror}") from error


def read_report(folder: Path) -> RunReport | None:
    """The report of a run that came to its end; None, where there is none such, or one of another `REPORT_VERSION`.

    Raises:
        ReportError: there is a file, but it cannot be read as one.
    """
    try:
        told = msgspec.json.decode((folder / METRICS_FILE).read_bytes(), type=dict[str, Any])
        if msgspec.convert(told.get("asked"), _ReportVersion).version != REPORT_VERSION:
            return None
        told["points"] = _restore_numbers(told.get("points"))
        return msgspec.convert(told, RunReport)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"{folder / METRICS_FILE} is no report: {error}; remove it to run this anew") from error


class _ReportVersion(msgspec.Struct, frozen=True):
    """What can be read of a report of any version."""

    version: int = 0


def to_json(fields: object) -> Any:
    """In what JSON has words for: null for NaN, and "inf" for what is infinite, as a spoilt perplexity is."""

    def known(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None if math.isnan(value) else str(value)
        return value

    return _map_leaves(msgspec.to_builtins(fields), known)


def _restore_numbers(fields: object) -> Any:
    """The numbers that `to_json` had no words for."""
    words = {None: math.nan, "inf": math.inf}
    return _map_leaves(fields, lambda value: words.get(value, value))


def _map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """JSON with each of its values changed."""
    if isinstance(tree, dict):
        return {name: _map_leaves(value, function) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_map_leaves(value, function) for value in tree]
    return function(tree)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    told = [list(columns), ["---:"] * len(columns), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in told) + "\n"


def table_columns(measurements: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    """The table's head and lines, without columns that hold nothing."""
    lines = [_format_cells(point) for point in measurements]
    filled = [place for place, _ in enumerate(COLUMNS) if any(line[place] for line in lines)]
    return [COLUMNS[place] for place in filled], [[line[place] for place in filled] for line in lines]


def format_measurement(measurement: Measurement) -> str:
    """One point on one line, without what it has no number for."""
    return ", ".join(f"{name} {told}" for name, told in zip(COLUMNS, _format_cells(measurement), strict=True) if told)


def _format_cells(measurement: Measurement) -> list[str]:
    """One line of the table, in the order of `COLUMNS`."""
    qualities = (
        measurement.es,
        measurement.err,
        measurement.trr,
        measurement.arr,
        measurement.rephrases,
        measurement.coming,
    )
    counts = (measurement.corrections, measurement.edits, measurement.failed, measurement.entries)
    shares = (
        measurement.edits_per_entry,
        measurement.agreement,
        measurement.covered,
        measurement.captured,
        measurement.seconds,
    )
    return [*map(str, counts), *map(_format_score, qualities), *map(format_number, shares)]


def _format_score(score: MeanScore) -> str:
    """The measure; and in parentheses the share that is exact, where that says something else."""
    exact = "" if score.value == score.exact else f" ({score.exact:.3f})"
    return "" if math.isnan(score.value) else f"{format_number(score.value)}{exact}"


def format_number(value: float) -> str:
    """With three decimals; nothing for what is none."""
    return "" if math.isnan(value) else f"{value:.3f}"
