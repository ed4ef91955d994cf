"""Requests with all the names of an entry's wording are found; those that lack one are not."""

from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.wording.comparison import extract_wording, parse_wording, wordings_agree
from gracestream.pipeline.wording.same_names import MAX_COMPARED_ENTRIES, SameNamesIndex


def test_a_wording_with_the_same_names_is_found() -> None:
    known = SameNamesIndex()
    known.upsert("a", extract_wording("Where was Danielle Darrieux born?"))
    known.upsert("b", extract_wording("Where was Danielle Steel born?"))
    known.upsert("c", extract_wording("what is it"))
    assert len(known) == 2
    assert known.find(extract_wording("Danielle Darrieux, a native of")) == ["a"]
    assert known.find(extract_wording("Who is Darrieux?")) == []
    assert known.find(extract_wording("Where was Danielle Darrieux not born?")) == []
    assert known.find("") == []


def test_no_more_are_compared_than_a_bound_allows() -> None:
    known = SameNamesIndex()
    for number in range(2 * MAX_COMPARED_ENTRIES):
        known.upsert(f"{number:03}", extract_wording("Where was Danielle Darrieux born?"))
    assert known.find(extract_wording("Danielle Darrieux writes")) == [
        f"{number:03}" for number in range(MAX_COMPARED_ENTRIES)
    ]


words = st.sampled_from(["who", "Johnson", "Hull", "Otto", "fee", "2021", "not"])
requests = st.lists(words, max_size=5).map(lambda some: extract_wording("who " + " ".join(some)))
steps = st.lists(st.tuples(st.sampled_from("abcd"), st.none() | requests), max_size=12)


@given(steps, requests)
def test_a_search_finds_what_a_look_at_all_wordings_finds(wordings: list[tuple[str, str | None]], asked: str) -> None:
    known, held = SameNamesIndex(), dict[str, str]()
    for entry_id, wording in wordings:
        held.pop(entry_id, None)
        if wording is None:
            known.remove(entry_id)
        else:
            known.upsert(entry_id, wording)
            held[entry_id] = wording
    names = set(parse_wording(asked).names)
    kept = {one: set(parse_wording(wording).names) for one, wording in held.items()}
    expected = [one for one in sorted(held) if kept[one] and kept[one] <= names and wordings_agree(held[one], asked)]
    assert known.find(asked) == expected
