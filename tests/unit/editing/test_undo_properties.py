"""Undo, whatever came before and after it: the codebook is what it would be, had that feedback never come."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.schemas.deltas import decode_delta
from gracestream.schemas.messages import Feedback
from tests.support.chosen_queries import CLASSES, PointModel
from tests.support.editing_stories import Story, assert_same, new_story, plan_of, see, without
from tests.support.examples import examples
from tests.support.tiny_models import CODEBOOK

MANY = examples(5)
"""Enough for each of `KINDS` with any seed. The seed depends on the text of the test."""


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
        if not one.is_undo or any(not takes[at] or takes[at] - names for at in touched):
            sent.append(one)
            takes.append(names)
    gone = {one.feedback_id for at, one in enumerate(sent) if not counts(at)}
    return gone, {one.feedback_id for one in sent if one.is_undo}


@dataclass(frozen=True)
class Undo:
    """A step that takes back some feedback of those before it, by its number, or all of an author."""

    of: int | str
    author: str | None

    def feedback(self, name: str, sent: Sequence[Feedback]) -> Feedback:
        whose: dict[str, Any] = {} if self.author is None else {"author": self.author}
        earlier = sent[self.of % len(sent)].feedback_id if isinstance(self.of, int) and sent else "nothing"
        what: dict[str, Any] = {"undo_author": self.of} if isinstance(self.of, str) else {"undo": earlier}
        return Feedback(v=1, feedback_id=name, **what, **whose)


@dataclass(frozen=True)
class Same:
    """A step that corrects an input of those before it once more, to this class."""

    of: int
    label: int


@dataclass(frozen=True)
class Except:
    """A step that excepts a place beside an input of a correction before it from that correction."""

    of: int
    right: float
    up: float

    def apply_to(self, name: str, story: Story) -> None:
        corrections = [one for one in story.feedback if one.is_correction]
        if corrections:
            one = corrections[self.of % len(corrections)]
            x, y = map(float, str(one.inputs).split())
            story.except_from(name, (x + self.right, y + self.up), one.feedback_id)


places = st.tuples(st.integers(0, 3), st.integers(0, 2))
jitters = st.sampled_from([0.0, 1e-4, 3e-4, 0.01, 0.3])
edges = st.builds(lambda x, side: (x + 0.05 + side, 0.0), st.integers(0, 3), st.sampled_from([-5e-5, 5e-5]))
"""Within the noise of each other, with other wordings."""
points = st.builds(lambda place, x, y: (place[0] + x, place[1] - y), places, jitters, jitters) | edges
rephrases = st.one_of(st.just([]), st.just([]), st.lists(points, max_size=3))
corrections = st.tuples(points, st.integers(0, CLASSES - 1), st.sampled_from(["ann", "bob"]), rephrases)
undos = st.one_of(st.integers(0, 30), st.sampled_from(["ann", "bob"]))
streams = st.lists(st.one_of(corrections, corrections, corrections, undos), min_size=3, max_size=16)
traffic = st.tuples(st.sampled_from([0.55, 1.45]), st.sampled_from([0.55, 1.6]))
plans = st.builds(
    plan_of,
    radius=st.sampled_from([1e-3, 0.3, 1.0, 3.0]),
    policy=st.sampled_from(["nearest", "paper"]),
    expand=st.sampled_from(["cover", "paper"]),
    retention_guard=st.booleans(),
    value_init=st.sampled_from(["layer", "label", "random"]),
    max_radius=st.sampled_from([math.inf, 0.2, 0.9]),
)
own_undos = st.builds(Undo, undos, st.sampled_from([None, "ann", "bob"]))
same = st.builds(Same, st.integers(0, 30), st.integers(0, CLASSES - 1))
sides = st.sampled_from([-0.4, -0.1, 0.0, 0.1, 0.2])
exceptions = st.builds(Except, st.integers(0, 30), sides, sides)
changes = st.one_of(corrections, corrections, corrections, same, traffic, plans, exceptions)
blocks = st.tuples(st.lists(changes, min_size=2, max_size=9), st.lists(own_undos, min_size=1, max_size=2))
histories = st.lists(blocks, min_size=1, max_size=4).map(
    lambda some: [step for block in some for part in block for step in part]
)

OPS = ("add", "expand", "split", "replace", "undo", "except")
KINDS = {(policy, op) for policy in ("nearest", "paper") for op in OPS}
KINDS -= {("paper", "replace")}  # it splits, as the paper has it


def played(
    first: EditConfig, stream: Sequence[Any], *, worded: bool
) -> tuple[Story, set[str], dict[str, tuple[str, str]], set[str]]:
    """The story of a stream, its effective undos, policy and operation by feedback, and the rejected corrections."""
    story = Story(EditEngine(PointModel(2, worded=worded), CODEBOOK, first))
    story.lead(first)
    undone: set[str] = set()
    did: dict[str, tuple[str, str]] = {}
    places: list[tuple[float, ...]] = []
    for number, step in enumerate(stream):
        name, before = f"f{number}", len(story.deltas)
        if isinstance(step, EditConfig):
            story.lead(step)
        elif isinstance(step, Undo):
            outcome = story.take(step.feedback(name, story.feedback))
            undone |= {name} if outcome.status == "undone" else set()
        elif isinstance(step, Except):
            step.apply_to(name, story)
        elif isinstance(step, Same):
            story.correct(name, places[step.of % len(places)] if places else (0.0, 0.0), step.label)
        elif len(step) == 2:
            see(story, step, number)
        else:
            places += [step[0], *step[3]]
            story.correct(name, *step)
        if len(story.deltas) > before:
            did[name] = story.engine.config.policy, decode_delta(story.deltas[-1]).op
    corrected = {one.feedback_id for one in story.feedback if not one.is_undo}
    return story, undone, did, corrected - did.keys()


@pytest.mark.slow
def test_after_an_undo_the_codebook_equals_a_replay_without_that_feedback() -> None:
    """Also after undos of undos, undos by author, under changing plans and traffic, and with edits that come after."""
    gone_by_kind: Counter[tuple[str, str]] = Counter()
    decided_again = 0

    @MANY
    @given(plans, histories, st.booleans())
    def check(first: EditConfig, stream: list[Any], worded: bool) -> None:
        nonlocal decided_again
        story, undone, did, rejected = played(
            first, stream, worded=worded
        )  # which were too near an input that is to stay right
        gone, effective = taken_back([one for one in story.feedback if one.feedback_id not in rejected])
        assert undone == effective
        gone |= rejected
        assert_same(story, without(story, gone))
        if not any(isinstance(step, tuple) and len(step) == 2 for step in stream):
            assert_same(story, without(story, gone, keep_contexts=False))  # there was no traffic to be seen
        gone_by_kind.update(did[name] for name in gone if name in did)
        decided_again += len(story.engine.memory.repeated_contexts)

    check()
    assert gone_by_kind.keys() >= KINDS, "each kind of decision is undone under both policies"
    assert decided_again >= 100


@examples(0.4)
@given(streams, st.sampled_from([0.3, 1.0]), st.sampled_from(["nearest", "paper"]))
def test_folding_the_log_gives_the_codebook_and_the_memory_after_undos(
    stream: list[Any], radius: float, policy: str
) -> None:
    story = new_story(radius=radius, policy=policy)
    for number, step in enumerate(stream):
        if isinstance(step, tuple):
            story.correct(f"f{number}", *step)
        else:
            story.undo(f"f{number}", f"f{number // 2}")
    folded = EditEngine(story.engine.model, story.engine.codebook.name, story.engine.config)
    for record in story.deltas:
        folded.apply(record)
    assert_same(Story(folded), story)
    assert folded.memory.undo_targets == story.engine.memory.undo_targets
    assert folded.memory.repeated_contexts == story.engine.memory.repeated_contexts
    assert folded.memory.authors == story.engine.memory.authors
    assert folded.memory.rephrase_owners == story.engine.memory.rephrase_owners
