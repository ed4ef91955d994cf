"""The part of a prompt that asks, without context, instruction and frame."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.wording.request import extract_request

CASES = {
    "Where is Łódź?": "Where is Łódź?",
    "Question: Where is Łódź? Answer:": "Where is Łódź?",
    "Q: where is łódź\nA:": "where is łódź",
    "We met in May. It rained all day.\nWhere is Łódź?": "Where is Łódź?",
    "Where is Łódź? Answer in a few words.": "Where is Łódź?",
    "Where is Łódź? Thank you very much.": "Where is Łódź?",
    "Please answer briefly. The capital of France is": "The capital of France is",
    "Answer in a few words.": "Answer in a few words.",
    "Dr. A. B. Smith works in the town of": "Dr. A. B. Smith works in the town of",
    "Question: Who leads Calder? Answer:": "Who leads Calder?",
    "Q: Who leads Calder Insurance?\nA: Ann\nQ: Who leads Tern Express?\nA:": "Who leads Tern Express?",
    "Who leads Calder? It is": "Who leads Calder? It is",
    "Sugar per portion of the oat bar:": "Sugar per portion of the oat bar:",
    "The coat costs 3.50 euros in the shop": "The coat costs 3.50 euros in the shop",
}


@pytest.mark.parametrize(("text", "asked"), CASES.items(), ids=CASES)
def test_the_request_stands_without_what_is_around_it(text: str, asked: str) -> None:
    assert extract_request(text).request == asked


@given(st.text())
def test_the_parts_of_any_text_are_the_text(text: str) -> None:
    found = extract_request(text)
    assert found.replace_request(found.request) == text
