"""The file of the read model, and its one writer.

Guarantees:

1. Records and the next offsets are stored in one transaction. A process that is killed continues where the file ends.
2. A file of another version, another cluster or another prefix is rebuilt. So is one that SQLite cannot read.
3. One process writes to a file. Another one that opens it gets an error.
4. Readers see the state after a whole batch, and never wait for the writer.
5. About `max_predictions` predictions are kept, the newest, also after the topics have deleted them. Feedback, outcomes
   and deltas are all kept.

Not promised: that the file survives a loss of power. It is rebuilt then, if it is damaged.
"""

import fcntl
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.read_model.records import RecordWriter
from gracestream.pipeline.read_model.schema import TABLES, VERSION

PRUNE_SLACK = 0.05
"""Share of `max_predictions` by which the table may exceed it, so that not every batch deletes."""

Position = tuple[str, int]
"""The name of a topic, without the prefix, and the number of a partition."""


class StoreError(UserError):
    """The file of the read model cannot be used. The text gives the remedy."""


class ReadModelStore:
    """The file of the read model, open for writing. Close it, or use it in a `with` statement.

    Args:
        path: The file. Its folder is created.
        cluster: The id of the Kafka cluster.
        prefix: The prefix of the topics.
        max_predictions: Predictions that are kept.

    Raises:
        StoreError: another process uses the file, or the disk cannot be written.
    """

    def __init__(self, path: Path, cluster: str, prefix: str, max_predictions: int) -> None:
        self.path, self._max_predictions = path, max_predictions
        self._source = (VERSION, cluster, prefix)
        self._change_count = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_file = path.with_name(f"{path.name}.lock").open("w")
        except OSError as error:
            raise StoreError(
                f"the file {path} cannot be written ({error.strerror}); set GRACESTREAM_CONSOLE_FILE"
            ) from error
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock_file.close()
            raise StoreError(
                f"another process uses the file {path}; end it, or set GRACESTREAM_CONSOLE_FILE to another file"
            ) from error
        self._connection = self._open()
        self._writer = RecordWriter(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, so that another process may use it."""
        self._connection.close()
        self._lock_file.close()

    def positions(self) -> dict[Position, int]:
        """The next offset of each partition that was read."""
        return {
            (topic, partition): next_offset
            for topic, partition, next_offset in self._connection.execute("SELECT * FROM positions")
        }

    def add(self, records: Iterable[tuple[str, Any]], positions: Mapping[Position, int]) -> None:
        """Store records, each with the name of its topic, and the next offsets, in one transaction.

        Raises:
            sqlite3.Error: nothing was stored, for example because the disk is full.
        """
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                for topic, record in records:
                    self._writer.write(topic, record)
                self._connection.executemany(
                    "INSERT OR REPLACE INTO positions VALUES (?, ?, ?)",
                    [(*position, next_offset) for position, next_offset in positions.items()],
                )
                self._prune()
        except BaseException:
            self._writer = RecordWriter(self._connection)  # the old one knows entries that were not stored
            raise
        self._change_count += 1

    def rebuild(self) -> None:
        """Delete everything, so that all topics are read again."""
        self._connection.close()
        _delete(self.path)
        self._connection = self._open()
        self._writer = RecordWriter(self._connection)

    @property
    def change_count(self) -> int:
        """A number that grows with each batch."""
        return self._change_count

    def reader(self) -> sqlite3.Connection:
        """A new connection that only reads, for one thread at a time. The caller closes it."""
        address = f"{self.path.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(address, uri=True, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        return connection

    def _prune(self) -> None:
        """Delete the oldest predictions beyond the limit, and requests that no kept prediction answers."""
        limit = self._max_predictions * (1 + PRUNE_SLACK)
        # Ids grow with each row, so the cheap first number bounds the second one.
        for count in ("coalesce(max(id) - min(id) + 1, 0)", "count(*)"):
            if self._connection.execute(f"SELECT {count} FROM predictions").fetchone()[0] <= limit:
                return
        (oldest,) = self._connection.execute(
            "SELECT timestamp FROM predictions ORDER BY timestamp DESC, id DESC LIMIT 1 OFFSET ?",
            (self._max_predictions - 1,),
        ).fetchone()
        self._connection.execute(
            "DELETE FROM prediction_text WHERE rowid IN (SELECT id FROM predictions WHERE timestamp < ?)", (oldest,)
        )
        self._connection.execute("DELETE FROM predictions WHERE timestamp < ?", (oldest,))
        self._connection.execute(
            "DELETE FROM requests WHERE timestamp < ? AND NOT EXISTS"
            " (SELECT 1 FROM predictions WHERE predictions.request_id = requests.request_id)",
            (oldest,),
        )

    def _open(self) -> sqlite3.Connection:
        """A connection to the tables; those of another source, or a damaged file, are replaced by empty ones."""
        with suppress(sqlite3.DatabaseError):
            connection = _connect(self.path)
            if _read_source(connection) == self._source:
                return connection
            connection.close()
        _delete(self.path)
        connection = _connect(self.path)
        connection.executescript(TABLES)
        with connection:
            connection.execute("INSERT INTO source VALUES (?, ?, ?)", self._source)
        return connection


def _connect(path: Path) -> sqlite3.Connection:
    # Threads take turns: the follower writes, and the process closes.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _read_source(connection: sqlite3.Connection) -> tuple[int, str, str] | None:
    """The version, cluster and prefix of the tables; None if there are none."""
    with suppress(sqlite3.OperationalError), closing(connection.execute("SELECT * FROM source")) as rows:
        found: tuple[int, str, str] | None = rows.fetchone()
        return found
    return None


def _delete(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
