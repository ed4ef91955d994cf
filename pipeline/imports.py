"""Corrections that people made in other tools, as fields of feedback.

Guarantees:

1. An item gets the same feedback id each time, unless its content changes. So an export can be imported again: the
   editor answers a correction that it knows with `unchanged`.
2. An item that holds no correction is left out, with the reason. Any other fault is an error that names its place.

Sources: a CSV file with a header; items of a Langfuse dataset, from its API or its export (JSON, JSON Lines or CSV);
and annotated tasks of Label Studio (JSON).
"""

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from gracestream.pipeline.errors import UserError

Source = Literal["csv", "langfuse", "label-studio"]

CSV_COLUMNS = ("id", "inputs", "target", "author", "note", "request_id", "rephrases")
"""The columns of a CSV file. `inputs` and `target` are needed; `rephrases` has one on each line of its cell."""

CSV_DELIMITERS = ",;\t"

DIGEST_LENGTH = 16
"""Hexadecimal digits of the content in an id."""

ANSWER_TYPES = ("textarea", "choices")
"""The controls of Label Studio whose result is an answer."""


class ExportError(UserError):
    """A file that cannot be imported. The text names the place and the remedy."""


@dataclass(frozen=True, slots=True)
class ImportedItem:
    """One item of an export.

    Attributes:
        place: Where it is in the file.
        fields: Of the feedback; empty if it is left out.
        left_out: Why; empty if it is not.
    """

    place: str
    fields: Mapping[str, Any]
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Which fields of an item hold the request and the answer; empty: the only ones that can.

    Attributes:
        inputs: A key of `input` (Langfuse) or of `data` (Label Studio).
        target: A key of `expectedOutput` (Langfuse), or the name of a control (Label Studio).
    """

    inputs: str = ""
    target: str = ""


def read_export(path: Path, source: Source, names: FieldNames) -> Iterator[ImportedItem]:
    """The items of an export, in order.

    Raises:
        ExportError: the file cannot be read, or an item has a fault.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from error
    if source == "csv":
        yield from _read_csv(path, text)
        return
    convert = _from_langfuse if source == "langfuse" else _from_label_studio
    for place, item in _read_objects(path, text):
        yield from convert(place, item, names)


def _read_csv(path: Path, text: str) -> Iterator[ImportedItem]:
    for place, row in _csv_rows(path, text, CSV_COLUMNS, ("inputs", "target")):
        fields: dict[str, Any] = {name: value for name, value in row.items() if value.strip()}
        if "target" not in fields:
            yield ImportedItem(place, {}, "it has no target")
            continue
        own_id = fields.pop("id", "row")  # the content identifies a row without an id, because rows move
        if "rephrases" in fields:
            fields["rephrases"] = [line.strip() for line in fields["rephrases"].splitlines() if line.strip()]
        yield ImportedItem(place, _with_id(f"csv-{own_id}", fields))


