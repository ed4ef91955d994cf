"""Any bytes are read as a whole message or rejected with a reason; a valid message comes back unchanged."""

import contextlib
import datetime as dt
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import UNSET

from gracestream import schemas
from gracestream.schemas.deltas import (
    GENESIS_DIGEST,
    Cause,
    Delta,
    EntryChange,
    Op,
    Tensor,
    chain_digest,
    decode_delta,
    seal_delta,
)
from gracestream.schemas.generate import SCHEMA_TYPES, json_schema
from gracestream.schemas.messages import (
    JSON_MESSAGES,
    AppliedEdit,
    ChatMessage,
    Feedback,
    InvalidMessage,
    LeftOut,
    Message,
    NearMiss,
    Outcome,
    Outputs,
    Parameters,
    Prediction,
    Request,
    SnapshotManifest,
    Status,
    decode,
    encode,
    peek_id,
)
from tests.support.examples import examples

GOLDEN = Path(schemas.__file__).parent / "golden"
JSON_RECORDS = [path.read_bytes() for path in sorted(GOLDEN.glob("*/*.json"))]
DELTA_RECORDS = [path.read_bytes() for path in sorted(GOLDEN.glob("*/*.msgpack"))]
VALIDATORS = {kind: jsonschema.Draft7Validator(json_schema(kind)) for kind in SCHEMA_TYPES.values()}
THOROUGH = examples(3)

# Strategies of valid messages.

VERSIONS = st.just(1)
TEXTS = st.text(max_size=40)
FILLED = TEXTS.filter(str.strip)
IDS = st.text(min_size=1, max_size=256)
COUNTS = st.integers(0, 2**63 - 1)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
TURNS = st.lists(st.builds(ChatMessage, st.sampled_from(["user", "assistant"]), FILLED), max_size=4)
CHATS = st.builds(
    lambda system, turns, last: (*system, *turns, ChatMessage("user", last)),
    st.lists(st.builds(ChatMessage, st.just("system"), FILLED), max_size=1),
    TURNS,
    FILLED,
)
INPUTS = FILLED | st.tuples(FILLED, FILLED) | CHATS


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.just(UNSET) | strategy


