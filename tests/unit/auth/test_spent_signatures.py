"""Spent signatures: the first feedback of each mark is known, in few bytes, and the same after a restart."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.auth import spent_signatures as spent
from gracestream.pipeline.auth.spent_signatures import SpentMarks, mark_of_id, mark_of_record
from tests.support.examples import examples

marks = st.lists(
    st.sampled_from([bytes(16), b"\0" * 15 + b"\1", b"\1" + b"\0" * 15, *(bytes([n]) * 16 for n in range(9))])
)


@examples(2)
@given(marks, st.integers(1, 5), st.integers(0, 40))
def test_it_knows_the_first_offset_of_each_mark_also_after_a_restart(
    given_marks: list[bytes], recent: int, restart: int
) -> None:
    log: list[tuple[int, bytes | None, int]] = [(2 * at, mark, at) for at, mark in enumerate(given_marks)]
    log.append((2 * len(log), None, len(log)))
    first: dict[bytes, int] = {}
    read: list[int] = []

    def since(offset: int) -> Iterable[tuple[int, bytes | None, int]]:
        read.append(offset)
        return (one for one in log[: restart if len(read) == 1 else None] if one[0] >= offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spent, "MAX_RECENT_MARKS", recent)
        known = SpentMarks(since)
        known.catch_up()
        known.catch_up()
        for _, mark, at in log:
            if mark is not None:
                first.setdefault(mark, at)
        assert {mark: known.first_offset(mark) for mark in first} == first
        assert known.first_offset(b"\xff" * 16) is None
        assert len(known) == len(first)
    assert read == [0, log[:restart][-1][0] + 1 if restart else 0], "it reads on where it ended"


def test_a_mark_takes_few_bytes() -> None:
    known = SpentMarks(lambda _: ())
    for number in range(3 * spent.MAX_RECENT_MARKS):
        known.add(mark_of_id("ann", str(number)), number)
    assert len(known) == 3 * spent.MAX_RECENT_MARKS
    assert known.array_bytes == 24 * len(known)
    assert [known.first_offset(mark_of_id("ann", str(number))) for number in (0, 70_000, 150_000)] == [
        0,
        70_000,
        150_000,
    ]


def test_marks_of_other_authors_ids_and_records_differ() -> None:
    names = ["ann", "bob", "ann\0", "an", 'a","b']
    made = [mark_of_id(*pair) for pair in itertools.product(names, names)]
    made += [mark_of_record(mark) for mark in made]
    assert len(set(made)) == len(made)
