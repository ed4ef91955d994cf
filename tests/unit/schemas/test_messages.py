"""An invalid message is rejected with a reason that an operator can act on; no other error is raised."""

import json
import math
import tracemalloc
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from msgspec import UNSET

from gracestream.schemas.deltas import GENESIS_DIGEST, Tensor, decode_delta
from gracestream.schemas.messages import (
    JSON_MESSAGES,
    Feedback,
    InvalidMessage,
    Message,
    Outcome,
    Request,
    decode,
    encode,
    peek_id,
)

DEEP = 100_000
PATIENT = settings(deadline=None)

REQUEST = {"v": 1, "request_id": "r", "inputs": "x"}
CORRECTION = {"v": 1, "feedback_id": "f", "inputs": "x", "target": "y"}
USER = {"role": "user", "content": "x"}
UNDO = {"v": 1, "feedback_id": "f", "undo": "f0"}
EXCEPTION = {"v": 1, "feedback_id": "f", "inputs": "x", "except_from": "f0"}
ENTRY = {"entry_id": "e"}
TENSOR = {"dtype": "float32", "shape": [2], "data": bytes(8)}
DELTA = {
    "v": 1,
    "codebook": "c",
    "model": "m",
    "layer": "l",
    "term": 1,
    "seq": 1,
    "op": "add",
    "digest": GENESIS_DIGEST,
}


def delta_record(**fields: Any) -> bytes:
    """A record with some fields of its own, its digest still the last pair."""
    return msgspec.msgpack.encode({name: fields.get(name, DELTA.get(name)) for name in {**fields, **DELTA}})


def without(message: dict[str, Any], *names: str) -> bytes:
    return json.dumps({name: value for name, value in message.items() if name not in names}).encode()


