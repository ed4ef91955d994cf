"""Reading the experiments' data: gzip files in one folder, which are not part of the repository."""

import gzip
import os
import zlib
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from gracestream.pipeline.errors import UserError

DATA_VARIABLE = "GRACESTREAM_DATA"
"""The environment variable with the folder of the data."""


class DataError(UserError):
    """Data are missing or malformed; the message names the file and the remedy."""


class ZsreRow(Struct, frozen=True):
    """A row of zsRE: a question, a rephrase, its answers, its subject, and an unrelated question (`loc`)."""

    src: str
    rephrase: str
    answers: Annotated[list[str], Meta(min_length=1)]
    subject: str
    loc: str


class CounterFactRow(Struct, frozen=True):
    """A row of CounterFact: an incomplete statement, a rephrase, its new end, its subject, and a statement to keep."""

    prompt: str
    rephrase_prompt: str
    target_new: str
    subject: str
    locality_prompt: str


class BiographyRow(Struct, frozen=True):
    """A row of the hallucination data: a biography so far, its next sentence, its subject, a web text in two parts."""

    prompt: str
    target_new: str
    subject: str
    locality_prompt: str
    locality_ground_truth: str


class CourtCaseRow(Struct, frozen=True):
    """A case of the US Supreme Court: its term (a year), the code of its issue area, its facts and its question."""

    term: int
    issue_area: Annotated[int, Meta(ge=1, le=14)]
    facts: str
    question: str


class QuestionRow(Struct, frozen=True):
    """A row of Natural Questions: a question and its answers."""

    question: str
    answer: Annotated[list[str], Meta(min_length=1)]


R = TypeVar("R", bound=Struct)


def find_data_file(name: str) -> Path:
    """The path of a file in the folder `GRACESTREAM_DATA`.

    Raises:
        DataError: the variable is not set, or the folder has no such file.
    """
    folder = os.environ.get(DATA_VARIABLE)
    if not folder:
        raise DataError(f"this needs {name}: set {DATA_VARIABLE} to its folder")
    path = Path(folder) / name
    if not path.is_file():
        raise DataError(f"this needs {name}: it is not in {folder}")
    return path


def read_rows(name: str, row_type: type[R]) -> list[R]:
    """The rows of a `.jsonl.gz` file in the folder `GRACESTREAM_DATA`.

    Raises:
        DataError: the file is missing or cannot be read, or a line is not a row of this type.
    """
    path = find_data_file(name)
    rows: list[R] = []
    try:
        with gzip.open(path, "rb") as lines:
            rows.extend(msgspec.json.decode(line, type=row_type) for line in lines if line.strip())
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: line {len(rows) + 1}: {error}") from error
    return rows
