"""One experiment: a stream of edits with measurements in between (paper, section 3)."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.experiments.editors.editor import EditOutcome, ModelEditor
from gracestream.pipeline.experiments.evaluation import MAX_ANSWER_TOKENS, Evaluator, ExampleScore
from gracestream.pipeline.experiments.tasks import Example, ExperimentTask, TaskCorrection
from gracestream.pipeline.model import EditableModel, InputError
from gracestream.schemas.messages import Parameters

UNCHANGED_STATUS = "unchanged"
"""Status of a correction whose target the model predicted already; it does not count as an edit."""

FAILED_STATUSES = ("rejected", "failed")
"""Statuses of edits after which the model did not predict the target."""


@dataclass(frozen=True, slots=True)
class MeanScore:
    """Means over examples: the task's measure, and the share of exact answers; NaN if there are no examples."""

    value: float
    exact: float

    @classmethod
    def from_scores(cls, scores: Sequence[ExampleScore]) -> "MeanScore":
        """The means of these scores."""
        if not scores:
            return cls(float("nan"), float("nan"))
        return cls(fmean(score.value for score in scores), fmean(score.exact for score in scores))


@dataclass(frozen=True, slots=True)
class Measurement:
    """The state of the model after some corrections.

    A text counts as reached if the editor's state for it differs from the state before the first edit.

    Attributes:
        corrections: Corrections so far.
        edits: Corrections whose target the model did not predict, so that an edit was needed.
        failed: Edits after which the model still did not predict the target.
        entries: Entries that the editor stores.
        seconds: Mean seconds of an edit.
        es: Edit success: the score of each edit's example right after the edit.
        err: Edit retention rate: the score of all corrections so far.
        trr: Test retention rate: the score of the examples that the unedited model was good at.
        arr: Accuracy retention rate: the score of examples similar to the edits that the unedited model answered right.
        rephrases: The score of the rephrases of the corrections so far.
        coming: The score of the corrections that are still to come.
        agreement: The share of TRR's examples with the same predicted tokens as before the first edit.
        covered: The share of the rephrases of the corrections so far that the editor reaches.
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
        """Successful edits per entry; NaN if no entry is stored."""
        return (self.edits - self.failed) / self.entries if self.entries else float("nan")


@dataclass(slots=True)
class EditStream:
    """Runs a task's edits through an editor, and measures the model in between.

    Attributes:
        task: The edits and the examples.
        editor: The editor.
        evaluator: Scores the edited model.
        on_correction: Called after each correction.
        outcomes: The outcome of each correction so far.
        edit_scores: The score of each correction right after it.
    """

    task: ExperimentTask
    editor: ModelEditor
    evaluator: Evaluator
    on_correction: Callable[[], object] = lambda: None
    outcomes: list[EditOutcome] = field(default_factory=list)
    edit_scores: list[ExampleScore] = field(default_factory=list)

    def run(self, measure_after: Sequence[int]) -> Iterator[Measurement]:
        """Yield a measurement before the first correction, and one after each number of corrections, in order."""
        unedited_scores = self._scores(self.task.retention)
        scored = zip(self.task.accurate, self._scores(self.task.accurate), strict=True)
        accurate = [example for example, score in scored if score.exact]
        unedited_states = self.editor.state_keys([*self.task.unrelated, *self._all_rephrases()])
        for count in sorted({0, *measure_after}):
            for correction in self.task.edits[len(self.outcomes) : count]:
                self.outcomes.append(self.editor.edit(len(self.outcomes), correction.example))
                self.edit_scores += self.evaluator.score(self.editor, [correction.example])
                self.on_correction()
            # The unedited states cover all rephrases; `_measure` selects those of the corrections so far.
            yield self._measure(unedited_scores, accurate, unedited_states)

    def _measure(
        self, unedited_scores: Sequence[ExampleScore], accurate: Sequence[Example], unedited_states: Sequence[Hashable]
    ) -> Measurement:
        count = len(self.outcomes)
        past, coming = self.task.edits[:count], self.task.edits[count:]
        retention_scores = self._scores(self.task.retention)
        edits = [index for index, outcome in enumerate(self.outcomes) if outcome.status != UNCHANGED_STATUS]
        states = self.editor.state_keys([*self.task.unrelated, *self._all_rephrases()])
        is_reached = [current != original for current, original in zip(states, unedited_states, strict=True)]
        # `is_reached` has the unrelated texts first, then the rephrases in the order of the edits.
        unrelated = len(self.task.unrelated)
        rephrases = sum(len(correction.rephrases) for correction in past)
        return Measurement(
            corrections=count,
            edits=len(edits),
            failed=sum(self.outcomes[index].status in FAILED_STATUSES for index in edits),
            entries=self.editor.num_entries,
            seconds=_mean([self.outcomes[index].seconds for index in edits]),
            es=MeanScore.from_scores([self.edit_scores[index] for index in edits]),
            err=MeanScore.from_scores(self._scores([correction.example for correction in past])),
            trr=MeanScore.from_scores(retention_scores),
            arr=MeanScore.from_scores(self._scores(accurate)),
            rephrases=MeanScore.from_scores(
                self._scores([example for correction in past for example in _rephrase_examples(correction)])
            ),
            coming=MeanScore.from_scores(self._scores([correction.example for correction in coming])),
            agreement=_mean(
                [
                    current.predicted_tokens == original.predicted_tokens
                    for current, original in zip(retention_scores, unedited_scores, strict=True)
                ]
            ),
            covered=_mean(is_reached[unrelated : unrelated + rephrases]),
            captured=_mean(is_reached[:unrelated]),
        )

    def _all_rephrases(self) -> list[str]:
        """The rephrases of all corrections, in order."""
        return [text for correction in self.task.edits for text in correction.rephrases]

    def _scores(self, examples: Sequence[Example]) -> list[ExampleScore]:
        return self.evaluator.score(self.editor, examples)


class StreamError(UserError):
    """An experiment cannot be run; the message says why."""


def select_examples(task: ExperimentTask, edits: int | None, retention: int | None, seed: int = 0) -> ExperimentTask:
    """The task with at most `edits` edits and `retention` retained examples; None: all.

    Seed 0 takes the first ones; any other seed shuffles both lists first.
    """
    if seed:
        generator = np.random.default_rng(seed)
        task = replace(
            task,
            edits=[task.edits[index] for index in generator.permutation(len(task.edits))],
            retention=[task.retention[index] for index in generator.permutation(len(task.retention))],
        )
    return replace(task, edits=task.edits[:edits], retention=task.retention[:retention])


def drop_unsupported(task: ExperimentTask, model: EditableModel) -> tuple[ExperimentTask, int]:
    """The task without the examples and texts that the model cannot take, and their number.

    A text may be too long for the model, for example. An edit goes with its rephrases: if one is too long, all are left
    out.

    Raises:
        StreamError: no edit is left.
    """

    def is_supported(example: Example) -> bool:
        try:
            model.prepare_correction(example.inputs, example.target)
            if task.measure == "f1":
                model.task.batch_key(model.task.tokenize(example.inputs), Parameters(max_new_tokens=MAX_ANSWER_TOKENS))
        except InputError:
            return False
        return True

    def is_prompt(text: str) -> bool:
        try:
            model.task.tokenize(text)
        except InputError:
            return False
        return True

    edits = [
        correction
        for correction in task.edits
        if all(map(is_supported, (correction.example, *_rephrase_examples(correction))))
    ]
    supported = replace(
        task,
        edits=edits,
        retention=list(filter(is_supported, task.retention)),
        accurate=list(filter(is_supported, task.accurate)),
        unrelated=list(filter(is_prompt, task.unrelated)),
        traffic=list(filter(is_prompt, task.traffic)),
    )
    if not task.edits:
        raise StreamError(f"the data of {task.name} hold no edits")
    if not edits:
        raise StreamError(
            f"the model can take none of the {len(task.edits)} edits of {task.name}; check that it is of the right"
            " kind, and that GRACESTREAM_MAX_INPUT_TOKENS and GRACESTREAM_MAX_TARGET_TOKENS are large enough"
        )
    return supported, _count_texts(task) - _count_texts(supported)


def _count_texts(task: ExperimentTask) -> int:
    parts: tuple[Sequence[object], ...] = (task.edits, task.retention, task.accurate, task.unrelated, task.traffic)
    return sum(len(part) for part in parts)


def _rephrase_examples(correction: TaskCorrection) -> list[Example]:
    return [Example(text, correction.example.target) for text in correction.rephrases]


def _mean(numbers: Sequence[float]) -> float:
    return fmean(numbers) if numbers else float("nan")
