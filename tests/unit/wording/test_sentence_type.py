"""Questions become statements to complete, and statements questions, where a rule says how."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.wording.sentence_type import convert_sentence_type

BOTH_WAYS = [
    ("What is the capital of Mongolia?", "The capital of Mongolia is"),
    ("What was the mother tongue of Danielle Darrieux?", "The mother tongue of Danielle Darrieux was"),
    ("What is the strait between Spain and Morocco called?", "The strait between Spain and Morocco is called"),
    ("What are the colours of the Dutch flag?", "The colours of the Dutch flag are"),
]


@pytest.mark.parametrize(("question", "statement"), BOTH_WAYS)
def test_a_question_becomes_a_statement_and_the_other_way_round(question: str, statement: str) -> None:
    assert convert_sentence_type(question) == statement
    assert convert_sentence_type(statement) == question


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("who was the first emperor of Rome", "The first emperor of Rome was"),
        ("Who invented dynamite?", "Dynamite was invented by"),
        ("Who wrote the novel 'Emma'?", "The novel 'Emma' was written by"),
        ("The currency of Poland is called the", "What is the currency of Poland called?"),
        ("The largest organ is: ", "What is the largest organ?"),
    ],
)
def test_some_go_one_way(text: str, other: str) -> None:
    assert convert_sentence_type(text) == other


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Where is it?",
        "What is it?",
        "Who called?",
        "What is the place that Ann comes from?",
        "Danielle Darrieux, a native",
        "The Berlin Wall fell in the year",
        "What is the capital of Mongolia? And of Bhutan?",
        "Wer ist der Autor von Faust?",
    ],
)
def test_others_have_no_other_type(text: str) -> None:
    assert convert_sentence_type(text) is None


@given(st.text(max_size=40))
def test_any_text_is_read(text: str) -> None:
    for one in (text, f"What is the {text}?", f"Who painted {text}?", f"The {text} is"):
        other = convert_sentence_type(one)
        assert other is None or other.strip()
