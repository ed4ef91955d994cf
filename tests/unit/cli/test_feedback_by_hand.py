"""What people write becomes messages, or an error that says what is wrong with it."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, ValidationError

from gracestream.pipeline.client import build_feedback, build_request, parse_signed_feedback
from gracestream.schemas.messages import InvalidMessage, Request
from gracestream.workers.cli.common import convert_fields

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
fields = st.dictionaries(
    st.sampled_from(["v", "request_id", "feedback_id", "inputs", "target", "undo", "min_seq", "parameters"]),
    json_values,
)


@given(st.text(min_size=1).filter(str.strip))
def test_a_text_alone_is_a_request_with_an_id_of_its_own(text: str) -> None:
    made = build_request(text)
    assert made.inputs == text
    assert made.request_id != build_request(text).request_id


def test_what_is_given_wins_over_what_is_made_up() -> None:
    assert build_request({"inputs": "a", "request_id": "mine"}).request_id == "mine"
    assert build_feedback({"inputs": "a", "target": "b", "feedback_id": "mine"}).feedback_id == "mine"
    assert build_feedback({"undo": "mine"}).undo == "mine"


@given(json_values | fields)
def test_whatever_json_holds_is_a_message_or_an_invalid_one(value: Any) -> None:
    for make in (build_request, build_feedback):
        try:
            make(value)
        except InvalidMessage as error:
            assert str(error)  # noqa: PT017 - either way is right


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("id", "did you mean `feedback_id`?"),
        ("Target", "did you mean `target`?"),
        ("rephrase", "did you mean `rephrases`?"),
        ("auther", "did you mean `author`?"),
        ("except", "did you mean `except_from`?"),
        ("answer", "the fields are v, feedback_id, inputs, target, rephrases, except_from, undo, undo_author,"),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest_one(name: str, remedy: str) -> None:
    with pytest.raises(InvalidMessage, match=re.escape(f"unknown field `{name}`; {remedy}")):
        build_feedback({"inputs": "a", "target": "b", name: "c"})


def test_a_field_of_another_message_is_unknown() -> None:
    with pytest.raises(InvalidMessage, match=r"unknown field `id`; did you mean `request_id`\?"):
        build_request({"inputs": "a", "id": "mine"})
    with pytest.raises(InvalidMessage, match="unknown field `target`; the fields are v, request_id, inputs"):
        build_request({"inputs": "a", "target": "b"})


def test_a_name_steers_no_terminal() -> None:
    with pytest.raises(InvalidMessage) as caught:
        build_feedback({"inputs": "a", "target": "b", "\x1b[2J\ud800": "c"})
    assert "`\\x1b[2J\\ud800`" in str(caught.value)


def test_a_signed_line_keeps_what_its_author_signed() -> None:
    line = b'{"v":1,"feedback_id":"f","inputs":"a","target":"b","ticket":7,"signature":"s"}'
    assert parse_signed_feedback(line).record == line


class Line(Struct):
    inputs: str
    rephrase: str = ""


def test_a_line_of_a_file_may_have_the_fields_of_a_message_and_no_others() -> None:
    assert convert_fields({"inputs": "a", "request_id": "r", "parameters": {}}, Line, Request) == Line("a")
    assert convert_fields("a", Line, Request) == Line("a")
    with pytest.raises(InvalidMessage, match=r"unknown field `rephrases`; did you mean `rephrase`\?"):
        convert_fields({"inputs": "a", "rephrases": ["b"]}, Line, Request)
    with pytest.raises(ValidationError, match="Expected `object`, got `int`"):
        convert_fields(3, Line, Request)


@pytest.mark.parametrize("text", ["\ud800", "a \udfff b"])
def test_half_a_surrogate_is_an_invalid_text(text: str) -> None:
    with pytest.raises(InvalidMessage, match="a text is not Unicode"):
        build_request(json.loads(json.dumps(text)))
    with pytest.raises(InvalidMessage, match="a text is not Unicode"):
        build_feedback({"inputs": "a", "target": text})
