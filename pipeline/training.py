"""Training a value: Adam on the model's own loss, with the value as the only parameter (paper, 2.2; appendix A)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.device import reproducible
from pipeline.passes import Passes, Rest, Verdict

LOSS_SCALE = 2.0**12
"""A model in float16 is given its loss so many times: its gradients are as small as 1e-8, which float16 takes for 0."""

LESS = 2.0**4
"""A gradient that overflows makes the scale so many times smaller, and its step is left out."""


LONG = 16
"""Tokens of a label from which on its value may take more steps: one vector has to decide on all of them."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How values are trained: they stop at `margin` (logits), or after `max_steps` steps at most.

    A label of more than `LONG` tokens has more steps, in proportion, until the model gives it.
    """

    max_steps: int = 100
    learning_rate: float = 2.0
    margin: float = 3.0

    def limit(self, tokens: int) -> int:
        """Steps at most, for a label of so many tokens."""
        return max(self.max_steps, math.ceil(self.max_steps * tokens / LONG))

    def enough(self, verdict: Verdict, steps: int) -> bool:
        """Whether a value needs no more steps: it has the margin, or is right after `max_steps`."""
        return verdict.right and (verdict.margin >= self.margin or steps >= self.max_steps)


@dataclass(frozen=True, slots=True)
class Trained:
    """A value (V, float32), the optimisation steps it took, and what the model says with it in place."""

    value_V: np.ndarray
    steps: int
    verdict: Verdict
    converged: bool


def train_value(passes: Passes, rest: Rest, start_V: Tensor, recipe: Recipe) -> Trained:
    """Train one value from `start_V`."""
    return train_values(passes, rest, [start_V], recipe)[0]


def train_shared(passes: Passes, rest: Rest, start_V: Tensor, recipe: Recipe) -> Trained:
    """Train one value for all rows of `rest`, until each has the margin.

    The verdict is the least margin of a row, with the mean loss; `converged` says whether every row is right.
    """
    with reproducible(passes.device):
        value_V = start_V.detach().float().clone().to(passes.device).requires_grad_()
        optimizer = torch.optim.Adam([value_V], lr=recipe.learning_rate)
        scales = {0: LOSS_SCALE} if passes.dtype == torch.float16 else {}
        rows = len(rest.supervised.labels)
        limit = recipe.limit(max(map(len, rest.supervised.labels)))
        for steps in range(limit + 1):
            with torch.enable_grad():
                judged = passes.judge(rest, value_V.expand(rows, -1))
                loss = torch.stack([loss for _, loss in judged]).mean()
            found = Verdict(min(one.margin for one, _ in judged), float(loss.detach()))
            if recipe.enough(found, steps) or steps == limit or not loss.isfinite():
                break
            optimizer.zero_grad()
            (loss * scales.get(0, 1.0)).backward()  # type: ignore[no-untyped-call]
            if scales:
                _unscale([value_V], [0], scales)
            optimizer.step()
        finite = bool(value_V.isfinite().all())
        return Trained(value_V.detach().cpu().numpy().copy(), steps, found, converged=found.right and finite)


def train_values(
    passes: Passes,
    rest: Rest,
    starts: Sequence[Tensor],
    recipe: Recipe,
    at_work: Callable[[], object] = lambda: None,
) -> list[Trained]:
    """Train a value for each row of `rest`, from its start (V); each stops by itself, and its row is left out then.

    Each step runs only what depends on the values, of which each depends on nothing but its input, its label and its
    start; the others change what it comes out as by rounding alone. `converged` says whether the margin was reached; a
    value that merely makes the prediction right after the last step counts as converged too. `at_work` is called at
    each step.
    """
    with reproducible(passes.device):
        return _trained(passes, rest, starts, recipe, at_work)


def _trained(
    passes: Passes, rest: Rest, starts: Sequence[Tensor], recipe: Recipe, at_work: Callable[[], object]
) -> list[Trained]:
    values = [start_V.detach().float().clone().to(passes.device).requires_grad_() for start_V in starts]
    optimizer = torch.optim.Adam(values, lr=recipe.learning_rate)
    scales = dict.fromkeys(range(len(values)), LOSS_SCALE) if passes.dtype == torch.float16 else {}
    limits = [recipe.limit(len(label_L)) for label_L in rest.supervised.labels]
    trained: dict[int, Trained] = {}
    left, steps = list(range(len(values))), 0
    while True:
        at_work()
        with torch.enable_grad():
            judged = passes.judge(rest, torch.stack([values[row] for row in left]))
        going = []
        for place, (row, (found, loss)) in enumerate(zip(left, judged, strict=True)):
            if recipe.enough(found, steps) or steps == limits[row] or not loss.isfinite():
                finite = bool(values[row].isfinite().all())
                value_V = values[row].detach().cpu().numpy().copy()
                trained[row] = Trained(value_V, steps, found, converged=found.right and finite)
            else:
                going.append(place)
        if not going:
            return [trained[row] for row in range(len(values))]
        optimizer.zero_grad()
        losses = [judged[place][1] * scales[left[place]] if scales else judged[place][1] for place in going]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        if scales:
            _unscale(values, [left[place] for place in going], scales)
        optimizer.step()  # not of those without a gradient, which have stopped
        steps += 1
        if len(going) < len(left):
            rest, left = rest.rows(going), [left[place] for place in going]


def _unscale(values: Sequence[Tensor], rows: Sequence[int], scales: dict[int, float]) -> None:
    """Divide the gradients of these rows by their scales; one that overflowed is dropped, and its scale lowered."""
    gradients = {row: values[row].grad for row in rows}
    for row, gradient_V in gradients.items():
        assert gradient_V is not None
        if scales[row] > 1 and not bool(gradient_V.isfinite().all()):
            values[row].grad = None
            scales[row] /= LESS
        else:
            gradient_V.div_(scales[row])
