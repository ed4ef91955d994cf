"""A history rewritten by an undo: some decisions are repeated in their recorded context, others are kept."""

import cProfile
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET

from gracestream.pipeline.editing import counterfactual as rewriting
from gracestream.pipeline.editing import value_search
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.schemas.deltas import decode_delta
from gracestream.schemas.messages import Feedback
from tests.support.chosen_queries import CLASSES
from tests.support.editing_stories import assert_same, new_story, plan_of, see, without


def test_a_value_that_started_from_the_undone_ones_is_trained_anew() -> None:
    story = new_story(value_init="label")
    story.correct("a", (0, 0), 1)
    story.correct("b", (9, 0), 1)
    story.correct("c", (19, 0), 1)
    assert [decode_delta(record).cause.context.start for record in story.deltas[1:]] == [UNSET, "a", "b"]  # type: ignore[union-attr]
    warm = story.engine.codebook.values_NV.copy()
    story.undo("u", "a")
    assert story.engine.codebook.entry_ids == ["c", "b"]
    assert not np.array_equal(story.engine.codebook.values_NV[1], warm[1])
    assert_same(story, without(story, {"a"}))
    story.undo("v", "u")
    assert story.engine.codebook.values_NV.tobytes() == warm[[2, 1, 0]].tobytes()


def test_a_value_is_trained_anew_where_only_its_start_has_gone() -> None:
    story = new_story(value_init="label")
    story.correct("other", (15, 0), 3)
    story.correct("a", (0, 0), 1)
    story.correct("b", (20, 0), 2)
    story.correct("c", (25, 0), 1)
    context = decode_delta(story.deltas[-1]).cause.context  # type: ignore[union-attr]
    assert (context.nearest, context.start) == ("b", "a")  # type: ignore[union-attr]
    story.undo("u", "a")
    assert set(decode_delta(story.deltas[-1]).decided) == {"c"}
    assert_same(story, without(story, {"a"}))


def test_a_value_that_would_start_from_one_that_came_back_is_trained_anew() -> None:
    story = new_story(value_init="label")
    story.correct("other", (15, 0), 3)
    story.correct("a", (0, 0), 1)
    story.undo("u", "a")
    story.correct("b", (20, 0), 2)
    story.correct("c", (25, 0), 1)
    story.undo("v", "u")
    assert set(decode_delta(story.deltas[-1]).decided) == {"c"}
    assert_same(story, without(story, {"u"}))


def test_values_that_started_from_others_are_not_trained_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    story = new_story(value_init="label")
    for number in range(6):
        story.correct(f"f{number}", (9 * number, 0), 1 + number % 2)
    monkeypatch.setattr(value_search, "train_value", None)
    assert story.undo("u", "f5").status == "undone"
    assert story.engine.codebook.entry_ids == ["f0", "f1", "f2", "f3", "f4"]


@pytest.mark.parametrize(
    "steps",
    [
        # The edit that `q` superseded was the undone one, and left no other trace.
        [("e", (0, 0), 1), ("x", (0.5, 0), 1), ("q", (0.5, 0), 2)],
        # The key of `y` would have taken `x` over, which so got an entry of its own.
        [("e", (0, 0), 1), ("x", (0.5, 0), 1), ("y", (0.6, 0), 2)],
        # Without `x` the entry of `e` serves `o`, and shrinks for `y` under another plan.
        [("e", (0, 0), 1), ("x", (-0.6, 0), 2), ("o", (-0.5, 0), 1), plan_of(policy="paper"), ("y", (0.9, 0), 3)],
        # Without `x` the entry of `e` serves `o`, and the key of `y` would take `o` over.
        [("z", (0.5, 0.8), 2), ("e", (0, 0), 1), ("x", (0.6, 0), 2), ("o", (0.5, 0), 1), ("y", (0.5, 0.45), 3)],
        # The bare model gives `x` right, so the radius of `a` keeps clear of it.
        [("x", (1, 0), 0), ("a", (0, 0), 1)],
        # Without `x` the bare model gives `o` right, so the radius of `a` keeps clear of that.
        [("x", (0, 9), 1), ("o", (0.5, 9), 0), ("a", (0.5, 8), 2)],
    ],
)
def test_a_decision_is_made_again_where_it_rested_on_the_undone_one_in_this_way_alone(steps: list[Any]) -> None:
    story = new_story()
    for step in steps:
        if isinstance(step, EditConfig):
            story.lead(step)
        else:
            story.correct(*step)
    story.undo("u", "x")
    assert_same(story, without(story, {"x"}))
    story.undo("v", "u")
    assert_same(story, without(story, {"u"}))


