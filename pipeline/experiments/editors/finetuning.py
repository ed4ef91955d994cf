"""Finetuning the layer that GRACE would wrap, in three ways (paper, appendix on compared editors).

All train the layer's weights by Adam on the model's loss for one correction, and stop once the model is right, or after
`STEPS` steps. The weights are the editor's until it is closed: then they are what they were.

- `FineTuning`: nothing else.
- `ElasticWeights`: elastic weight consolidation (Kirkpatrick et al. 2017, in its online form): the more the model's
  answers so far depend on a weight, the more it resists. Their Fisher information is that of the traffic, under what
  the model itself says next, and of each correction once it is made.
- `Retraining`: after so many corrections the original weights are trained on all of them.
"""

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from pipeline.experiments.editors.editor import Made
from pipeline.experiments.tasks import Example
from pipeline.model import EditableModel, Verdict, verdict
from pipeline.tasks import Supervised

STEPS = 100
LEARNING_RATE = 1e-2
"""The paper's, of those that it tried the best for finetuning."""

STRENGTH = 1e3
"""Of the elastic weights' resistance."""

SAMPLE = 128
"""Texts of the traffic that tell which weights count, at most."""


class FineTuning:
    """Trains the weights of the wrapped layer; used as a context, at whose end they are the original ones again."""

    entries = 0

    def __init__(self, model: EditableModel, learning_rate: float = LEARNING_RATE, steps: int = STEPS) -> None:
        self._model, self._rate, self._steps = model, learning_rate, steps
        self.weights: list[Tensor] = list(model.module.get_submodule(model.layer).parameters())
        self._original = [weight.detach().clone() for weight in self.weights]
        self._changes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the original weights back."""
        self._changes += 1
        with torch.no_grad():
            for weight, original in zip(self.weights, self._original, strict=True):
                weight.copy_(original)

    def edit(self, number: int, example: Example) -> Made:
        """Train until the model gives the target."""
        del number
        begun = time.perf_counter()
        _, supervised = self._model.supervised(example.inputs, example.target)
        if self._judged(supervised).right:
            return Made("unchanged", 0, time.perf_counter() - begun)
        steps = self._train([supervised], self._steps)
        steps += self._after(supervised)
        right = self._judged(supervised).right
        return Made("added" if right else "failed", steps, time.perf_counter() - begun)

    def states(self, texts: Sequence[str]) -> list[Hashable]:
        """Every answer depends on the weights."""
        return [self._changes] * len(texts)

    def serving(self, mask_BT: Tensor | None) -> AbstractContextManager[object]:
        """The weights are in the model."""
        del mask_BT
        return nullcontext()

    def _judged(self, supervised: Supervised) -> Verdict:
        with torch.no_grad():
            return verdict(self._model.task.logits(supervised)[0], supervised.labels[0])[0]

    def _after(self, supervised: Supervised) -> int:
        """What a correction brings with it once it is made; the steps that this takes."""
        del supervised
        return 0

    def _train(self, corrections: Sequence[Supervised], most: int) -> int:
        """A step on each that is wrong, in turns, until none is, or so many are made; the number of steps."""
        self._changes += 1
        optimizer = torch.optim.Adam(self.weights, lr=self._rate)
        steps = 0
        with self._trainable():
            while steps < most:
                begun = steps
                for supervised in corrections:
                    judged, loss = verdict(self._model.task.logits(supervised)[0], supervised.labels[0])
                    if judged.right or steps == most:
                        continue
                    optimizer.zero_grad()
                    (loss + self._penalty()).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    steps += 1
                if steps == begun:
                    break
        return steps

    @contextmanager
    def _trainable(self) -> Iterator[None]:
        try:
            for weight in self.weights:
                weight.requires_grad_(True)
            with torch.enable_grad():
                yield
        finally:
            for weight in self.weights:
                weight.requires_grad_(False)
                weight.grad = None

    def _penalty(self) -> Tensor | float:
        """What is added to the loss."""
        return 0.0


class ElasticWeights(FineTuning):
    """Weights that count are held near where they were after the last correction.

    Attributes:
        fisher: How much each weight counts, in the shape of `weights`.
    """

    def __init__(
        self,
        model: EditableModel,
        traffic: Sequence[str],
        strength: float = STRENGTH,
        learning_rate: float = LEARNING_RATE,
        steps: int = STEPS,
    ) -> None:
        super().__init__(model, learning_rate, steps)
        self._strength = strength
        self._anchors = [weight.detach().clone() for weight in self.weights]
        self.fisher = [torch.zeros_like(weight) for weight in self.weights]
        for text in traffic[:SAMPLE]:
            (logits_1C,) = self._model.task.logits(self._next(text))
            self._observe(self._next(text, int(logits_1C.argmax())), 1 / min(SAMPLE, len(traffic)))

    def _next(self, text: str, token: int = 0) -> Supervised:
        """One token after the text, or its class."""
        return self._model.task.supervised(text, (token,))

    def _after(self, supervised: Supervised) -> int:
        self._observe(supervised, 1.0)
        self._anchors = [weight.detach().clone() for weight in self.weights]
        return 0

    def _observe(self, supervised: Supervised, share: float) -> None:
        """Add what an answer tells of the weights: the square of its loss's slope."""
        with self._trainable():
            _, loss = verdict(self._model.task.logits(supervised)[0], supervised.labels[0])
            slopes = torch.autograd.grad(loss, self.weights)
        self.fisher = [had + share * slope.square() for had, slope in zip(self.fisher, slopes, strict=True)]

    def _penalty(self) -> Tensor:
        parts = zip(self.weights, self._anchors, self.fisher, strict=True)
        apart = torch.stack([(fisher * (weight - anchor).square()).sum() for weight, anchor, fisher in parts])
        return self._strength / 2 * apart.sum()


class Retraining(FineTuning):
    """After every `every` corrections that were needed, those so far are trained together from the original weights."""

    def __init__(
        self, model: EditableModel, every: int = 10, learning_rate: float = LEARNING_RATE, steps: int = STEPS
    ) -> None:
        super().__init__(model, learning_rate, steps)
        self._every = every
        self._corrections: list[Supervised] = []

    def _after(self, supervised: Supervised) -> int:
        self._corrections.append(supervised)
        if len(self._corrections) % self._every:
            return 0
        self.restore()
        return self._train(self._corrections, self._steps * len(self._corrections))
