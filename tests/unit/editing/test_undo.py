"""Undo: afterwards the codebook is what it would be, had that feedback never come."""

import copy
from typing import Any

import pytest
import torch
from msgspec import UNSET

from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.editing.undo import undo
from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.pipeline.errors import HistoryError
from gracestream.schemas.deltas import decode_delta
from gracestream.schemas.messages import Feedback
from tests.support.chosen_queries import answer
from tests.support.editing_stories import Story, assert_same, new_story, plan_of


def test_an_undone_correction_is_answered_as_before_it() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2)
    assert answer(story.engine, 1, 1) == 2
    outcome = story.undo("u", "a")
    assert (outcome.status, outcome.seq) == ("undone", 3)
    assert answer(story.engine, 1, 1) == 0
    assert len(story.engine.codebook) == 0


def test_the_value_and_radius_that_an_edit_changed_come_back() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2)
    before = story.engine.codebook.entry(0)
    story.correct("b", (1, 1.5), 2)
    story.correct("c", (1, 1), 3)
    story.undo("u", "c")
    story.undo("v", "b")
    after = story.engine.codebook.entry(0)
    assert (after.radius, after.label) == (before.radius, before.label)
    assert after.value_V.tobytes() == before.value_V.tobytes()


def test_a_correction_that_rested_on_the_undone_one_gets_an_entry_of_its_own() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2)
    assert story.correct("b", (1, 1.5), 2).status == "unchanged"
    story.undo("u", "a")
    assert story.engine.codebook.entry_ids == ["b"]
    assert answer(story.engine, 1, 1.5) == 2


def test_an_undo_searches_its_keys_on_the_host_wherever_the_model_runs() -> None:
    """Its own copy of the keys would fill a GPU; on torch's device without numbers any search would fail."""
    story, on_host = new_story(), new_story()
    for one in (story, on_host):
        one.correct("a", (1, 1), 2)
        one.correct("b", (1, 1.5), 2)
        one.correct("c", (4, 1), 3)
    story.engine.model.device = torch.device("meta")
    assert KeyIndex(story.engine.codebook, story.engine.model.device)._search.device.type == "meta"
    for one in (story, on_host):
        one.undo("u", "a")
    assert set(decode_delta(story.deltas[-1]).decided) == {"b", "c"}
    assert_same(story, on_host)
    assert story.deltas == on_host.deltas


def test_an_undo_can_be_undone() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2)
    state = story.engine.codebook.state_digest()
    story.undo("u", "a")
    assert story.undo("v", "u").status == "undone"
    assert story.engine.codebook.state_digest() == state
    assert story.undo("w", "v").status == "undone"
    assert len(story.engine.codebook) == 0


def test_what_an_author_has_taken_back_already_is_not_taken_back_again() -> None:
    """The author's own undo is in force, but it takes back nothing but what goes with it."""
    story = new_story()
    story.correct("a", (0, 0), 1, "ann")
    story.correct("b", (5, 5), 1, "bob")
    assert story.take(Feedback(v=1, feedback_id="u", undo_author="ann", author="ann")).status == "undone"
    deltas = len(story.deltas)
    for name, author in (("v", "ann"), ("w", None)):
        outcome = story.take(Feedback(v=1, feedback_id=name, undo_author="ann", author=author or UNSET))
        assert (outcome.status, outcome.seq) == ("unchanged", UNSET)
        assert outcome.reason == "nothing that the author 'ann' sent is in force"
    assert len(story.deltas) == deltas
    story.undo("x", "u")
    assert sorted(story.engine.codebook.entry_ids) == ["a", "b"]
    assert story.undo_author("y", "ann").status == "undone"
    assert story.engine.codebook.entry_ids == ["b"]


def test_an_undo_that_is_undone_is_not_undone_again() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2)
    story.undo("u", "a")
    story.undo("v", "u")
    deltas = len(story.deltas)
    outcome = story.undo("w", "u")
    assert (outcome.status, outcome.reason) == ("unchanged", "it is undone already")
    assert len(story.deltas) == deltas


@pytest.mark.parametrize("fields", [{"undo_author": "ann"}, {"undo": "late"}])
def test_an_undo_covers_only_feedback_before_it_whenever_it_is_decided_on(fields: dict[str, Any]) -> None:
    story = new_story()
    story.correct("early", (0, 0), 1, "ann")
    story.correct("late", (5, 5), 1, "ann")
    edited = undo(story.engine, Feedback(v=1, feedback_id="u", **fields), 1, story)
    assert edited.outcome is not None
    if "undo" in fields:
        assert edited.outcome.reason == "no feedback 'late' has had an effect, so there is nothing to undo"
    else:
        assert edited.outcome.reason == "it takes back early"


