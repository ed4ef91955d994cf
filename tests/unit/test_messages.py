"""Whatever bytes arrive, a message is read whole or refused with a reason; nothing else is raised."""

import contextlib
import datetime as dt
import json
import math
from pathlib import Path
from typing import Any, Literal

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from msgspec import UNSET

import schemas
from schemas.deltas import GENESIS, Cause, Delta, EntryChange, Op, Tensor, chain, decode_delta, seal
from schemas.generate import SCHEMAS, json_schema
from schemas.messages import (
    JSON_MESSAGES,
    AppliedEdit,
    Feedback,
    InvalidMessage,
    Message,
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

GOLDEN = Path(schemas.__file__).parent / "golden"
JSON_RECORDS = [path.read_bytes() for path in sorted(GOLDEN.glob("*/*.json"))]
DELTA_RECORDS = [path.read_bytes() for path in sorted(GOLDEN.glob("*/*.msgpack"))]
VALIDATORS = {kind: jsonschema.Draft7Validator(json_schema(kind)) for kind in SCHEMAS.values()}
DEEP = 100_000
PATIENT = settings(deadline=None)
THOROUGH = settings(deadline=None, max_examples=300)

REQUEST = {"v": 1, "request_id": "r", "inputs": "x"}
CORRECTION = {"v": 1, "feedback_id": "f", "inputs": "x", "target": "y"}
UNDO = {"v": 1, "feedback_id": "f", "undo": "f0"}
ENTRY = {"entry_id": "e"}
TENSOR = {"dtype": "float32", "shape": [2], "data": bytes(8)}
DELTA = {"v": 1, "codebook": "c", "model": "m", "layer": "l", "term": 1, "seq": 1, "op": "add", "digest": GENESIS}


def delta_record(**fields: Any) -> bytes:
    """A record with some fields of its own, its digest still the last pair."""
    return msgspec.msgpack.encode({name: fields.get(name, DELTA.get(name)) for name in {**fields, **DELTA}})


def without(message: dict[str, Any], *names: str) -> bytes:
    return json.dumps({name: value for name, value in message.items() if name not in names}).encode()


class TestBadRecords:
    """Each is refused with a reason that an operator can act on."""

    @pytest.mark.parametrize(
        ("raw", "kind", "reason"),
        [
            (None, Request, "no value"),
            (b"", Request, "truncated"),
            (b"hello", Request, "JSON is malformed"),
            (b"[]", Request, "Expected `object`, got `array`"),
            (b"null", Request, "Expected `object`, got `null`"),
            (b"\xef\xbb\xbf{}", Request, "JSON is malformed"),
            (b'{"v":1,"request_id":"r","inputs":"\xff"}', Request, "not UTF-8.* position 34"),
            (b'{"v":1,"request_id":"r","inputs":"x","later":"\xff"}', Request, "not UTF-8"),
            (b'{"v":1,"request_id":"r","inputs":"\xed\xa0\x80"}', Request, "not UTF-8"),
            (b'{"v":1,"request_id":"r","inputs":"\\ud800 and more"}', Request, "JSON is malformed"),
            (b'{"v":1,"request_id":"r","inputs":"\\ud800"}', Request, "surrogate|truncated"),
            (b'{"v":1,"request_id":"r","inputs":"\\udc00x"}', Request, "surrogate"),
            (b'{"v":1,"request_id":"r","inputs":"x"} {}', Request, "trailing characters"),
            (
                b'{"v":1,"request_id":"r","inputs":"x","min_seq":' + b"9" * 5000 + b"}",
                Request,
                r"out of range.*min_seq",
            ),
            (b'{"v":1,"request_id":"r","inputs":"x","min_seq":NaN}', Request, "JSON is malformed"),
            (without(REQUEST, "v"), Request, "missing required field `v`"),
            (without(REQUEST, "request_id"), Request, "missing required field `request_id`"),
            (without(REQUEST, "inputs"), Request, "missing required field `inputs`"),
            (without(REQUEST | {"v": "1"}), Request, r"Expected `int`, got `str` - at `\$.v`"),
            (without(REQUEST | {"v": 0}), Request, r"`int` >= 1 - at `\$.v`"),
            (without(REQUEST | {"v": 2}), Request, "schema version 2 is newer than 1"),
            (without(REQUEST | {"v": 2, "inputs": {"text": "x"}}), Request, "schema version 2 is newer than 1"),
            (without(REQUEST | {"v": 10**18}), Request, "is newer than 1"),
            (without(REQUEST | {"v": 10**4000}), Request, r"Expected `int` <= .* at `\$.v`"),
            (without(REQUEST | {"request_id": ""}), Request, r"length >= 1 - at `\$.request_id`"),
            (without(REQUEST | {"request_id": "r" * 257}), Request, r"length <= 256 - at `\$.request_id`"),
            (without(REQUEST | {"inputs": 7}), Request, r"got `int` - at `\$.inputs`"),
            (without(REQUEST | {"inputs": ["x"]}), Request, r"`array` of length 2 - at `\$.inputs`"),
            (without(REQUEST | {"inputs": ""}), Request, "`inputs` is empty"),
            (without(REQUEST | {"inputs": " \u00a0\n"}), Request, "`inputs` is empty"),
            (without(REQUEST | {"inputs": ["x", " "]}), Request, "`inputs` is empty"),
            (without(REQUEST | {"parameters": {"temperature": 1}}), Request, "unknown field `temperature`"),
            (without(REQUEST | {"parameters": {"max_new_tokens": 0}}), Request, "max_new_tokens"),
            (without(REQUEST | {"min_seq": -1}), Request, "min_seq"),
            (without(REQUEST | {"min_seq": None}), Request, "min_seq"),
            (without(CORRECTION, "target"), Feedback, "needs `inputs` and `target`, or `undo`"),
            (without(CORRECTION, "inputs"), Feedback, "needs `inputs` and `target`, or `undo`"),
            (without(UNDO, "undo"), Feedback, "needs `inputs` and `target`, or `undo`"),
            (without(CORRECTION | {"target": "\t"}), Feedback, "`target` is empty"),
            (without(CORRECTION | {"inputs": "\t"}), Feedback, "`inputs` is empty"),
            (without(CORRECTION | UNDO), Feedback, "not both"),
            (without(UNDO | {"target": "y"}), Feedback, "not both"),
            (without(UNDO | {"undo": ""}), Feedback, r"\$.undo"),
        ],
        ids=lambda value: repr(value[:60]) if isinstance(value, bytes) else None,
    )
    def test_say_what_is_wrong(self, raw: bytes | None, kind: type[Message], reason: str) -> None:
        with pytest.raises(InvalidMessage, match=reason):
            decode(raw, kind)

    def test_over_the_limit_name_both_sizes_and_are_not_parsed(self) -> None:
        with pytest.raises(InvalidMessage, match="has 2000 bytes; the limit is 1024"):
            decode(b"{" * 2000, Request, max_bytes=1024)

    def test_at_the_limit_pass(self) -> None:
        raw = without(REQUEST)
        assert decode(raw, Request, max_bytes=len(raw)).request_id == "r"

    @pytest.mark.parametrize("kind", JSON_MESSAGES)
    @pytest.mark.parametrize("field", ["later", "inputs", "parameters", "outputs", "v"])
    @pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
    def test_nested_without_end_are_refused(
        self, kind: type[Message], field: str, opening: bytes, closing: bytes
    ) -> None:
        start = b'{"' + field.encode() + b'":' + opening * DEEP
        for raw in (start, start + b"1" + closing * DEEP + b"}"):
            with pytest.raises(InvalidMessage, match="not a valid"):
                decode(raw, kind)

    def test_give_a_reason_of_one_short_line_whatever_they_hold(self) -> None:
        raw = without(REQUEST | {"parameters": {"one\ntwo " + "x" * 100_000: 1}})
        with pytest.raises(InvalidMessage, match=r"unknown field `one two .*… *.*at `\$.parameters`$") as caught:
            decode(raw, Request)
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)


