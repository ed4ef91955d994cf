"""What an edited model says to examples, and how good that is: the paper's m(f(x), y)."""

import math
import re
import string
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from msgspec import UNSET

from gracestream.pipeline.experiments.editors.editor import ModelEditor
from gracestream.pipeline.experiments.tasks import Example, Measure
from gracestream.pipeline.model import EditableModel, check_target
from gracestream.schemas.messages import Parameters

SCORING_BATCH_SIZE = 16
"""Examples in one pass."""

MAX_ANSWER_TOKENS = 24
"""Tokens of an answer, at most: one for all, so that none depends on the others that are asked with it."""

MAX_FINITE_LOSS = 700.0
"""A loss from here on, which weights that were spoilt can bring about, is an infinite perplexity."""

ARTICLE_PATTERN = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True, slots=True)
class ExampleScore:
    """How a model does on one example.

    Attributes:
        exact: It gives the target and nothing else.
        loss: Mean cross entropy of the target's tokens, without the one that ends it.
        value: The task's measure: F1 of the words said, accuracy (1 or 0), or perplexity.
        predicted_tokens: At each place of the target, what the model chooses there.
    """

    exact: bool
    loss: float
    value: float
    predicted_tokens: tuple[int, ...]


def word_f1(answer: str, target: str) -> float:
    """The harmonic mean of precision and recall of words, as the SQuAD benchmark counts them."""
    ours, theirs = Counter(_normalized_words(answer)), Counter(_normalized_words(target))
    shared = sum((ours & theirs).values())
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * shared / (ours.total() + theirs.total())


def _normalized_words(text: str) -> list[str]:
    """In lower case, without punctuation and articles."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return ARTICLE_PATTERN.sub(" ", plain).split()


class Evaluator:
    """Scores of a model under any editor. What was scored in the same state before is not run again."""

    def __init__(self, model: EditableModel, measure: Measure) -> None:
        self._model, self._measure = model, measure
        self._cached_scores: dict[tuple[Example, Hashable], ExampleScore] = {}

    def score(self, editor: ModelEditor, examples: Sequence[Example]) -> list[ExampleScore]:
        """One for each example."""
        states = editor.state_keys([example.inputs for example in examples])
        asked = list(zip(examples, states, strict=True))
        new = [one for one in dict.fromkeys(asked) if one not in self._cached_scores]
        new.sort(key=lambda one: len(one[0].inputs))
        together = SCORING_BATCH_SIZE if self._model.suffix_runner.supports_padding() else 1
        for start in range(0, len(new), together):
            some = new[start : start + together]
            found = self._score_batch(editor, [example for example, _ in some])
            self._cached_scores.update(zip(some, found, strict=True))
        return [self._cached_scores[one] for one in asked]

    def _score_batch(self, editor: ModelEditor, examples: Sequence[Example]) -> list[ExampleScore]:
        task = self._model.task
        supervised = task.collate([self._model.prepare_correction(one.inputs, one.target)[1] for one in examples])
        with torch.no_grad(), editor.with_edits(supervised.batch):
            logits = task.logits(supervised)
        rows = list(zip(logits, supervised.labels, strict=True))
        right = [check_target(*row)[0].predicts_target for row in rows]
        losses = [self._target_loss(*row) for row in rows]
        values = list(map(self._measure_value, right, losses))
        if self._measure == "f1":
            wrong = [place for place, one in enumerate(right) if not one]
            said = self._generate_answers(editor, [examples[place] for place in wrong])
            for place, text in zip(wrong, said, strict=True):
                values[place] = word_f1(text, examples[place].target)
        chosen = [tuple(row_LC.argmax(dim=1).tolist()) for row_LC in logits]
        return list(map(ExampleScore, right, losses, values, chosen))

    def _target_loss(self, logits_LC: torch.Tensor, label_L: torch.Tensor) -> float:
        end = self._model.task.tokenizer.eos_token_id
        said = len(label_L) - (len(label_L) > 1 and int(label_L[-1]) == end)
        return float(torch.nn.functional.cross_entropy(logits_LC[:said], label_L[:said]))

    def _measure_value(self, is_correct: bool, loss: float) -> float:
        if self._measure != "perplexity":
            return float(is_correct)
        return math.exp(loss) if loss < MAX_FINITE_LOSS else math.inf

    def _generate_answers(self, editor: ModelEditor, examples: Sequence[Example]) -> list[str]:
        """Answers as they are generated."""
        if not examples:
            return []
        task = self._model.task
        batch = task.batch([task.tokenize(example.inputs) for example in examples])
        with torch.inference_mode(), editor.with_edits(batch):
            answers = task.run(batch, [Parameters(max_new_tokens=MAX_ANSWER_TOKENS)] * len(examples))
        texts = (answer.outputs.text for answer in answers)
        return ["" if text is UNSET else text for text in texts]