REQUESTS = st.builds(
    Request,
    v=VERSIONS,
    request_id=IDS,
    inputs=INPUTS,
    parameters=st.builds(
        Parameters,
        max_new_tokens=maybe(st.integers(1, 4096)),
        min_new_tokens=maybe(st.integers(0, 4096)),
        repetition_penalty=maybe(st.floats(0, 10, exclude_min=True)),
        no_repeat_ngram_size=maybe(st.integers(0, 64)),
    ),
    min_seq=maybe(COUNTS),
)
PREDICTIONS = st.builds(
    Prediction,
    v=VERSIONS,
    request_id=TEXTS,
    outputs=maybe(
        st.builds(
            Outputs,
            text=maybe(TEXTS),
            label=maybe(TEXTS),
            probabilities=maybe(st.dictionaries(TEXTS, NUMBERS, max_size=4)),
        )
    ),
    score=maybe(NUMBERS),
    edit=maybe(st.builds(AppliedEdit, entry_id=TEXTS, distance=NUMBERS, radius=NUMBERS)),
    near_miss=maybe(st.builds(NearMiss, entry_id=TEXTS, distance=NUMBERS, radius=NUMBERS, reason=st.just("answer"))),
    codebook_seq=COUNTS,
    term=COUNTS,
    model=TEXTS,
    replica=TEXTS,
    latency_ms=NUMBERS,
    error=maybe(TEXTS),
)
NOTES = {
    "v": VERSIONS,
    "feedback_id": IDS,
    "request_id": maybe(TEXTS),
    "author": maybe(IDS),
    "note": maybe(TEXTS),
    "signature": maybe(TEXTS),
}
FEEDBACK = st.one_of(
    st.lists(INPUTS, min_size=1, max_size=5, unique=True).flatmap(
        lambda texts: st.builds(
            Feedback, inputs=st.just(texts[0]), rephrases=st.just(tuple(texts[1:])), target=FILLED, **NOTES
        )
    ),
    st.builds(Feedback, undo=IDS, **NOTES),
    st.builds(Feedback, undo_author=IDS, **NOTES),
)
OUTCOMES = st.builds(
    Outcome,
    v=VERSIONS,
    feedback_id=TEXTS,
    status=st.sampled_from(Status.__args__),  # type: ignore[attr-defined]
    entry_id=maybe(TEXTS),
    seq=maybe(COUNTS),
    steps=maybe(COUNTS),
    loss=maybe(NUMBERS),
    seconds=maybe(NUMBERS),
    reason=maybe(TEXTS),
    left_out=st.lists(st.builds(LeftOut, rephrase=st.integers(1, 16), reason=TEXTS), max_size=3).map(tuple),
)
MANIFESTS = st.builds(
    SnapshotManifest,
    v=VERSIONS,
    codebook=TEXTS,
    model=maybe(TEXTS),
    layer=maybe(TEXTS),
    seq=COUNTS,
    term=COUNTS,
    digest=TEXTS,
    uri=TEXTS,
    sha256=TEXTS,
    entries=COUNTS,
    bytes=COUNTS,
    offset=maybe(COUNTS),
)
TENSORS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=4).map(
    lambda numbers: Tensor.from_array(np.array(numbers, np.float32))
)
RADIUS_LIMIT = float(np.finfo(np.float32).max)
DELTAS = st.builds(
    Delta,
    v=VERSIONS,
    codebook=TEXTS,
    model=TEXTS,
    layer=TEXTS,
    term=st.integers(1, 2**53 - 1),
    seq=st.integers(1, 2**53 - 1),
    op=st.sampled_from(Op.__args__),  # type: ignore[attr-defined]
    entries=st.lists(
        st.builds(
            EntryChange,
            entry_id=TEXTS,
            key=maybe(TENSORS),
            value=maybe(TENSORS),
            radius=maybe(st.floats(0, RADIUS_LIMIT)),
            label=maybe(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(tuple)),
            removed=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    cause=maybe(
        st.builds(
            Cause,
            feedback_id=TEXTS,
            offset=COUNTS,
            entry_id=maybe(TEXTS),
            query=maybe(TENSORS),
            supersedes=st.lists(TEXTS, max_size=2).map(tuple),
            traffic=maybe(st.dictionaries(TEXTS, COUNTS, max_size=2)),
        )
    ),
    environment=maybe(st.dictionaries(TEXTS, TEXTS, max_size=2)),
    digest=st.just(GENESIS_DIGEST),
)


class TestRoundTrip:
    @given(REQUESTS | PREDICTIONS | FEEDBACK | OUTCOMES | MANIFESTS)
    def test_every_valid_message_comes_back_equal_and_fits_its_schema(self, message: Message) -> None:
        raw = encode(message)
        assert decode(raw, type(message)) == message
        VALIDATORS[type(message)].validate(json.loads(raw))

    @given(REQUESTS)
    def test_the_id_of_a_request_can_be_peeked(self, request: Request) -> None:
        assert peek_id(encode(request), "request_id") == request.request_id

    @given(DELTAS, st.binary(min_size=32, max_size=32))
    def test_every_sealed_delta_comes_back_equal_continues_the_chain_and_fits_its_schema(
        self, delta: Delta, previous: bytes
    ) -> None:
        record, sealed = seal_delta(delta, previous)
        assert decode_delta(record) == sealed
        assert sealed.digest == chain_digest(previous, record)
        assert sealed == msgspec.structs.replace(delta, digest=sealed.digest)
        VALIDATORS[Delta].validate(json.loads(msgspec.json.encode(sealed)))


# Fuzzing. A failure here may also be a crash of the interpreter, which no assertion can catch.


@st.composite
def mutated(draw: st.DrawFn, records: list[bytes]) -> bytes:
    """A golden record with a few bytes replaced, inserted, removed or doubled, perhaps cut short."""
    record = bytearray(draw(st.sampled_from(records)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(record)))
        end = min(len(record), start + draw(st.integers(0, 8)))
        record[start:end] = draw(st.binary(max_size=8) | st.just(bytes(record[start:end] * 2)))
    return bytes(record[: draw(st.none() | st.integers(0, len(record)))])


def anything(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=6,
    )


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
JSON_VALUES = anything(SCALARS)
MSGPACK_VALUES = anything(
    SCALARS
    | st.binary(max_size=40)
    | st.datetimes(timezones=st.just(dt.UTC))
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=16))
)


