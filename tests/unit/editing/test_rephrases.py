"""Rephrases: further keys of one correction, made, kept, taken over and taken back with it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gracestream.pipeline.editing.result import committed_outcome, make_correction
from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.schemas.deltas import decode_delta
from gracestream.schemas.messages import Feedback, Outcome, encode
from tests.support.chosen_queries import CLASSES, answer, at
from tests.support.editing_stories import assert_same, fields_of, new_story, plan_of, see, without
from tests.support.examples import examples
from tests.support.recorded_history import PLAN, Recorded

FAR = (5.0, 5.0)
WEAK = ValueTrainingConfig(max_steps=200, learning_rate=0.02, stop_margin=0.01)


def reasons(outcome: Outcome) -> dict[int, str]:
    return {one.rephrase: one.reason for one in outcome.left_out}


def test_each_rephrase_gets_a_key_with_the_same_value_and_target_in_one_delta() -> None:
    story = new_story()
    outcome = story.correct("a", (1, 1), 2, rephrases=[FAR, (-4, 3)])
    assert (outcome.status, outcome.entry_id, outcome.left_out) == ("added", "a", ())
    assert len(story.deltas) == 2
    assert story.engine.codebook.entry_ids == ["a", "a#1", "a#2"]
    entries = [story.engine.codebook.entry(slot) for slot in range(3)]
    assert len({entry.value_V.tobytes() for entry in entries}) == 1
    assert {entry.label for entry in entries} == {(2,)}
    assert [answer(story.engine, *place) for place in ((1, 1), FAR, (-4, 3), (9, 9))] == [2, 2, 2, 0]


def test_a_rephrase_at_which_the_value_fails_is_left_out_and_named() -> None:
    """The value leads by little, the input tilts the model's answer, and no value can be trained for several texts."""
    story = new_story()
    tries = {number: (0.0, number / 2) for number in range(1, 17)}
    engine = story.engine
    engine.config, engine.model.suffix_runner._padding_supported = plan_of(recipe=WEAK), False
    outcome = story.correct("a", (0, 0), 2, rephrases=list(tries.values()))
    left = reasons(outcome)
    assert 0 < len(left) < 16
    assert set(left.values()) == {
        "the value of the correction does not give the target here; correct this text on its own"
    }
    for number, place in tries.items():
        assert (f"a#{number}" in engine.memory) == (number not in left)
        if number not in left:
            assert answer(engine, *place) == 2


def test_a_value_that_fails_at_rephrases_is_trained_on_for_all_texts() -> None:
    story, alone = new_story(recipe=WEAK), new_story(recipe=WEAK)
    tries = [(0.0, number / 2) for number in range(1, 17)]
    outcome = story.correct("a", (0, 0), 2, rephrases=tries)
    assert outcome.left_out == ()
    assert all(answer(story.engine, *place) == 2 for place in [(0, 0), *tries])
    assert (outcome.steps or 0) > (alone.correct("a", (0, 0), 2).steps or 0)
    state = story.engine.codebook.state_digest()
    story.undo("u", "a")
    story.undo("v", "u")
    assert story.engine.codebook.state_digest() == state


def test_a_rephrase_that_the_model_cannot_take_is_left_out() -> None:
    story = new_story()
    one = fields_of(make_correction("a", at(1, 1), "2")) | {"rephrases": (at(float("nan"), 0), at(*FAR))}
    outcome = story.take(Feedback(**one))
    assert reasons(outcome) == {1: "the model's activations on this input are not finite"}
    assert story.engine.codebook.entry_ids == ["a", "a#2"]


def test_an_undo_takes_back_every_key_and_an_undo_of_it_brings_them_back() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2, "ann", [FAR, (-4, 3)])
    story.correct("b", (9, 0), 1, "bob", [(0, 9)])
    state = story.engine.codebook.state_digest()
    assert story.undo("u", "a").status == "undone"
    assert sorted(story.engine.codebook.entry_ids) == ["b", "b#1"]
    assert sorted(story.engine.memory.feedback_ids) == ["b", "b#1"]
    assert answer(story.engine, *FAR) == 0
    story.undo("v", "u")
    assert story.engine.codebook.state_digest() == state
    story.undo_author("w", "ann")
    assert sorted(story.engine.codebook.entry_ids) == ["b", "b#1"]


