"""What each record of the topics becomes in the read model.

Guarantees:

1. A record that is stored again changes nothing.
2. Records of different partitions may come in any order, those of one partition in the order of their offsets.
3. A record that cannot be decoded becomes a row of `unreadable`: another program may write to the topics.

Times are Kafka's, in milliseconds.
"""

import json
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.history import StepDescriber, decode_history_delta
from gracestream.pipeline.kafka import DELTAS, EDITS, FEEDBACK, PREDICTIONS, REQUESTS
from gracestream.schemas.deltas import Delta
from gracestream.schemas.headers import AUTHOR_HEADER, feedback_offset_of
from gracestream.schemas.messages import (
    Feedback,
    Inputs,
    InvalidMessage,
    Outcome,
    Prediction,
    Request,
    decode,
    to_display_text,
    to_one_line,
)

T = TypeVar("T")

TOPICS = (REQUESTS, PREDICTIONS, FEEDBACK, EDITS, DELTAS)
"""The topics that the read model follows."""


class RecordWriter:
    """Writes records into the tables, within a transaction of the caller.

    Args:
        connection: The connection to the tables.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._describer = _load_describer(connection)
        self._writers: Mapping[str, Callable[[Any], None]] = {
            REQUESTS: self._write_request,
            PREDICTIONS: self._write_prediction,
            FEEDBACK: self._write_feedback,
            EDITS: self._write_outcome,
            DELTAS: self._write_delta,
        }

    def write(self, topic: str, record: Any) -> None:
        """Write one record of a topic; `topic` is its name without the prefix."""
        try:
            self._writers[topic](record)
        except (InvalidMessage, HistoryError, OverflowError, UnicodeEncodeError) as error:
            # The last two come from SQLite: a number of more than 64 bits, and half of a surrogate pair.
            self._insert(
                "unreadable",
                topic=topic,
                partition=record.partition,
                offset=record.offset,
                timestamp=record.timestamp,
                reason=to_one_line(error),
            )

    def _write_request(self, record: Any) -> None:
        request = decode(record.value, Request)
        text = to_display_text(request.inputs)
        self._insert(
            "requests",
            request_id=request.request_id,
            timestamp=record.timestamp,
            inputs=_to_json(request.inputs),
            text=text,
        )
        self._connection.execute(
            "UPDATE prediction_text SET request = ? WHERE rowid IN (SELECT id FROM predictions WHERE request_id = ?)",
            (text, request.request_id),
        )

    def _write_prediction(self, record: Any) -> None:
        prediction = decode(record.value, Prediction)
        outputs, near_miss = prediction.outputs, prediction.near_miss
        answer, is_label = "", False
        if outputs is not UNSET:
            is_label = outputs.text is UNSET
            answer = _or(outputs.text, _or(outputs.label, ""))
        match = prediction.edit if near_miss is UNSET else near_miss
        row_id = self._insert(
            "predictions",
            partition=record.partition,
            offset=record.offset,
            timestamp=record.timestamp,
            request_id=prediction.request_id,
            answer=answer,
            is_label=is_label,
            score=_or(prediction.score, None),
            error=_or(prediction.error, ""),
            entry_id=None if prediction.edit is UNSET else prediction.edit.entry_id,
            near_entry_id=None if near_miss is UNSET else near_miss.entry_id,
            near_reason="" if near_miss is UNSET else near_miss.reason,
            near_detail="" if near_miss is UNSET else _or(near_miss.detail, ""),
            near_target="" if near_miss is UNSET else _or(near_miss.target, ""),
            distance=None if match is UNSET else match.distance,
            radius=None if match is UNSET else match.radius,
            seq=prediction.codebook_seq,
            term=prediction.term,
            replica=prediction.replica,
            latency_ms=prediction.latency_ms,
        )
        if row_id is not None:
            self._connection.execute(
                "INSERT INTO prediction_text (rowid, request, answer)"
                " VALUES (?, coalesce((SELECT text FROM requests WHERE request_id = ?), ''), ?)",
                (row_id, prediction.request_id, answer),
            )

    def _write_feedback(self, record: Any) -> None:
        feedback = decode(record.value, Feedback)
        self._insert(
            "feedback",
            offset=record.offset,
            timestamp=record.timestamp,
            feedback_id=feedback.feedback_id,
            kind="undo" if feedback.is_undo else "exception" if feedback.is_exception else "correction",
            author=_or(feedback.author, None),
            inputs=None if feedback.inputs is UNSET else _to_json(feedback.inputs),
            text=None if feedback.inputs is UNSET else to_display_text(feedback.inputs),
            target=_or(feedback.target, None),
            rephrases=_to_json(feedback.rephrases),
            except_from=_or(feedback.except_from, None),
            undo=_or(feedback.undo, None),
            undo_author=_or(feedback.undo_author, None),
            request_id=_or(feedback.request_id, None),
            note=_or(feedback.note, None),
            signed=feedback.signature is not UNSET,
        )

    def _write_outcome(self, record: Any) -> None:
        outcome = decode(record.value, Outcome)
        offset = feedback_offset_of(record)
        if offset < 0:
            return  # another program's record
        author = dict(record.headers).get(AUTHOR_HEADER)
        self._insert(
            "outcomes",
            feedback_offset=offset,
            timestamp=record.timestamp,
            feedback_id=outcome.feedback_id,
            status=outcome.status,
            author=None if author is None else author.decode(errors="replace"),
            entry_id=_or(outcome.entry_id, None),
            seq=_or(outcome.seq, None),
            steps=_or(outcome.steps, None),
            seconds=_or(outcome.seconds, None),
            reason=_or(outcome.reason, None),
        )

    def _write_delta(self, record: Any) -> None:
        delta = decode_history_delta(record.value)
        if self._has_delta(delta):
            return
        step = self._describer.describe(delta, record.timestamp / 1000)
        if step is None:
            return
        cause = delta.cause
        self._insert(
            "deltas",
            seq=delta.seq,
            term=delta.term,
            op=delta.op,
            timestamp=record.timestamp,
            feedback_id=step.feedback_id,
            feedback_offset=None if cause is UNSET else cause.offset,
            author=step.author,
            is_signed=cause is not UNSET and cause.standing is not UNSET and cause.standing.signed,
            undoes=json.dumps(step.undoes),
        )
        for entry_id, change in step.entries.items():
            self._insert("entry_changes", entry_id=entry_id, seq=delta.seq, change=change)
        self._write_entries(delta)

    def _write_entries(self, delta: Delta) -> None:
        for change in delta.entries:
            if change.removed:
                self._connection.execute(
                    "UPDATE entries SET removed_seq = ? WHERE entry_id = ?", (delta.seq, change.entry_id)
                )
                continue
            self._connection.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?, NULL) ON CONFLICT DO UPDATE SET removed_seq = NULL,"
                " radius = coalesce(?, radius), wording = coalesce(?, wording)",
                (
                    change.entry_id,
                    _or(change.wording, ""),
                    _or(change.radius, 0.0),
                    delta.seq,
                    _or(change.radius, None),
                    _or(change.wording, None),
                ),
            )
        for exception in delta.exceptions:
            self._connection.execute(
                "INSERT OR REPLACE INTO exceptions VALUES (?, ?)",
                (exception.feedback_id, json.dumps(exception.entry_ids)),
            )

    def _has_delta(self, delta: Delta) -> bool:
        found = self._connection.execute("SELECT 1 FROM deltas WHERE seq >= ?", (delta.seq,)).fetchone()
        return found is not None

    def _insert(self, table: str, **values: object) -> int | None:
        """Insert a row, or replace that of a request. Returns its id; None if the row exists already."""
        verb = "REPLACE" if table == "requests" else "IGNORE"
        cursor = self._connection.execute(
            f"INSERT OR {verb} INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})",
            tuple(values.values()),
        )
        return cursor.lastrowid if cursor.rowcount else None


def _load_describer(connection: sqlite3.Connection) -> StepDescriber:
    """A describer in the state after the deltas in the tables."""
    describer = StepDescriber()
    (term,) = connection.execute("SELECT coalesce(max(term), 0) FROM deltas").fetchone()
    describer.term = term
    describer.existing_entries = {
        entry_id for (entry_id,) in connection.execute("SELECT entry_id FROM entries WHERE removed_seq IS NULL")
    }
    describer.exceptions = {
        feedback_id: tuple(json.loads(entry_ids))
        for feedback_id, entry_ids in connection.execute("SELECT feedback_id, entry_ids FROM exceptions")
    }
    return describer


def _or(value: T | UnsetType, default: Any) -> Any:
    return default if value is UNSET else value


def _to_json(inputs: Inputs | tuple[Inputs, ...]) -> str:
    return msgspec.json.encode(inputs).decode()
