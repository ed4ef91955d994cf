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
from tests.support.editing_stories import Story, assert_same, plan_of, story


def test_an_undone_correction_is_answered_as_before_it() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    assert answer(told.engine, 1, 1) == 2
    outcome = told.undo("u", "a")
    assert (outcome.status, outcome.seq) == ("undone", 3)
    assert answer(told.engine, 1, 1) == 0
    assert len(told.engine.codebook) == 0


def test_the_value_and_radius_that_an_edit_changed_come_back() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    before = told.engine.codebook.entry(0)
    told.correct("b", (1, 1.5), 2)
    told.correct("c", (1, 1), 3)
    told.undo("u", "c")
    told.undo("v", "b")
    after = told.engine.codebook.entry(0)
    assert (after.radius, after.label) == (before.radius, before.label)
    assert after.value_V.tobytes() == before.value_V.tobytes()


def test_a_correction_that_rested_on_the_undone_one_gets_an_entry_of_its_own() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    assert told.correct("b", (1, 1.5), 2).status == "unchanged"
    told.undo("u", "a")
    assert told.engine.codebook.entry_ids == ["b"]
    assert answer(told.engine, 1, 1.5) == 2


def test_an_undo_searches_its_keys_on_the_host_wherever_the_model_runs() -> None:
    """Its own copy of the keys would fill a GPU; on torch's device without numbers any search would fail."""
    told, on_host = story(), story()
    for one in (told, on_host):
        one.correct("a", (1, 1), 2)
        one.correct("b", (1, 1.5), 2)
        one.correct("c", (4, 1), 3)
    told.engine.model.device = torch.device("meta")
    assert KeyIndex(told.engine.codebook, told.engine.model.device)._search.device.type == "meta"
    for one in (told, on_host):
        one.undo("u", "a")
    assert set(decode_delta(told.deltas[-1]).decided) == {"b", "c"}
    assert_same(told, on_host)
    assert told.deltas == on_host.deltas


def test_an_undo_can_be_undone() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    state = told.engine.codebook.state_digest()
    told.undo("u", "a")
    assert told.undo("v", "u").status == "undone"
    assert told.engine.codebook.state_digest() == state
    assert told.undo("w", "v").status == "undone"
    assert len(told.engine.codebook) == 0


def test_what_an_author_has_taken_back_already_is_not_taken_back_again() -> None:
    """The author's own undo is in force, but it takes back nothing but what goes with it."""
    told = story()
    told.correct("a", (0, 0), 1, "ann")
    told.correct("b", (5, 5), 1, "bob")
    assert told.take(Feedback(v=1, feedback_id="u", undo_author="ann", author="ann")).status == "undone"
    deltas = len(told.deltas)
    for name, author in (("v", "ann"), ("w", None)):
        outcome = told.take(Feedback(v=1, feedback_id=name, undo_author="ann", author=author or UNSET))
        assert (outcome.status, outcome.seq) == ("unchanged", UNSET)
        assert outcome.reason == "nothing that the author 'ann' sent is in force"
    assert len(told.deltas) == deltas
    told.undo("x", "u")
    assert sorted(told.engine.codebook.entry_ids) == ["a", "b"]
    assert told.undo_author("y", "ann").status == "undone"
    assert told.engine.codebook.entry_ids == ["b"]


def test_an_undo_that_is_undone_is_not_undone_again() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    told.undo("u", "a")
    told.undo("v", "u")
    deltas = len(told.deltas)
    outcome = told.undo("w", "u")
    assert (outcome.status, outcome.reason) == ("unchanged", "it is undone already")
    assert len(told.deltas) == deltas


@pytest.mark.parametrize("fields", [{"undo_author": "ann"}, {"undo": "late"}])
def test_an_undo_covers_only_feedback_before_it_whenever_it_is_decided_on(fields: dict[str, Any]) -> None:
    told = story()
    told.correct("early", (0, 0), 1, "ann")
    told.correct("late", (5, 5), 1, "ann")
    edited = undo(told.engine, Feedback(v=1, feedback_id="u", **fields), 1, told)
    assert edited.outcome is not None
    if "undo" in fields:
        assert edited.outcome.reason == "no feedback 'late' has had an effect, so there is nothing to undo"
    else:
        assert edited.outcome.reason == "it takes back early"


