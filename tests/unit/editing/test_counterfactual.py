"""A history rewritten by an undo: which decisions are made again, with what they saw, and which are kept."""

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
from tests.support.editing_stories import assert_same, plan_of, see, story, without


def test_a_value_that_started_from_the_undone_ones_is_trained_anew() -> None:
    told = story(value_init="label")
    told.correct("a", (0, 0), 1)
    told.correct("b", (9, 0), 1)
    told.correct("c", (19, 0), 1)
    assert [decode_delta(record).cause.seen.start for record in told.deltas[1:]] == [UNSET, "a", "b"]  # type: ignore[union-attr]
    warm = told.engine.codebook.values_NV.copy()
    told.undo("u", "a")
    assert told.engine.codebook.entry_ids == ["c", "b"]
    assert not np.array_equal(told.engine.codebook.values_NV[1], warm[1])
    assert_same(told, without(told, {"a"}))
    told.undo("v", "u")
    assert told.engine.codebook.values_NV.tobytes() == warm[[2, 1, 0]].tobytes()


def test_a_value_is_trained_anew_where_only_its_start_has_gone() -> None:
    told = story(value_init="label")
    told.correct("other", (15, 0), 3)
    told.correct("a", (0, 0), 1)
    told.correct("b", (20, 0), 2)
    told.correct("c", (25, 0), 1)
    seen = decode_delta(told.deltas[-1]).cause.seen  # type: ignore[union-attr]
    assert (seen.nearest, seen.start) == ("b", "a")  # type: ignore[union-attr]
    told.undo("u", "a")
    assert set(decode_delta(told.deltas[-1]).decided) == {"c"}
    assert_same(told, without(told, {"a"}))


def test_a_value_that_would_start_from_one_that_came_back_is_trained_anew() -> None:
    told = story(value_init="label")
    told.correct("other", (15, 0), 3)
    told.correct("a", (0, 0), 1)
    told.undo("u", "a")
    told.correct("b", (20, 0), 2)
    told.correct("c", (25, 0), 1)
    told.undo("v", "u")
    assert set(decode_delta(told.deltas[-1]).decided) == {"c"}
    assert_same(told, without(told, {"u"}))


def test_values_that_started_from_others_are_not_trained_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    told = story(value_init="label")
    for number in range(6):
        told.correct(f"f{number}", (9 * number, 0), 1 + number % 2)
    monkeypatch.setattr(value_search, "train_value", None)
    assert told.undo("u", "f5").status == "undone"
    assert told.engine.codebook.entry_ids == ["f0", "f1", "f2", "f3", "f4"]


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
    told = story()
    for step in steps:
        if isinstance(step, EditConfig):
            told.lead(step)
        else:
            told.correct(*step)
    told.undo("u", "x")
    assert_same(told, without(told, {"x"}))
    told.undo("v", "u")
    assert_same(told, without(told, {"u"}))


def test_a_decision_is_made_again_where_a_nearer_key_came_back() -> None:
    told = story()
    told.correct("x", (0.6, 0), 2)
    told.undo("u", "x")
    told.correct("e", (-0.9, 0), 1)
    assert told.correct("q", (0, 0), 2).status == "split"
    told.undo("v", "u")
    assert_same(told, without(told, {"u"}))
    assert sorted(told.engine.codebook.entry_ids) == ["e", "x"]


def test_of_two_keys_in_one_place_the_same_one_counts_after_an_undo() -> None:
    """Which slot they have depends on the entry that went."""
    told = story(policy="paper", retention_guard=False, radius=1e-3)
    for name, place, label in (("a", (0, 0), 1), ("b", (1, 0), 1), ("c", (1, 0), 2)):
        told.correct(name, place, label)
    told.undo("u", "a")
    told.correct("d", (1, 0), 1)
    assert_same(told, without(told, {"a"}))


def test_an_edit_was_superseded_only_by_what_the_undone_one_made_of_its_entry() -> None:
    """Without the guard another key may lie nearer to an edit than that of the entry which serves it by the record."""
    told = story(retention_guard=False)
    told.correct("e", (0, 0), 1)
    assert told.correct("o", (0.5, 0), 1).status == "unchanged"
    told.correct("n", (0.6, 0), 2)
    assert told.correct("x", (0, 0), 3).status == "replaced"
    told.correct("q", (0.5, 0), 1)
    assert "o" not in told.engine.memory
    told.undo("u", "x")
    assert_same(told, without(told, {"x"}))
    assert told.engine.memory.serving_entry_id("o") == "e"