def test_a_later_edit_does_not_take_a_rephrase_over() -> None:
    """A key that is nearer to another edit's query gives that edit an entry of its own; a rephrase is such an edit."""
    story = new_story(radius=2.0)
    story.correct("a", (0, 0), 1)
    story.correct("b", (9, 9), 1, rephrases=[(1e-4, 0)])
    assert story.engine.memory.serving_entry_id("b#1") == "a"
    story.correct("c", (1, 0), 2)
    assert answer(story.engine, 1e-4, 0) == 1
    story.correct("d", (1.4, 0), 3, rephrases=[(0.4, 0)])
    assert [answer(story.engine, *place) for place in ((1e-4, 0), (1, 0), (0.4, 0), (0, 0))] == [1, 2, 3, 1]


def test_a_later_correction_takes_over_the_one_text_that_it_corrects() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2, rephrases=[FAR])
    assert story.correct("b", FAR, 3).status == "replaced"
    assert [answer(story.engine, *place) for place in ((1, 1), FAR)] == [2, 3]
    assert sorted(story.engine.memory.feedback_ids) == ["a", "b"]
    story.correct("c", (8, 8), 1, rephrases=[(1, 1)])
    assert [answer(story.engine, *place) for place in ((1, 1), FAR, (8, 8))] == [1, 3, 1]
    assert sorted(story.engine.memory.feedback_ids) == ["b", "c", "c#1"]
    story.undo("u", "c")
    assert [answer(story.engine, *place) for place in ((1, 1), FAR, (8, 8))] == [2, 3, 0]


def test_a_correction_that_an_entry_serves_gives_its_rephrases_that_entrys_value() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2)
    outcome = story.correct("b", (1, 1.5), 2, rephrases=[FAR])
    assert (outcome.status, outcome.entry_id) == ("expanded", "b")
    assert story.engine.codebook.entry_ids == ["a", "b", "b#1"]
    assert len({story.engine.codebook.entry(slot).value_V.tobytes() for slot in range(3)}) == 1
    assert answer(story.engine, *FAR) == 2


def test_a_rephrase_next_to_its_correction_does_not_take_it_along_when_corrected() -> None:
    """The correction is within an entry's radius, and its rephrase's key would be nearer to it than the entry's key."""
    story = new_story(radius=2.0)
    story.correct("a", (0, 0), 2)
    story.correct("b", (1.0, 0), 2, rephrases=[(1.2, 0)])
    story.correct("c", (1.2, 0), 3)
    assert [answer(story.engine, x, 0) for x in (0, 1.0, 1.2)] == [2, 2, 3]


def test_a_correction_that_the_model_fulfils_keeps_its_right_rephrases_and_leaves_out_the_rest() -> None:
    story = new_story()
    story.correct("x", FAR, 3)
    outcome = story.correct("a", (1, 1), 0, rephrases=[(1, 2), FAR])
    assert outcome.status == "unchanged"
    assert reasons(outcome) == {
        2: "the model answers the inputs of the correction by itself, so there is no value; correct this text on its"
        " own"
    }
    assert story.engine.memory.serving_entry_id("a#1") == ""
    story.correct("b", (1, 2.2), 1)
    assert [answer(story.engine, *place) for place in ((1, 1), (1, 2), FAR, (1, 2.2))] == [0, 0, 3, 1]


def test_an_id_that_would_name_another_edits_key_is_rejected_both_ways() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2, rephrases=[FAR])
    story.undo("u", "a")
    outcome = story.correct("a#1", (9, 9), 1)
    assert (outcome.status, outcome.reason) == (
        "rejected",
        "its id is the name of a key of feedback 'a'; choose another id",
    )
    assert story.undo("a#2", "nothing").reason != story.undo("a#1", "u").reason == outcome.reason
    story.correct("t#1", (9, 9), 1)
    outcome = story.correct("t", (1, 1), 2, rephrases=[FAR])
    assert outcome.status == "rejected"
    assert outcome.reason == "the key of its rephrase 1 would be named 't#1', the id of feedback at offset 5"


def test_traffic_forgets_rephrases() -> None:
    story = new_story()
    see(story, FAR, 0)
    see(story, (-3, -3), 1)
    story.correct("a", (1, 1), 2, rephrases=[FAR])
    assert len(story.engine.traffic_sample) == 1


def test_the_same_correction_again_is_unchanged() -> None:
    story = new_story()
    story.correct("a", (1, 1), 2, rephrases=[FAR])
    assert story.correct("a", (1, 1), 2, rephrases=[FAR]).status == "unchanged"
    assert len(story.deltas) == 2


