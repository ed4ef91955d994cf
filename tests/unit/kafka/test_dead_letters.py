"""A dead letter says why it is there and where it came from, whatever it holds, and always fits its queue."""

import hashlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gracestream import schemas
from gracestream.pipeline.kafka import dead_letters
from gracestream.pipeline.kafka.dead_letters import MAX_REASON_CHARACTERS, dead_letter_for
from gracestream.pipeline.kafka.lenient_records import MAX_UNTRUNCATED_BYTES, TRUNCATED_BYTES
from gracestream.schemas.deltas import MAX_DELTA_BYTES
from gracestream.schemas.messages import escape_unprintable, to_one_line

DOCUMENT = yaml.safe_load((Path(schemas.__file__).parent / "asyncapi.yaml").read_text(encoding="utf-8"))
DOCUMENTED = DOCUMENT["components"]["messages"]["rejected"]["headers"]
ANY_TEXT = st.text(st.characters())
"""Half surrogates too."""


@given(
    reason=ANY_TEXT,
    name=st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True),
    partition=st.integers(0, 2**31 - 1),
    offset=st.integers(0, 2**63 - 1),
)
def test_its_headers_tell_the_reason_and_the_place(reason: str, name: str, partition: int, offset: int) -> None:
    headers = dict(dead_letter_for(reason, b"k", b"v", name, partition, offset).headers)
    assert {header: value.decode() for header, value in headers.items()} == {
        "reason": escape_unprintable(reason),
        "source_topic": name,
        "source_partition": str(partition),
        "source_offset": str(offset),
    }


@given(key=st.none() | st.binary(), value=st.none() | st.binary())
def test_it_keeps_key_and_value_and_can_always_be_sent(key: bytes | None, value: bytes | None) -> None:
    letter = dead_letter_for("why", key, value, "requests", 0, 0)
    assert letter.value == value
    assert letter.key == key or (letter.key == b"" and key is None and value is None)
    assert not (letter.key is None and letter.value is None)


def test_it_is_whole_as_long_as_it_fits() -> None:
    value = bytes(MAX_UNTRUNCATED_BYTES - 3)
    letter = dead_letter_for("why", b"key", value, "requests", 0, 0)
    assert letter.value is value
    assert len(letter.headers) == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, bytes(MAX_UNTRUNCATED_BYTES + 1)),
        (b"key", bytes(MAX_UNTRUNCATED_BYTES)),
        (bytes(MAX_UNTRUNCATED_BYTES + 1), None),
        (bytes(MAX_UNTRUNCATED_BYTES), b"x" * 20_000),
    ],
    ids=["a value", "a value with its key", "a key", "both"],
)
def test_one_too_large_is_cut_and_says_what_it_was(key: bytes | None, value: bytes | None) -> None:
    letter = dead_letter_for("why", key, value, "requests", 0, 0)
    headers = {name: content.decode() for name, content in letter.headers}
    assert letter.key == (None if key is None else key[:TRUNCATED_BYTES])
    assert letter.value == (None if value is None else value[:TRUNCATED_BYTES])
    for name, part in (("key", key or b""), ("value", value or b"")):
        assert (f"{name}_bytes" in headers) == (len(part) > TRUNCATED_BYTES)
        if len(part) > TRUNCATED_BYTES:
            assert headers[f"{name}_bytes"] == str(len(part))
            assert headers[f"{name}_sha256"] == hashlib.sha256(part).hexdigest()
    assert headers.keys() <= DOCUMENTED["properties"].keys()


@given(reason=ANY_TEXT)
def test_its_headers_leave_room_for_the_largest_that_is_kept_whole(reason: str) -> None:
    letter = dead_letter_for(reason * 1000, None, None, "t" * 249, 2**31 - 1, 2**63 - 1)
    headers = sum(len(name) + len(content) + 20 for name, content in letter.headers)
    assert len(letter.headers[0][1].decode()) <= MAX_REASON_CHARACTERS
    assert MAX_UNTRUNCATED_BYTES + headers + 1000 < MAX_DELTA_BYTES


def test_its_headers_are_the_documented_ones() -> None:
    assert [header for header, _ in dead_letter_for("why", None, b"", "requests", 0, 0).headers] == DOCUMENTED[
        "required"
    ]


def test_both_topics_with_strangers_have_a_queue() -> None:
    assert {f"{source}.dlq" for source in dead_letters.DLQ_TOPICS} == set(dead_letters.DLQ_TOPICS.values())


@given(text=ANY_TEXT)
def test_what_is_printed_steers_no_terminal_and_can_be_encoded(text: str) -> None:
    assert escape_unprintable(text).isprintable()
    assert escape_unprintable(text).encode().decode() == escape_unprintable(text)


@pytest.mark.parametrize("text", ["déjà vu, 濡れ, 💧", "C:\\temp"])
def test_what_can_be_read_is_printed_as_it_is(text: str) -> None:
    assert escape_unprintable(text) == text


def test_the_reason_for_an_error_holds_no_control_characters() -> None:
    assert to_one_line(ValueError("a\x1b[2J\n b \u202e \ud800")) == "a\\x1b[2J b \\u202e \\ud800"
