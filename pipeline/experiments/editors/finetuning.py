"""Three baselines that finetune the layer that GRACE would wrap (paper, appendix on compared editors).

All three train the layer's weights with Adam on the model's loss for one correction. They stop once the model predicts
the target, or after `MAX_EDIT_STEPS` steps.

- `FineTuning`: finetuning without regularisation.
- `ElasticWeights`: elastic weight consolidation in its online form (Kirkpatrick et al. 2017). A quadratic penalty holds
  each weight near its last value, in proportion to its Fisher information. The information is estimated on the traffic,
  with answers sampled from the model, and on each successful correction. The whole traffic counts as much as one
  correction.
- `PeriodicRetraining`: finetuning; after every `interval` corrections the original weights are trained on all of them.
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
"""Adam's learning rate: the best one for finetuning in the paper's search."""

PENALTY_STRENGTH = 1e3
"""Factor of the penalty of `ElasticWeights`."""

MAX_FISHER_TEXTS = 128
"""Largest number of traffic texts for the estimate of the Fisher information."""


class FineTuning(WeightEditor):
    """Trains the weights of the wrapped layer."""

    def __init__(self, model: EditableModel, learning_rate: float = LEARNING_RATE, steps: int = MAX_EDIT_STEPS) -> None:
        super().__init__(model)
        self.learning_rate, self._steps = learning_rate, steps

    def _apply_correction(self, example: Example, supervised: TargetPass) -> int:
        """Train until the model predicts the target; return the number of steps."""
        del example
        steps = self._train([supervised], self._steps)
        return steps + self._after_correction(supervised)

    def _after_correction(self, supervised: TargetPass) -> int:
        """Do the work that follows each correction; return its optimisation steps."""
        del supervised
        return 0

    def _train(self, corrections: Sequence[TargetPass], max_steps: int) -> int:
        """Take one step on each unfulfilled correction in turn until all are fulfilled; return the number of steps.

        At most `max_steps` steps are taken.
        """
        optimizer = torch.optim.Adam(self.weights, lr=self.learning_rate)
        steps = 0
        with self._gradients_enabled():
            while steps < max_steps:
                steps_before_round = steps
                for supervised in corrections:
                    check, loss = check_target(self._model.task.logits(supervised)[0], supervised.labels[0])
                    if check.predicts_target or steps == max_steps:
                        continue
                    optimizer.zero_grad()
                    (loss + self._penalty()).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    steps += 1
                if steps == steps_before_round:
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
        """The regularisation term of the loss."""
        return 0.0


class ElasticWeights(FineTuning):
    """Finetuning with elastic weight consolidation, anchored at the weights after the last correction.

    Attributes:
        fisher: The Fisher information of each weight, in the shapes of `weights`.
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
                target_pass = self._next_token_pass(text)
            except InputError:  # the text leaves no room for another token
                continue
            with torch.no_grad():
                (logits_1C,) = self._model.task.logits(target_pass)
            sampled = torch.multinomial(logits_1C[0].float().softmax(dim=0).cpu(), 1, generator=generator)
            self._update_fisher(self._next_token_pass(text, int(sampled)), 1 / min(MAX_FISHER_TEXTS, len(traffic)))

    def _next_token_pass(self, text: str, token: int = 0) -> TargetPass:
        """A pass with one token after the text as its target, or with its class."""
        return self._model.task.make_target_pass(text, (token,))

    def _after_correction(self, supervised: TargetPass) -> int:
        if self._check_prediction(supervised).predicts_target:  # a failed correction is not worth protecting
            self._update_fisher(supervised, 1.0)
        self._anchors = [weight.detach().clone() for weight in self.weights]
        return 0

    def _update_fisher(self, supervised: TargetPass, sample_weight: float) -> None:
        """Add the squared gradient of the target's loss, times `sample_weight`."""
        with self._gradients_enabled():
            _, loss = check_target(self._model.task.logits(supervised)[0], supervised.labels[0])
            gradients = torch.autograd.grad(loss, self.weights)
        self.fisher = [
            fisher + sample_weight * gradient.square() for fisher, gradient in zip(self.fisher, gradients, strict=True)
        ]

    def _penalty(self) -> Tensor:
        parts = zip(self.weights, self._anchors, self.fisher, strict=True)
        distances = torch.stack([(fisher * (weight - anchor).square()).sum() for weight, anchor, fisher in parts])
        return self._strength / 2 * distances.sum()


class PeriodicRetraining(FineTuning):
    """Finetuning; after every `interval` corrections the original weights are trained on all corrections so far."""

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