def test_a_history_with_rephrases_comes_out_again_byte_for_byte() -> None:
    made = Recorded()

    def correct(name: str, place: tuple[float, float], label: int, *rephrases: tuple[float, float]) -> None:
        one = fields_of(make_correction(name, at(*place), str(label)))
        made.take(Feedback(**one | {"rephrases": tuple(at(*other) for other in rephrases)}))

    correct("a", (0, 0), 1, (5, 5), (8, 0))
    made.see(0, 0.0, 1.2)
    correct("b", (5, 5), 2, (8, 0), (0, 9))
    correct("c", (0.3, 0), 1, (3, -3))
    made.undo("u", "a")
    correct("d", (-4, -4), 0, (-5, -5), (0, 9))
    made.undo("v", "u")
    reproduced = made.reproduced()
    assert reproduced.report.first_difference is None
    assert reproduced.records == made.deltas


def test_values_that_are_trained_together_and_on_for_rephrases_come_out_again() -> None:
    made = Recorded(replace(PLAN, value_init="layer", recipe=WEAK))
    places = [(0.0, 0.0), (40.0, 0.0), (0.0, 40.0)]
    corrections = [fields_of(make_correction(f"f{x}-{y}", at(x, y), "2")) for x, y in places]
    others = [tuple(at(x, y + number / 2) for number in range(1, 9)) for x, y in places]
    sent = [Feedback(**one | {"rephrases": texts}) for one, texts in zip(corrections, others, strict=True)]
    outcomes = made.send(*map(encode, sent))
    assert [outcome and (outcome.status, outcome.left_out) for outcome in outcomes] == [("added", ())] * 3
    causes = [decode_delta(record).cause for record in made.deltas[1:]]
    assert [cause is not UNSET and cause.together for cause in causes] == [(0, 1, 2)] * 3
    assert made.reproduced().records == made.deltas


def test_a_delta_without_an_outcome_names_what_it_left_out() -> None:
    made = Recorded()
    made.take(
        Feedback(**fields_of(make_correction("a", at(0, 0), "1")) | {"rephrases": (at(float("nan"), 0), at(5, 5))})
    )
    assert [one.rephrase for one in committed_outcome(decode_delta(made.deltas[1])).left_out] == [1]


def test_a_rephrase_that_is_served_otherwise_now_is_a_difference() -> None:
    made = Recorded()
    one = fields_of(make_correction("a", at(0, 0), "1"))
    made.take(Feedback(**one | {"rephrases": (at(5, 5),)}))
    delta = decode_delta(made.deltas[1])
    assert delta.cause is not UNSET
    (key,) = delta.cause.rephrases
    made.rewrite(2, cause=delta.cause.__class__(**fields_of(delta.cause) | {"rephrases": (key, key)}))  # type: ignore[arg-type]
    assert "it was served by ('a', (), 'a#1', 'a#1') and is by ('a', (), 'a#1') now" in str(
        made.reproduced().report.first_difference
    )


places = st.sampled_from([(float(x), float(y)) for x in range(3) for y in range(3)])
corrections = st.tuples(places, st.integers(1, CLASSES - 1), st.lists(places, max_size=4))
steps = st.one_of(corrections, corrections, st.integers(0, 9))


@pytest.mark.slow
@examples(1.5)
@given(st.lists(steps, min_size=1, max_size=10), st.sampled_from([0.3, 1.0, 3.0]))
def test_every_text_in_force_gets_the_target_of_its_last_correction(stream: list[Any], radius: float) -> None:
    """Whatever corrections, undos and corrections of the same texts come: by the words of what was sent alone."""
    story = new_story(radius=radius)
    sent: dict[str, dict[tuple[float, ...], int]] = {}
    for number, step in enumerate(stream):
        name = f"f{number}"
        if isinstance(step, int):
            if sent.pop(f"f{step}", None) is not None:
                story.undo(name, f"f{step}")
            continue
        place, label, others = step
        outcome = story.correct(name, place, label, rephrases=others)
        assert outcome.status != "rejected"
        texts = [other for other in dict.fromkeys(others) if other != place]
        left = {texts[one.rephrase - 1] for one in outcome.left_out}
        sent[name] = {text: label for text in (place, *texts) if text not in left}
    expected: dict[tuple[float, ...], int] = {}
    for targets in sent.values():
        expected |= targets
    for place, label in expected.items():
        assert answer(story.engine, *place) == label
    gone = {one.feedback_id for one in story.feedback if not one.is_undo} - sent.keys()
    assert_same(story, without(story, gone))
