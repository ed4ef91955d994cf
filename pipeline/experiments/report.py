"""The folder of an experiment's results: everything as JSON, a table, and the codebook."""

import math
from pathlib import Path

import msgspec

from pipeline.codebook import Codebook
from pipeline.codebook_file import save
from pipeline.errors import UserError
from pipeline.experiments.editors.editor import Made
from pipeline.experiments.stream import Point, Quality

COLUMNS = (
    "corrections", "edits", "entries", "ES", "ERR", "TRR", "ARR", "rephrases", "coming", "agreement", "captured",
    "seconds an edit",
)  # fmt: skip


class ReportError(UserError):
    """Results that cannot be written."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, under which settings and versions, and what came of it.

    Attributes:
        experiment: Its name.
        measure: Of answers.
        editor: Its name.
        model: The model's fingerprint.
        layer: The layer that is edited.
        environment: Versions, device and settings.
        left_out: Examples and texts that the model cannot take.
        points: How things stood on the way.
        made: What became of each correction.
    """

    experiment: str
    measure: str
    editor: str
    model: str
    layer: str
    environment: dict[str, str]
    left_out: int
    points: list[Point]
    made: list[Made]


def made(folder: Path) -> Path:
    """The folder, made if need be: before hours of work and not after them.

    Raises:
        ReportError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"the results cannot be written to {folder}: {error.strerror}") from error
    return folder


def write(report: Report, codebook: Codebook | None, folder: Path) -> None:
    """Write `metrics.json`, `table.md` and, of GRACE, `codebook.safetensors` into a folder that is there.

    Raises:
        ReportError, FileError: the folder cannot be written to.
    """
    try:
        (folder / "metrics.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        (folder / "table.md").write_text(_markdown(report), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"the results cannot be written to {folder}: {error.strerror}") from error
    if codebook is not None:
        save(codebook, folder / "codebook.safetensors")


def cells(point: Point) -> list[str]:
    """One line of the table, in the order of `COLUMNS`."""
    qualities = (point.success, point.retained, point.kept, point.accurate, point.rephrased, point.coming)
    counts = (point.corrections, point.edits, point.entries)
    shares = (point.agreement, point.captured, point.seconds)
    return [*map(str, counts), *map(_quality, qualities), *map(_number, shares)]


def _markdown(report: Report) -> str:
    lines = [list(COLUMNS), ["---:"] * len(COLUMNS), *map(cells, report.points)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _quality(quality: Quality) -> str:
    """The measure; and in parentheses the share that is exact, where that says something else."""
    exact = "" if quality.value == quality.exact else f" ({quality.exact:.3f})"
    return "" if math.isnan(quality.value) else f"{_number(quality.value)}{exact}"


def _number(number: float) -> str:
    return "" if math.isnan(number) else f"{number:.3f}"
