"""Passes over corrections that differ in the value alone, and compute no more than what depends on it.

What runs before the edited layer does not depend on the value, nor do earlier positions; what a classifier's head does
not read need not be computed. Whether a model can be run in such parts is not taken on trust: a probe tells, whose loss
and gradient have to be those of the whole model.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import replace as replace_in
from typing import Any, Literal, Self

import torch
from torch import Tensor

from gracestream.pipeline.codebook import CodebookLookup, Label
from gracestream.pipeline.device import raise_if_device_lost
from gracestream.pipeline.model.activation_cache import ActivationCache
from gracestream.pipeline.model.adaptor import Adaptor, AdaptorPass
from gracestream.pipeline.model.batch import Batch
from gracestream.pipeline.model.cls_attention import ClsOnlyAttention
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.tasks.base import InputError, ModelTask, TargetPass
from gracestream.pipeline.model.tasks.classification import Classification


@dataclass(frozen=True, slots=True)
class TargetCheck:
    """Whether the model gives a label: `margin` is the least lead (logits) of a label's token, `loss` the mean CE."""

    margin: float
    loss: float

    @property
    def predicts_target(self) -> bool:
        """Every token of the label is the model's choice."""
        return self.margin > 0


Optimisations = Literal["all", "no narrowing", "none"]
"""What is left out of a pass that differs from an earlier one in the value alone: all that can be, all but what a
classifier's head does not read, or nothing."""


@dataclass(frozen=True, slots=True)
class SuffixPass:
    """What of a forward pass over corrections, a row each, depends on the value and counts.

    What runs before the layer does not depend on it, nor do earlier positions; `cls_attention` leaves out what a
    classifier's head never reads.
    """

    target_pass: TargetPass
    activations: ActivationCache
    cls_attention: ClsOnlyAttention | None = None

    def select_rows(self, indices: Sequence[int]) -> Self:
        """What is left of it for some of its rows."""
        return replace_in(
            self, target_pass=self.target_pass.select_rows(indices), activations=self.activations.select_rows(indices)
        )


PASS_OVERHEAD_TOKENS = 32
"""Tokens that cost about as much as one more pass does by itself."""