class TestGoodRecords:
    @pytest.mark.parametrize("inputs", ["x", ("x", "y"), "\u200b", "\x00", "💧" * 1000])
    def test_inputs_are_a_text_or_a_pair(self, inputs: str | tuple[str, str]) -> None:
        assert decode(without(REQUEST | {"inputs": inputs}), Request).inputs == inputs

    def test_an_id_may_have_256_characters_of_any_script(self) -> None:
        assert decode(without(REQUEST | {"request_id": "濡" * 256}), Request).request_id == "濡" * 256

    def test_unknown_fields_are_ignored(self) -> None:
        plain = decode(without(CORRECTION), Feedback)
        assert decode(without(CORRECTION | {"later": {"v": [None]}}), Feedback) == plain

    @pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
    def test_a_number_that_is_not_finite_is_left_out(self, loss: float) -> None:
        outcome = Outcome(v=1, feedback_id="f", status="rejected", steps=100, loss=loss, reason="did not converge")
        assert decode(encode(outcome), Outcome) == msgspec.structs.replace(outcome, loss=UNSET)

    def test_absent_options_are_not_written(self) -> None:
        assert json.loads(encode(Request(v=1, request_id="r", inputs="x"))) == REQUEST


class TestPeekedId:
    @pytest.mark.parametrize("field", ["request_id", "feedback_id"])
    def test_is_found_in_a_record_that_is_otherwise_invalid(self, field: Literal["request_id", "feedback_id"]) -> None:
        assert peek_id(json.dumps({"v": 99, field: "id-1", "inputs": 7}).encode(), field) == "id-1"

    @pytest.mark.parametrize(
        "raw",
        [
            None,
            b"",
            b"{",
            b"[]",
            b"7",
            b'"request_id"',
            b"{}",
            b'{"request_id":7}',
            b'{"request_id":null}',
            b'{"request_id":""}',
            b'{"request_id":"' + b"r" * 257 + b'"}',
            b'{"request_id":"\xff"}',
            b'{"request_id":"\\ud800"}',
            b'{"request_id":"r","x":' + b"9" * 5000 + b"e999}",
            b'{"request_id":"r","x":' + b"[" * DEEP,
            b'{"request_id":"r","x":' + b"[" * DEEP + b"]" * DEEP + b"}",
        ],
        ids=lambda value: repr(value[:40]) if value else repr(value),
    )
    def test_is_none_where_there_is_none_to_read(self, raw: bytes | None) -> None:
        assert peek_id(raw, "request_id") is None


