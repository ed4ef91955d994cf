"""Training anew what left no delta: it is decided on the codebook of its time, and another status is a difference."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.provenance import describe_environment
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.pipeline.errors import HistoryError
from gracestream.schemas.messages import Feedback, Outcome, decode, encode
from tests.support.chosen_queries import at
from tests.support.recorded_history import PLAN, Recorded

HOPELESS = replace(PLAN, value_init="layer", recipe=ValueTrainingConfig(max_steps=0))
"""Under it no value is found: the layer's own output, which every value starts from, is as wrong as it was."""


def said_of(history: Recorded, plan: EditConfig) -> dict[str, str]:
    """What a `lead` delta tells of a plan."""
    return describe_environment(history.engine.model, plan)


def assert_all_the_same(history: Recorded, no_change: int) -> None:
    compared = history.reproduced().report
    assert compared.first_difference is None
    assert compared.same_without_delta == len(history.no_change_decisions()) == no_change
    assert compared.decisions == compared.same_decisions == compared.same_records + no_change


def first_difference(history: Recorded) -> str | None:
    compared = history.reproduced().report
    assert compared.decisions == compared.same_decisions + (compared.first_difference is not None)
    return compared.first_difference


def no_class(history: Recorded) -> str:
    return history.correct("f", (9, 9), 7).status


def input_that_breaks_the_model(history: Recorded) -> str:
    return history.take(make_correction("f", "1 2 3", "1")).status


def used_id(history: Recorded) -> str:
    return history.correct("a", (9, 9), 2).status


def same_correction_again(history: Recorded) -> str:
    return history.correct("a", (0, 0), 1).status


def undo_of_nothing(history: Recorded) -> str:
    return history.undo("u", "nobody").status


def undo_that_is_idle(history: Recorded) -> str:
    history.undo("u", "a")
    return history.undo("v", "a").status


def no_value(history: Recorded) -> str:
    history.lead(HOPELESS)
    return history.correct("f", (9, 9), 2).status


def no_radius_that_a_delta_holds(history: Recorded) -> str:
    history.lead(replace(PLAN, radius=math.inf))
    return history.correct("f", (9, 9), 2).status


@pytest.mark.parametrize(
    ("decision", "status"),
    [
        (no_class, "rejected"),
        (input_that_breaks_the_model, "rejected"),
        (used_id, "rejected"),
        (same_correction_again, "unchanged"),
        (undo_of_nothing, "rejected"),
        (undo_that_is_idle, "unchanged"),
        (no_value, "rejected"),
        (no_radius_that_a_delta_holds, "rejected"),
    ],
)
def test_each_kind_comes_to_the_same_again(decision: Callable[[Recorded], str], status: str) -> None:
    history = Recorded()
    history.correct("a", (0, 0), 1)
    assert decision(history) == status
    assert_all_the_same(history, 1)


def test_what_was_rejected_and_is_made_now_is_the_first_difference() -> None:
    history = Recorded()
    history.correct("a", (0, 0), 1)
    history.lead(HOPELESS, **said_of(history, PLAN))
    history.correct("b", (5, 5), 2)
    history.correct("c", (9, 9), 2)
    found = str(first_difference(history))
    assert found.startswith(
        "after delta 3 (feedback 'b', offset 1): it was 'rejected' (no value was found in 0 steps; "
    )
    assert found.endswith(") and is 'added' now")


def test_what_was_unchanged_and_is_rejected_now_is_a_difference() -> None:
    history = Recorded()
    history.correct("a", (0, 0), 1)
    history.correct("a", (0, 0), 1)
    history.feedback[1] = make_correction("a", at(0, 0), "2")
    assert first_difference(history) == (
        "after delta 2 (feedback 'a', offset 1): it was 'unchanged' and is 'rejected' now:"
        " its id was used at offset 0; a new correction needs a new id"
    )


def test_a_reason_in_other_words_is_none() -> None:
    history = Recorded()
    history.lead(
        HOPELESS, **said_of(history, replace(PLAN, recipe=ValueTrainingConfig(max_steps=1, learning_rate=1e-6)))
    )
    history.correct("b", (5, 5), 2)
    assert_all_the_same(history, 1)


