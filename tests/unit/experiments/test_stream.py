"""What a stream of edits reports is what becomes of the model."""

import math
from dataclasses import replace

import pytest

from pipeline.experiments.editors.grace import Grace
from pipeline.experiments.editors.known import EDITORS
from pipeline.experiments.evaluation import Evaluation
from pipeline.experiments.stream import Point, Stream, fitting
from pipeline.experiments.tasks import TASKS, Edit, Example, Task
from pipeline.plan import Plan
from tests.unit.engine.tiny import editable, texts
from workers.cli.experiments import Method, Name

TEXTS = texts(30, seed=11)
NAMES = ["right", "wrong", "both"]
PLAN = Plan(radius=1e-3, radius_unit="absolute", traffic=0)


def task(edits: int = 6) -> Task:
    """Corrections of a classifier, of which each is asked in other words by its own text."""
    examples = [Example(text, NAMES[place % 3]) for place, text in enumerate(TEXTS)]
    return Task(
        "tiny",
        "accuracy",
        [Edit(example, (example.inputs,)) for example in examples[:edits]],
        retention=examples[10:20],
        unrelated=TEXTS[20:],
    )


def stream(plan: Plan, given: Task) -> Stream:
    model = editable("bert")
    return Stream(given, Grace(model, plan, []), Evaluation(model, given.measure))


def test_points_tell_how_it_was_before_on_the_way_and_after() -> None:
    found = list(stream(PLAN, task()).run([3, 6]))
    assert [point.corrections for point in found] == [0, 3, 6]
    before, half, after = found
    assert (before.edits, before.entries, math.isnan(before.es.value)) == (0, 0, True)
    assert after.edits == after.entries > half.edits > 0
    assert (after.es.exact, after.err.exact, after.rephrases.exact) == (1, 1, 1)
    assert before.coming.exact < 1
    assert math.isnan(after.coming.exact)
    assert half.seconds > 0


def test_an_edit_of_a_small_ball_touches_nothing_else() -> None:
    *_, after = stream(PLAN, task()).run([6])
    assert (after.agreement, after.captured) == (1, 0)


def test_large_balls_reach_what_they_should_not_and_it_shows() -> None:
    wrong = next(edit for edit in task().edits if edit.example.target == "both")
    given = replace(task(), edits=[wrong])
    before, after = stream(replace(PLAN, radius=100.0), given).run([1])
    assert (after.edits, after.es.exact, after.captured) == (1, 1, 1)
    assert after.agreement < 1
    assert after.trr != before.trr


def test_the_same_stream_comes_out_the_same() -> None:
    first, second = (list(stream(PLAN, task()).run([2, 6])) for _ in range(2))
    assert list(map(without_times, first)) == list(map(without_times, second))


def without_times(point: Point) -> str:
    return repr(replace(point, seconds=0.0))  # NaN is not equal to itself


def test_what_the_model_cannot_take_is_left_out_and_counted() -> None:
    given, long = task(), " ".join(["river"] * 60)
    given = replace(
        given,
        edits=[*given.edits, Edit(Example(long, "right")), Edit(Example(TEXTS[0], "no such label"))],
        retention=[*given.retention, Example(long, "right")],
        unrelated=[*given.unrelated, long],
    )
    assert fitting(given, editable("bert")) == (task(), 4)


@pytest.mark.parametrize("edits", [0, 1])
def test_a_stream_of_next_to_nothing_is_measured_all_the_same(edits: int) -> None:
    found = list(stream(PLAN, task(edits)).run([edits]))
    assert found[-1].corrections == edits
    assert len(found) == edits + 1


def test_the_command_names_every_editor_and_every_task() -> None:
    """It spells them out: to import them takes seconds."""
    assert {*Method} == {*EDITORS}
    assert {*Name} == {*TASKS}
