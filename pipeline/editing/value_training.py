"""Train values: Adam on the model's own loss, with the value as the only parameter (GRACE, section 2.2, appendix A).

1. Each value of a batch depends only on its own texts, label and start. The batch changes it by rounding only.
2. The same batch on the same environment gives the same bits (docs/explanation/determinism.md).
3. The model's parameters do not change.

Not promised: convergence. `TrainedValue.converged` reports it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gracestream.pipeline.device import deterministic_algorithms
from gracestream.pipeline.model import SuffixPass, SuffixRunner, TargetCheck, TargetPass

LOSS_SCALE = 2.0**12
"""Initial loss scale of a float16 model. Its gradients can be as small as 1e-8, which float16 rounds to 0."""

SCALE_BACKOFF_FACTOR = 2.0**4
"""Divisor of the loss scale after a gradient has overflowed; that step is skipped for the value."""

LONG_LABEL_TOKENS = 16
"""Tokens from which a label gets more steps, in proportion: one vector has to determine all of them."""

MAX_FORM_STEPS = 20
"""Additional steps for the forms of a correction; most values reach the margin in half of them."""

FORM_MARGIN = 0.5
"""Logit margin at which a form counts as trained. A margin of 3 took three times the steps, for no more texts."""

CORRECTION_MARGIN = 1.0
"""Logit margin that the correction must keep meanwhile, or that of the configuration if it is smaller."""

FORM_RATE_FACTOR = 1.5
"""Factor on the learning rate during these additional steps; it saves a fourth of them."""


@dataclass(frozen=True, slots=True)
class ValueTrainingConfig:
    """How values are trained.

    Attributes:
        max_steps: The limit of optimisation steps. A label of more than `LONG_LABEL_TOKENS` tokens has more steps, in
            proportion, but stops as soon as the model predicts it.
        learning_rate: The learning rate of Adam.
        stop_margin: Training stops once each token of the label leads by this many logits.
    """

    max_steps: int = 100
    learning_rate: float = 2.0
    stop_margin: float = 3.0

    def step_limit(self, tokens: int) -> int:
        """The limit of steps for a label with this number of tokens."""
        return max(self.max_steps, math.ceil(self.max_steps * tokens / LONG_LABEL_TOKENS))

    def is_done(self, target_check: TargetCheck, steps: int) -> bool:
        """Whether a value needs no more steps: it has the margin, or predicts the target after `max_steps`."""
        return target_check.predicts_target and (target_check.margin >= self.stop_margin or steps >= self.max_steps)


@dataclass(frozen=True, slots=True)
class TrainedValue:
    """A value (V, float32), its number of steps, and the check of the target with the value in place."""

    value_V: np.ndarray
    steps: int
    target_check: TargetCheck
    converged: bool


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    """A value that was trained on its correction, with further texts at which it should predict the target.

    Attributes:
        trained: The value so far.
        correction_pass: The pass over the correction.
        suffix: The part of that pass that depends on the value.
        rephrase_passes: Passes over rephrases, which a reviewer gave; the value must not lose any of them.
        form_passes: Passes over forms, which rules made (`pipeline.editing.forms`); these are best effort.
        has_full_budget: Whether training may take as many steps as for a correction, because a rephrase fails.
    """

    trained: TrainedValue
    correction_pass: TargetPass
    suffix: SuffixPass
    rephrase_passes: tuple[TargetPass, ...] = ()
    form_passes: tuple[TargetPass, ...] = ()
    has_full_budget: bool = False

    @property
    def all_passes(self) -> list[TargetPass]:
        """All passes: the correction, the rephrases, the forms."""
        return [self.correction_pass, *self.rephrase_passes, *self.form_passes]


def train_value(
    suffix_runner: SuffixRunner, suffix: SuffixPass, start_V: Tensor, recipe: ValueTrainingConfig
) -> TrainedValue:
    """Train one value from `start_V` (V)."""
    return train_values(suffix_runner, suffix, [start_V], recipe)[0]


def train_values(
    suffix_runner: SuffixRunner,
    suffix: SuffixPass,
    starts: Sequence[Tensor],
    recipe: ValueTrainingConfig,
    heartbeat: Callable[[], object] = lambda: None,
) -> list[TrainedValue]:
    """Train a value for each row of `suffix`; each value stops by itself, and its row then leaves the batch.

    A value is `converged` if it is finite and the model predicts the target with it, with or without the margin.

    Args:
        suffix_runner: Runs the part of the model that depends on the values.
        suffix: The passes over the corrections, one row each.
        starts: The start (V) of each row.
        recipe: The training configuration.
        heartbeat: Called at each step.
    """
    limits = [recipe.step_limit(len(label_L)) for label_L in suffix.target_pass.labels]

    def should_stop(value: int, checks: Sequence[TargetCheck], steps: int) -> bool:
        return recipe.is_done(checks[0], steps) or steps == limits[value]

    runs = _optimize(suffix_runner, suffix, range(len(starts)), starts, recipe.learning_rate, should_stop, heartbeat)
    return [
        TrainedValue(value_V, steps, check, converged=check.predicts_target and bool(np.isfinite(value_V).all()))
        for value_V, steps, _, (check,) in runs
    ]


def train_further(
    suffix_runner: SuffixRunner,
    corrections: Sequence[TrainingTexts],
    recipe: ValueTrainingConfig,
    heartbeat: Callable[[], object] = lambda: None,
) -> list[TrainedValue]:
    """Train values further on all of their texts, as rows of one padded batch.

    A value stops once three margins hold: that of the configuration at each rephrase, `CORRECTION_MARGIN` at the
    correction, and `FORM_MARGIN` at each form. After `MAX_FORM_STEPS` steps forms no longer count.

    The new value replaces the old one only if the model predicts the target:

    1. at more texts than before,
    2. at no fewer rephrases than before, and
    3. at the correction alone, with the smaller of `CORRECTION_MARGIN` and the old margin.
    """
    owners = [number for number, texts in enumerate(corrections) for _ in texts.all_passes]
    form_steps = min(MAX_FORM_STEPS, recipe.max_steps)
    limits = [recipe.step_limit(max(len(row.labels[0]) for row in texts.all_passes)) for texts in corrections]
    limits = [limit if texts.has_full_budget else form_steps for limit, texts in zip(limits, corrections, strict=True)]
    margins = [
        [min(CORRECTION_MARGIN, recipe.stop_margin)]
        + [recipe.stop_margin] * len(texts.rephrase_passes)
        + [min(FORM_MARGIN, recipe.stop_margin)] * len(texts.form_passes)
        for texts in corrections
    ]

    def should_stop(value: int, checks: Sequence[TargetCheck], steps: int) -> bool:
        counted = None if steps < form_steps else 1 + len(corrections[value].rephrase_passes)
        return steps == limits[value] or all(
            check.predicts_target and (check.margin >= margin or steps >= recipe.max_steps)
            for check, margin in list(zip(checks, margins[value], strict=True))[:counted]
        )

    starts = [torch.from_numpy(texts.trained.value_V.copy()) for texts in corrections]
    suffix = suffix_runner.suffix_by_length([row for texts in corrections for row in texts.all_passes])
    rate = FORM_RATE_FACTOR * recipe.learning_rate
    runs = _optimize(suffix_runner, suffix, owners, starts, rate, should_stop, heartbeat)
    return [_select_better(suffix_runner, texts, *run) for texts, run in zip(corrections, runs, strict=True)]


def _select_better(
    suffix_runner: SuffixRunner,
    texts: TrainingTexts,
    value_V: np.ndarray,
    steps: int,
    before: Sequence[TargetCheck],
    after: Sequence[TargetCheck],
) -> TrainedValue:
    """The new value if it is better by the rules of `train_further`, else the old one."""
    rephrases = slice(1, 1 + len(texts.rephrase_passes))
    gains_texts = sum(check.predicts_target for check in after) > sum(check.predicts_target for check in before)
    keeps_rephrases = sum(check.predicts_target for check in after[rephrases]) >= sum(
        check.predicts_target for check in before[rephrases]
    )
    if not (steps and gains_texts and keeps_rephrases and np.isfinite(value_V).all()):
        return texts.trained
    # A padded batch rounds otherwise than the correction alone, which is what counts. The outcome reports this check.
    alone = suffix_runner.check_value(texts.suffix, torch.from_numpy(value_V.copy()))
    if not (alone.predicts_target and alone.margin >= min(CORRECTION_MARGIN, texts.trained.target_check.margin)):
        return texts.trained
    return TrainedValue(value_V, texts.trained.steps + steps, alone, texts.trained.converged)


TrainingRun = tuple[np.ndarray, int, list[TargetCheck], list[TargetCheck]]
"""A value (V), its number of steps, and the checks of its rows before the first and after the last step."""


def _optimize(
    suffix_runner: SuffixRunner,
    suffix: SuffixPass,
    owners: Sequence[int],
    starts: Sequence[Tensor],
    learning_rate: float,
    should_stop: Callable[[int, Sequence[TargetCheck], int], bool],
    heartbeat: Callable[[], object],
) -> list[TrainingRun]:
    """Train one value for each group of rows of `suffix`.

    Args:
        suffix_runner: Runs the part of the model that depends on the values.
        suffix: The passes, one row each.
        owners: For each row, the number of the value that is injected into it.
        starts: The start (V) of each value.
        learning_rate: The learning rate of Adam.
        should_stop: Called with the number of a value, the checks of its rows and the steps so far. A value also stops
            if its loss is not finite.
        heartbeat: Called at each step.
    """
    with deterministic_algorithms(suffix_runner.device):
        values = [start_V.detach().float().clone().to(suffix_runner.device).requires_grad_() for start_V in starts]
        optimizer = torch.optim.Adam(values, lr=learning_rate)
        scales = dict.fromkeys(range(len(values)), LOSS_SCALE) if suffix_runner.dtype == torch.float16 else {}
        first_checks: dict[int, list[TargetCheck]] = {}
        trained: dict[int, TrainingRun] = {}
        active, steps = list(owners), 0
        while True:
            heartbeat()
            with torch.enable_grad():
                evaluated = suffix_runner.evaluate(suffix, torch.stack([values[value] for value in active]))
            losses: dict[int, Tensor] = {}
            for value in dict.fromkeys(active):
                rows = [row for row, owner in zip(evaluated, active, strict=True) if owner == value]
                checks = [check for check, _ in rows]
                first_checks.setdefault(value, checks)
                loss = torch.stack([loss for _, loss in rows]).mean()
                if should_stop(value, checks, steps) or not loss.isfinite():
                    value_V = values[value].detach().cpu().numpy().copy()
                    trained[value] = value_V, steps, first_checks[value], checks
                else:
                    losses[value] = loss * scales[value] if scales else loss
            if not losses:
                return [trained[value] for value in range(len(values))]
            optimizer.zero_grad()
            # No row depends on another value, so the gradient of the sum is each value's own.
            torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
            if scales:
                _unscale(values, list(losses), scales)
            optimizer.step()  # skips values without a gradient: these have stopped, or their gradient overflowed
            steps += 1
            remaining = [row for row, value in enumerate(active) if value in losses]
            if len(remaining) < len(active):
                suffix, active = suffix.select_rows(remaining), [active[row] for row in remaining]


def _unscale(values: Sequence[Tensor], numbers: Sequence[int], scales: dict[int, float]) -> None:
    """Divide the gradients of these values by their scales; drop a gradient that overflowed, and lower its scale."""
    gradients = {number: values[number].grad for number in numbers}
    for number, gradient_V in gradients.items():
        assert gradient_V is not None
        # At a scale of 1 the gradient itself is not finite. The value then becomes NaN and stops by its loss.
        if scales[number] > 1 and not bool(gradient_V.isfinite().all()):
            values[number].grad = None
            scales[number] /= SCALE_BACKOFF_FACTOR
        else:
            gradient_V.div_(scales[number])
