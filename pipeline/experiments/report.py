"""The folder of an experiment's results: everything as JSON, a table, and the codebook."""

import fcntl
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from gracestream.pipeline.codebook import Codebook, save
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.experiments.editors.editor import Made
from gracestream.pipeline.experiments.editors.serving import Use
from gracestream.pipeline.experiments.plots import draw_run
from gracestream.pipeline.experiments.stream import Point, Quality

COLUMNS = (
    "corrections", "edits", "failed", "entries", "ES", "ERR", "TRR", "ARR", "rephrases", "coming", "edits an entry",
    "agreement", "covered", "captured", "seconds an edit",
)  # fmt: skip


METRICS, TABLE, PLOTS, CODEBOOK = "metrics.json", "table.md", "plots.png", "codebook.safetensors"
VERSION = 2
"""Of the editors and measures; raised when one changes what comes of a run."""

LOCK = ".lock"
"""Stays where it is: who deleted it might delete another's."""


class ReportError(UserError):
    """Results that cannot be written."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
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
        version: `VERSION` of those that ran it.
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


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, under which settings and versions, and what came of it.

    Attributes:
        asked: What was asked for.
        measure: Of answers.
        model: The model's fingerprint.
        layer: The layer that is edited.
        environment: Versions, device and settings.
        left_out: Examples and texts that the model cannot take.
        points: How things stood on the way.
        made: What became of each correction.
        uses: Of what the editor has stored, at the end.
        agreeing: Of a run through Kafka the share of corrections that replicas answer as was measured here.
    """

    asked: Asked
    measure: str
    model: str
    layer: str
    environment: dict[str, str]
    left_out: int
    points: Annotated[list[Point], msgspec.Meta(min_length=1)]
    made: list[Made]
    uses: list[Use]
    agreeing: float | None = None


def made(folder: Path) -> Path:
    """The folder, made if need be: before hours of work and not after them.

    Raises:
        ReportError: it cannot be made.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder of results; the system frees that of a process which died.

    Raises:
        ReportError: another one is at work in it, or it cannot be written to.
    """
    with writing(folder):
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ReportError(f"another process is at work in {folder}: name another folder with --out") from None
    try:
        yield
    finally:
        os.close(lock)


def write(report: Report, codebook: Codebook | None, folder: Path, *, plots: bool = True) -> None:
    """Write `table.md`, `plots.png`, of GRACE `codebook.safetensors`, and at last `metrics.json`.

    Those of a run before are taken away first, so that without `metrics.json` nothing is there that can be relied on.

    Raises:
        ReportError, FileError: the folder cannot be written to.
    """
    with writing(folder):
        for name in (METRICS, TABLE, PLOTS, CODEBOOK):
            (folder / name).unlink(missing_ok=True)
    if codebook is not None:
        save(codebook, folder / CODEBOOK)
    with writing(folder):
        _tell(report, folder)
        if plots:
            _draw(report, folder)
        half = folder / f".{METRICS}"
        half.write_bytes(msgspec.json.format(msgspec.json.encode(plain(report)), indent=1) + b"\n")
        half.replace(folder / METRICS)


def complete(report: Report, folder: Path, *, plots: bool) -> None:
    """Write `table.md` anew from a report that was read, and `plots.png` where there is none.

    Raises:
        ReportError: the folder cannot be written to.
    """
    with writing(folder):
        _tell(report, folder)
        if plots and not (folder / PLOTS).exists():
            _draw(report, folder)


def _tell(report: Report, folder: Path) -> None:
    (folder / TABLE).write_text(markdown(*columns_of(report.points)), encoding="utf-8")


def _draw(report: Report, folder: Path) -> None:
    asked = report.asked
    title = f"{asked.experiment}, {asked.editor}, {report.layer}, seed {asked.seed}"
    draw_run(report.points, report.uses, report.measure, title, folder / PLOTS)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Whatever is written inside to the folder, where it cannot be, is a `ReportError`."""
    try:
        yield
    except FileExistsError as error:
        raise ReportError(f"the results cannot be written to {folder}: it is no folder") from error
    except OSError as error:
        raise ReportError(f"the results cannot be written to {folder}: {error.strerror}") from error


def read(folder: Path) -> Report | None:
    """The report of a run that came to its end; None, where there is none such, or one of another `VERSION`.

    Raises:
        ReportError: there is a file, but it cannot be read as one.
    """
    try:
        told = msgspec.json.decode((folder / METRICS).read_bytes(), type=dict[str, Any])
        if msgspec.convert(told.get("asked"), _Version).version != VERSION:
            return None
        told["points"] = _numbers(told.get("points"))
        return msgspec.convert(told, Report)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"{folder / METRICS} is no report: {error}; remove it to run this anew") from error


class _Version(msgspec.Struct, frozen=True):
    """What can be read of a report of any version."""

    version: int = 0


def plain(told: object) -> Any:
    """In what JSON has words for: null for NaN, and "inf" for what is infinite, as a spoilt perplexity is."""

    def known(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None if math.isnan(value) else str(value)
        return value

    return _each(msgspec.to_builtins(told), known)


def _numbers(told: object) -> Any:
    """The numbers that `plain` had no words for."""
    words = {None: math.nan, "inf": math.inf}
    return _each(told, lambda value: words.get(value, value))


def _each(told: Any, change: Callable[[Any], Any]) -> Any:
    """JSON with each of its values changed."""
    if isinstance(told, dict):
        return {name: _each(value, change) for name, value in told.items()}
    if isinstance(told, list):
        return [_each(value, change) for value in told]
    return change(told)


def markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    told = [list(columns), ["---:"] * len(columns), *map(list, lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in told) + "\n"


def columns_of(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """The table's head and lines, without columns that hold nothing."""
    lines = [_cells(point) for point in points]
    filled = [place for place, _ in enumerate(COLUMNS) if any(line[place] for line in lines)]
    return [COLUMNS[place] for place in filled], [[line[place] for place in filled] for line in lines]


def in_words(point: Point) -> str:
    """One point on one line, without what it has no number for."""
    return ", ".join(f"{name} {told}" for name, told in zip(COLUMNS, _cells(point), strict=True) if told)


def _cells(point: Point) -> list[str]:
    """One line of the table, in the order of `COLUMNS`."""
    qualities = (point.es, point.err, point.trr, point.arr, point.rephrases, point.coming)
    counts = (point.corrections, point.edits, point.failed, point.entries)
    shares = (point.edits_an_entry, point.agreement, point.covered, point.captured, point.seconds)
    return [*map(str, counts), *map(_quality, qualities), *map(number, shares)]


def _quality(quality: Quality) -> str:
    """The measure; and in parentheses the share that is exact, where that says something else."""
    exact = "" if quality.value == quality.exact else f" ({quality.exact:.3f})"
    return "" if math.isnan(quality.value) else f"{number(quality.value)}{exact}"


def number(told: float) -> str:
    """With three decimals; nothing for what is none."""
    return "" if math.isnan(told) else f"{told:.3f}"
