"""The log of one stream: what came of each correction, with its delta, and what was measured on the way.

1. A line is one JSON object, written in one piece when it is complete. A last line that was cut off does not count.
2. The lines of corrections, folded by an engine in their order, give the engine that made them.
3. One process at a time has the log open.

Not promised: that a line survives a failure of the machine.
"""

import fcntl
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct

from tests.bench.framework import BenchError, Row


class LeadRecord(Struct, frozen=True, tag="led"):
    """The record by which the engine began."""

    record: bytes


class LoggedCorrection(Struct, frozen=True, tag="made"):
    """One correction.

    Attributes:
        number: Its place in the stream, from 0.
        status: Of its outcome.
        right: Whether it was answered right at once.
        steps: Of training.
        seconds: What it took, and of that the parts by name.
        record: Its delta; None where it was rejected.
    """

    number: int
    status: str
    right: bool
    steps: int
    seconds: dict[str, float]
    record: bytes | None = None


class CheckpointRows(Struct, frozen=True, tag="measured"):
    """The rows of a checkpoint, after so many corrections; `by` identifies the code that measured them."""

    after: int
    what: str
    by: str
    rows: list[Row]


Line = LeadRecord | LoggedCorrection | CheckpointRows


class StreamLog:
    """A file of lines, open for one process; use it as a context manager.

    Raises:
        BenchError: another process has it open, or a complete line cannot be read.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._cut_torn_line()
        except BlockingIOError as error:
            self._file.close()
            raise BenchError(f"another run is writing {path}; wait for its end, or stop it") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, line: Line) -> None:
        """Write one more line."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def lines(self) -> Iterator[Line]:
        """All lines, in the order in which they were written."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield msgspec.json.decode(line, type=Line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise BenchError(
                        f"line {number} of {self._path} cannot be read: {error}; remove the file"
                    ) from error

    def corrections(self) -> Iterator[LoggedCorrection]:
        """The corrections, in their order."""
        return (line for line in self.lines() if isinstance(line, LoggedCorrection))

    def records(self, count: int) -> Iterator[bytes]:
        """The record by which the engine began, and those of the first `count` corrections."""
        for line in self.lines():
            is_correction = isinstance(line, LoggedCorrection) and line.number < count
            if (
                not isinstance(line, CheckpointRows)
                and (is_correction or isinstance(line, LeadRecord))
                and line.record is not None
            ):
                yield line.record

    def measured(self) -> dict[tuple[int, str, str], list[Row]]:
        """The rows of each checkpoint: by the number of corrections, what was measured, and by which code."""
        return {(one.after, one.what, one.by): one.rows for one in self.lines() if isinstance(one, CheckpointRows)}

    def _cut_torn_line(self) -> None:
        """A run that was killed may have left a part of a line at the end."""
        self._file.seek(0)
        complete_bytes = 0
        for line in self._file:
            complete_bytes += len(line) if line.endswith(b"\n") else 0
        self._file.truncate(complete_bytes)
