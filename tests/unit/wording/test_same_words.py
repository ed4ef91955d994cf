"""Requests in the same words are found, whatever their case, frame or typos; requests in other words are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.wording.comparison import ELLIPSIS, MAX_WORDS, extract_wording
from gracestream.pipeline.wording.same_words import SameWordsIndex, have_same_words, limits_radius

EDITED = "Question: What is the mother tongue of Danielle Darrieux? Answer:"

SAME = [
    "what is the mother tongue of danielle darrieux",
    "WHAT IS THE MOTHER TONGUE OF DANIELLE DARRIEUX?",
    "What is the mother tongue of Danielle Darrieux?\n",
    "What is mother tongue of Danielle Darrieux?",
    "What is the mother tongue of Danielle Darreiux?",
    "What is the mohter tongue of Daniele Darrieux?",
    "What is the mother tongue of 'Danielle Darrieux'?!",
    "Answer in a few words.\nWhat is the mother tongue of Danielle Darrieux?",
    "You are a helpful assistant. Reply with the answer only. What is the mother tongue of Danielle Darrieux?",
    "Hello, I have a question. What is the mother tongue of Danielle Darrieux? Please answer briefly. Thanks!",
]

OTHER = [
    "",
    "What is the mother tongue of Danielle?",
    "What is the mother tongue of Danielle Darling?",
    "What is the father tongue of Danielle Darrieux?",
    "What isn't the mother tongue of Danielle Darrieux?",
    "Danielle Darrieux: what is the mother tongue of?",
    "What was the mother tongue of Danielle Darrieux?",
    "This is about the second edition. What is the mother tongue of Danielle Darrieux?",
    "I mean her adopted daughter. What is the mother tongue of Danielle Darrieux?",
]


@pytest.mark.parametrize("other", SAME)
def test_these_ask_in_the_same_words(other: str) -> None:
    assert have_same_words(extract_wording(EDITED), extract_wording(other))
    assert have_same_words(extract_wording(other), extract_wording(EDITED))
    assert not limits_radius(extract_wording(EDITED), extract_wording(other))


@pytest.mark.parametrize("other", OTHER)
def test_these_do_not(other: str) -> None:
    assert not have_same_words(extract_wording(EDITED), extract_wording(other))
    assert not have_same_words(extract_wording(other), extract_wording(EDITED))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Who taught Johnson?", "Who taught Johnston?"),
        ("What is the largest county in Georgia?", "What is the largest country in Georgia?"),
        ("What is martial law?", "What is marital law?"),
        ("Where is a desert?", "Where is a dessert?"),
        ("Who is Alan Turing?", "Who is Allan Turing?"),
        ("Where are the hacks?", "Where are the shacks?"),
        ("What is the fee in 2021?", "What is the fee in 2012?"),
        ("What is the fee for 5 items?", "What is the fee for 55 items?"),
        ("Is Python 3.1 old?", "Is Python 3.10 old?"),
        ("Whose area code is 020?", "Whose area code is 20?"),
        ("Which form is due?", "Which from is due?"),
        ("Who beat France, Spain or Italy?", "Who beat Italy, Spain or France?"),
        ("What is 12 + 4?", "What is 12 - 4?"),
        ("Is 5 < 3?", "Is 5 > 3?"),
        ("What is 5!?", "What is 5?"),
        ("What is the square root of -4?", "What is the square root of 4?"),
        ("What is vitamin A?", "What is a vitamin?"),
        ("What does 😀 mean?", "What does 😢 mean?"),
        ("😀\nWhat does this emoji mean?", "😢\nWhat does this emoji mean?"),
        ("パリの人口は?", "バリの人口は?"),
        ("दिल क्या है?", "दाल क्या है?"),
        ("¿Cuántos años tiene?", "¿Cuántos anos tiene?"),
        ("Give an answer that is not correct. What is it called?", "What is it called?"),
    ],
)
def test_what_looks_alike_may_ask_for_something_else(one: str, other: str) -> None:
    assert not have_same_words(extract_wording(one), extract_wording(other))


def test_more_candidates_than_a_bound_allows_are_not_compared() -> None:
    known = SameWordsIndex()
    for number in range(6):
        known.upsert(str(number), extract_wording(EDITED))
    assert known.find(extract_wording(EDITED), 4) == ["0", "1", "2", "3"]
    assert len(known.find(extract_wording(EDITED))) == 6


def test_a_context_makes_a_request_another_one_even_beside_itself() -> None:
    asked = extract_wording("My son is five. What is the maximum dose?")
    assert asked == f"{ELLIPSIS}What is the maximum dose?"
    assert not have_same_words(asked, asked)
    assert limits_radius(asked, asked)


def test_a_text_that_is_too_long_has_the_same_words_as_none() -> None:
    long = extract_wording("word " * (MAX_WORDS + 1))
    assert not have_same_words(long, long)


words = st.sampled_from(
    ["who", "taught", "johnson", "jonhson", "john", "the", "fee", "fee?", "2021", "2012", "not", "mothers"]
)
requests = st.lists(words, max_size=5).map(lambda some: extract_wording(" ".join(some)))
steps = st.lists(st.tuples(st.sampled_from("abcd"), st.none() | st.lists(requests, max_size=2)), max_size=12)


@given(steps, requests)
def test_a_search_finds_what_a_look_at_all_wordings_finds(
    added_wordings: list[tuple[str, list[str] | None]], asked: str
) -> None:
    known, held = SameWordsIndex(), dict[str, list[str]]()
    for name, wordings in added_wordings:
        held.pop(name, None)
        if wordings is None:
            known.remove(name)
        else:
            known.upsert(name, *wordings)
            held[name] = wordings
    assert known.find(asked) == sorted(
        n for n, some in held.items() if any(have_same_words(one, asked) for one in some)
    )


@given(requests, requests)
def test_the_same_words_are_so_both_ways_and_agree(one: str, other: str) -> None:
    assert have_same_words(one, other) == have_same_words(other, one)
    if one and not one.startswith(ELLIPSIS):
        assert have_same_words(one, one)
