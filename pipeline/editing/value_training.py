"""Training a value: Adam on the model's own loss, with the value as the only parameter (paper, 2.2; appendix A)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gracestream.pipeline.device import reproducible
from gracestream.pipeline.model import Passes, Rest, Supervised, Verdict

LOSS_SCALE = 2.0**12
"""A model in float16 is given its loss so many times: its gradients are as small as 1e-8, which float16 takes for 0."""

LESS = 2.0**4
"""A gradient that overflows makes the scale so many times smaller, and its step is left out."""


LONG = 16
"""Tokens of a label from which on its value may take more steps: one vector has to decide on all of them."""


FORM_STEPS = 20
"""Steps in which a value is trained on for the sake of forms: most have the margin after half as many."""

FORM_MARGIN = 0.5
"""Logit margin at which a form counts as trained: three would take three times the steps and served no more texts."""

OWN_MARGIN = 1.0
"""Logit margin that the correction itself keeps then, or the recipe's where that is smaller."""

FASTER = 1.5
"""The learning rate is so many times the recipe's then, which saves a fourth of the steps."""


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


@dataclass(frozen=True, slots=True)
class Texts:
    """A value that was trained at its correction's prompt, and other texts at which it should give the target.

    Attributes:
        trained: The value so far.
        own: The pass over the correction.
        rest: The same, as it depends on the value.
        asked: Passes over texts that a reviewer gave.
        forms: Passes over forms made by rules, which are best effort.
        longer: Whether training may take as many steps as a correction's, for the sake of `asked`.
    """

    trained: Trained
    own: Supervised
    rest: Rest
    asked: tuple[Supervised, ...] = ()
    forms: tuple[Supervised, ...] = ()
    longer: bool = False

    @property
    def rows(self) -> list[Supervised]:
        """All passes, the correction's first."""
        return [self.own, *self.asked, *self.forms]


def train_value(passes: Passes, rest: Rest, start_V: Tensor, recipe: Recipe) -> Trained:
    """Train one value from `start_V`."""
    return train_values(passes, rest, [start_V], recipe)[0]


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
    limits = [recipe.limit(len(label_L)) for label_L in rest.supervised.labels]

    def ends(value: int, verdicts: Sequence[Verdict], steps: int) -> bool:
        return recipe.enough(verdicts[0], steps) or steps == limits[value]

    found = _trained(passes, rest, range(len(starts)), starts, recipe.learning_rate, ends, at_work)
    return [
        Trained(value_V, steps, verdict, converged=verdict.right and bool(np.isfinite(value_V).all()))
        for value_V, steps, _, (verdict,) in found
    ]


def train_on(
    passes: Passes, corrections: Sequence[Texts], recipe: Recipe, at_work: Callable[[], object] = lambda: None
) -> list[Trained]:
    """Train values on for all their texts, as rows of one padded batch.

    A value stops once each asked text has the recipe's margin, the correction `OWN_MARGIN`, and each form
    `FORM_MARGIN`; after `FORM_STEPS` steps forms count no more. The new value is taken only where it gives the target
    at more texts than before, at no fewer of the asked ones, and at the correction by itself. Else the old one stays.
    """
    owners = [number for number, texts in enumerate(corrections) for _ in texts.rows]
    short = min(FORM_STEPS, recipe.max_steps)
    limits = [recipe.limit(max(len(row.labels[0]) for row in texts.rows)) for texts in corrections]
    limits = [limit if texts.longer else short for limit, texts in zip(limits, corrections, strict=True)]
    margins = [
        [min(OWN_MARGIN, recipe.margin)]
        + [recipe.margin] * len(texts.asked)
        + [min(FORM_MARGIN, recipe.margin)] * len(texts.forms)
        for texts in corrections
    ]

    def ends(value: int, verdicts: Sequence[Verdict], steps: int) -> bool:
        counted = None if steps < short else 1 + len(corrections[value].asked)
        return steps == limits[value] or all(
            one.right and (one.margin >= margin or steps >= recipe.max_steps)
            for one, margin in list(zip(verdicts, margins[value], strict=True))[:counted]
        )

    starts = [torch.from_numpy(texts.trained.value_V.copy()) for texts in corrections]
    rest = passes.rest_of_unequal([row for texts in corrections for row in texts.rows])
    found = _trained(passes, rest, owners, starts, FASTER * recipe.learning_rate, ends, at_work)
    return [_better(passes, texts, *one) for texts, one in zip(corrections, found, strict=True)]


def _better(
    passes: Passes, texts: Texts, value_V: np.ndarray, steps: int, before: Sequence[Verdict], after: Sequence[Verdict]
) -> Trained:
    """The value that was trained on, where it serves more texts; else the one before."""
    asked = slice(1, 1 + len(texts.asked))
    gains = sum(one.right for one in after) > sum(one.right for one in before)
    keeps = sum(one.right for one in after[asked]) >= sum(one.right for one in before[asked])
    if not (steps and gains and keeps and np.isfinite(value_V).all()):
        return texts.trained
    alone = passes.gives(texts.rest, torch.from_numpy(value_V.copy()))
    if not (alone.right and alone.margin >= min(OWN_MARGIN, texts.trained.verdict.margin)):
        return texts.trained
    return Trained(value_V, texts.trained.steps + steps, alone, texts.trained.converged)


Found = tuple[np.ndarray, int, list[Verdict], list[Verdict]]
"""A value (V), its steps, and the verdicts of its rows before the first and after the last of them."""


def _trained(
    passes: Passes,
    rest: Rest,
    owners: Sequence[int],
    starts: Sequence[Tensor],
    learning_rate: float,
    ends: Callable[[int, Sequence[Verdict], int], bool],
    at_work: Callable[[], object],
) -> list[Found]:
    """Train values, each for the rows of `rest` that it owns, until `ends` (value, verdicts, steps) says so."""
    with reproducible(passes.device):
        values = [start_V.detach().float().clone().to(passes.device).requires_grad_() for start_V in starts]
        optimizer = torch.optim.Adam(values, lr=learning_rate)
        scales = dict.fromkeys(range(len(values)), LOSS_SCALE) if passes.dtype == torch.float16 else {}
        first: dict[int, list[Verdict]] = {}
        trained: dict[int, Found] = {}
        left, steps = list(owners), 0
        while True:
            at_work()
            with torch.enable_grad():
                judged = passes.judge(rest, torch.stack([values[value] for value in left]))
            losses: dict[int, Tensor] = {}
            for value in dict.fromkeys(left):
                rows = [row for row, owner in zip(judged, left, strict=True) if owner == value]
                verdicts = [verdict for verdict, _ in rows]
                first.setdefault(value, verdicts)
                loss = torch.stack([loss for _, loss in rows]).mean()
                if ends(value, verdicts, steps) or not loss.isfinite():
                    value_V = values[value].detach().cpu().numpy().copy()
                    trained[value] = value_V, steps, first[value], verdicts
                else:
                    losses[value] = loss * scales[value] if scales else loss
            if not losses:
                return [trained[value] for value in range(len(values))]
            optimizer.zero_grad()
            torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
            if scales:
                _unscale(values, list(losses), scales)
            optimizer.step()  # not of those without a gradient, which have stopped
            steps += 1
            going = [place for place, value in enumerate(left) if value in losses]
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
