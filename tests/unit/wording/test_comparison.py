"""The wording check: what asks for the same in other words agrees, and what asks for something else does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.wording.comparison import (
    MAX_WORDS,
    common_words,
    contrast_groups,
    extract_wording,
    find_disagreement,
    is_same_word,
)
from gracestream.schemas.deltas import MAX_WORDING
from tests.support.examples import examples

QUESTION = "Who manages the branch in Leeds?"

SAME = [
    (QUESTION, "WHO MANAGES THE BRANCH IN LEEDS?"),
    (QUESTION, "who manages the branch in leeds"),
    (QUESTION, "Question: Who manages the branch in Leeds? Answer:"),
    (QUESTION, "We met on 3 May 2019.\nWho manages the branch in Leeds? "),
    (QUESTION, "Who manages the branch in Leeds? Answer in a few words."),
    (QUESTION, "Who is the manager of the branch in Leeds?"),
    (QUESTION, "Who mangaes the branch in Leeds?"),
    (QUESTION, "Who manages Leeds' branch?"),
    ("What year was the bridge built?", "In which year was the construction of the bridge finished?"),
    ("What is Ann's occupation?", "What does Ann do for a living?"),
    ("Three cards are free", "3 cards are free"),
    ("This is Anna", "Q: this is anna\nA:"),
    ("It isn't allowed in Leeds", "It is not allowed in Leeds"),
    ("The fee is 1,000 euros", "The fee is 1000 euros"),
    ("Où se trouve Łódź ?", "où se trouve łódź"),
    ("Who is Gauß?", "WHO IS GAUSS?"),
    ("Where is İzmir?", "WHERE IS IZMIR?"),
    ("Where is Zürich?", "where is zu\u0308rich"),
    ("Where is Zürich?", "Where is Zurich?"),
    ("Who won World War II?", "Who won World War 2?"),
    ("Who was Louis XVII?", "who was louis xvii"),
    ("The 2nd floor sells", "the 2 floor sells"),
    ("It costs 1000.50 euros", "It costs 1,000.5 euros"),
    ("Ward \u0661\u0662 is open", "Ward 12 is open"),
    ("Was ist die Hauptstadt von Frankreich?", "Wie heißt die Hauptstadt von Frankreich?"),
    ("\u6cd5\u56fd\u7684\u9996\u90fd\u662f\u4ec0\u4e48", "\u4ec0\u4e48\u662f\u6cd5\u56fd\u7684\u9996\u90fd"),
]

DIFFERENT = [
    ("The fee in 2021 was", "The fee in 2023 was", "numbers"),
    ("The fee in 2021 was", "The fee was", "numbers"),
    ("Three cards are free", "Four cards are free", "numbers"),
    ("If the invoice has been paid", "If the invoice has not been paid", "negated"),
    ("Staff with a key", "Staff without a key", "negated"),
    ("It is allowed", "It isn't allowed", "negated"),
    ("It is allowed", "It is n't allowed", "negated"),
    ("The minimum deposit is", "The maximum deposit is", "'minimum' and 'maximum'"),
    ("The lowest deposit is", "The maximum deposit is", "exclude"),
    ("What must the buyer bring?", "What must the seller bring?", "exclude"),
    ("The dose for adults is", "The dose for children is", "exclude"),
    ("The distance in miles is", "The distance in kilometres is", "exclude"),
    (QUESTION, "Who manages the branch in Hull?", "'leeds' and 'hull'"),
    ("Where is the number on the toaster?", "Where is the number on the kettle?", "names"),
    ("Dr Anna Lindqvist works on", "Dr Anna Lindgren works on", "names"),
    ("The Gold account is", "The Plus account is", "names"),
    ("What is vitamin C good for?", "What is vitamin D good for?", "'c' and 'd'"),
    ("What is the price of Plan A?", "What is the price of Plan B?", "names"),
    ("Who designed the language C?", "Who designed the language C++?", "names"),
    ("Who was Louis XVII?", "Who was Louis XVIII?", "numbers"),
    ("The fee is 1,5 euros", "The fee is 15 euros", "numbers"),
    ("The fee is $5", "The fee is €5", "numbers"),
    ("The desk opens at 10am", "The desk opens at 10pm", "exclude"),
    ("The 2021 fee of Dr. Smith is", "The 2023 fee of Dr. Smith is", "numbers"),
    ("Tell me the fee in 2021. Thanks.", "Tell me the fee in 2023. Thanks.", "numbers"),
    ("Moving from Standard to Plus takes", "Moving from Plus to Standard takes", "order"),
]


@pytest.mark.parametrize(("edited", "asked"), SAME, ids=[asked for _, asked in SAME])
def test_the_same_in_other_words_agrees(edited: str, asked: str) -> None:
    assert find_disagreement(extract_wording(edited), extract_wording(asked)) == ""


@pytest.mark.parametrize(("edited", "asked", "reason"), DIFFERENT, ids=[asked for _, asked, _ in DIFFERENT])
def test_what_asks_for_something_else_disagrees_and_says_why(edited: str, asked: str, reason: str) -> None:
    assert reason in find_disagreement(extract_wording(edited), extract_wording(asked))


@pytest.mark.parametrize(
    "text",
    ["", " \n", "?!", " ".join(["word"] * (MAX_WORDS + 1)), "x" * (MAX_WORDING + 1)],
    ids=["empty", "blank", "marks", "too many words", "too long"],
)
def test_a_text_that_cannot_be_compared_has_no_wording_and_agrees_with_all(text: str) -> None:
    assert extract_wording(text) == ""
    assert find_disagreement("", extract_wording(QUESTION)) == find_disagreement(extract_wording(QUESTION), "") == ""


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("discover", "discovered", True),
        ("recieve", "receive", True),
        ("calder", "clader", True),
        ("calder", "calde", True),
        ("calder", "corder", False),
        ("anna", "anne", False),
        ("hull", "hall", False),
        ("cat", "act", False),
    ],
)
def test_inflection_and_a_typo_make_no_other_word(one: str, other: str, same: bool) -> None:
    assert is_same_word(one, other) is is_same_word(other, one) is same


PIECES = (
    *("Who", "is", "the", "not", "maximum", "minimum", "2021", "2022", "three", "Leeds", "Hull", "leeds", "buyer"),
    *("seller", ".", "?", "\n", "Question:", "A:", "n't", "isn't", "'s", "II", "\u0661", "1,5", "2nd", "$"),
)
TEXTS = st.text() | st.lists(st.sampled_from(PIECES)).map(" ".join)


@examples(3)
@given(TEXTS, TEXTS)
def test_the_check_is_symmetric_and_a_text_agrees_with_itself(one: str, other: str) -> None:
    edited, asked = extract_wording(one), extract_wording(other)
    assert len(edited) <= MAX_WORDING
    assert "\n" not in edited
    assert find_disagreement(edited, edited) == ""
    assert bool(find_disagreement(edited, asked)) == bool(find_disagreement(asked, edited))


def test_the_lists_of_words_are_sound() -> None:
    assert len(common_words()) > 1000
    assert all(word == word.lower() for word in (*common_words(), *contrast_groups()))
    for word, places in contrast_groups().items():
        groups = [group for group, _ in places]
        assert len(groups) == len(set(groups)), f"{word!r} stands on two sides of one group"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["a", "A: ", "1,", "x-", "? ", "Question: ", " ", "\n", "\u2019", "."])
def test_a_long_hostile_text_is_read_once(piece: str) -> None:
    """An expression that goes back over a text again and again would take hours."""
    extract_wording("x" + piece * 200_000 + "y")
