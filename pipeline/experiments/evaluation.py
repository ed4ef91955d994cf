"""Scoring an edited model on examples: the paper's m(f(x), y)."""

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
"""Examples of one forward pass."""

MAX_ANSWER_TOKENS = 24
"""Largest number of tokens of an answer. All answers share one limit, so none depends on the rest of its batch."""

MAX_FINITE_LOSS = 700.0
"""Loss from which the perplexity counts as infinite: `exp` overflows at 709.8. Ruined weights reach such losses."""

ARTICLE_PATTERN = re.compile(r"\b(a|an|the)\b")
"""Articles, which the SQuAD metric ignores."""


@dataclass(frozen=True, slots=True)
class ExampleScore:
    """A model's score on one example.

    Attributes:
        exact: The model predicts exactly the target.
        loss: Mean cross entropy of the target's tokens, without the end-of-sequence token.
        value: The task's measure: F1 of the answer's words, accuracy (1 or 0), or perplexity.
        predicted_tokens: The most probable token at each position of the target, given the target's tokens before it.
    """

    exact: bool
    loss: float
    value: float
    predicted_tokens: tuple[int, ...]


def word_f1(answer: str, target: str) -> float:
    """The harmonic mean of the precision and recall of words, as the SQuAD benchmark defines it."""
    answer_words, target_words = Counter(_normalized_words(answer)), Counter(_normalized_words(target))
    shared = sum((answer_words & target_words).values())
    if not answer_words or not target_words:
        return float(answer_words == target_words)
    return 2 * shared / (answer_words.total() + target_words.total())


def _normalized_words(text: str) -> list[str]:
    """The words in lower case, without punctuation and articles."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return ARTICLE_PATTERN.sub(" ", plain).split()


class Evaluator:
    """Scores a model under any editor; an example is scored again only if the editor's state for it has changed."""

    def __init__(self, model: EditableModel, measure: Measure) -> None:
        self._model, self._measure = model, measure
        self._cached_scores: dict[tuple[Example, Hashable], ExampleScore] = {}

    def score(self, editor: ModelEditor, examples: Sequence[Example]) -> list[ExampleScore]:
        """The score of each example."""
        states = editor.state_keys([example.inputs for example in examples])
        wanted = list(zip(examples, states, strict=True))
        new = [pair for pair in dict.fromkeys(wanted) if pair not in self._cached_scores]
        new.sort(key=lambda pair: len(pair[0].inputs))
        batch_size = SCORING_BATCH_SIZE if self._model.suffix_runner.supports_padding() else 1
        for start in range(0, len(new), batch_size):
            batch = new[start : start + batch_size]
            scores = self._score_batch(editor, [example for example, _ in batch])
            self._cached_scores.update(zip(batch, scores, strict=True))
        return [self._cached_scores[pair] for pair in wanted]

    def _score_batch(self, editor: ModelEditor, examples: Sequence[Example]) -> list[ExampleScore]:
        task = self._model.task
        supervised = task.collate(
            [self._model.prepare_correction(example.inputs, example.target)[1] for example in examples]
        )
        with torch.no_grad(), editor.with_edits(supervised.batch):
            logits = task.logits(supervised)
        rows = list(zip(logits, supervised.labels, strict=True))
        exact = [check_target(*row)[0].predicts_target for row in rows]
        losses = [self._target_loss(*row) for row in rows]
        values = list(map(self._measure_value, exact, losses))
        # An exact answer has F1 1, so only the others are generated.
        if self._measure == "f1":
            inexact = [index for index, example in enumerate(exact) if not example]
            answers = self._generate_answers(editor, [examples[index] for index in inexact])
            for index, text in zip(inexact, answers, strict=True):
                values[index] = word_f1(text, examples[index].target)
        predicted = [tuple(row_LC.argmax(dim=1).tolist()) for row_LC in logits]
        return list(map(ExampleScore, exact, losses, values, predicted))

    def _target_loss(self, logits_LC: torch.Tensor, label_L: torch.Tensor) -> float:
        """The mean cross entropy of a target's tokens, without an end-of-sequence token after them."""
        end = self._model.task.tokenizer.eos_token_id
        length = len(label_L) - (len(label_L) > 1 and int(label_L[-1]) == end)
        return float(torch.nn.functional.cross_entropy(logits_LC[:length], label_L[:length]))

    def _measure_value(self, is_correct: bool, loss: float) -> float:
        if self._measure != "perplexity":
            return float(is_correct)
        return math.exp(loss) if loss < MAX_FINITE_LOSS else math.inf

    def _generate_answers(self, editor: ModelEditor, examples: Sequence[Example]) -> list[str]:
        """The generated answers as text."""
        if not examples:
            return []
        task = self._model.task
        batch = task.batch([task.tokenize(example.inputs) for example in examples])
        with torch.inference_mode(), editor.with_edits(batch):
            answers = task.run(batch, [Parameters(max_new_tokens=MAX_ANSWER_TOKENS)] * len(examples))
        texts = (answer.outputs.text for answer in answers)
        return ["" if text is UNSET else text for text in texts]