def test_only_decisions_near_the_undone_one_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told = story()
    generator = np.random.default_rng(0)
    for number in range(60):
        x, y = generator.uniform(0, 40, 2)
        told.correct(f"f{number}", (x, y), int(generator.integers(1, CLASSES)))
    again: list[str] = []
    edit = EditEngine.edit

    def counted(self: EditEngine, feedback: Feedback, *rest: Any, **named: Any) -> Any:
        again.append(feedback.feedback_id)
        return edit(self, feedback, *rest, **named)

    monkeypatch.setattr(EditEngine, "edit", counted)
    told.undo("u", "f3")
    assert len(again) < 6
    monkeypatch.undo()
    assert_same(told, without(told, {"f3"}))


def test_an_undo_costs_in_proportion_to_the_history() -> None:
    """One of two authors whose edits take turns goes: nothing is looked through again for each of them."""
    calls = []
    for corrections in (100, 200):
        told = story(traffic_sample_size=0)
        for number in range(corrections):
            told.correct(f"f{number}", (9 * number, 0), 1 + number % 3, ("ann", "bob")[number % 2])
        profile = cProfile.Profile()
        profile.runcall(told.undo_author, "u", "ann")
        calls.append(sum(entry.callcount for entry in profile.getstats()))
        assert len(told.engine.codebook) == corrections / 2
    assert calls[1] < 2.3 * calls[0]


def test_deciding_everything_again_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decisions that are kept are those that would be made again."""
    digests = set()
    for shortcut in (True, False):
        told = story(radius=1.5)
        for number in range(12):
            told.correct(f"f{number}", (number % 4, (number * number) % 5), 1 + number % 3)
        if not shortcut:
            monkeypatch.setattr(rewriting.CounterfactualReplay, "_decision_unaffected", lambda *_: False)
        told.undo("u", "f2")
        digests.add(told.engine.codebook.digest)
        assert_same(told, without(told, {"f2"}))
    assert len(digests) <= 2  # what the deltas say of the decisions made again differs, the state does not


def test_a_correction_that_cannot_be_made_without_it_falls_away_and_the_outcome_says_so() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    told.lead(plan_of(recipe=ValueTrainingConfig(max_steps=0)))
    told.correct("b", (1, 1.2), 2)
    outcome = told.undo("u", "a")
    assert outcome.status == "undone"
    reason = "it takes back a; these corrections depended on that and cannot be made without: b (no value was found"
    assert reason in str(outcome.reason)
    assert len(told.engine.codebook) == 0
    assert "b" not in told.engine.memory


def test_a_decision_that_is_made_again_sees_the_traffic_of_its_time() -> None:
    told = story()
    told.correct("a", (0, 0), 1)
    see(told, (5, 1.0), 0)
    told.correct("b", (5, 0), 2)
    told.correct("c", (0.1, 0), 2)
    radius = float(told.engine.codebook.radii_N[told.engine.codebook.slot("b")])
    told.engine.reservoir = type(told.engine.reservoir)(8, 0)
    told.undo("u", "a")
    assert float(told.engine.codebook.radii_N[told.engine.codebook.slot("b")]) == radius == pytest.approx(0.8)


def test_what_an_earlier_undo_saw_is_not_forgotten_by_a_later_one() -> None:
    told = story(radius=0.5)
    told.correct("x", (0, 0), 1)
    told.correct("a", (1.2, 0), 1)
    told.correct("b", (0.9, 0), 1)
    told.undo("u", "a")
    state = told.engine.codebook.state_digest()
    told.undo("v", "x")
    see(told, (-0.6, 0), 0)
    told.undo("w", "v")
    assert told.engine.codebook.state_digest() == state


def test_decisions_are_made_again_under_the_plan_of_their_term() -> None:
    told = story(radius=0.5)
    told.correct("a", (0, 0), 1)
    told.correct("b", (0, 0.3), 1)
    told.lead(plan_of(radius=0.05, policy="paper", retention_guard=False))
    told.undo("u", "a")
    assert told.engine.codebook.radii_N.tolist() == [0.5]


def test_a_decision_whose_correction_is_gone_leaves_the_undo_rejected() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    told.correct("b", (1, 1.5), 2)
    told.feedback[1] = Feedback(v=1, feedback_id="other", undo="nothing")
    outcome = told.undo("u", "a")
    assert outcome.status == "rejected"
    assert outcome.reason == "delta 3 depends on feedback at offset 1, which is no longer there"
    assert len(told.engine.codebook) == 1


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
    told = story(worded=True, radius=0.3, traffic_sample_size=0)
    for step in steps:
        assert told.correct(*step).status != "rejected"
    before = told.engine.codebook.state_digest()
    assert told.undo("u", gone).status == "undone"
    assert_same(told, without(told, {gone}))
    told.undo("v", "u")
    assert told.engine.codebook.state_digest() == before
