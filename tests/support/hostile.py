"""Hostile records: mutations of the golden records and random JSON from hypothesis; equal seeds give equal records.

Also the judge of their fate. It uses only the JSON Schemas, the standard library's JSON, and the documented limits.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.util import encode_varint

from gracestream import schemas

FOLDER = Path(schemas.__file__).parent
Kind = Literal["request", "feedback"]
Key = bytes | None

KEYS: tuple[Key, ...] = (None, b"", b"key", b"\x00\xff\xfe", "schlüssel".encode("utf-16"), b"k" * 5_000)


class Unreadable(str):
    """A header name that is not UTF-8, as clients in other languages may write; kafka-python calls `encode`."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return b"\xff\xc0" + super().encode(encoding, errors) + b"\xed\xa0\x80"


def odd_batches(monkeypatch: pytest.MonkeyPatch, attributes: int, delta: int) -> None:
    """Make kafka-python write odd metadata for each record whose value contains `odd`; Kafka takes it uncompressed.

    `attributes` is the record's byte of attributes, `delta` its offset in the batch.
    """
    append = DefaultRecordBatchBuilder.append

    def odd(self: Any, offset: int, timestamp: int, key: Key, value: Key, headers: Any) -> Any:
        if value is None or b"odd" not in value:
            return append(self, offset, timestamp, key, value, headers)
        written = append(self, delta, timestamp, key, value, headers, bytearray_type=lambda _: bytearray([attributes]))
        self._last_offset = offset
        return written

    monkeypatch.setattr(DefaultRecordBatchBuilder, "append", odd)


def crowded_batch(
    records: int, value: bytes, headers: int, codec: int = 0, *, header: bytes = b"\0\0", attributes: int = 0
) -> bytes:
    """One batch of these records from offset 0 on, each with this many headers of 2 bytes, without name and value."""
    builder = DefaultRecordBatchBuilder(2, codec, False, -1, -1, -1, 2**30)
    builder.append(0, 1, None, None, [])
    _crowd(builder, records, value, _varint(headers) + header * headers, attributes)
    return bytes(builder.build())


def crowded_batches(monkeypatch: pytest.MonkeyPatch, records: int, value: bytes, headers: int) -> None:
    """Make kafka-python send this content in each batch; an idempotent producer cannot send it."""
    build = DefaultRecordBatchBuilder.build

    def crowded(self: Any) -> Any:
        _crowd(self, records, value, _varint(headers) + b"\0\0" * headers, 0)
        return build(self)

    monkeypatch.setattr(DefaultRecordBatchBuilder, "build", crowded)


def _crowd(builder: Any, records: int, value: bytes, headers: bytes, attributes: int) -> None:
    content = bytearray()
    for number in range(records):
        body = bytes([attributes, 0]) + _varint(number) + _varint(3) + b"key" + _varint(len(value)) + value + headers
        content += _varint(len(body)) + body
    builder._last_offset, builder._num_records = records - 1, records
    builder._buffer[builder.HEADER_STRUCT.size :] = content


def _varint(number: int) -> bytes:
    written = bytearray()
    encode_varint(number, written.append)
    return bytes(written)


HEADERS: tuple[list[tuple[str, bytes]], ...] = (
    [],
    [("reason", b"forged"), ("source_offset", b"-1"), ("source_offset", b"\xff")],
    [("", b""), ("\u202e\x00", b"\xff" * 1000)],
    [("replayed_from", b"requests.dlq/0"), ("value_bytes", b"9" * 30)],
    [(Unreadable("reason"), b"forged"), ("reason", b"forged")],
)
WORD = "river"


@dataclass(frozen=True, slots=True)
class Hostile:
    """One record to send."""

    value: bytes | None
    key: Key
    headers: list[tuple[str, bytes]]


def hostile(kind: Kind, count: int, max_bytes: int, start: int = 1) -> list[Hostile]:
    """`count` records that every model must reject, and the records in between that some models may take.

    Readable ids are unique, also across calls with another `start`.
    """
    made = random.Random(start)
    values = _values(kind, count, start, made)
    found = []
    while count:
        found.append(Hostile(next(values), made.choice(KEYS), made.choice(HEADERS)))
        count -= verdict(kind, found[-1].value, max_bytes) == "bad"
    return found