def test_a_rejected_correction_stays_rejected() -> None:
    """Nothing of it stands in the log, its author was told, and may send it again."""
    told = story()
    told.correct("a", (1, 1), 2)
    told.lead(plan_of(recipe=ValueTrainingConfig(max_steps=0)))
    assert told.correct("b", (1, 1), 3).status == "rejected"
    told.lead(plan_of())
    told.undo("u", "a")
    assert len(told.engine.codebook) == 0
    assert told.correct("b", (1, 1), 3).status == "added"


def test_all_that_an_author_did_is_undone_and_nothing_else() -> None:
    told = story()
    told.correct("a", (0, 0), 1, "ann")
    told.correct("b", (5, 5), 1, "bob")
    told.take(Feedback(v=1, feedback_id="c", undo="b", author="ann"))
    told.correct("d", (9, 9), 1, "ann")
    assert told.undo_author("u", "ann").status == "undone"
    assert told.engine.codebook.entry_ids == ["b"]
    assert told.undo_author("v", "carl").status == "rejected"
    assert told.undo_author("w", "ann").status == "unchanged"


@pytest.mark.parametrize(
    ("taken_back", "status", "reason"),
    [
        ("nobody", "rejected", "no feedback 'nobody' has had an effect, so there is nothing to undo"),
        ("u", "rejected", "no feedback 'u' has had an effect"),
        ("gone", "unchanged", "it is undone already"),
    ],
)
def test_an_undo_of_nothing_says_so(taken_back: str, status: str, reason: str) -> None:
    told = story()
    told.correct("gone", (1, 1), 2)
    told.undo("first", "gone")
    seq = told.engine.codebook.seq
    outcome = told.undo("u", taken_back)
    assert outcome.status == status
    assert reason in str(outcome.reason)
    assert told.engine.codebook.seq == seq


def test_an_id_is_used_once_also_by_an_undo() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    assert "its id was used at offset 0" in str(told.undo("a", "a").reason)
    told.undo("u", "a")
    assert "its id was used at offset 0" in str(told.correct("a", (1, 1), 2).reason)
    assert "its id was used at offset 2" in str(told.correct("u", (1, 1), 2).reason)


def test_a_log_that_is_not_the_engines_own_is_a_fault() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    told.deltas.pop()
    with pytest.raises(HistoryError, match=r"the log replays to delta 1 \(.*\), but the editor is at delta 2"):
        told.undo("u", "a")


@pytest.mark.parametrize("taken_back", ["a", "b", "d", "e"])
def test_what_a_fenced_editor_left_in_the_log_changes_nothing(taken_back: str) -> None:
    """It has decided on the same feedback, in a term of its own, otherwise than those who led after it."""
    told = story()
    told.correct("a", (0, 0), 1)
    told.correct("b", (0, 0.5), 1)
    told.correct("c", (0.6, 0), 2)
    fenced = copy.deepcopy(told)
    fenced.lead(plan_of(policy="paper", retention_guard=False, radius=3.0))
    for plan in (plan_of(), plan_of(radius=0.5)):
        told.lead(plan)
    plain = copy.deepcopy(told)
    for number, left in enumerate((None, *leave(fenced))):
        for one in (plain, told):
            if left is not None and one is told:
                one.apply(left)
            one.correct("defg"[number], (0.3 * number, 0.9), 3 - number % 2)
    assert len(told.deltas) == len(plain.deltas) + 3
    for name, undone in (("u", taken_back), ("v", "u")):
        assert plain.undo(name, undone) == told.undo(name, undone)
        assert told.engine.codebook.digest == plain.engine.codebook.digest
        assert_same(told, plain)


def leave(fenced: Story) -> list[bytes]:
    """A lead, a correction and an undo."""
    fenced.correct("d", (0, 0), 3)
    fenced.undo("e", "a")
    return fenced.deltas[-3:]


def test_the_delta_of_an_undo_says_what_it_takes_back_and_for_whom() -> None:
    told = story()
    told.correct("a", (1, 1), 2, "ann")
    told.correct("b", (1, 1.5), 2)
    told.take(Feedback(v=1, feedback_id="u", undo="a", author="bob"))
    delta = decode_delta(told.deltas[-1])
    assert delta.op == "undo"
    assert (delta.cause.feedback_id, delta.cause.undoes, delta.cause.author) == ("u", ("a",), "bob")  # type: ignore[union-attr]
    assert [(edit.feedback_id, edit.removed) for edit in delta.edits] == [("a", True), ("b", False)]
    assert set(delta.decided) == {"b"}
