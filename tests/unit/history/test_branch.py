"""What a branch makes of the offsets that its source's deltas name."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gracestream.pipeline.history.branch import _referenced_offsets, _with_copied_offsets
from gracestream.schemas.deltas import Cause, Delta

LEAD = Delta(v=1, codebook="c", model="m", layer="l", term=1, seq=1, op="lead", digest=b"")


@given(st.lists(st.integers(0, 1000), min_size=1, unique=True), st.data())
def test_every_offset_becomes_that_of_the_copy(offsets: list[int], data: st.DataObject) -> None:
    together = tuple(data.draw(st.lists(st.sampled_from(offsets), unique=True)))
    cause = Cause(feedback_id="f", offset=offsets[0], together=together)
    delta = Delta(v=1, codebook="c", model="m", layer="l", term=1, seq=2, op="add", digest=b"x", cause=cause)
    assert set(_referenced_offsets(delta)) == {offsets[0], *together}
    copies = {offset: 2000 + number for number, offset in enumerate(offsets)}
    moved = _with_copied_offsets(delta, "copy", copies)
    assert moved.cause is not UNSET
    assert (moved.codebook, moved.cause.offset) == ("copy", 2000)
    assert moved.cause.together == tuple(copies[offset] for offset in together)


def test_a_new_term_names_none() -> None:
    assert _referenced_offsets(LEAD) == ()
    assert _with_copied_offsets(LEAD, "copy", {}).codebook == "copy"