@pytest.mark.parametrize("first", ["delta", "no_change"])
def test_differences_are_met_in_the_order_of_feedback(first: str) -> None:
    history = Recorded()
    history.lead(HOPELESS, **said_of(history, PLAN))
    if first == "no_change":
        history.correct("b", (5, 5), 2)
    history.lead(PLAN)
    history.correct("a", (0, 0), 1)
    history.lead(HOPELESS, **said_of(history, PLAN))
    history.correct("c", (9, 9), 2)
    history.rewrite(4, op="split")
    expected = {"no_change": "after delta 2 (feedback 'b', offset 0)", "delta": "delta 4 (feedback 'a', offset 0)"}
    assert str(first_difference(history)).startswith(expected[first])


def test_it_is_decided_under_the_plan_of_its_time() -> None:
    """No delta but that of the next term tells when that was."""
    history = Recorded(HOPELESS)
    history.correct("a", (0, 0), 1)
    history.lead(PLAN)
    history.lead(HOPELESS)
    history.correct("b", (0, 0), 1)
    history.lead(PLAN)
    history.correct("c", (0, 0), 1)
    assert_all_the_same(history, 2)


def test_around_undos_it_is_decided_on_the_codebook_of_its_time() -> None:
    history = Recorded()
    history.correct("a", (0, 0), 1)
    history.undo("u", "a")
    history.lead(HOPELESS)
    assert history.correct("b", (0, 0), 1).status == "rejected", "nothing answers so any more"
    assert history.correct("a", (0, 0), 1).status == "rejected"
    history.undo("v", "u")
    assert history.correct("a", (0, 0), 1).status == "unchanged"
    assert history.undo("w", "u").status == "unchanged"
    assert_all_the_same(history, 4)


def test_it_is_decided_with_the_traffic_of_its_time() -> None:
    """The entry of the same target may not grow that far, so the input would need a value of its own."""
    history = Recorded()
    history.see(0, 0.0, 1.2)
    history.correct("a", (0, 0), 1)
    history.lead(HOPELESS)
    assert history.correct("b", (1.2, 0), 1).status == "rejected"
    assert_all_the_same(history, 1)


def test_it_is_decided_with_the_initial_radius_of_its_time() -> None:
    """The decision's record has its radius, 0.5. With the 9.0 of the altered `lead` delta it would be an expansion."""
    history = Recorded()
    history.correct("a", (0, 0), 1)
    history.lead(replace(HOPELESS, radius=0.5), **said_of(history, replace(HOPELESS, radius=9.0)))
    assert history.correct("b", (3, 0), 1).status == "rejected"
    assert_all_the_same(history, 1)


def test_what_the_model_had_no_part_in_is_not_decided_again() -> None:
    """Feedback that was unreadable or not accepted is not decided, although the engine could decide on it now."""
    history = Recorded()
    history.correct("a", (0, 0), 1)
    unreadable = b'{"v": 1, "feedback_id": "b", "inputs": "5 5"}'
    rejected = Feedback(v=1, feedback_id="c", inputs=at(9, 9), target="1")
    history.send(unreadable)
    history.correct("d", (2, 2), 1)
    history.send(encode(rejected), minutes=0)
    statuses = [decode(edit.value, Outcome).status for edit in history.edits]
    assert statuses == ["added", "rejected", "expanded", "rejected"]
    history.feedback[1] = make_correction("b", at(5, 5), "1")
    assert_all_the_same(history, 0)


def test_up_to_a_delta_it_is_what_was_decided_before_the_next_one() -> None:
    history = Recorded()
    history.correct("a", (0, 0), 1)
    history.correct("x", (9, 9), 7)
    history.correct("b", (5, 5), 2)
    history.correct("y", (9, 9), 7)
    for deltas, no_change in ((1, 0), (2, 1), (3, 2)):
        compared = history.reproduced(deltas).report
        assert (compared.same_without_delta, compared.first_difference) == (no_change, None)


def test_feedback_that_is_gone_is_a_fault() -> None:
    history = Recorded()
    history.correct("x", (9, 9), 7)
    del history.feedback[0]
    with pytest.raises(HistoryError, match="the feedback behind a decision after delta 1 is not there"):
        history.reproduced()
