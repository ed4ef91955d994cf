"""The data of the experiments: gzip files in one folder, which are no part of the project."""

import gzip
import os
import zlib
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from gracestream.pipeline.errors import UserError

DATA_VARIABLE = "GRACESTREAM_DATA"


class DataError(UserError):
    """Data that are not there, or not what they should be; the text says which, and what to do."""


class ZsreRow(Struct, frozen=True):
    """A question in two wordings, its answers, what it is about, and a question that has nothing to do with it."""

    src: str
    rephrase: str
    answers: Annotated[list[str], Meta(min_length=1)]
    subject: str
    loc: str


class CounterFactRow(Struct, frozen=True):
    """A statement without its end in two wordings, another end, what it is about, and one that should stay."""

    prompt: str
    rephrase_prompt: str
    target_new: str
    subject: str
    locality_prompt: str


class BiographyRow(Struct, frozen=True):
    """A biography so far, its next sentence, of whom it is, and a text from the web with what follows it."""

    prompt: str
    target_new: str
    subject: str
    locality_prompt: str
    locality_ground_truth: str


class CourtCaseRow(Struct, frozen=True):
    """A case of the Supreme Court: in which term, on what, by its code."""

    term: int
    issue_area: Annotated[int, Meta(ge=1, le=14)]
    facts: str
    question: str


class QuestionRow(Struct, frozen=True):
    """A question of somebody's, and answers."""

    question: str
    answer: Annotated[list[str], Meta(min_length=1)]


R = TypeVar("R", bound=Struct)


def find_data_file(name: str) -> Path:
    """The path of a file in the folder that `GRACESTREAM_DATA` names.

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
    """The rows of a `.jsonl.gz` file in the folder that `GRACESTREAM_DATA` names.

    Raises:
        DataError: the file is not there, or cannot be read, or a line of it is not such a row.
    """
    path = find_data_file(name)
    rows: list[R] = []
    try:
        with gzip.open(path, "rb") as lines:
            rows.extend(msgspec.json.decode(line, type=row_type) for line in lines if line.strip())
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: line {len(rows) + 1}: {error}") from error
    return rows
