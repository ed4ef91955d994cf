"""Training a value: Adam on the model's own loss, with the value as the only parameter (paper, 2.2; appendix A)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gracestream.pipeline.device import deterministic_algorithms
from gracestream.pipeline.model import SuffixPass, SuffixRunner, TargetCheck, TargetPass

LOSS_SCALE = 2.0**12
"""A model in float16 is given its loss so many times: its gradients are as small as 1e-8, which float16 takes for 0."""

SCALE_BACKOFF_FACTOR = 2.0**4
"""A gradient that overflows makes the scale so many times smaller, and its step is left out."""


LONG_LABEL_TOKENS = 16
"""Tokens of a label from which on its value may take more steps: one vector has to decide on all of them."""


MAX_FORM_STEPS = 20
"""Steps in which a value is trained on for the sake of forms: most have the margin after half as many."""

FORM_MARGIN = 0.5
"""Logit margin at which a form counts as trained: three would take three times the steps and served no more texts."""

CORRECTION_MARGIN = 1.0
"""Logit margin that the correction itself keeps then, or the recipe's where that is smaller."""

FORM_RATE_FACTOR = 1.5
"""The learning rate is so many times the recipe's then, which saves a fourth of the steps."""


@dataclass(frozen=True, slots=True)
class ValueTrainingConfig:
    """How values are trained: they stop at `margin` (logits), or after `max_steps` steps at most.

    A label of more than `LONG_LABEL_TOKENS` tokens has more steps, in proportion, until the model gives it.
    """

    max_steps: int = 100
    learning_rate: float = 2.0
    margin: float = 3.0

    def step_limit(self, tokens: int) -> int:
        """Steps at most, for a label of so many tokens."""
        return max(self.max_steps, math.ceil(self.max_steps * tokens / LONG_LABEL_TOKENS))

    def is_done(self, target_check: TargetCheck, steps: int) -> bool:
        """Whether a value needs no more steps: it has the margin, or is right after `max_steps`."""
        return target_check.predicts_target and (target_check.margin >= self.margin or steps >= self.max_steps)


@dataclass(frozen=True, slots=True)
class TrainedValue:
    """A value (V, float32), the optimisation steps it took, and what the model says with it in place."""

    value_V: np.ndarray
    steps: int
    target_check: TargetCheck
    converged: bool


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    """A value that was trained at its correction's prompt, and other texts at which it should give the target.

    Attributes:
        trained: The value so far.
        correction_pass: The pass over the correction.
        suffix: The same, as it depends on the value.
        rephrase_passes: Passes over texts that a reviewer gave.
        form_passes: Passes over forms made by rules, which are best effort.
        has_full_budget: Whether training may take as many steps as a correction's, for the sake of `rephrase_passes`.
    """

    trained: TrainedValue
    correction_pass: TargetPass
    suffix: SuffixPass
    rephrase_passes: tuple[TargetPass, ...] = ()
    form_passes: tuple[TargetPass, ...] = ()
    has_full_budget: bool = False

    @property
    def all_passes(self) -> list[TargetPass]:
        """All passes, the correction's first."""
        return [self.correction_pass, *self.rephrase_passes, *self.form_passes]


def train_value(
    suffix_runner: SuffixRunner, suffix: SuffixPass, start_V: Tensor, recipe: ValueTrainingConfig
) -> TrainedValue:
    """Train one value from `start_V`."""
    return train_values(suffix_runner, suffix, [start_V], recipe)[0]


def train_values(
    suffix_runner: SuffixRunner,
    suffix: SuffixPass,
    starts: Sequence[Tensor],
    recipe: ValueTrainingConfig,
    heartbeat: Callable[[], object] = lambda: None,
) -> list[TrainedValue]:
    """Train a value for each row of `suffix`, from its start (V); each stops by itself, and its row is left out then.

    Each step runs only what depends on the values, of which each depends on nothing but its input, its label and its
    start; the others change what it comes out as by rounding alone. `converged` says whether the margin was reached; a
    value that merely makes the prediction right after the last step counts as converged too. `heartbeat` is called at
    each step.
    """
    limits = [recipe.step_limit(len(label_L)) for label_L in suffix.target_pass.labels]

    def ends(value: int, verdicts: Sequence[TargetCheck], steps: int) -> bool:
        return recipe.is_done(verdicts[0], steps) or steps == limits[value]

    found = _optimize(suffix_runner, suffix, range(len(starts)), starts, recipe.learning_rate, ends, heartbeat)
    return [
        TrainedValue(value_V, steps, verdict, converged=verdict.predicts_target and bool(np.isfinite(value_V).all()))
        for value_V, steps, _, (verdict,) in found
    ]