class TestBadDeltas:
    @pytest.mark.parametrize(
        ("record", "reason"),
        [
            (None, "no value"),
            (b"", "truncated"),
            (b"\xc1", "malformed"),
            (b"\x90", "Expected `object`, got `array`"),
            (msgspec.msgpack.encode(msgspec.msgpack.Ext(5, b"x")), "got `ext`"),
            (msgspec.msgpack.encode(DELTA) + bytes(32), "trailing characters"),
            (msgspec.msgpack.encode(DELTA)[:-1], "truncated"),
            (msgspec.msgpack.encode({1: 2, **DELTA}), "Expected `str`, got `int`"),
            (delta_record(v=2), "schema version 2 is newer than 1"),
            (delta_record(v=2, op="merge"), "schema version 2 is newer than 1"),
            (delta_record(v=2**63 - 1), "is newer than 1"),
            (delta_record(v=2**64 - 1), r"\$.v"),
            (delta_record(op="merge"), "Invalid enum value 'merge'"),
            (delta_record(term=0), r"\$.term"),
            (delta_record(seq=0), r"\$.seq"),
            (delta_record(term=2**53), r"\$.term"),
            (delta_record(seq=2**64 - 1), r"\$.seq"),
            (delta_record(digest=bytes(31)), "does not end with its digest"),
            (delta_record(digest=b""), "does not end with its digest"),
            (delta_record(digest="0" * 32), r"Expected `bytes`, got `str` - at `\$.digest`"),
            (msgspec.msgpack.encode({**DELTA, "region": "eu-1"}), "does not end with its digest"),
            (delta_record(entries=[{}]), r"missing required field `entry_id` - at `\$.entries\[0\]`"),
            (delta_record(entries=[ENTRY | {"label": [2**63]}]), r"\$.entries\[0\].label\[0\]"),
            (delta_record(entries=[ENTRY | {"label": [0.5]}]), r"\$.entries\[0\].label\[0\]"),
            (delta_record(entries=[ENTRY | {"key": TENSOR | {"dtype": "float64"}}]), "float64"),
            (delta_record(entries=[ENTRY | {"key": TENSOR | {"shape": [-1]}}]), r"\$.entries\[0\].key.shape\[0\]"),
            (delta_record(entries=[ENTRY | {"key": TENSOR | {"shape": [1] * 9}}]), r"\$.entries\[0\].key.shape"),
            (delta_record(entries=[ENTRY | {"key": TENSOR | {"data": "12345678"}}]), r"\$.entries\[0\].key.data"),
            (delta_record(cause={"feedback_id": "f"}), r"missing required field `offset` - at `\$.cause`"),
        ],
        ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else None,
    )
    def test_say_what_is_wrong(self, record: bytes | None, reason: str) -> None:
        with pytest.raises(InvalidMessage, match=reason):
            decode_delta(record)

    @pytest.mark.parametrize("radius", [math.nan, math.inf, -math.inf, -1.0, -5, 1e39, True, None, "1"])
    def test_name_a_radius_that_is_no_finite_distance(self, radius: Any) -> None:
        with pytest.raises(InvalidMessage, match=r"\$.entries\[0\].radius"):
            decode_delta(delta_record(entries=[ENTRY | {"radius": radius}]))

    @pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x81\x91"])
    def test_nested_without_end_are_refused(self, opening: bytes) -> None:
        for start in (b"", b"\x81\xa5later", b"\x81\xa7entries", b"\x82\xa1v\x01\xa5later"):
            with pytest.raises(InvalidMessage, match="not a valid delta"):
                decode_delta(start + opening * DEEP + b"\xc0")


