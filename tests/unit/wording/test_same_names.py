"""Requests with all the names of an entry's wording are found; those that lack one are not."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gracestream.pipeline.wording.comparison import agrees, parsed, wording_of
from gracestream.pipeline.wording.same_names import MOST, SameNames


def test_a_wording_with_the_same_names_is_found() -> None:
    known = SameNames()
    known.put("a", wording_of("Where was Danielle Darrieux born?"))
    known.put("b", wording_of("Where was Danielle Steel born?"))
    known.put("c", wording_of("what is it"))
    assert len(known) == 2
    assert known.named(wording_of("Danielle Darrieux, a native of")) == ["a"]
    assert known.named(wording_of("Who is Darrieux?")) == []
    assert known.named(wording_of("Where was Danielle Darrieux not born?")) == []
    assert known.named("") == []


def test_no_more_are_compared_than_a_bound_allows() -> None:
    known = SameNames()
    for number in range(2 * MOST):
        known.put(f"{number:03}", wording_of("Where was Danielle Darrieux born?"))
    assert known.named(wording_of("Danielle Darrieux writes")) == [f"{number:03}" for number in range(MOST)]


words = st.sampled_from(["who", "Johnson", "Hull", "Otto", "fee", "2021", "not"])
requests = st.lists(words, max_size=5).map(lambda some: wording_of("who " + " ".join(some)))
steps = st.lists(st.tuples(st.sampled_from("abcd"), st.none() | requests), max_size=12)


@settings(deadline=None)
@given(steps, requests)
def test_a_search_finds_what_a_look_at_all_wordings_finds(told: list[tuple[str, str | None]], asked: str) -> None:
    known, held = SameNames(), dict[str, str]()
    for entry_id, wording in told:
        held.pop(entry_id, None)
        if wording is None:
            known.drop(entry_id)
        else:
            known.put(entry_id, wording)
            held[entry_id] = wording
    names = set(parsed(asked).names)
    kept = {one: set(parsed(wording).names) for one, wording in held.items()}
    expected = [one for one in sorted(held) if kept[one] and kept[one] <= names and agrees(held[one], asked)]
    assert known.named(asked) == expected
