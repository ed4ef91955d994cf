"""What a stream of edits reports is what becomes of the model."""

import math
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.experiments.editors.editor import EditOutcome
from gracestream.pipeline.experiments.editors.grace import Grace
from gracestream.pipeline.experiments.editors.known import EDITOR_FACTORIES
from gracestream.pipeline.experiments.evaluation import Evaluator
from gracestream.pipeline.experiments.stream import EditStream, Measurement, drop_unsupported
from gracestream.pipeline.experiments.tasks import TASKS, Example, ExperimentTask, TaskCorrection
from gracestream.pipeline.model.batch import Batch
from gracestream.workers.cli.experiments import EditorName, ExperimentName
from tests.support.tiny_models import editable, texts

TEXTS = texts(30, seed=11)
NAMES = ["right", "wrong", "both"]
PLAN = EditConfig(radius=1e-3, radius_unit="absolute", traffic_sample_size=0)


def task(edits: int = 6) -> ExperimentTask:
    """Corrections of a classifier, of which each is asked in other words by its own text."""
    examples = [Example(text, NAMES[place % 3]) for place, text in enumerate(TEXTS)]
    return ExperimentTask(
        "tiny",
        "accuracy",
        [TaskCorrection(example, (example.inputs,)) for example in examples[:edits]],
        retention=examples[10:20],
        unrelated=TEXTS[20:],
    )


def stream(plan: EditConfig, given: ExperimentTask) -> EditStream:
    model = editable("bert")
    return EditStream(given, Grace(model, plan, []), Evaluator(model, given.measure))


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


class GivenResults:
    """An editor that changes nothing and returns the given results."""

    num_entries = 2

    def __init__(self, *statuses: str) -> None:
        self._statuses = statuses

    def edit(self, number: int, example: Example) -> EditOutcome:
        del example
        return EditOutcome(self._statuses[number], 1, 10.0**number)

    def state_keys(self, texts: Sequence[str]) -> list[Hashable]:
        return [None] * len(texts)

    def with_edits(self, batch: Batch) -> AbstractContextManager[object]:
        del batch
        return nullcontext()


@pytest.mark.parametrize("failed", ["rejected", "failed"])
def test_edits_are_what_was_needed_whether_it_succeeded_or_not(failed: str) -> None:
    model = editable("bert")
    examples = [edit.example for edit in task(9).edits]
    scores = [one.exact for one in Evaluator(model, "accuracy").score(GivenResults(), examples)]
    right, wrong = (examples[scores.index(which)] for which in (True, False))
    given = replace(task(), edits=[TaskCorrection(right), TaskCorrection(wrong), TaskCorrection(wrong)])
    *_, after = EditStream(given, GivenResults("unchanged", failed, "added"), Evaluator(model, "accuracy")).run([3])
    assert (after.corrections, after.edits, after.failed, after.edits_per_entry) == (3, 2, 1, 0.5)
    assert after.seconds == (10 + 100) / 2
    assert after.es.value == 0, "what the model said right was no edit"
    assert after.err.value == pytest.approx(1 / 3), "it is to be retained all the same"


def test_accuracy_is_retained_of_what_was_right_before() -> None:
    model = editable("bert")
    names = [Example(text, name) for text in TEXTS[10:14] for name in NAMES]
    first, *_, last = stream(PLAN, replace(task(), accurate=names)).run([6])
    assert sum(score.exact for score in Evaluator(model, "accuracy").score(GivenResults(), names)) in range(1, 5)
    assert (first.arr.value, last.arr.value) == (1, 1)
    wrong = next(edit for edit in task().edits if edit.example.target == "both")
    *_, spoilt = stream(replace(PLAN, radius=100.0), replace(task(), edits=[wrong], accurate=names)).run([1])
    assert spoilt.arr.value < 1
    *_, none = stream(PLAN, replace(task(), accurate=[])).run([1])
    assert math.isnan(none.arr.value)


def test_an_edit_with_a_small_radius_changes_no_other_answer() -> None:
    *_, after = stream(PLAN, task()).run([6])
    assert (after.agreement, after.captured) == (1, 0)


def test_metrics_show_that_a_large_radius_changes_other_answers() -> None:
    wrong = next(edit for edit in task().edits if edit.example.target == "both")
    given = replace(task(), edits=[wrong])
    before, after = stream(replace(PLAN, radius=100.0), given).run([1])
    assert (after.edits, after.es.exact, after.captured) == (1, 1, 1)
    assert after.agreement < 1
    assert after.trr != before.trr


def test_the_same_stream_comes_out_the_same() -> None:
    first, second = (list(stream(PLAN, task()).run([2, 6])) for _ in range(2))
    assert list(map(without_times, first)) == list(map(without_times, second))


def without_times(point: Measurement) -> str:
    return repr(replace(point, seconds=0.0))  # NaN is not equal to itself


def test_what_the_model_cannot_take_is_left_out_and_counted() -> None:
    given, long = task(), " ".join(["river"] * 60)
    given = replace(
        given,
        edits=[
            *given.edits,
            TaskCorrection(Example(long, "right")),
            TaskCorrection(Example(TEXTS[0], "no such label")),
        ],
        retention=[*given.retention, Example(long, "right")],
        unrelated=[*given.unrelated, long],
    )
    assert drop_unsupported(given, editable("bert")) == (task(), 4)


@pytest.mark.parametrize("edits", [0, 1])
def test_a_stream_of_next_to_nothing_is_measured_all_the_same(edits: int) -> None:
    found = list(stream(PLAN, task(edits)).run([edits]))
    assert found[-1].corrections == edits
    assert len(found) == edits + 1


def test_the_command_names_every_editor_and_every_task() -> None:
    """It spells them out: to import them takes seconds."""
    assert {*EditorName} == {*EDITOR_FACTORIES}
    assert {*ExperimentName} == {*TASKS}