def _csv_rows(
    path: Path, text: str, known: Sequence[str], needed: Sequence[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of a CSV file with a header, each with its place. `known` is empty if any column is allowed."""
    header = text.partition("\n")[0]
    delimiter = max(CSV_DELIMITERS, key=header.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    columns = [column.strip() for column in reader.fieldnames or ()]
    reader.fieldnames = columns
    if missing := [name for name in needed if name not in columns]:
        raise ExportError(f"{path} has no column {missing[0]!r}; its first line must name the columns")
    if unknown := [column for column in columns if known and column not in known]:
        raise ExportError(f"{path} has the column {unknown[0]!r}, which is unknown; the columns are {', '.join(known)}")
    try:
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise ExportError(f"{place}: it has not as many cells as the first line")
            yield place, row
    except csv.Error as error:
        raise ExportError(f"{path}, line {reader.line_num}: {error}") from error


def _read_objects(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a file, each with its place: of a JSON array, an API's page, JSON Lines, or a CSV file."""
    if path.suffix == ".csv":
        for place, row in _csv_rows(path, text, (), ()):
            yield place, {name: _json_or_text(value) for name, value in row.items()}
        return
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        found = [_decode_line(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if isinstance(found, dict):
        found = found["data"] if isinstance(found.get("data"), list) else [found]
    if not isinstance(found, list):
        raise ExportError(f"{path} holds no list of items")
    for number, item in enumerate(found, start=1):
        place = f"{path}, item {number}"
        if not isinstance(item, dict):
            raise ExportError(f"{place}: it is not an object")
        yield place, item


def _decode_line(path: Path, number: int, line: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ExportError(f"{path}, line {number}: it is not JSON: {error}") from error


def _json_or_text(value: str) -> Any:
    """A cell of a CSV export: Langfuse writes objects as JSON, and texts sometimes. A number is a text, too."""
    try:
        decoded = msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value
    return decoded if isinstance(decoded, str | dict | list) else value


def _from_langfuse(place: str, item: Mapping[str, Any], names: FieldNames) -> Iterator[ImportedItem]:
    """One item of a dataset. Its expected output is the right answer."""
    expected = item.get("expectedOutput", item.get("expected_output"))
    if str(item.get("status", "")).upper() == "ARCHIVED":
        yield ImportedItem(place, {}, "it is archived")
        return
    if expected in (None, ""):
        yield ImportedItem(place, {}, "it has no expected output")
        return
    if not item.get("id"):
        raise ExportError(f"{place}: it has no id")
    fields = {
        "inputs": _inputs(place, item.get("input"), names.inputs),
        "target": _answer(place, expected, names.target),
    }
    trace = item.get("sourceTraceId", item.get("source_trace_id"))
    fields |= {"note": f"Langfuse trace {trace}"} if trace else {}
    yield ImportedItem(place, _with_id(f"langfuse-{item['id']}", fields))


def _inputs(place: str, value: Any, name: str) -> Any:
    """A text, or the messages of a chat, in an item's input."""
    if isinstance(value, dict) and name:
        value = value.get(name)
    elif isinstance(value, dict) and isinstance(value.get("messages"), list):
        value = value["messages"]
    elif isinstance(value, dict):
        value = _only_text(place, value, "--inputs-field")
    if isinstance(value, list):
        try:
            return [{"role": message["role"], "content": message["content"]} for message in value]
        except (KeyError, TypeError) as error:
            raise ExportError(f"{place}: its messages have no role and content") from error
    if not isinstance(value, str):
        raise ExportError(f"{place}: its input is neither a text nor messages; name a field with --inputs-field")
    return value


def _answer(place: str, value: Any, name: str) -> str:
    """The text of an expected output."""
    if isinstance(value, dict) and name:
        value = value.get(name)
    elif isinstance(value, dict) and "content" in value:
        value = value["content"]
    elif isinstance(value, dict):
        value = _only_text(place, value, "--target-field")
    if not isinstance(value, str):
        raise ExportError(f"{place}: its expected output is no text; name a field with --target-field")
    return value


def _only_text(place: str, fields: Mapping[str, Any], option: str) -> str:
    texts = {name: value for name, value in fields.items() if isinstance(value, str)}
    if len(texts) != 1:
        raise ExportError(f"{place}: it has {len(texts)} texts ({', '.join(texts) or 'none'}); name one with {option}")
    (only,) = texts.values()
    return only


def _from_label_studio(place: str, task: Mapping[str, Any], names: FieldNames) -> Iterator[ImportedItem]:
    """The annotations of one task. Each is a correction."""
    data, annotations = task.get("data"), task.get("annotations")
    if not isinstance(data, dict) or not isinstance(annotations, list):
        raise ExportError(f"{place}: it is no task of Label Studio's JSON export")
    if not annotations:
        yield ImportedItem(place, {}, "it has no annotation")
    for annotation in annotations:
        if annotation.get("was_cancelled"):
            yield ImportedItem(place, {}, "its annotation was skipped")
            continue
        answer = _annotated_answer(place, annotation.get("result", ()), names.target)
        if answer is None:
            yield ImportedItem(place, {}, "its annotation has no answer")
            continue
        author = annotation.get("completed_by")
        email = author.get("email") if isinstance(author, dict) else None
        fields = {"inputs": _inputs(place, data, names.inputs), "target": answer}
        fields |= {"author": email} if email else {}
        yield ImportedItem(place, _with_id(f"label-studio-{task.get('id')}-{annotation.get('id')}", fields))


def _annotated_answer(place: str, results: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """The text or the choice of an annotation; None if it has none."""
    found = [
        result for result in results if result.get("type") in ANSWER_TYPES and name in ("", result.get("from_name"))
    ]
    if not found:
        return None
    controls = sorted({str(result.get("from_name")) for result in found})
    if len(controls) > 1:
        raise ExportError(f"{place}: it has several answers ({', '.join(controls)}); name one with --target-field")
    value = found[-1].get("value", {})
    texts = value.get("text") if found[-1]["type"] == "textarea" else value.get("choices")
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or len(texts) != 1 or not isinstance(texts[0], str):
        raise ExportError(f"{place}: {controls[0]} has not exactly one answer")
    return texts[0]


def _with_id(own_id: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with an id, which names the item and its content: a changed item is another correction."""
    content = msgspec.json.encode([fields["inputs"], fields["target"], fields.get("rephrases", [])])
    return {"feedback_id": f"{own_id}-{hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]}", **fields}
