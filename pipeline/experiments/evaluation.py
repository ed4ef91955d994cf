"""What an edited model says to examples, and how good that is: the paper's m(f(x), y)."""

import math
import re
import string
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from msgspec import UNSET

from gracestream.pipeline.experiments.editors.editor import Editor
from gracestream.pipeline.experiments.tasks import Example, Measure
from gracestream.pipeline.model import EditableModel, verdict
from gracestream.schemas.messages import Parameters

AT_ONCE = 16
"""Examples in one pass."""

ANSWER = 24
"""Tokens of an answer, at most: one for all, so that none depends on the others that are asked with it."""

MOST_LOSS = 700.0
"""A loss from here on, which weights that were spoilt can bring about, is an infinite perplexity."""

ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True, slots=True)
class Score:
    """How a model does on one example.

    Attributes:
        exact: It gives the target and nothing else.
        loss: Mean cross entropy of the target's tokens, without the one that ends it.
        value: The task's measure: F1 of the words said, accuracy (1 or 0), or perplexity.
        chosen: At each place of the target, what the model chooses there.
    """

    exact: bool
    loss: float
    value: float
    chosen: tuple[int, ...]


def f1(said: str, target: str) -> float:
    """The harmonic mean of precision and recall of words, as the SQuAD benchmark counts them."""
    ours, theirs = Counter(_words(said)), Counter(_words(target))
    shared = sum((ours & theirs).values())
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * shared / (ours.total() + theirs.total())


def _words(text: str) -> list[str]:
    """In lower case, without punctuation and articles."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return ARTICLES.sub(" ", plain).split()


class Evaluation:
    """Scores of a model under any editor. What was scored in the same state before is not run again."""

    def __init__(self, model: EditableModel, measure: Measure) -> None:
        self._model, self._measure = model, measure
        self._known: dict[tuple[Example, Hashable], Score] = {}

    def scores(self, editor: Editor, examples: Sequence[Example]) -> list[Score]:
        """One for each example."""
        states = editor.states([example.inputs for example in examples])
        asked = list(zip(examples, states, strict=True))
        new = [one for one in dict.fromkeys(asked) if one not in self._known]
        new.sort(key=lambda one: len(one[0].inputs))
        together = AT_ONCE if self._model.passes.pads() else 1
        for start in range(0, len(new), together):
            some = new[start : start + together]
            found = self._scored(editor, [example for example, _ in some])
            self._known.update(zip(some, found, strict=True))
        return [self._known[one] for one in asked]

    def _scored(self, editor: Editor, examples: Sequence[Example]) -> list[Score]:
        task = self._model.task
        supervised = task.together([self._model.supervised(one.inputs, one.target)[1] for one in examples])
        with torch.no_grad(), editor.serving(supervised.batch):
            logits = task.logits(supervised)
        rows = list(zip(logits, supervised.labels, strict=True))
        right = [verdict(*row)[0].right for row in rows]
        losses = [self._loss(*row) for row in rows]
        values = list(map(self._value, right, losses))
        if self._measure == "f1":
            wrong = [place for place, one in enumerate(right) if not one]
            said = self._said(editor, [examples[place] for place in wrong])
            for place, text in zip(wrong, said, strict=True):
                values[place] = f1(text, examples[place].target)
        chosen = [tuple(row_LC.argmax(dim=1).tolist()) for row_LC in logits]
        return list(map(Score, right, losses, values, chosen))

    def _loss(self, logits_LC: torch.Tensor, label_L: torch.Tensor) -> float:
        end = self._model.task.tokenizer.eos_token_id
        said = len(label_L) - (len(label_L) > 1 and int(label_L[-1]) == end)
        return float(torch.nn.functional.cross_entropy(logits_LC[:said], label_L[:said]))

    def _value(self, right: bool, loss: float) -> float:
        if self._measure != "perplexity":
            return float(right)
        return math.exp(loss) if loss < MOST_LOSS else math.inf

    def _said(self, editor: Editor, examples: Sequence[Example]) -> list[str]:
        """Answers as they are generated."""
        if not examples:
            return []
        task = self._model.task
        batch = task.batch([task.tokenize(example.inputs) for example in examples])
        with torch.inference_mode(), editor.serving(batch):
            answers = task.run(batch, [Parameters(max_new_tokens=ANSWER)] * len(examples))
        texts = (answer.outputs.text for answer in answers)
        return ["" if text is UNSET else text for text in texts]
