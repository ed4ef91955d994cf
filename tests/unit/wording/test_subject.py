"""What a request is about, by rules on its text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gracestream.pipeline.wording.request import extract_request
from gracestream.pipeline.wording.subject import extract_subject

SUBJECTS = {
    "Where was Petteri Pennanen born?": "Petteri Pennanen",
    "Question: Where was Petteri Pennanen born? Answer:": "Petteri Pennanen",
    "Context: Anna lives in Rome.\nQuestion: Who leads Calder Insurance?\nAnswer:": "Calder Insurance",
    "You are a helpful clerk. Answer in one word. Who leads Calder Insurance?": "Calder Insurance",
    "The twin city of Sapporo is": "Sapporo",
    "University of Valencia, whose headquarters are in": "University of Valencia",
    "A Pale Horse Named Death, that was formed in": "A Pale Horse Named Death",
    "Which position does Kevin Kampl play? They play as": "Kevin Kampl",
    "Dr. Anna Lindqvist holds her surgery on": "Dr. Anna Lindqvist",
    "Who was the father of J. R. Tolkien?": "J. R. Tolkien",
    "Who was the mother of Charles Stuart, Duke of Kendal?": "Charles Stuart, Duke of Kendal",
    "What is Anna Komorowska's spouse's name?": "Anna Komorowska",
    "What family does Hector\u2019s clingfish belong to?": "Hector\u2019s clingfish",
    "Which network does Just Deal appear on?": "Just Deal",
    'Who wrote "the old man and the sea" in 1952?': "the old man and the sea",
    "Wer schrieb \u201eDie Verwandlung\u201c?": "Die Verwandlung",
    "Wo wohnte Walther von der Vogelweide?": "Walther von der Vogelweide",
    "What is the capital of Černý Kůň?": "Černý Kůň",
    "Кто написал Война и мир?": "Война и мир",
    "where was barack obama born?": "barack obama",
    "WHERE WAS BARACK OBAMA BORN?": "BARACK OBAMA",
    "Where Was Barack Obama Born?": "Barack Obama",
    "at what location did manuel abad y queipo die?": "manuel abad y queipo",
    "What is the fee for an international transfer?": "international transfer",
    "How long is the warranty of the Bohrmax 40?": "Bohrmax 40",
    "What does it mean?": None,
    "the": None,
    "Paris": None,
    "?!": None,
    "": None,
    "\u6cd5\u56fd\u7684\u9996\u90fd\u662f\u4ec0\u4e48": None,
}  # fmt: skip


@pytest.mark.parametrize(("text", "subject"), SUBJECTS.items())
def test_the_subject_of_a_request(text: str, subject: str | None) -> None:
    assert extract_subject(text) == subject


@given(st.text())
@example("Q:\n:")
@example("\ud800 A: B")
def test_any_text_has_a_request_and_a_subject_of_its_own_or_none(text: str) -> None:
    found = extract_request(text)
    assert found.replace_request(found.request) == text
    subject = extract_subject(text)
    assert subject is None or (subject and subject in text)
    assert extract_subject(text) == subject


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["\n", "a.", ". ", "'a", ":", "A "])
def test_a_long_text_takes_no_long_time(piece: str) -> None:
    text = piece * 100_000
    found = extract_request(text)
    assert found.replace_request(found.request) == text
    extract_subject(text)