def test_a_decision_is_made_again_where_a_nearer_key_came_back() -> None:
    story = new_story()
    story.correct("x", (0.6, 0), 2)
    story.undo("u", "x")
    story.correct("e", (-0.9, 0), 1)
    assert story.correct("q", (0, 0), 2).status == "split"
    story.undo("v", "u")
    assert_same(story, without(story, {"u"}))
    assert sorted(story.engine.codebook.entry_ids) == ["e", "x"]


def test_of_two_keys_in_one_place_the_same_one_counts_after_an_undo() -> None:
    """Which slot they have depends on the entry that went."""
    story = new_story(policy="paper", retention_guard=False, radius=1e-3)
    for name, place, label in (("a", (0, 0), 1), ("b", (1, 0), 1), ("c", (1, 0), 2)):
        story.correct(name, place, label)
    story.undo("u", "a")
    story.correct("d", (1, 0), 1)
    assert_same(story, without(story, {"a"}))


def test_an_edit_was_superseded_only_by_what_the_undone_one_made_of_its_entry() -> None:
    """Without the guard another key may lie nearer to an edit than that of the entry which serves it by the record."""
    story = new_story(retention_guard=False)
    story.correct("e", (0, 0), 1)
    assert story.correct("o", (0.5, 0), 1).status == "unchanged"
    story.correct("n", (0.6, 0), 2)
    assert story.correct("x", (0, 0), 3).status == "replaced"
    story.correct("q", (0.5, 0), 1)
    assert "o" not in story.engine.memory
    story.undo("u", "x")
    assert_same(story, without(story, {"x"}))
    assert story.engine.memory.serving_entry_id("o") == "e"


def test_only_decisions_near_the_undone_one_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    story = new_story()
    generator = np.random.default_rng(0)
    for number in range(60):
        x, y = generator.uniform(0, 40, 2)
        story.correct(f"f{number}", (x, y), int(generator.integers(1, CLASSES)))
    again: list[str] = []
    edit = EditEngine.edit

    def counted(self: EditEngine, feedback: Feedback, *rest: Any, **named: Any) -> Any:
        again.append(feedback.feedback_id)
        return edit(self, feedback, *rest, **named)

    monkeypatch.setattr(EditEngine, "edit", counted)
    story.undo("u", "f3")
    assert len(again) < 6
    monkeypatch.undo()
    assert_same(story, without(story, {"f3"}))


def test_an_undo_costs_in_proportion_to_the_history() -> None:
    """One of two authors whose edits take turns goes: nothing is looked through again for each of them."""
    calls = []
    for corrections in (100, 200):
        story = new_story(traffic_sample_size=0)
        for number in range(corrections):
            story.correct(f"f{number}", (9 * number, 0), 1 + number % 3, ("ann", "bob")[number % 2])
        profile = cProfile.Profile()
        profile.runcall(story.undo_author, "u", "ann")
        calls.append(sum(entry.callcount for entry in profile.getstats()))
        assert len(story.engine.codebook) == corrections / 2
    assert calls[1] < 2.3 * calls[0]


