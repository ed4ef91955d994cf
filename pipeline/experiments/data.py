"""The data of the experiments: gzip files in one folder, which are no part of the project."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

from pipeline.errors import UserError

FOLDER = "GRACESTREAM_DATA"
BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Where the data are looked for, unless `GRACESTREAM_DATA` names a folder: beside the repository."""


class DataError(UserError):
    """Data that are not there, or not what they should be; the text says which, and what to do."""


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a `.jsonl.gz` file in the folder that `GRACESTREAM_DATA` names.

    Raises:
        DataError: the file is not there, or cannot be read.
    """
    folder = Path(os.environ.get(FOLDER) or BESIDE)
    path = folder / name
    if not path.is_file():
        raise DataError(f"this needs {name}, which is not in {folder}; set {FOLDER} to its folder")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
