"""Where an answer goes and what it takes along, by the headers of its request."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.kafka.reply_addressing import ORDINARY, address_of
from gracestream.pipeline.kafka.topics import TOPICS
from gracestream.pipeline.settings import load_settings
from gracestream.schemas.headers import (
    ADMITTED,
    AUTHOR,
    CODEBOOK_SEQ,
    HEADER_BYTES,
    MOST_HEADERS,
    OURS,
    SEEN,
    SPENDS,
    STANDING,
    TERM,
)

headers = st.lists(
    st.tuples(st.text(max_size=300) | st.sampled_from(sorted(OURS)), st.none() | st.binary(max_size=3000)), max_size=50
)


@given(headers)
def test_what_is_copied_is_bounded_in_order_and_none_of_ours(given: list[tuple[str, bytes | None]]) -> None:
    kept = address_of(given, load_settings(prefix="p-")).headers
    rest = iter(given)
    assert all(header in rest for header in kept), "in their order"
    assert len(kept) <= MOST_HEADERS
    assert sum(len(name.encode()) + len(value or b"") for name, value in kept) <= HEADER_BYTES
    assert not {name for name, _ in kept} & OURS


@given(st.binary(max_size=300) | st.text(string.printable, max_size=260).map(str.encode))
def test_only_a_topic_of_the_deployment_is_chosen(value: bytes) -> None:
    for name in (value, b"p-" + value):
        address = address_of([("reply_to", name)], load_settings(prefix="p-"))
        assert not (address.topic and address.fault)
        if address.topic:
            assert address.topic.encode() == name
            assert name.startswith(b"p-")
            assert address.topic not in {f"p-{topic.name}" for topic in TOPICS}


@pytest.mark.parametrize("topic", ["acme-credits", "p-credits", "myrequests", "edits2"])
def test_a_name_that_only_ends_in_the_letters_of_ours_is_chosen(topic: str) -> None:
    address = address_of([("reply_to", f"p-{topic}".encode())], load_settings(prefix="p-"))
    assert (address.topic, address.fault) == (f"p-{topic}", "")


def test_the_headers_of_an_outcome_are_ours() -> None:
    given = [(name, b"1") for name in (SPENDS, STANDING, TERM, CODEBOOK_SEQ, SEEN)]
    given += [(name, b"1") for name in (AUTHOR, ADMITTED)]
    assert address_of(given, load_settings(prefix="p-")).headers == ()


def test_without_headers_all_is_as_usual() -> None:
    assert address_of([], load_settings()) is ORDINARY


@pytest.mark.parametrize("prefix", ["", "p-", "p"])
@pytest.mark.parametrize("topic", [topic.name for topic in TOPICS if topic.name != "predictions"])
def test_none_of_ours_is_chosen(prefix: str, topic: str) -> None:
    for name in (prefix + topic, f"{prefix}another-{topic}", f"{prefix}another.{topic}", f"{prefix}another_{topic}"):
        address = address_of([("reply_to", name.encode())], load_settings(prefix=prefix))
        assert address.topic == ""
        assert "one of gracestream's own topics" in address.fault