def test_a_rejected_correction_stays_rejected() -> None:
    """The log holds nothing of it. Its author got the reason, and may send it again."""
    story = new_story()
    story.correct("a", (1, 1), 2)
    story.lead(plan_of(recipe=ValueTrainingConfig(max_steps=0)))
    assert story.correct("b", (1, 1), 3).status == "rejected"
    story.lead(plan_of())
    story.undo("u", "a")
    assert len(story.engine.codebook) == 0
    assert story.correct("b", (1, 1), 3).status == "added"


def test_all_that_an_author_did_is_undone_and_nothing_else() -> None:
    story = new_story()
    story.correct("a", (0, 0), 1, "ann")
    story.correct("b", (5, 5), 1, "bob")
    story.take(Feedback(v=1, feedback_id="c", undo="b", author="ann"))
    story.correct("d", (9, 9), 1, "ann")
    assert story.undo_author("u", "ann").status == "undone"
    assert story.engine.codebook.entry_ids == ["b"]
    assert story.undo_author("v", "carl").status == "rejected"
    assert story.undo_author("w", "ann").status == "unchanged"


@pytest.mark.parametrize(
    ("taken_back", "status", "reason"),
    [
        ("nobody", "rejected", "no feedback 'nobody' has had an effect, so there is nothing to undo"),
        ("u", "rejected", "no feedback 'u' has had an effect"),
        ("gone", "unchanged", "it is undone already"),
    ],
)
def test_an_undo_of_nothing_says_so(taken_back: str, status: str, reason: str) -> None:
    story = new_story()
    story.correct("gone", (1, 1), 2)
    story.undo("first", "gone")
    seq = story.engine.codebook.seq
    outcome = story.undo("u", taken_back)
    assert outcome.status == status
    assert reason in str(outcome.reason)
    assert story.engine.codebook.seq == seq


def test_an_id_is_used_once_also_by_an_undo() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2)
    assert "its id was used at offset 0" in str(story.undo("a", "a").reason)
    story.undo("u", "a")
    assert "its id was used at offset 0" in str(story.correct("a", (1, 1), 2).reason)
    assert "its id was used at offset 2" in str(story.correct("u", (1, 1), 2).reason)


def test_a_log_that_is_not_the_engines_own_is_a_fault() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2)
    story.deltas.pop()
    with pytest.raises(HistoryError, match=r"the log replays to delta 1 \(.*\), but the editor is at delta 2"):
        story.undo("u", "a")


@pytest.mark.parametrize("taken_back", ["a", "b", "d", "e"])
def test_what_a_fenced_editor_left_in_the_log_changes_nothing(taken_back: str) -> None:
    """It has decided on the same feedback, in a term of its own, otherwise than those who led after it."""
    story = new_story()
    story.correct("a", (0, 0), 1)
    story.correct("b", (0, 0.5), 1)
    story.correct("c", (0.6, 0), 2)
    fenced = copy.deepcopy(story)
    fenced.lead(plan_of(policy="paper", retention_guard=False, radius=3.0))
    for plan in (plan_of(), plan_of(radius=0.5)):
        story.lead(plan)
    plain = copy.deepcopy(story)
    for number, left in enumerate((None, *leave(fenced))):
        for one in (plain, story):
            if left is not None and one is story:
                one.apply(left)
            one.correct("defg"[number], (0.3 * number, 0.9), 3 - number % 2)
    assert len(story.deltas) == len(plain.deltas) + 3
    for name, undone in (("u", taken_back), ("v", "u")):
        assert plain.undo(name, undone) == story.undo(name, undone)
        assert story.engine.codebook.digest == plain.engine.codebook.digest
        assert_same(story, plain)


def leave(fenced: Story) -> list[bytes]:
    """A lead, a correction and an undo."""
    fenced.correct("d", (0, 0), 3)
    fenced.undo("e", "a")
    return fenced.deltas[-3:]


def test_the_delta_of_an_undo_says_what_it_takes_back_and_for_whom() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2, "ann")
    story.correct("b", (1, 1.5), 2)
    story.take(Feedback(v=1, feedback_id="u", undo="a", author="bob"))
    delta = decode_delta(story.deltas[-1])
    assert delta.op == "undo"
    assert (delta.cause.feedback_id, delta.cause.undoes, delta.cause.author) == ("u", ("a",), "bob")  # type: ignore[union-attr]
    assert [(edit.feedback_id, edit.removed) for edit in delta.edits] == [("a", True), ("b", False)]
    assert set(delta.decided) == {"b"}
