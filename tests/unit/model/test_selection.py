"""The choice of requests that go through the model together."""

from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.model.engines.selection import select_batch

WAITING = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 30)), min_size=1, max_size=40)


@given(WAITING, st.integers(1, 8))
def test_the_first_goes_with_its_neighbours_in_length(waiting: list[tuple[str, int]], size: int) -> None:
    places = select_batch(waiting, size)
    alike = [place for place, (group, _) in enumerate(waiting) if group == waiting[0][0]]
    assert 0 in places
    assert len(set(places)) == len(places) == min(size, len(alike))
    assert set(places) <= set(alike)
    lengths = sorted(waiting[place][1] for place in places)
    left = [waiting[place][1] for place in alike if place not in places]
    assert not [tokens for tokens in left if lengths[0] < tokens < lengths[-1]], "one in between was left out"


@given(WAITING, st.integers(1, 8))
def test_no_neighbours_have_less_padding(waiting: list[tuple[str, int]], size: int) -> None:
    alike = sorted(tokens for group, tokens in waiting if group == waiting[0][0])
    windows = [alike[start : start + size] for start in range(max(1, len(alike) - size + 1))]
    least = min(some[-1] * len(some) - sum(some) for some in windows if waiting[0][1] in some)
    chosen = [waiting[place][1] for place in select_batch(waiting, size)]
    assert max(chosen) * len(chosen) - sum(chosen) == least
