"""Undo, whatever came before and after it: the codebook is what it would be, had that feedback never come."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from pipeline.editing import EditEngine
from pipeline.plan import Plan
from schemas.messages import Feedback
from tests.unit.engine.points import CLASSES, PointModel
from tests.unit.engine.stories import Story, assert_same, plan_of, see, story, without
from tests.unit.engine.tiny import CODEBOOK

MANY = settings(deadline=None, max_examples=150)


def taken_back(feedback: Sequence[Feedback]) -> tuple[set[str], set[str]]:
    """What counts as never sent, and which undos had an effect; by what was sent alone, without the engine.

    Feedback counts unless a later undo that counts takes it back. An undo is idle, as if it had not been sent, where
    nothing that it takes back counts but undos of nothing else.
    """
    sent: list[Feedback] = []
    takes: list[set[str]] = []

    def counts(at: int) -> bool:
        later = range(at + 1, len(sent))
        return not any(sent[at].feedback_id in takes[after] and counts(after) for after in later)

    for one in feedback:
        names = {
            other.feedback_id
            for other in sent
            if one.undo == other.feedback_id or (one.undo_author is not UNSET and one.undo_author == other.author)
        }
        touched = [at for at, other in enumerate(sent) if other.feedback_id in names and counts(at)]
        if not one.undoes or any(not takes[at] or takes[at] - names for at in touched):
            sent.append(one)
            takes.append(names)
    gone = {one.feedback_id for at, one in enumerate(sent) if not counts(at)}
    return gone, {one.feedback_id for one in sent if one.undoes}


@dataclass(frozen=True)
class Undo:
    """A step that takes back the feedback of an earlier step, by its number, or all of an author."""

    of: int | str
    author: str | None

    def feedback(self, number: int) -> Feedback:
        whose: dict[str, Any] = {} if self.author is None else {"author": self.author}
        what = {"undo_author": self.of} if isinstance(self.of, str) else {"undo": f"f{self.of % (number + 1)}"}
        return Feedback(v=1, feedback_id=f"f{number}", **what, **whose)


places = st.tuples(st.integers(0, 3), st.integers(0, 2))
jitters = st.sampled_from([0.0, 1e-4, 3e-4, 0.01, 0.3])
points = st.builds(lambda place, x, y: (place[0] + x, place[1] - y), places, jitters, jitters)
corrections = st.tuples(points, st.integers(0, CLASSES - 1), st.sampled_from(["ann", "bob"]))
undos = st.one_of(st.integers(0, 30), st.sampled_from(["ann", "bob"]))
streams = st.lists(st.one_of(corrections, corrections, corrections, undos), min_size=3, max_size=16)
traffic = st.tuples(st.sampled_from([0.55, 1.45]), st.sampled_from([0.55, 1.6]))
plans = st.builds(
    plan_of,
    radius=st.sampled_from([1e-3, 0.3, 1.0, 3.0]),
    policy=st.sampled_from(["nearest", "paper"]),
    expand=st.sampled_from(["cover", "paper"]),
    guard=st.booleans(),
    init=st.sampled_from(["layer", "label", "random"]),
    max_radius=st.sampled_from([math.inf, 0.2, 0.9]),
)
own_undos = st.builds(Undo, undos, st.sampled_from([None, "ann", "bob"]))
step = st.one_of(corrections, corrections, corrections, corrections, own_undos, own_undos, traffic, plans)


@MANY
@given(plans, st.lists(step, min_size=3, max_size=20))
def test_after_an_undo_the_codebook_equals_a_replay_without_that_feedback(first: Plan, stream: list[Any]) -> None:
    """Also after undos of undos, undos by author, under changing plans and traffic, and with edits that come after."""
    told = Story(EditEngine(PointModel(2), CODEBOOK, first))
    told.lead(first)
    undone = set()
    for number, step in enumerate(stream):
        if isinstance(step, Plan):
            told.lead(step)
        elif isinstance(step, Undo):
            outcome = told.take(step.feedback(number))
            undone |= {outcome.feedback_id} if outcome.status == "undone" else set()
        elif len(step) == 2:
            see(told, step, number)
        else:
            told.correct(f"f{number}", *step)
    gone, effective = taken_back(told.feedback)
    assert undone == effective
    assert_same(told, without(told, gone))


@settings(deadline=None, max_examples=25)
@given(streams, st.sampled_from([0.3, 1.0]), st.sampled_from(["nearest", "paper"]))
def test_folding_the_log_gives_the_codebook_and_the_memory_after_undos(
    stream: list[Any], radius: float, policy: str
) -> None:
    told = story(radius=radius, policy=policy)
    for number, step in enumerate(stream):
        if isinstance(step, tuple):
            told.correct(f"f{number}", step[0], step[1], step[2])
        else:
            told.undo(f"f{number}", f"f{number // 2}")
    folded = EditEngine(told.engine.model, told.engine.codebook.name, told.engine.plan)
    for record in told.deltas:
        folded.apply(record)
    assert_same(Story(folded), told)
    assert folded.memory.undoes == told.engine.memory.undoes
    assert folded.memory.decided == told.engine.memory.decided
    assert folded.memory.authors == told.engine.memory.authors
