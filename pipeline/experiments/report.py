"""The folder of a run's results: the report as JSON, a table, plots, and the codebook.

1. `metrics.json` is written last and moved into place. If it exists, the other files of its run are complete.
2. One process at a time writes to a folder (`exclusive_lock`).
3. A report of another `REPORT_VERSION` counts as missing.
"""

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
"""Columns of the table, in order; `_format_cells` fills them."""

METRICS_FILE, TABLE_FILE, PLOTS_FILE, CODEBOOK_FILE = "metrics.json", "table.md", "plots.png", "codebook.safetensors"
REPORT_VERSION = 2
"""Version of the editors and measures; raised when a change of them alters the results of a run."""

LOCK_FILE = ".lock"
"""Is never deleted: deleting it could remove a lock that another process has just taken."""


class ReportError(UserError):
    """Results cannot be written or read; the message names the file and the remedy."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of a run. Equal specifications give equal results, except for times and rounding.

    Attributes:
        experiment: Name of the experiment.
        data: SHA-256 of the experiment's data.
        editor: Name of the editor.
        edits: Largest number of corrections; None: all.
        retention: Largest number of examples for TRR; None: all.
        every: Corrections between two measurements.
        seed: Draws the order of the corrections and the retained examples; 0: the order of the data.
        expand: How the paper policy expands a radius: just to include the query (`cover`), or by the initial radius.
        settings: The editor's settings that were set explicitly, as texts.
        through: `engine`: corrections are decided in this process; `kafka`: by an editor worker.
        version: `REPORT_VERSION` of the program that ran it.
    """

    experiment: str
    data: str
    editor: str
    edits: int | None
    retention: int | None
    every: int
    seed: int
    settings: dict[str, str]
    expand: Literal["cover", "paper"] = "cover"
    through: Literal["engine", "kafka"] = "engine"
    version: int = 0


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run's specification, environment and results.

    Attributes:
        asked: The specification.
        measure: The measure of answers.
        model: The model's fingerprint.
        layer: The edited layer.
        environment: Versions, device and settings.
        left_out: Number of examples and texts that the model cannot take.
        points: The measurements, in order.
        made: The outcome of each correction.
        uses: Prompts that each stored entry serves at the end.
        agreeing: For a run through Kafka, the share of corrections on which replicas agree with the scores here.
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
    """Create the folder if it is missing, and return it; called before hours of work, so that failures show early.

    Raises:
        ReportError: the folder cannot be created.
    """
    with translate_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """A context that keeps other processes from writing to a folder of results.

    The operating system releases the lock when the process dies.

    Raises:
        ReportError: another process holds the lock, or the folder cannot be written to.
    """
    with translate_write_errors(folder):
        lock = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ReportError(f"another process writes to {folder}: name another folder with --out") from None
    try:
        yield
    finally:
        os.close(lock)


def write_report(report: RunReport, codebook: Codebook | None, folder: Path, *, plots: bool = True) -> None:
    """Write the files of a run; `metrics.json` marks it as complete.

    1. Delete the files of an earlier run, `metrics.json` first: from here on the folder counts as incomplete.
    2. Write `codebook.safetensors` (GRACE only), `table.md` and `plots.png`.
    3. Write `metrics.json` under another name and move it into place.

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
        temporary = folder / f".{METRICS_FILE}"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(to_json(report)), indent=1) + b"\n")
        temporary.replace(folder / METRICS_FILE)


def refresh_outputs(report: RunReport, folder: Path, *, plots: bool) -> None:
    """Write `table.md` again from a report, and `plots.png` if it is missing.

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
    spec = report.asked
    title = f"{spec.experiment}, {spec.editor}, {report.layer}, seed {spec.seed}"
    draw_run(report.points, report.uses, report.measure, title, folder / PLOTS_FILE)


@contextmanager
def translate_write_errors(folder: Path) -> Iterator[None]:
    """A context that turns an `OSError` of writing to the folder into a `ReportError`."""
    try:
        yield
    except FileExistsError as error:
        raise ReportError(f"the results cannot be written to {folder}: it is not a folder") from error
    except OSError as error:
        raise ReportError(f"the results cannot be written to {folder}: {error.strerror}") from error


def read_report(folder: Path) -> RunReport | None:
    """The report of a complete run; None if there is none, or if it is of another `REPORT_VERSION`.

    Raises:
        ReportError: the file exists but is not a report.
    """
    try:
        fields = msgspec.json.decode((folder / METRICS_FILE).read_bytes(), type=dict[str, Any])
        if msgspec.convert(fields.get("asked"), _ReportVersion).version != REPORT_VERSION:
            return None
        fields["points"] = _restore_numbers(fields.get("points"))
        return msgspec.convert(fields, RunReport)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"{folder / METRICS_FILE} is not a report: {error}; remove it to run this again") from error


class _ReportVersion(msgspec.Struct, frozen=True):
    """The only field that reports of all versions share."""

    version: int = 0


def to_json(fields: object) -> Any:
    """The object as JSON builtins; NaN becomes null, and infinity (a perplexity of ruined weights) becomes "inf"."""

    def encode(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None if math.isnan(value) else str(value)
        return value

    return _map_leaves(msgspec.to_builtins(fields), encode)


def _restore_numbers(fields: object) -> Any:
    """The inverse of `to_json` for numbers: null becomes NaN, and "inf" becomes infinity."""
    numbers = {None: math.nan, "inf": math.inf}
    return _map_leaves(fields, lambda value: numbers.get(value, value))


def _map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The JSON tree with `function` applied to each leaf."""
    if isinstance(tree, dict):
        return {name: _map_leaves(value, function) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_map_leaves(value, function) for value in tree]
    return function(tree)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with right-aligned columns."""
    lines = [list(columns), ["---:"] * len(columns), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def table_columns(measurements: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    """The table's columns and rows, without columns that are empty in every row."""
    rows = [_format_cells(point) for point in measurements]
    filled = [index for index, _ in enumerate(COLUMNS) if any(row[index] for row in rows)]
    return [COLUMNS[index] for index in filled], [[row[index] for index in filled] for row in rows]


def format_measurement(measurement: Measurement) -> str:
    """A measurement on one line, without the columns that are empty."""
    return ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, _format_cells(measurement), strict=True) if cell)


def _format_cells(measurement: Measurement) -> list[str]:
    """The cells of one row, in the order of `COLUMNS`; a NaN gives an empty cell."""
    scores = (
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
    return [*map(str, counts), *map(_format_score, scores), *map(format_number, shares)]


def _format_score(score: MeanScore) -> str:
    """The measure, followed by the exact share in parentheses if it differs; empty for NaN."""
    exact = "" if score.value == score.exact else f" ({score.exact:.3f})"
    return "" if math.isnan(score.value) else f"{format_number(score.value)}{exact}"


def format_number(value: float) -> str:
    """The number with three decimals; empty for NaN."""
    return "" if math.isnan(value) else f"{value:.3f}"
