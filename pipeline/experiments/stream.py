"""One experiment: edits one after the other, and how the model does at points on the way (paper, section 3)."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.experiments.editors.editor import EditOutcome, ModelEditor
from gracestream.pipeline.experiments.evaluation import MAX_ANSWER_TOKENS, Evaluator, ExampleScore
from gracestream.pipeline.experiments.tasks import Edit, Example, ExperimentTask
from gracestream.pipeline.model import EditableModel, InputError
from gracestream.schemas.messages import Parameters

UNCHANGED_STATUS = "unchanged"
"""The status of a correction that the model was right on already: it is no edit."""

FAILED_STATUSES = ("rejected", "failed")
"""Statuses of edits after which the model was not right."""


@dataclass(frozen=True, slots=True)
class MeanScore:
    """Means over some examples: the task's measure, and the share that is exactly right. NaN of no examples."""

    value: float
    exact: float

    @classmethod
    def from_scores(cls, scores: Sequence[ExampleScore]) -> "MeanScore":
        """Of these scores."""
        if not scores:
            return cls(float("nan"), float("nan"))
        return cls(fmean(score.value for score in scores), fmean(score.exact for score in scores))


@dataclass(frozen=True, slots=True)
class Measurement:
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
    es: MeanScore
    err: MeanScore
    trr: MeanScore
    arr: MeanScore
    rephrases: MeanScore
    coming: MeanScore
    agreement: float
    covered: float
    captured: float

    @property
    def edits_per_entry(self) -> float:
        """Of those that did not fail; NaN where nothing is stored."""
        return (self.edits - self.failed) / self.entries if self.entries else float("nan")


@dataclass(slots=True)
class EditStream:
    """Runs a task's edits through an editor. `run` is told after how many corrections to measure.

    Attributes:
        on_correction: Called after each correction.
        outcomes: What became of each correction so far.
        edit_scores: How the model did on each right after it.
    """

    task: ExperimentTask
    editor: ModelEditor
    evaluator: Evaluator
    on_correction: Callable[[], object] = lambda: None
    outcomes: list[EditOutcome] = field(default_factory=list)
    edit_scores: list[ExampleScore] = field(default_factory=list)

    def run(self, measure_after: Sequence[int]) -> Iterator[Measurement]:
        """One point for each number, in ascending order, and one before the first edit."""
        before = self._scores(self.task.retention)
        known = zip(self.task.accurate, self._scores(self.task.accurate), strict=True)
        accurate = [example for example, score in known if score.exact]
        bare = self.editor.state_keys([*self.task.unrelated, *self._all_rephrases()])
        for point in sorted({0, *measure_after}):
            for edit in self.task.edits[len(self.outcomes) : point]:
                self.outcomes.append(self.editor.edit(len(self.outcomes), edit.example))
                self.edit_scores += self.evaluator.score(self.editor, [edit.example])
                self.on_correction()
            yield self._measure(before, accurate, bare)

    def _measure(
        self, unedited_scores: Sequence[ExampleScore], accurate: Sequence[Example], unedited_states: Sequence[Hashable]
    ) -> Measurement:
        count = len(self.outcomes)
        come, coming = self.task.edits[:count], self.task.edits[count:]
        kept = self._scores(self.task.retention)
        edits = [place for place, one in enumerate(self.outcomes) if one.status != UNCHANGED_STATUS]
        states = self.editor.state_keys([*self.task.unrelated, *self._all_rephrases()])
        reached = [now != was for now, was in zip(states, unedited_states, strict=True)]
        unrelated = len(self.task.unrelated)
        rephrases = sum(len(edit.rephrases) for edit in come)
        return Measurement(
            corrections=count,
            edits=len(edits),
            failed=sum(self.outcomes[place].status in FAILED_STATUSES for place in edits),
            entries=self.editor.num_entries,
            seconds=_mean([self.outcomes[place].seconds for place in edits]),
            es=MeanScore.from_scores([self.edit_scores[place] for place in edits]),
            err=MeanScore.from_scores(self._scores([edit.example for edit in come])),
            trr=MeanScore.from_scores(kept),
            arr=MeanScore.from_scores(self._scores(accurate)),
            rephrases=MeanScore.from_scores(
                self._scores([example for edit in come for example in _rephrase_examples(edit)])
            ),
            coming=MeanScore.from_scores(self._scores([edit.example for edit in coming])),
            agreement=_mean(
                [now.predicted_tokens == was.predicted_tokens for now, was in zip(kept, unedited_scores, strict=True)]
            ),
            covered=_mean(reached[unrelated : unrelated + rephrases]),
            captured=_mean(reached[:unrelated]),
        )

    def _all_rephrases(self) -> list[str]:
        """Of all corrections."""
        return [text for edit in self.task.edits for text in edit.rephrases]

    def _scores(self, examples: Sequence[Example]) -> list[ExampleScore]:
        return self.evaluator.score(self.editor, examples)


class StreamError(UserError):
    """An experiment that cannot be run; the text says why."""


def select_examples(task: ExperimentTask, edits: int | None, retention: int | None, seed: int = 0) -> ExperimentTask:
    """The task with so many of its edits, and of what must stay, at most; None: all. A seed but 0 draws which."""
    if seed:
        generator = np.random.default_rng(seed)
        task = replace(
            task,
            edits=[task.edits[place] for place in generator.permutation(len(task.edits))],
            retention=[task.retention[place] for place in generator.permutation(len(task.retention))],
        )
    return replace(task, edits=task.edits[:edits], retention=task.retention[:retention])


def drop_unsupported(task: ExperimentTask, model: EditableModel) -> tuple[ExperimentTask, int]:
    """The task without what the model cannot take, such as longer texts than it has room for; and how much that is.

    Raises:
        StreamError: no edit is left.
    """

    def fits(example: Example) -> bool:
        try:
            model.prepare_correction(example.inputs, example.target)
            if task.measure == "f1":
                model.task.batch_key(model.task.tokenize(example.inputs), Parameters(max_new_tokens=MAX_ANSWER_TOKENS))
        except InputError:
            return False
        return True

    def asks(text: str) -> bool:
        try:
            model.task.tokenize(text)
        except InputError:
            return False
        return True

    edits = [edit for edit in task.edits if all(map(fits, (edit.example, *_rephrase_examples(edit))))]
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
    return left, _count_texts(task) - _count_texts(left)


def _count_texts(task: ExperimentTask) -> int:
    parts: tuple[Sequence[object], ...] = (task.edits, task.retention, task.accurate, task.unrelated, task.traffic)
    return sum(len(part) for part in parts)


def _rephrase_examples(edit: Edit) -> list[Example]:
    return [Example(text, edit.example.target) for text in edit.rephrases]


def _mean(numbers: Sequence[float]) -> float:
    return fmean(numbers) if numbers else float("nan")
