"""The log of one stream: the result and the delta of each correction, and the rows of each checkpoint.

1. A line is one complete JSON object, written in one piece. A last line that was cut off is dropped.
2. An engine that applies the logged deltas in order has the state of the engine that made them.
3. Only one process at a time has the log open.

Not promised: a line may be lost if the machine fails.
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
    """The lead delta with which the engine started."""

    record: bytes


class LoggedCorrection(Struct, frozen=True, tag="made"):
    """One correction.

    Attributes:
        number: The position in the stream, from 0.
        status: The status of the outcome.
        right: Whether it was right immediately afterwards.
        steps: The training steps.
        seconds: The seconds of each part, by name.
        record: The delta; None if the correction was rejected.
    """

    number: int
    status: str
    right: bool
    steps: int
    seconds: dict[str, float]
    record: bytes | None = None


class CheckpointRows(Struct, frozen=True, tag="measured"):
    """The rows of a checkpoint after `after` corrections. `by` is a digest of the code that measured them."""

    after: int
    what: str
    by: str
    rows: list[Row]


Line = LeadRecord | LoggedCorrection | CheckpointRows


class StreamLog:
    """A file of lines, open in one process. Use it as a context manager.

    Raises:
        BenchError: Another process has it open, or a complete line cannot be read.
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
            raise BenchError(f"another run is writing {path}; wait for it or stop it") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, line: Line) -> None:
        """Append a line."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def lines(self) -> Iterator[Line]:
        """All lines, in the order of writing."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield msgspec.json.decode(line, type=Line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise BenchError(
                        f"line {number} of {self._path} cannot be read: {error}; remove the file"
                    ) from error

    def corrections(self) -> Iterator[LoggedCorrection]:
        """The logged corrections, in order."""
        return (line for line in self.lines() if isinstance(line, LoggedCorrection))

    def records(self, count: int) -> Iterator[bytes]:
        """The lead delta, and the deltas of the first `count` corrections."""
        for line in self.lines():
            is_correction = isinstance(line, LoggedCorrection) and line.number < count
            if (
                not isinstance(line, CheckpointRows)
                and (is_correction or isinstance(line, LeadRecord))
                and line.record is not None
            ):
                yield line.record

    def measured(self) -> dict[tuple[int, str, str], list[Row]]:
        """The rows of checkpoints, by number of corrections, measurement, and digest of the measuring code."""
        return {(one.after, one.what, one.by): one.rows for one in self.lines() if isinstance(one, CheckpointRows)}

    def _cut_torn_line(self) -> None:
        """Drop an incomplete last line, which a killed run may have left."""
        self._file.seek(0)
        complete_bytes = 0
        for line in self._file:
            complete_bytes += len(line) if line.endswith(b"\n") else 0
        self._file.truncate(complete_bytes)