def test_deciding_everything_again_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decisions that are kept are those that would be made again."""
    digests = set()
    for shortcut in (True, False):
        story = new_story(radius=1.5)
        for number in range(12):
            story.correct(f"f{number}", (number % 4, (number * number) % 5), 1 + number % 3)
        if not shortcut:
            monkeypatch.setattr(rewriting.CounterfactualReplay, "_decision_unaffected", lambda *_: False)
        story.undo("u", "f2")
        digests.add(story.engine.codebook.digest)
        assert_same(story, without(story, {"f2"}))
    assert len(digests) <= 2  # what the deltas say of the decisions made again differs, the state does not


def test_a_correction_that_cannot_be_made_without_it_falls_away_and_the_outcome_says_so() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2)
    story.lead(plan_of(recipe=ValueTrainingConfig(max_steps=0)))
    story.correct("b", (1, 1.2), 2)
    outcome = story.undo("u", "a")
    assert outcome.status == "undone"
    reason = "it takes back a; these corrections depended on that and cannot be made without: b (no value was found"
    assert reason in str(outcome.reason)
    assert len(story.engine.codebook) == 0
    assert "b" not in story.engine.memory


def test_a_decision_that_is_made_again_sees_the_traffic_of_its_time() -> None:
    story = new_story()
    story.correct("a", (0, 0), 1)
    see(story, (5, 1.0), 0)
    story.correct("b", (5, 0), 2)
    story.correct("c", (0.1, 0), 2)
    radius = float(story.engine.codebook.radii_N[story.engine.codebook.slot("b")])
    story.engine.traffic_sample = type(story.engine.traffic_sample)(8, 0)
    story.undo("u", "a")
    assert float(story.engine.codebook.radii_N[story.engine.codebook.slot("b")]) == radius == pytest.approx(0.8)


def test_what_an_earlier_undo_saw_is_not_forgotten_by_a_later_one() -> None:
    story = new_story(radius=0.5)
    story.correct("x", (0, 0), 1)
    story.correct("a", (1.2, 0), 1)
    story.correct("b", (0.9, 0), 1)
    story.undo("u", "a")
    state = story.engine.codebook.state_digest()
    story.undo("v", "x")
    see(story, (-0.6, 0), 0)
    story.undo("w", "v")
    assert story.engine.codebook.state_digest() == state


def test_decisions_are_made_again_under_the_plan_of_their_term() -> None:
    story = new_story(radius=0.5)
    story.correct("a", (0, 0), 1)
    story.correct("b", (0, 0.3), 1)
    story.lead(plan_of(radius=0.05, policy="paper", retention_guard=False))
    story.undo("u", "a")
    assert story.engine.codebook.radii_N.tolist() == [0.5]


def test_a_decision_whose_correction_is_gone_leaves_the_undo_rejected() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2)
    story.correct("b", (1, 1.5), 2)
    story.feedback[1] = Feedback(v=1, feedback_id="other", undo="nothing")
    outcome = story.undo("u", "a")
    assert outcome.status == "rejected"
    assert outcome.reason == "delta 3 depends on feedback at offset 1, which is no longer there"
    assert len(story.engine.codebook) == 1


NEAR_B = ("n", (7.1, -1.0), 2)
"""So that no other entry is the nearest to `b`."""


@pytest.mark.parametrize(
    ("steps", "gone"),
    [
        # Without `a` the bare model gives `b` right, which has its words.
        ([("a", (0.0, 0.0), 1), NEAR_B, ("b", (7.0, -1.0), 0)], "a"),
        # `a` superseded `b`, which has its words.
        ([NEAR_B, ("b", (7.0, -1.0), 0), ("a", (0.0, 0.0), 1)], "a"),
        ([NEAR_B, ("b", (7.0, -1.0), 0), ("a", (0.0, 0.0), 1)], "b"),
        # The guard gives `b` an entry that leaves `kept` to the bare model, which has its words.
        ([("a", (0.4, 0.0), 1), ("b", (0.6, 0.0), 1), ("kept", (8.0, -1.0), 0), ("c", (0.7, 0.0), 2)], "kept"),
    ],
)
def test_a_decision_is_made_again_where_it_rested_on_words_alone(steps: list[Any], gone: str) -> None:
    story = new_story(worded=True, radius=0.3, traffic_sample_size=0)
    for step in steps:
        assert story.correct(*step).status != "rejected"
    before = story.engine.codebook.state_digest()
    assert story.undo("u", gone).status == "undone"
    assert_same(story, without(story, {gone}))
    story.undo("v", "u")
    assert story.engine.codebook.state_digest() == before