class SuffixRunner:
    """Those of one model, with one layer wrapped by an adaptor."""

    def __init__(self, module: Any, layer: str, task: ModelTask, adaptor: Adaptor) -> None:
        self._module, self._layer, self._task, self._adaptor = module, layer, task, adaptor
        parameter = next(module.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self._cls_attention = (
            ClsOnlyAttention.for_model(module, layer, adaptor.replace) if task.query == "first" else None
        )
        self._optimisations: Optimisations | None = None
        self._batched_modules: set[torch.nn.Module] | None = None
        """What may be kept of a pass, once a probe has told."""
        self._padding_supported: bool | None = None

    def inspect(
        self, target_pass: TargetPass, codebook_lookup: CodebookLookup
    ) -> tuple[TargetCheck, AdaptorPass, SuffixPass]:
        """Whether the edited model gives the label, what the wrapped module saw, and the rest for other values."""
        if self._optimisations is None:
            self._optimisations = self._verified_optimisations()
        batch = target_pass.batch
        serving = self._adaptor.with_codebook(
            batch, codebook_lookup, row_wording=self._task.wording_getter(batch), capture_output=True
        )
        with torch.no_grad(), serving as session:
            logits, rest = self._run_whole_pass(target_pass, self._optimisations)
        return check_target(logits[0], target_pass.labels[0])[0], session, rest

    def supports_padding(self) -> bool:
        """Whether rows of different lengths are trained in one pass as each is alone, rounding apart, on a probe.

        They are not where padding reaches what is not padding, as in a convolution, or counts as a position.
        """
        if self._padding_supported is None:
            self._padding_supported = self._probe_padding()
        return self._padding_supported

    def _probe_padding(self) -> bool:
        label = self._probe_label()
        try:
            rows = [
                self._task.make_target_pass(PROBE_TEXTS[0], label),
                self._task.make_target_pass(" ".join(PROBE_TEXTS[1:3]), label[:1]),
            ]
        except InputError:
            return False
        starts = [self._layer_output(row) for row in rows]
        expected = [
            self._loss_and_grad(self.suffix_of([row]), start_V) for row, start_V in zip(rows, starts, strict=True)
        ]
        try:
            both = self.suffix_of(rows)
            found = self._losses_and_grads(both, torch.stack(starts))
            found += [self._loss_and_grad(both.select_rows([place]), starts[place]) for place in range(len(rows))]
        except Exception as error:  # noqa: BLE001  (a model that takes no padding fails anyhow)
            raise_if_device_lost(error)
            return False
        return all(self._is_close(ours, theirs) for ours, theirs in zip(found, expected * 2, strict=True))

    def _probe_label(self) -> Label:
        """A class, or a few tokens."""
        return (0,) * (1 if isinstance(self._task, Classification) else 3)

    def _layer_output(self, target_pass: TargetPass) -> Tensor:
        """The module's own output (V) where a value of the first row would go."""
        with torch.no_grad(), self._adaptor.capture_output(target_pass.batch) as session:
            self._task.logits(target_pass)
        return session.outputs_BV[0]

    def suffix_of(self, rows: Sequence[TargetPass]) -> SuffixPass:
        """What is left for other values of one pass over several corrections."""
        supervised = self._task.collate(rows)
        if self._optimisations is None:
            self._optimisations = self._verified_optimisations()
        with torch.no_grad(), self._adaptor.capture_output(supervised.batch):
            return self._run_whole_pass(supervised, self._optimisations)[1]

    def suffix_by_length(self, rows: Sequence[TargetPass]) -> SuffixPass:
        """The same of rows of unequal lengths: shorter and longer ones pass apart, where that saves padding enough."""
        order = sorted(range(len(rows)), key=lambda row: rows[row].num_tokens)
        lengths = [rows[row].num_tokens for row in order]
        # What a split saves: each shorter row then has less padding.
        saved, split = max((place * (lengths[-1] - lengths[place - 1]), place) for place in range(1, len(rows) + 1))
        if saved < PASS_OVERHEAD_TOKENS:
            return self.suffix_of(rows)
        parts = [self.suffix_of([rows[row] for row in some]) for some in (order[:split], order[split:])]
        supervised = self._task.join_suffixes([part.target_pass for part in parts])
        prefix = parts[0].activations.concatenate([part.activations for part in parts[1:]])
        if supervised is None or prefix is None:
            return self.suffix_of(rows)
        return SuffixPass(supervised, prefix, parts[0].cls_attention).select_rows(
            [order.index(row) for row in range(len(rows))]
        )

    def _run_whole_pass(self, target_pass: TargetPass, optimisations: Optimisations) -> tuple[list[Tensor], SuffixPass]:
        """Logits of the whole pass, and what is left of it for other values."""
        if optimisations == "none":
            return self._task.logits(target_pass), SuffixPass(target_pass, ActivationCache())
        prefix = ActivationCache.for_layer(self._module, self._layer, self._batched_modules)
        with prefix.record():
            logits, left = self._task.logits_and_suffix(target_pass, self._adaptor.replace)
        last = self._cls_attention if optimisations == "all" else None
        if left.past_key_values:
            prefix.slice_tokens(slice(-left.batch.kwargs["input_ids"].shape[1], None))
        elif last is not None and last.layer_inside:
            if prefix.contains(last.attention) and left.batch.mask_BT is not None:
                prefix.slice_tokens(slice(1))  # then the block is over the first token from the start
                left = replace_in(left, batch=Batch(left.batch.kwargs, left.batch.mask_BT[:, :1]))
            last = None
        return logits, SuffixPass(left, prefix, last)

    def _verified_optimisations(self) -> Optimisations:
        """The most of them under which loss and gradient are those of the whole model, rounding apart, on a probe."""
        try:
            supervised = self._task.make_target_pass(" ".join(PROBE_TEXTS[:3]), self._probe_label())
        except InputError:
            return "none"
        start_V = self._layer_output(supervised)
        wave_V = torch.cos(torch.arange(len(start_V), device=self.device)) * start_V.abs().mean()
        expected = [
            self._loss_and_grad(SuffixPass(supervised, ActivationCache()), value_V) for value_V in (start_V, wave_V)
        ]
        choices: tuple[Optimisations, ...] = ("all", "no narrowing")
        for shortcuts in choices:
            try:
                with torch.no_grad(), self._adaptor.capture_output(supervised.batch):
                    _, rest = self._run_whole_pass(supervised, shortcuts)
                if self._batched_modules is None:
                    self._batched_modules = rest.activations.batched_modules()
                    with torch.no_grad(), self._adaptor.capture_output(supervised.batch):
                        _, rest = self._run_whole_pass(supervised, shortcuts)
                found = [self._loss_and_grad(rest, value_V) for value_V in (start_V, wave_V)]
            except Exception as error:  # noqa: BLE001  (a model that is built in another way fails anyhow)
                raise_if_device_lost(error)
                continue
            if all(self._is_close(ours, theirs) for ours, theirs in zip(found, expected, strict=True)):
                return shortcuts
        return "none"

    def _loss_and_grad(self, suffix: SuffixPass, value_V: Tensor) -> Tensor:
        """The loss with a value in place, and its derivative by each of the value's numbers: (1 + V)."""
        return self._losses_and_grads(suffix, value_V[None])[0]

    def _losses_and_grads(self, suffix: SuffixPass, values_BV: Tensor) -> list[Tensor]:
        """Likewise, of each row."""
        values_BV = values_BV.clone().requires_grad_()
        with torch.enable_grad():
            losses_B = torch.stack([loss for _, loss in self.evaluate(suffix, values_BV)])
        (slopes_BV,) = torch.autograd.grad(losses_B.sum(), values_BV)
        return list(torch.cat([losses_B.detach()[:, None], slopes_BV], dim=1))

    def _is_close(self, actual: Tensor, expected: Tensor) -> bool:
        allowed = 1e-3 if self._module.dtype in (torch.float32, torch.float64) else 0.05
        pairs = (actual[:1], expected[:1]), (actual[1:], expected[1:])
        return all(float((a - b).abs().max()) <= allowed * float(b.abs().max()) for a, b in pairs)

    def evaluate(self, suffix: SuffixPass, values_BV: Tensor) -> list[tuple[TargetCheck, Tensor]]:
        """Of each row the verdict with its value in place, and the loss, which can be differentiated by the value."""
        return [
            check_target(*row)
            for row in zip(self._edited_logits(suffix, values_BV), suffix.target_pass.labels, strict=True)
        ]

    def _edited_logits(self, suffix: SuffixPass, values_BV: Tensor) -> list[Tensor]:
        """Of each row the logits (L, C) at its label's places with its value in place."""
        narrowed = nullcontext() if suffix.cls_attention is None else suffix.cls_attention.enabled()
        with suffix.activations.replay(), narrowed, self._adaptor.inject(suffix.target_pass.batch, values_BV):
            return self._task.logits(suffix.target_pass)

    def check_value(self, suffix: SuffixPass, value_V: Tensor) -> TargetCheck:
        """Whether a value in place makes the model give the label."""
        with torch.no_grad():
            return self.evaluate(suffix, value_V.to(self.device)[None])[0][0]

    def tokens_influenced(self, suffix: SuffixPass, value_V: Tensor) -> int:
        """How many tokens of the label, from its first, a value has a say in: in a last block no more than one."""
        value_V = value_V.to(self.device)
        with torch.no_grad():
            ours_LC, others_LC = (
                self._edited_logits(suffix, one_V[None])[0] for one_V in (value_V, torch.zeros_like(value_V))
            )
        told = (ours_LC != others_LC).any(dim=1).nonzero()
        return int(told.max()) + 1 if len(told) else 0


def check_target(logits_LC: Tensor, label_L: Tensor) -> tuple[TargetCheck, Tensor]:
    """The verdict on logits, and the loss (mean cross entropy) as a tensor that can be differentiated."""
    loss = torch.nn.functional.cross_entropy(logits_LC, label_L)
    chosen_L = logits_LC.detach().gather(1, label_L[:, None])[:, 0]
    others_LC = logits_LC.detach().scatter(1, label_L[:, None], -torch.inf)
    return TargetCheck(margin=float((chosen_L - others_LC.amax(dim=1)).min()), loss=float(loss.detach())), loss
