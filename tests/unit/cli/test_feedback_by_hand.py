"""What people write becomes messages, or an error that says what is wrong with it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.client import build_feedback, build_request
from gracestream.schemas.messages import InvalidMessage

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


@pytest.mark.parametrize("text", ["\ud800", "a \udfff b"])
def test_half_a_surrogate_is_an_invalid_text(text: str) -> None:
    with pytest.raises(InvalidMessage, match="a text is not Unicode"):
        build_request(json.loads(json.dumps(text)))
    with pytest.raises(InvalidMessage, match="a text is not Unicode"):
        build_feedback({"inputs": "a", "target": text})