class TestTensors:
    @PATIENT
    @given(
        npst.arrays(
            np.float32,
            npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
            elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
        )
    )
    def test_give_their_numbers_back_bit_for_bit(self, array: np.ndarray) -> None:
        back = Tensor.of(array).array()
        assert (back.shape, back.dtype, back.tobytes()) == (array.shape, np.dtype("<f4"), array.tobytes())

    def test_do_not_mind_strides_byte_order_or_width(self) -> None:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        for other in (array.T.copy().T, array.astype(">f4"), array.astype(np.float64), array[::-1][::-1]):
            assert Tensor.of(other) == Tensor.of(array)

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e39])
    def test_are_not_made_of_numbers_that_float32_cannot_hold(self, number: float) -> None:
        with pytest.raises(ValueError, match="not finite"):
            Tensor.of(np.array([0.0, number]))

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
    def test_are_not_read_where_a_number_is_not_finite(self, number: float) -> None:
        with pytest.raises(ValueError, match="not finite"):
            Tensor(dtype="float32", shape=(2,), data=np.array([0, number], "<f4").tobytes()).array()

    @pytest.mark.parametrize(
        "shape",
        [
            (2,),
            (0,),
            (2**32, 2**32),
            (2**62, 4),
            (2**31, 2**31, 4),
            (2**63,),
            (2**64 - 1, 2**64 - 1),
            (2**63 - 1, 2**63 - 1),
            (2**64 - 1,) * 8,
        ],
        ids=str,
    )
    @pytest.mark.parametrize("size", [1, 4])
    @pytest.mark.filterwarnings("error")
    def test_are_not_read_where_bytes_and_shape_disagree_even_if_the_product_overflows(
        self, shape: tuple[int, ...], size: int
    ) -> None:
        tensor = Tensor(dtype="float32", shape=shape, data=bytes(size))
        with pytest.raises(ValueError, match=f"{size} bytes do not fill"):
            tensor.array()

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("shape", [(0, 2**63 - 1), (0, 2**64 - 1), (2**64 - 1, 0)], ids=str)
    def test_are_not_read_where_an_empty_one_has_a_side_beyond_all_memory(self, shape: tuple[int, ...]) -> None:
        tensor = Tensor(dtype="float32", shape=shape, data=b"")
        with pytest.raises(ValueError, match=r"array is too big|dimension exceeded"):
            tensor.array()