class TestBadRecords:
    """Each message is rejected with a reason that an operator can act on."""

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
            (without(REQUEST | {"inputs": ["x"]}), Request, "`inputs` is a list of 1 text; give a text, a pair"),
            (without(REQUEST | {"inputs": ["x"] * 3}), Request, "`inputs` is a list of 3 texts"),
            (without(REQUEST | {"inputs": []}), Request, "`inputs` is an empty list; give a text, a pair"),
            (without(REQUEST | {"inputs": [USER, "x"]}), Request, "mixes texts with messages; give a pair"),
            (
                without(REQUEST | {"inputs": [USER, {"role": "tool", "content": "x"}]}),
                Request,
                r"`inputs\[1\].role` is 'tool'; use system, user or assistant",
            ),
            (
                without(REQUEST | {"inputs": [USER, {"role": "system", "content": "x"}, USER]}),
                Request,
                r"`inputs\[1\].role` is 'system'; only the first message",
            ),
            (
                without(REQUEST | {"inputs": [USER, {"role": "assistant", "content": "x"}]}),
                Request,
                r"`inputs\[1\].role` is 'assistant'; the last message must be the user's",
            ),
            (without(REQUEST | {"inputs": [{**USER, "role": "system"}]}), Request, "last message must be the user's"),
            (
                without(REQUEST | {"inputs": [{**USER, "content": " \n"}]}),
                Request,
                r"`inputs\[0\].content` is empty; give it a text",
            ),
            (
                without(REQUEST | {"inputs": [{**USER, "content": [{"type": "text"}]}]}),
                Request,
                r"got `array` - at `\$.inputs\[0\].content`; a message of a chat is \{\"role\"",
            ),
            (
                without(REQUEST | {"inputs": [{**USER, "content": None}]}),
                Request,
                "got `null`.*; a message of a chat is",
            ),
            (without(REQUEST | {"inputs": [{"role": "user"}]}), Request, "`content` .*; a message of a chat is"),
            (
                without(REQUEST | {"inputs": [{**USER, "name": "n"}]}),
                Request,
                "unknown field `name` .*; a message of a",
            ),
            (without(REQUEST | {"inputs": {"messages": [USER]}}), Request, r"got `object` - at `\$.inputs`"),
            (
                without(REQUEST | {"inputs": [USER] * 257}),
                Request,
                "`inputs` has 257 messages; the limit is 256: leave out the earliest turns",
            ),
            (without(CORRECTION | {"inputs": [{**USER, "role": "you"}]}), Feedback, "'you'; use system, user"),
            (without(REQUEST | {"inputs": ""}), Request, "`inputs` is empty"),
            (without(REQUEST | {"inputs": " \u00a0\n"}), Request, "`inputs` is empty"),
            (without(REQUEST | {"inputs": ["x", " "]}), Request, "`inputs` is empty"),
            (without(REQUEST | {"parameters": {"temperature": 1}}), Request, "unknown field `temperature`"),
            (without(REQUEST | {"parameters": {"max_new_tokens": 0}}), Request, "max_new_tokens"),
            (without(REQUEST | {"min_seq": -1}), Request, "min_seq"),
            (without(REQUEST | {"min_seq": None}), Request, "min_seq"),
            (
                without(CORRECTION, "target"),
                Feedback,
                "needs `inputs` and `target`, or `inputs` and `except_from`, or `undo`",
            ),
            (
                without(CORRECTION, "inputs"),
                Feedback,
                "needs `inputs` and `target`, or `inputs` and `except_from`, or `undo`",
            ),
            (without(UNDO, "undo"), Feedback, "needs `inputs` and `target`, or `inputs` and `except_from`, or `undo`"),
            (without(CORRECTION | {"target": "\t"}), Feedback, "`target` is empty"),
            (without(CORRECTION | {"inputs": "\t"}), Feedback, "`inputs` is empty"),
            (without(CORRECTION | {"rephrases": "x"}), Feedback, r"got `str` - at `\$.rephrases`"),
            (without(CORRECTION | {"rephrases": ["z", " "]}), Feedback, r"`rephrases\[1\]` is empty"),
            (without(CORRECTION | {"rephrases": [["z"]]}), Feedback, r"`rephrases\[0\]` is a list of 1 text"),
            (
                without(CORRECTION | {"rephrases": [[{**USER, "role": "you"}]]}),
                Feedback,
                r"`rephrases\[0\]\[0\].role` is 'you'",
            ),
            (without(CORRECTION | {"rephrases": [[{"role": "user"}]]}), Feedback, "`content` .*; a message of a chat"),
            (
                without(CORRECTION | {"rephrases": ["z", CORRECTION["inputs"]]}),
                Feedback,
                r"`rephrases\[1\]` is the same as `inputs`; leave it out",
            ),
            (
                without(CORRECTION | {"rephrases": ["z", "zz", "z"]}),
                Feedback,
                r"`rephrases\[2\]` is the same as `rephrases\[0\]`; leave it out",
            ),
            (
                without(CORRECTION | {"rephrases": [f"z{number}" for number in range(17)]}),
                Feedback,
                "`rephrases` has 17 items; the limit is 16",
            ),
            (
                without(EXCEPTION | {"rephrases": ["z"]}),
                Feedback,
                "`rephrases` belong to a correction, and this is an exception",
            ),
            (without(EXCEPTION | {"target": "y"}), Feedback, "not several"),
            (without(EXCEPTION | UNDO), Feedback, "not several"),
            (without(EXCEPTION, "inputs"), Feedback, "needs `inputs` and `target`, or `inputs` and `except_from`"),
            (without(EXCEPTION | {"except_from": ""}), Feedback, r"\$.except_from"),
            (without(UNDO | {"rephrases": ["z"]}), Feedback, "`rephrases` belong to a correction, and this is an undo"),
            (without(CORRECTION | UNDO), Feedback, "one of a correction .* and an undo, not several"),
            (without(UNDO | {"target": "y"}), Feedback, "one of a correction .* and an undo, not several"),
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
    def test_nested_without_end_are_rejected(
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

    def test_no_rephrases_are_as_good_as_absent(self) -> None:
        found = decode(without(CORRECTION | {"rephrases": []}), Feedback)
        assert found == decode(without(CORRECTION), Feedback)
        assert b"rephrases" not in encode(found)

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
        assert peek_id(b'{"' + field.encode() + b'":"id-1","x":' + b"9" * 5000 + b"e999}", field) == "id-1"

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
            b'{"request_id":"r","x":' + b"[" * DEEP,
            b'{"request_id":"r","x":' + b"[" * DEEP + b"]" * DEEP + b"}",
        ],
        ids=lambda value: repr(value[:40]) if value else repr(value),
    )
    def test_is_none_where_there_is_none_to_read(self, raw: bytes | None) -> None:
        assert peek_id(raw, "request_id") is None

    def test_a_huge_record_is_not_made_into_objects_for_its_id(self) -> None:
        raw = b'{"x": [' + b"[]," * 1_000_000 + b'[]], "request_id": "r"}'
        tracemalloc.start()
        try:
            assert peek_id(raw, "request_id") == "r"
            assert tracemalloc.get_traced_memory()[1] < 2 * len(raw)
        finally:
            tracemalloc.stop()


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
    def test_nested_without_end_are_rejected(self, opening: bytes) -> None:
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
        back = Tensor.from_array(array).array()
        assert (back.shape, back.dtype, back.tobytes()) == (array.shape, np.dtype("<f4"), array.tobytes())

    def test_do_not_mind_strides_byte_order_or_width(self) -> None:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        for other in (array.T.copy().T, array.astype(">f4"), array.astype(np.float64), array[::-1][::-1]):
            assert Tensor.from_array(other) == Tensor.from_array(array)

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e39])
    def test_are_not_made_of_numbers_that_float32_cannot_hold(self, number: float) -> None:
        with pytest.raises(ValueError, match="not finite"):
            Tensor.from_array(np.array([0.0, number]))

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
