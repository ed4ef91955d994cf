"""Where an answer goes and what it takes along, by the headers of its request."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.kafka.reply_addressing import DEFAULT_REPLY_ADDRESS, resolve_reply_address
from gracestream.pipeline.kafka.topics import TOPICS
from gracestream.pipeline.settings import load_settings
from gracestream.schemas.headers import (
    ACCEPTED_AT_HEADER,
    AUTHOR_HEADER,
    CODEBOOK_SEQ_HEADER,
    CONTEXT_HEADER,
    MAX_COPIED_HEADER_BYTES,
    MAX_COPIED_HEADERS,
    RESERVED_HEADERS,
    SPENT_MARK_HEADER,
    STANDING_HEADER,
    TERM_HEADER,
)

headers = st.lists(
    st.tuples(st.text(max_size=300) | st.sampled_from(sorted(RESERVED_HEADERS)), st.none() | st.binary(max_size=3000)),
    max_size=50,
)


@given(headers)
def test_what_is_copied_is_bounded_in_order_and_none_of_ours(given: list[tuple[str, bytes | None]]) -> None:
    kept = resolve_reply_address(given, load_settings(topic_prefix="p-").kafka).headers
    rest = iter(given)
    assert all(header in rest for header in kept), "in their order"
    assert len(kept) <= MAX_COPIED_HEADERS
    assert sum(len(name.encode()) + len(value or b"") for name, value in kept) <= MAX_COPIED_HEADER_BYTES
    assert not {name for name, _ in kept} & RESERVED_HEADERS


@given(st.binary(max_size=300) | st.text(string.printable, max_size=260).map(str.encode))
def test_only_a_topic_of_the_deployment_is_chosen(value: bytes) -> None:
    for name in (value, b"p-" + value):
        address = resolve_reply_address([("reply_to", name)], load_settings(topic_prefix="p-").kafka)
        assert not (address.topic and address.error)
        if address.topic:
            assert address.topic.encode() == name
            assert name.startswith(b"p-")
            assert address.topic not in {f"p-{topic.name}" for topic in TOPICS}


@pytest.mark.parametrize("topic", ["acme-credits", "p-credits", "myrequests", "edits2"])
def test_a_name_that_only_ends_in_the_letters_of_ours_is_chosen(topic: str) -> None:
    address = resolve_reply_address([("reply_to", f"p-{topic}".encode())], load_settings(topic_prefix="p-").kafka)
    assert (address.topic, address.error) == (f"p-{topic}", "")


def test_the_headers_of_an_outcome_are_ours() -> None:
    given = [
        (name, b"1") for name in (SPENT_MARK_HEADER, STANDING_HEADER, TERM_HEADER, CODEBOOK_SEQ_HEADER, CONTEXT_HEADER)
    ]
    given += [(name, b"1") for name in (AUTHOR_HEADER, ACCEPTED_AT_HEADER)]
    assert resolve_reply_address(given, load_settings(topic_prefix="p-").kafka).headers == ()


def test_without_headers_all_is_as_usual() -> None:
    assert resolve_reply_address([], load_settings().kafka) is DEFAULT_REPLY_ADDRESS


@pytest.mark.parametrize("prefix", ["", "p-", "p"])
@pytest.mark.parametrize("topic", [topic.name for topic in TOPICS if topic.name != "predictions"])
def test_none_of_ours_is_chosen(prefix: str, topic: str) -> None:
    for name in (prefix + topic, f"{prefix}another-{topic}", f"{prefix}another.{topic}", f"{prefix}another_{topic}"):
        address = resolve_reply_address([("reply_to", name.encode())], load_settings(topic_prefix=prefix).kafka)
        assert address.topic == ""
        assert "one of gracestream's own topics" in address.error