# Strategies of valid messages.

VERSIONS = st.just(1)
TEXTS = st.text(max_size=40)
FILLED = TEXTS.filter(str.strip)
IDS = st.text(min_size=1, max_size=256)
COUNTS = st.integers(0, 2**63 - 1)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
INPUTS = FILLED | st.tuples(FILLED, FILLED)


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
    codebook_seq=COUNTS,
    term=COUNTS,
    model=TEXTS,
    replica=TEXTS,
    latency_ms=NUMBERS,
    error=maybe(TEXTS),
)
NOTES = {"request_id": maybe(TEXTS), "author": maybe(TEXTS), "note": maybe(TEXTS)}
FEEDBACK = st.builds(Feedback, v=VERSIONS, feedback_id=IDS, inputs=INPUTS, target=FILLED, **NOTES) | st.builds(
    Feedback, v=VERSIONS, feedback_id=IDS, undo=IDS, **NOTES
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
)
MANIFESTS = st.builds(
    SnapshotManifest,
    v=VERSIONS,
    codebook=TEXTS,
    seq=COUNTS,
    term=COUNTS,
    digest=TEXTS,
    uri=TEXTS,
    sha256=TEXTS,
    entries=COUNTS,
    bytes=COUNTS,
)
TENSORS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=4).map(
    lambda numbers: Tensor.of(np.array(numbers, np.float32))
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
    digest=st.just(GENESIS),
)


class TestRoundTrip:
    @PATIENT
    @given(REQUESTS | PREDICTIONS | FEEDBACK | OUTCOMES | MANIFESTS)
    def test_every_valid_message_comes_back_equal_and_fits_its_schema(self, message: Message) -> None:
        raw = encode(message)
        assert decode(raw, type(message)) == message
        VALIDATORS[type(message)].validate(json.loads(raw))

    @PATIENT
    @given(REQUESTS)
    def test_the_id_of_a_request_can_be_peeked(self, request: Request) -> None:
        assert peek_id(encode(request), "request_id") == request.request_id

    @PATIENT
    @given(DELTAS, st.binary(min_size=32, max_size=32))
    def test_every_sealed_delta_comes_back_equal_continues_the_chain_and_fits_its_schema(
        self, delta: Delta, previous: bytes
    ) -> None:
        record, sealed = seal(delta, previous)
        assert decode_delta(record) == sealed
        assert sealed.digest == chain(previous, record)
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
    """Decode, and read every tensor; a tensor may be refused by ValueError only."""
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
    record, sealed = seal(delta, GENESIS)
    assert decode_delta(record) == sealed


class TestFuzz:
    @THOROUGH
    @given(st.binary(max_size=200))
    @example(b'{"v":1,"request_id":"r","inputs":["",""]}')
    def test_arbitrary_bytes_are_read_or_refused(self, raw: bytes) -> None:
        read_message(raw)
        read_delta(raw)

    @THOROUGH
    @given(mutated(JSON_RECORDS))
    def test_mutations_of_golden_messages_are_read_or_refused(self, raw: bytes) -> None:
        read_message(raw)

    @THOROUGH
    @given(mutated(DELTA_RECORDS))
    def test_mutations_of_golden_deltas_are_read_or_refused(self, record: bytes) -> None:
        read_delta(record)

    @THOROUGH
    @given(tampered([json.loads(raw) for raw in JSON_RECORDS], JSON_VALUES))
    def test_golden_messages_with_a_foreign_part_are_read_or_refused(self, message: Any) -> None:
        read_message(msgspec.json.encode(message))

    @THOROUGH
    @given(tampered([msgspec.msgpack.decode(record) for record in DELTA_RECORDS], MSGPACK_VALUES))
    def test_golden_deltas_with_a_foreign_part_are_read_or_refused(self, delta: Any) -> None:
        read_delta(msgspec.msgpack.encode(delta))
