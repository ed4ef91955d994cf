"""Finetuning the layer that GRACE would wrap, in three ways (paper, appendix on compared editors).

All train the layer's weights by Adam on the model's loss for one correction, and stop once the model is right, or after
`STEPS` steps.

- `FineTuning`: nothing else.
- `ElasticWeights`: elastic weight consolidation (Kirkpatrick et al. 2017, in its online form): the more the model's
  answers so far depend on a weight, the more it resists. Their Fisher information is that of the traffic, under answers
  drawn from the model itself, and of each correction that was made: all traffic counts as much as one.
- `PeriodicRetraining`: after so many corrections the original weights are trained on all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gracestream.pipeline.experiments.editors.editor import MAX_EDIT_STEPS
from gracestream.pipeline.experiments.editors.weights import WeightEditor
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import EditableModel, InputError, TargetPass, check_target

LEARNING_RATE = 1e-2
"""The paper's, of those that it tried the best for finetuning."""

PENALTY_STRENGTH = 1e3
"""Of the elastic weights' resistance."""

MAX_FISHER_TEXTS = 128
"""Texts of the traffic that tell which weights count, at most."""


class FineTuning(WeightEditor):
    """Trains the weights of the wrapped layer."""

    def __init__(self, model: EditableModel, learning_rate: float = LEARNING_RATE, steps: int = MAX_EDIT_STEPS) -> None:
        super().__init__(model)
        self.learning_rate, self._steps = learning_rate, steps

    def _apply_correction(self, example: Example, supervised: TargetPass) -> int:
        """Train until the model gives the target."""
        del example
        steps = self._train([supervised], self._steps)
        return steps + self._after_correction(supervised)

    def _after_correction(self, supervised: TargetPass) -> int:
        """What a correction brings with it once it is made; the steps that this takes."""
        del supervised
        return 0

    def _train(self, corrections: Sequence[TargetPass], max_steps: int) -> int:
        """A step on each that is wrong, in turns, until none is, or so many are made; the number of steps."""
        optimizer = torch.optim.Adam(self.weights, lr=self.learning_rate)
        steps = 0
        with self._gradients_enabled():
            while steps < max_steps:
                begun = steps
                for supervised in corrections:
                    judged, loss = check_target(self._model.task.logits(supervised)[0], supervised.labels[0])
                    if judged.predicts_target or steps == max_steps:
                        continue
                    optimizer.zero_grad()
                    (loss + self._penalty()).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    steps += 1
                if steps == begun:
                    break
        return steps

    @contextmanager
    def _gradients_enabled(self) -> Iterator[None]:
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
        strength: float = PENALTY_STRENGTH,
        learning_rate: float = LEARNING_RATE,
        steps: int = MAX_EDIT_STEPS,
    ) -> None:
        super().__init__(model, learning_rate, steps)
        self._strength = strength
        self._anchors = [weight.detach().clone() for weight in self.weights]
        self.fisher = [torch.zeros_like(weight) for weight in self.weights]
        generator = torch.Generator().manual_seed(0)
        for text in traffic[:MAX_FISHER_TEXTS]:
            try:
                asked = self._next_token_pass(text)
            except InputError:  # no room for a token after it
                continue
            with torch.no_grad():
                (logits_1C,) = self._model.task.logits(asked)
            drawn = torch.multinomial(logits_1C[0].float().softmax(dim=0).cpu(), 1, generator=generator)
            self._update_fisher(self._next_token_pass(text, int(drawn)), 1 / min(MAX_FISHER_TEXTS, len(traffic)))

    def _next_token_pass(self, text: str, token: int = 0) -> TargetPass:
        """One token after the text, or its class."""
        return self._model.task.make_target_pass(text, (token,))

    def _after_correction(self, supervised: TargetPass) -> int:
        if self._check_prediction(supervised).predicts_target:  # what failed is nothing to hold on to
            self._update_fisher(supervised, 1.0)
        self._anchors = [weight.detach().clone() for weight in self.weights]
        return 0

    def _update_fisher(self, supervised: TargetPass, sample_weight: float) -> None:
        """Add what an answer tells of the weights: the square of its loss's slope."""
        with self._gradients_enabled():
            _, loss = check_target(self._model.task.logits(supervised)[0], supervised.labels[0])
            slopes = torch.autograd.grad(loss, self.weights)
        self.fisher = [had + sample_weight * slope.square() for had, slope in zip(self.fisher, slopes, strict=True)]

    def _penalty(self) -> Tensor:
        parts = zip(self.weights, self._anchors, self.fisher, strict=True)
        apart = torch.stack([(fisher * (weight - anchor).square()).sum() for weight, anchor, fisher in parts])
        return self._strength / 2 * apart.sum()


class PeriodicRetraining(FineTuning):
    """After every `interval` corrections, train on all corrections so far, starting from the original weights."""

    def __init__(
        self,
        model: EditableModel,
        interval: int = 10,
        learning_rate: float = LEARNING_RATE,
        steps: int = MAX_EDIT_STEPS,
    ) -> None:
        super().__init__(model, learning_rate, steps)
        self._interval = interval
        self._corrections: list[TargetPass] = []

    def _after_correction(self, supervised: TargetPass) -> int:
        self._corrections.append(supervised)
        if len(self._corrections) % self._interval:
            return 0
        self.restore()
        return self._train(self._corrections, self._steps * len(self._corrections))