def train_further(
    suffix_runner: SuffixRunner,
    corrections: Sequence[TrainingTexts],
    recipe: ValueTrainingConfig,
    heartbeat: Callable[[], object] = lambda: None,
) -> list[TrainedValue]:
    """Train values on for all their texts, as rows of one padded batch.

    A value stops once each asked text has the recipe's margin, the correction `CORRECTION_MARGIN`, and each form
    `FORM_MARGIN`; after `MAX_FORM_STEPS` steps forms count no more. The new value is taken only where it gives the
    target at more texts than before, at no fewer of the asked ones, and at the correction by itself. Else the old one
    stays.
    """
    owners = [number for number, texts in enumerate(corrections) for _ in texts.all_passes]
    short = min(MAX_FORM_STEPS, recipe.max_steps)
    limits = [recipe.step_limit(max(len(row.labels[0]) for row in texts.all_passes)) for texts in corrections]
    limits = [limit if texts.has_full_budget else short for limit, texts in zip(limits, corrections, strict=True)]
    margins = [
        [min(CORRECTION_MARGIN, recipe.margin)]
        + [recipe.margin] * len(texts.rephrase_passes)
        + [min(FORM_MARGIN, recipe.margin)] * len(texts.form_passes)
        for texts in corrections
    ]

    def ends(value: int, verdicts: Sequence[TargetCheck], steps: int) -> bool:
        counted = None if steps < short else 1 + len(corrections[value].rephrase_passes)
        return steps == limits[value] or all(
            one.predicts_target and (one.margin >= margin or steps >= recipe.max_steps)
            for one, margin in list(zip(verdicts, margins[value], strict=True))[:counted]
        )

    starts = [torch.from_numpy(texts.trained.value_V.copy()) for texts in corrections]
    rest = suffix_runner.suffix_by_length([row for texts in corrections for row in texts.all_passes])
    found = _optimize(suffix_runner, rest, owners, starts, FORM_RATE_FACTOR * recipe.learning_rate, ends, heartbeat)
    return [_select_better(suffix_runner, texts, *one) for texts, one in zip(corrections, found, strict=True)]


def _select_better(
    suffix_runner: SuffixRunner,
    texts: TrainingTexts,
    value_V: np.ndarray,
    steps: int,
    before: Sequence[TargetCheck],
    after: Sequence[TargetCheck],
) -> TrainedValue:
    """The value that was trained on, where it serves more texts; else the one before."""
    asked = slice(1, 1 + len(texts.rephrase_passes))
    gains = sum(one.predicts_target for one in after) > sum(one.predicts_target for one in before)
    keeps = sum(one.predicts_target for one in after[asked]) >= sum(one.predicts_target for one in before[asked])
    if not (steps and gains and keeps and np.isfinite(value_V).all()):
        return texts.trained
    alone = suffix_runner.check_value(texts.suffix, torch.from_numpy(value_V.copy()))
    if not (alone.predicts_target and alone.margin >= min(CORRECTION_MARGIN, texts.trained.target_check.margin)):
        return texts.trained
    return TrainedValue(value_V, texts.trained.steps + steps, alone, texts.trained.converged)


TrainingRun = tuple[np.ndarray, int, list[TargetCheck], list[TargetCheck]]
"""A value (V), its steps, and the verdicts of its rows before the first and after the last of them."""


def _optimize(
    suffix_runner: SuffixRunner,
    suffix: SuffixPass,
    owners: Sequence[int],
    starts: Sequence[Tensor],
    learning_rate: float,
    should_stop: Callable[[int, Sequence[TargetCheck], int], bool],
    heartbeat: Callable[[], object],
) -> list[TrainingRun]:
    """Train one value for each group of rows of `suffix`, until `should_stop` (value, checks, steps) is true."""
    with deterministic_algorithms(suffix_runner.device):
        values = [start_V.detach().float().clone().to(suffix_runner.device).requires_grad_() for start_V in starts]
        optimizer = torch.optim.Adam(values, lr=learning_rate)
        scales = dict.fromkeys(range(len(values)), LOSS_SCALE) if suffix_runner.dtype == torch.float16 else {}
        first: dict[int, list[TargetCheck]] = {}
        trained: dict[int, TrainingRun] = {}
        left, steps = list(owners), 0
        while True:
            heartbeat()
            with torch.enable_grad():
                judged = suffix_runner.evaluate(suffix, torch.stack([values[value] for value in left]))
            losses: dict[int, Tensor] = {}
            for value in dict.fromkeys(left):
                rows = [row for row, owner in zip(judged, left, strict=True) if owner == value]
                verdicts = [verdict for verdict, _ in rows]
                first.setdefault(value, verdicts)
                loss = torch.stack([loss for _, loss in rows]).mean()
                if should_stop(value, verdicts, steps) or not loss.isfinite():
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
                suffix, left = suffix.select_rows(going), [left[place] for place in going]


def _unscale(values: Sequence[Tensor], rows: Sequence[int], scales: dict[int, float]) -> None:
    """Divide the gradients of these rows by their scales; one that overflowed is dropped, and its scale lowered."""
    gradients = {row: values[row].grad for row in rows}
    for row, gradient_V in gradients.items():
        assert gradient_V is not None
        if scales[row] > 1 and not bool(gradient_V.isfinite().all()):
            values[row].grad = None
            scales[row] /= SCALE_BACKOFF_FACTOR
        else:
            gradient_V.div_(scales[row])
