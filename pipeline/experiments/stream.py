"""One experiment: edits one after the other, and how the model does at points on the way (paper, section 3)."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.experiments.editors.editor import Editor, Made
from gracestream.pipeline.experiments.evaluation import ANSWER, Evaluation, Score
from gracestream.pipeline.experiments.tasks import Edit, Example, Task
from gracestream.pipeline.model import EditableModel, InputError
from gracestream.schemas.messages import Parameters

UNNEEDED = "unchanged"
"""The status of a correction that the model was right on already: it is no edit."""

FAILED = ("rejected", "failed")
"""Statuses of edits after which the model was not right."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over some examples: the task's measure, and the share that is exactly right. NaN of no examples."""

    value: float
    exact: float

    @classmethod
    def of(cls, scores: Sequence[Score]) -> "Quality":
        """Of these scores."""
        if not scores:
            return cls(float("nan"), float("nan"))
        return cls(fmean(score.value for score in scores), fmean(score.exact for score in scores))


@dataclass(frozen=True, slots=True)
class Point:
    """How things stand after some corrections.

    Attributes:
        corrections: That have come.
        edits: Those of them that were needed: the model was wrong.
        failed: Those edits after which it was still wrong.
        entries: Stored by the editor.
        seconds: Spent on an edit, mean.
        es: Edit success: of each edit when it was made, on its own example.
        err: Edit retention rate: of all corrections that have come, now.
        trr: Test retention rate: of what the model was good at before.
        arr: Accuracy retention rate: of what it said right before any edit, in texts like the edited.
        rephrases: Of the corrections that have come, in other words.
        coming: Of the corrections that have not come yet.
        agreement: The share of TRR's examples at each token of which, after those before it, the model's choice is
            what it was before any edit.
        covered: The share of the rephrases of corrections that have come which the editor reaches.
        captured: The share of unrelated texts that the editor reaches.
    """

    corrections: int
    edits: int
    failed: int
    entries: int
    seconds: float
    es: Quality
    err: Quality
    trr: Quality
    arr: Quality
    rephrases: Quality
    coming: Quality
    agreement: float
    covered: float
    captured: float

    @property
    def edits_an_entry(self) -> float:
        """Of those that did not fail; NaN where nothing is stored."""
        return (self.edits - self.failed) / self.entries if self.entries else float("nan")


@dataclass(slots=True)
class Stream:
    """Runs a task's edits through an editor. `run` is told after how many corrections to measure.

    Attributes:
        at_work: Called after each correction.
        made: What became of each correction so far.
        success: How the model did on each right after it.
    """

    task: Task
    editor: Editor
    evaluation: Evaluation
    at_work: Callable[[], object] = lambda: None
    made: list[Made] = field(default_factory=list)
    success: list[Score] = field(default_factory=list)

    def run(self, points: Sequence[int]) -> Iterator[Point]:
        """One point for each number, in ascending order, and one before the first edit."""
        before = self._scores(self.task.retention)
        known = zip(self.task.accurate, self._scores(self.task.accurate), strict=True)
        accurate = [example for example, score in known if score.exact]
        bare = self.editor.states([*self.task.unrelated, *self._rephrases()])
        for point in sorted({0, *points}):
            for edit in self.task.edits[len(self.made) : point]:
                self.made.append(self.editor.edit(len(self.made), edit.example))
                self.success += self.evaluation.scores(self.editor, [edit.example])
                self.at_work()
            yield self._point(before, accurate, bare)

    def _point(self, before: Sequence[Score], accurate: Sequence[Example], bare: Sequence[Hashable]) -> Point:
        count = len(self.made)
        come, coming = self.task.edits[:count], self.task.edits[count:]
        kept = self._scores(self.task.retention)
        edits = [place for place, one in enumerate(self.made) if one.status != UNNEEDED]
        states = self.editor.states([*self.task.unrelated, *self._rephrases()])
        reached = [now != was for now, was in zip(states, bare, strict=True)]
        unrelated = len(self.task.unrelated)
        rephrases = sum(len(edit.rephrases) for edit in come)
        return Point(
            corrections=count,
            edits=len(edits),
            failed=sum(self.made[place].status in FAILED for place in edits),
            entries=self.editor.entries,
            seconds=_mean([self.made[place].seconds for place in edits]),
            es=Quality.of([self.success[place] for place in edits]),
            err=Quality.of(self._scores([edit.example for edit in come])),
            trr=Quality.of(kept),
            arr=Quality.of(self._scores(accurate)),
            rephrases=Quality.of(self._scores([example for edit in come for example in _rephrased(edit)])),
            coming=Quality.of(self._scores([edit.example for edit in coming])),
            agreement=_mean([now.chosen == was.chosen for now, was in zip(kept, before, strict=True)]),
            covered=_mean(reached[unrelated : unrelated + rephrases]),
            captured=_mean(reached[:unrelated]),
        )

    def _rephrases(self) -> list[str]:
        """Of all corrections."""
        return [text for edit in self.task.edits for text in edit.rephrases]

    def _scores(self, examples: Sequence[Example]) -> list[Score]:
        return self.evaluation.scores(self.editor, examples)


class StreamError(UserError):
    """An experiment that cannot be run; the text says why."""


def first(task: Task, edits: int | None, retention: int | None, seed: int = 0) -> Task:
    """The task with so many of its edits, and of what must stay, at most; None: all. A seed but 0 draws which."""
    if seed:
        generator = np.random.default_rng(seed)
        task = replace(
            task,
            edits=[task.edits[place] for place in generator.permutation(len(task.edits))],
            retention=[task.retention[place] for place in generator.permutation(len(task.retention))],
        )
    return replace(task, edits=task.edits[:edits], retention=task.retention[:retention])


def fitting(task: Task, model: EditableModel) -> tuple[Task, int]:
    """The task without what the model cannot take, such as longer texts than it has room for; and how much that is.

    Raises:
        StreamError: no edit is left.
    """

    def fits(example: Example) -> bool:
        try:
            model.supervised(example.inputs, example.target)
            if task.measure == "f1":
                model.task.admit(model.task.tokenize(example.inputs), Parameters(max_new_tokens=ANSWER))
        except InputError:
            return False
        return True

    def asks(text: str) -> bool:
        try:
            model.task.tokenize(text)
        except InputError:
            return False
        return True

    edits = [edit for edit in task.edits if all(map(fits, (edit.example, *_rephrased(edit))))]
    left = replace(
        task,
        edits=edits,
        retention=list(filter(fits, task.retention)),
        accurate=list(filter(fits, task.accurate)),
        unrelated=list(filter(asks, task.unrelated)),
        traffic=list(filter(asks, task.traffic)),
    )
    if not task.edits:
        raise StreamError(f"the data of {task.name} hold no edits")
    if not edits:
        raise StreamError(
            f"the model can take none of the {len(task.edits)} edits of {task.name}: is it one of the kind that they"
            " are for, and are GRACESTREAM_MAX_INPUT_TOKENS and GRACESTREAM_MAX_TARGET_TOKENS large enough?"
        )
    return left, _size(task) - _size(left)


def _size(task: Task) -> int:
    parts: tuple[Sequence[object], ...] = (task.edits, task.retention, task.accurate, task.unrelated, task.traffic)
    return sum(len(part) for part in parts)


def _rephrased(edit: Edit) -> list[Example]:
    return [Example(text, edit.example.target) for text in edit.rephrases]


def _mean(numbers: Sequence[float]) -> float:
    return fmean(numbers) if numbers else float("nan")
