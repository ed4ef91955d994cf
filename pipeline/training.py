"""Training a value: Adam on the model's own loss, with the value as the only parameter (paper, 2.2; appendix A)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.model import EditableModel, Rest, Verdict


@dataclass(frozen=True, slots=True)
class Recipe:
    """How values are trained: they stop at `margin` (logits), or after `max_steps` steps at most."""

    max_steps: int = 100
    learning_rate: float = 2.0
    margin: float = 3.0


@dataclass(frozen=True, slots=True)
class Trained:
    """A value (V, float32), the optimisation steps it took, and what the model says with it in place."""

    value_V: np.ndarray
    steps: int
    verdict: Verdict
    converged: bool


def train_value(model: EditableModel, rest: Rest, start_V: Tensor, recipe: Recipe) -> Trained:
    """Train one value from `start_V`.

    Each step runs only what depends on the value, which itself depends on nothing but this input, this label and the
    start. `converged` says whether the margin was reached; a value that merely makes the prediction right after the
    last step counts as converged too.
    """
    value_V = start_V.detach().float().clone().to(model.device).requires_grad_()
    optimizer = torch.optim.Adam([value_V], lr=recipe.learning_rate)
    steps = 0
    while True:
        with torch.enable_grad():
            found, loss = model.judge(rest, value_V)
        if (found.right and found.margin >= recipe.margin) or steps == recipe.max_steps or not torch.isfinite(loss):
            break
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps += 1
    finite = bool(torch.isfinite(value_V).all())
    return Trained(value_V.detach().cpu().numpy(), steps, found, converged=found.right and finite)