@st.composite
def tampered(draw: st.DrawFn, records: list[Any], values: st.SearchStrategy[Any]) -> Any:
    """A decoded golden record with one of its parts, at any depth, replaced by any value."""
    root: Any = {"record": draw(st.sampled_from(records))}
    root = (
        json.loads(json.dumps(root)) if values is JSON_VALUES else msgspec.msgpack.decode(msgspec.msgpack.encode(root))
    )
    node, part = root, "record"
    while draw(st.booleans()) and isinstance(node[part], dict | list) and node[part]:
        node = node[part]
        part = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    node[part] = draw(values)
    return root["record"]


def read_message(raw: bytes) -> None:
    """Decode as every kind; what decodes also encodes, and decodes again to the same."""
    for kind in JSON_MESSAGES:
        with contextlib.suppress(InvalidMessage):
            message = decode(raw, kind)
            VALIDATORS[kind].validate(json.loads(raw))
            with contextlib.suppress(OverflowError):  # a plain count beyond 64 bits can be read, not written
                assert decode(encode(message), kind) == message
    peek_id(raw, "request_id")
    peek_id(raw, "feedback_id")


def read_delta(record: bytes) -> None:
    """Decode, and read every tensor; a tensor may be rejected by ValueError only."""
    try:
        delta = decode_delta(record)
    except InvalidMessage:
        return
    cause = delta.cause
    tensors = [tensor for entry in delta.entries for tensor in (entry.key, entry.value)]
    tensors += [] if isinstance(cause, msgspec.UnsetType) else [cause.query]
    for tensor in tensors:
        with contextlib.suppress(ValueError):
            if not isinstance(tensor, msgspec.UnsetType):
                assert np.isfinite(tensor.array()).all()
    assert all(isinstance(entry.radius, msgspec.UnsetType) or 0 <= entry.radius < math.inf for entry in delta.entries)
    record, sealed = seal_delta(delta, GENESIS_DIGEST)
    assert decode_delta(record) == sealed


class TestFuzz:
    @THOROUGH
    @given(st.binary(max_size=200))
    @example(b'{"v":1,"request_id":"r","inputs":["",""]}')
    def test_arbitrary_bytes_are_read_or_rejected(self, raw: bytes) -> None:
        read_message(raw)
        read_delta(raw)

    @THOROUGH
    @given(mutated(JSON_RECORDS))
    def test_mutations_of_golden_messages_are_read_or_rejected(self, raw: bytes) -> None:
        read_message(raw)

    @THOROUGH
    @given(mutated(DELTA_RECORDS))
    def test_mutations_of_golden_deltas_are_read_or_rejected(self, record: bytes) -> None:
        read_delta(record)

    @THOROUGH
    @given(tampered([json.loads(raw) for raw in JSON_RECORDS], JSON_VALUES))
    def test_golden_messages_with_a_foreign_part_are_read_or_rejected(self, message: Any) -> None:
        read_message(msgspec.json.encode(message))

    @THOROUGH
    @given(tampered([msgspec.msgpack.decode(record) for record in DELTA_RECORDS], MSGPACK_VALUES))
    def test_golden_deltas_with_a_foreign_part_are_read_or_rejected(self, delta: Any) -> None:
        read_delta(msgspec.msgpack.encode(delta))
