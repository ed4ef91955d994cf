"""Questions to the read model: lists of predictions with filters, one request, one entry, and the timeline.

Each function takes a connection of `ReadModelStore.reader`. Lists are pages: `Page.next_cursor` continues after the
last row. A cursor names a row, so rows that arrive meanwhile neither repeat nor hide others.
"""

import json
import sqlite3
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct

T = TypeVar("T")

PAGE_SIZE = 50
MIN_TRIGRAM_LENGTH = 3
"""Shortest text that the index of trigrams finds. A shorter one is compared with each row."""

COMMON_MATCHES = 20_000
"""Number of matches from which a text is so common that the newest rows are compared one by one, until a page is full.

Of a rarer text all matches are found first, which takes milliseconds per thousand of them.
"""

Kind = Literal["all", "edited", "unedited", "near_miss", "error"]


class PredictionFilter(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which predictions to list; an empty field means any.

    Attributes:
        text: In the request or the answer, whatever its case.
        kind: By what answered.
        entry: The entry that answered, or might have.
        replica: The name of the replica.
        author: The author of the correction behind the entry that answered, or might have.
        since, until: Of Kafka's time, in milliseconds; `until` is excluded.
        min_score, max_score: Of the score, where there is one.
    """

    text: str = ""
    kind: Kind = "all"
    entry: str = ""
    replica: str = ""
    author: str = ""
    since: int | None = None
    until: int | None = None
    min_score: float | None = None
    max_score: float | None = None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some rows of a list, and where it goes on; an empty cursor if it ends."""

    rows: list[T]
    next_cursor: str = ""


class PredictionRow(Struct, frozen=True, kw_only=True):
    """One prediction with its request. The fields are those of the message; times are in milliseconds.

    Attributes:
        text: The request in one line; None if `requests` has deleted it.
        is_label: Whether the answer is a classifier's label.
        near_reason: Empty if the prediction is no near miss.
    """

    id: int
    timestamp: int
    request_id: str
    text: str | None
    answer: str
    is_label: bool
    score: float | None
    error: str
    entry_id: str | None
    near_entry_id: str | None
    near_reason: str
    near_detail: str
    near_target: str
    distance: float | None
    radius: float | None
    seq: int
    term: int
    replica: str
    latency_ms: float


class FeedbackRow(Struct, frozen=True, kw_only=True):
    """One record of feedback with its outcome.

    Attributes:
        offset: Of the record on `feedback`.
        text: The inputs in one line; None for an undo.
        inputs: As JSON.
        status: Of the outcome; None while it waits for the editor.
        decided_at: The time of the outcome.
        accepted_author: The author that the editor accepted; None if it accepted none.
    """

    offset: int
    timestamp: int
    feedback_id: str
    kind: str
    author: str | None
    inputs: str | None
    text: str | None
    target: str | None
    except_from: str | None
    undo: str | None
    undo_author: str | None
    request_id: str | None
    note: str | None
    signed: bool
    status: str | None
    decided_at: int | None
    accepted_author: str | None
    entry_id: str | None
    seq: int | None
    reason: str | None


class DeltaRow(Struct, frozen=True, kw_only=True):
    """One delta, described, with the feedback behind it.

    Attributes:
        changes: By entry id, what happened to the entry.
        undoes: The ids of the feedback that an undo takes back.
    """

    seq: int
    term: int
    op: str
    timestamp: int
    feedback_id: str | None
    author: str | None
    is_signed: bool
    undoes: tuple[str, ...]
    text: str | None
    target: str | None
    note: str | None
    changes: dict[str, str]


class EntryRow(Struct, frozen=True, kw_only=True):
    """An entry at the newest delta.

    Attributes:
        removed_seq: The delta that removed it; None while it is in force.
        target: Of the newest correction that changed it; None if there is none.
        answers, near_misses: The numbers of kept predictions.
    """

    entry_id: str
    wording: str
    radius: float
    created_seq: int
    removed_seq: int | None
    target: str | None
    answers: int
    near_misses: int


def find_predictions(
    connection: sqlite3.Connection, wanted: PredictionFilter, cursor: str = "", limit: int = PAGE_SIZE
) -> Page[PredictionRow]:
    """The predictions that a filter selects, newest first.

    Raises:
        ValueError: the cursor is not one of a page.
    """
    conditions, parameters = _conditions(connection, wanted)
    if cursor:
        timestamp, row_id = map(int, cursor.split("-"))
        conditions.append("(p.timestamp, p.id) < (?, ?)")
        parameters += [timestamp, row_id]
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    found = connection.execute(
        "SELECT p.*, r.text FROM predictions p LEFT JOIN requests r USING (request_id)"
        f" {where} ORDER BY p.timestamp DESC, p.id DESC LIMIT ?",
        (*parameters, limit + 1),
    ).fetchall()
    rows = [_to_struct(row, PredictionRow) for row in found[:limit]]
    return Page(rows, f"{rows[-1].timestamp}-{rows[-1].id}" if len(found) > limit else "")


def find_request(connection: sqlite3.Connection, request_id: str) -> tuple[str | None, list[PredictionRow]]:
    """The inputs of a request, as JSON, and its predictions, newest first. None: `requests` has deleted it."""
    inputs = connection.execute("SELECT inputs FROM requests WHERE request_id = ?", (request_id,)).fetchone()
    rows = connection.execute(
        "SELECT p.*, r.text FROM predictions p LEFT JOIN requests r USING (request_id) WHERE request_id = ?"
        " ORDER BY p.timestamp DESC, p.id DESC",
        (request_id,),
    )
    return None if inputs is None else inputs["inputs"], [_to_struct(row, PredictionRow) for row in rows]


def find_responsible(connection: sqlite3.Connection, prediction: PredictionRow) -> list[DeltaRow]:
    """The deltas that made an answer possible, newest first: those of its entry, up to the codebook that served it."""
    if prediction.entry_id is None:
        return []
    return [row for row in entry_timeline(connection, prediction.entry_id) if row.seq <= prediction.seq]


def find_feedback(
    connection: sqlite3.Connection, *, request_id: str = "", feedback_id: str = "", limit: int = PAGE_SIZE
) -> list[FeedbackRow]:
    """Feedback with its outcomes, newest first: all, that about a request, or that with an id."""
    conditions = {"f.request_id = ?": request_id, "f.feedback_id = ?": feedback_id}
    used = {condition: value for condition, value in conditions.items() if value}
    where = f"WHERE {' AND '.join(used)}" if used else ""
    rows = connection.execute(
        "SELECT f.*, o.status, o.timestamp AS decided_at, o.author AS accepted_author, o.entry_id, o.seq, o.reason"
        f" FROM feedback f LEFT JOIN outcomes o ON o.feedback_offset = f.offset {where}"
        " ORDER BY f.offset DESC LIMIT ?",
        (*used.values(), limit),
    )
    return [_to_struct(row, FeedbackRow) for row in rows]


def timeline(
    connection: sqlite3.Connection, *, before_seq: int | None = None, author: str = "", limit: int = PAGE_SIZE
) -> Page[DeltaRow]:
    """The deltas, newest first; those of an author if one is named."""
    conditions: list[str] = []
    parameters: list[Any] = []
    if before_seq is not None:
        conditions.append("d.seq < ?")
        parameters.append(before_seq)
    if author:
        conditions.append("d.author = ?")
        parameters.append(author)
    rows = _delta_rows(connection, conditions, parameters, limit + 1)
    return Page(rows[:limit], str(rows[limit - 1].seq) if len(rows) > limit else "")


def entry_timeline(connection: sqlite3.Connection, entry_id: str) -> list[DeltaRow]:
    """The deltas that changed an entry, newest first."""
    return _delta_rows(connection, ["d.seq IN (SELECT seq FROM entry_changes WHERE entry_id = ?)"], [entry_id], None)


def find_entry(connection: sqlite3.Connection, entry_id: str) -> EntryRow | None:
    """An entry, in force or removed; None if no delta names it."""
    row = connection.execute(
        "SELECT e.*,"
        " (SELECT f.target FROM entry_changes c JOIN deltas d USING (seq)"
        "  JOIN feedback f ON f.offset = d.feedback_offset"
        "  WHERE c.entry_id = e.entry_id AND f.target IS NOT NULL ORDER BY c.seq DESC LIMIT 1) AS target,"
        " (SELECT count(*) FROM predictions p WHERE p.entry_id = e.entry_id) AS answers,"
        " (SELECT count(*) FROM predictions p WHERE p.near_entry_id = e.entry_id) AS near_misses"
        " FROM entries e WHERE entry_id = ?",
        (entry_id,),
    ).fetchone()
    return None if row is None else _to_struct(row, EntryRow)


def replicas(connection: sqlite3.Connection) -> list[str]:
    """The names of the replicas that answered, in order."""
    # One step of the index for each name; DISTINCT would read the whole index.
    rows = connection.execute(
        "WITH RECURSIVE names (name) AS (SELECT min(replica) FROM predictions UNION ALL"
        " SELECT (SELECT min(replica) FROM predictions WHERE replica > name) FROM names WHERE name IS NOT NULL)"
        " SELECT name FROM names WHERE name IS NOT NULL"
    )
    return [name for (name,) in rows]


def _conditions(connection: sqlite3.Connection, wanted: PredictionFilter) -> tuple[list[str], list[Any]]:
    """The conditions of a filter, and their parameters."""
    conditions: list[str] = []
    parameters: list[Any] = []

    def add(condition: str, *values: object) -> None:
        conditions.append(condition)
        parameters.extend(values)

    if len(wanted.text) >= MIN_TRIGRAM_LENGTH:
        quoted = '"{}"'.format(wanted.text.replace('"', '""'))
        add(
            "EXISTS (SELECT 1 FROM prediction_text WHERE prediction_text MATCH ? AND rowid = p.id)"
            if _is_common(connection, quoted)
            else "p.id IN (SELECT rowid FROM prediction_text WHERE prediction_text MATCH ?)",
            quoted,
        )
    elif wanted.text:
        pattern = "%{}%".format("".join(f"\\{one}" if one in "%_\\" else one for one in wanted.text))
        add("(r.text LIKE ? ESCAPE '\\' OR p.answer LIKE ? ESCAPE '\\')", pattern, pattern)
    if wanted.kind != "all":
        add(
            {
                "edited": "p.entry_id IS NOT NULL",
                "unedited": "p.entry_id IS NULL",
                "near_miss": "p.near_entry_id IS NOT NULL",
                "error": "p.error != ''",
            }[wanted.kind]
        )
    if wanted.entry:
        add("(p.entry_id = ? OR p.near_entry_id = ?)", wanted.entry, wanted.entry)
    if wanted.replica:
        add("p.replica = ?", wanted.replica)
    if wanted.author:
        add(
            "coalesce(p.entry_id, p.near_entry_id) IN"
            " (SELECT c.entry_id FROM entry_changes c JOIN deltas d USING (seq) WHERE d.author = ?)",
            wanted.author,
        )
    for condition, value in (
        ("p.timestamp >= ?", wanted.since),
        ("p.timestamp < ?", wanted.until),
        ("p.score >= ?", wanted.min_score),
        ("p.score <= ?", wanted.max_score),
    ):
        if value is not None:
            add(condition, value)
    return conditions, parameters


def _is_common(connection: sqlite3.Connection, quoted: str) -> bool:
    (count,) = connection.execute(
        "SELECT count(*) FROM (SELECT 1 FROM prediction_text WHERE prediction_text MATCH ? LIMIT ?)",
        (quoted, COMMON_MATCHES),
    ).fetchone()
    return bool(count == COMMON_MATCHES)


def _delta_rows(
    connection: sqlite3.Connection, conditions: list[str], parameters: list[Any], limit: int | None
) -> list[DeltaRow]:
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = connection.execute(
        "SELECT d.*, f.text, f.target, f.note,"
        " (SELECT json_group_object(entry_id, change) FROM entry_changes c WHERE c.seq = d.seq) AS changes"
        f" FROM deltas d LEFT JOIN feedback f ON f.offset = d.feedback_offset {where} ORDER BY d.seq DESC LIMIT ?",
        (*parameters, -1 if limit is None else limit),
    ).fetchall()
    return [_to_struct(row, DeltaRow) for row in rows]


def _to_struct(row: sqlite3.Row, kind: type[T]) -> T:
    """A row as a Struct. SQLite has neither booleans nor lists."""
    values = {name: row[name] for name in kind.__struct_fields__}  # type: ignore[attr-defined]
    for name, value in values.items():
        if name in ("is_label", "signed", "is_signed"):
            values[name] = bool(value)
        elif name == "changes":
            values[name] = json.loads(value)
        elif name == "undoes":
            values[name] = tuple(json.loads(value))
    return kind(**values)