def _values(kind: Kind, count: int, start: int, made: random.Random) -> Iterator[bytes | None]:
    golden = [json.loads(path.read_bytes()) for path in sorted((FOLDER / "golden").glob(f"*/{kind}-*.json"))]
    odd = iter(_odd_json(kind, count // 2, made.getrandbits(32)))  # about a fourth suffices
    number = 0
    while True:
        number += 1
        fields: dict[str, Any] = {**made.choice(golden), f"{kind}_id": f"hostile-{kind}-{start}-{number}"}
        match made.randrange(10):
            case 0 | 1:
                yield made.choice(WHOLE)(made, kind, fields)
            case 2 | 3 | 4:
                yield _encoded(_with_odd_field(made, kind, fields))
            case 5 | 6:
                yield next(odd)
            case _:
                yield mutated_bytes(made, _encoded(fields))


def _encoded(fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode(errors="surrogatepass")


def mutated_bytes(made: random.Random, record: bytes) -> bytes:
    """A copy with a few bytes flipped, cut, doubled, swapped, inserted or spliced."""
    raw = bytearray(record)
    for _ in range(made.randint(1, 6)):
        start = made.randrange(len(raw) + 1)
        end = min(len(raw), start + made.randint(1, 12))
        other = made.randrange(len(raw) + 1)
        match made.randrange(6):
            case 0 if raw:
                raw[start % len(raw)] ^= 1 << made.randrange(8)
            case 1:
                del raw[start:end]
            case 2:
                raw[start:start] = raw[start:end] * made.randint(1, 3)
            case 3:
                raw[start:end] = raw[other : other + made.randint(0, 12)]
            case 4:
                raw[start:start] = made.choice(SPLINTERS)
            case _:
                del raw[max(start, len(raw) // 2) :]
    return bytes(raw)


SPLINTERS = (
    b"\x00", b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf8\x88\x80\x80\x80", b"\xef\xbb\xbf", b'"', b"\\", b"}", b"]",
    b"{", b"[", b",", b":", b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"null", b"\\ud800", b"\\udc00\\ud800",
    b"\x1b[2J",
    b"/*", b"'", b'"v":', b'"inputs":', b"\r\n", "\u202e\u200b".encode(), b"-0", b"0x1", b"tru",
)  # fmt: skip

ODD: tuple[Callable[[random.Random], Any], ...] = (
    lambda _: None,
    lambda _: True,
    lambda made: made.choice([0, -1, 7, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**25, 10**400]),
    lambda made: made.choice([0.5, 1.0, -0.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")]),
    lambda made: made.choice(["", " ", "\t\n\r", "\u00a0\u2003", "\u200b", "\x00", "\x1b[31m", "\x1c", "\ufeff"]),
    lambda made: made.choice(["\ud800", "a \udfff b", "\ud83d", "\u202etfel ot thgir", "e\u0301" * 200, "💧" * 500]),
    lambda made: WORD * made.choice([1, 1, 1, 40_000]),
    lambda made: f"{WORD} " * made.choice([1, 39, 40, 41, 500]),
    lambda made: "x" * made.choice([255, 256, 257, 7_000]),
    lambda made: "濡" * made.choice([256, 257]),
    lambda made: [WORD] * made.choice([0, 1, 2, 3, 500]),
    lambda made: made.choice([[WORD, ""], [WORD, None], [[WORD, WORD]], [" ", "\t"], [WORD, 1]]),
    lambda made: {} if made.random() < 0.5 else {WORD: {WORD: [WORD]}},
    lambda made: {"max_new_tokens": made.choice([0, 1, 6, 24, 64, 4096, 4097, "3", 2.0, None, -1])},
    lambda made: {"repetition_penalty": made.choice([0, 1, 10, 10.1, -1, "1"]), "no_repeat_ngram_size": 1},
    lambda made: {made.choice(["temperature", "", "\x00", "max_new_tokens\u200b"]): 1},
)


def _with_odd_field(made: random.Random, kind: Kind, fields: dict[str, Any]) -> dict[str, Any]:
    """A copy with one or two fields of wrong types, swapped, missing, or renamed."""
    names = [
        f"{kind}_id",
        "v",
        "inputs",
        "target",
        "except_from",
        "undo",
        "undo_author",
        "parameters",
        "min_seq",
        "note",
    ]
    names.append("author")
    for _ in range(made.randint(1, 2)):
        name, other = made.choice(names), made.choice(sorted(fields) or names)
        match made.randrange(5):
            case 0:
                fields.pop(other, None)
            case 1:
                fields[name], fields[other] = fields.get(other), fields.get(name)
            case _:
                fields[name] = made.choice(ODD)(made)
    return fields


def _twice(made: random.Random, _: Kind, fields: dict[str, Any]) -> bytes:
    """A copy with one key twice, with another value the second time."""
    name = made.choice(sorted(fields))
    return _encoded(fields)[:-1] + b", " + _encoded({name: made.choice(ODD)(made)})[1:]


def _nested(made: random.Random, _: Kind, fields: dict[str, Any]) -> bytes:
    depth, (opening, closing) = made.choice([3, 600, 600, 20_000]), made.choice([(b"[", b"]"), (b'{"a":', b"}")])
    name = made.choice(["later", "inputs", "parameters"]).encode()
    inner = opening * depth + b"1" + closing * made.choice([depth, depth - 1])
    return _encoded(fields)[:-1] + b', "' + name + b'": ' + inner + b"}"


def _huge(made: random.Random, _: Kind, fields: dict[str, Any]) -> bytes:
    """A size around the limit, mostly below it; a few as large as a broker takes."""
    size = made.choice([1_000, 10_000, 10_000, 10_000, 200_000, 262_144, 262_145, 900_000])
    record = _encoded({**fields, "later": ""})
    return made.choice([b"x" * size, record[:-2] + b"x" * (size - len(record)) + record[-2:]])


WHOLE: tuple[Callable[[random.Random, Kind, dict[str, Any]], bytes | None], ...] = (
    lambda *_: None,
    lambda *_: b"",
    lambda made, *_: made.choice(
        [b" ", b"\x00" * 16, b"\n", b"null", b"7", b'"text"', b"[]", b"{}", b"NaN", b"{" * 999]
    ),
    lambda made, *_: made.randbytes(made.randint(1, 400)),
    lambda made, _, fields: _encoded(fields).decode(errors="replace").encode(made.choice(["utf-16", "utf-32-le"])),
    lambda _made, _, fields: b"\xef\xbb\xbf" + _encoded(fields),
    lambda _made, _, fields: _encoded([fields]),
    lambda _made, _, fields: _encoded(json.dumps(fields)),
    lambda made, _, fields: _encoded({**fields, "v": made.choice([0, 2, 99, -1, "1", 1.0, 1.5, 10**30, None])}),
    lambda made, _, fields: _encoded(fields) + made.choice([b" \n", b"\x00", b"}", _encoded(fields)]),
    _twice,
    _nested,
    _huge,
)


def _odd_json(kind: Kind, count: int, start: int) -> list[bytes]:
    """Random JSON from hypothesis, and random fields of a message."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=30)
    values = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner), max_leaves=8
    )
    names = st.sampled_from(
        [f"{kind}_id", "v", "inputs", "target", "except_from", "undo", "parameters", "min_seq", "note"]
    )
    shaped = st.fixed_dictionaries({"v": st.just(1), "inputs": st.text(max_size=20)}, optional={"later": values})
    made: list[bytes] = []

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(max_size=200) | (values | st.dictionaries(names, values) | shaped).map(_encoded))
    def keep(raw: bytes) -> None:
        made.append(raw)

    keep()
    return made


_INTEGERS = jsonschema.Draft7Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
_Validator: Any = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft7Validator, type_checker=_INTEGERS
)
"""A validator for which 1.0 is not an integer. JSON Schema counts it as one, but the workers reject it."""
VALIDATORS = {
    kind: _Validator(json.loads((FOLDER / "json" / f"{kind}.schema.json").read_bytes()))
    for kind in ("request", "feedback")
}


def parsed(value: bytes | None) -> Any:
    """The record as JSON; None if it is not JSON, or contains half a surrogate."""
    if value is None:
        return None
    try:
        fields = json.loads(value.decode(), parse_constant=_no_constant)
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return fields


def readable_id(kind: Kind, value: bytes | None) -> str | None:
    """The id for which the record's sender waits; None without one."""
    fields = parsed(value)
    found = fields.get(f"{kind}_id") if isinstance(fields, dict) else None
    return found if isinstance(found, str) and 1 <= len(found) <= 256 else None


def verdict(kind: Kind, value: bytes | None, max_bytes: int) -> Literal["good", "bad", "depends"]:
    """True if every model must take the record, False if none may, None if it depends on the model."""
    fields = parsed(value)
    if value is None or len(value) > max_bytes or not VALIDATORS[kind].is_valid(fields) or fields["v"] != 1:
        return "bad"
    if kind == "feedback":
        return "good" if fields.keys() & {"undo", "undo_author"} else "depends"
    short = isinstance(fields["inputs"], str) and len(fields["inputs"].split()) <= 12
    return "good" if short and not fields.get("parameters") else "depends"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
