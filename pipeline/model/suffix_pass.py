"""Runs forward passes that differ in the injected value only, and computes no more than depends on that value.

Three parts of a pass need not run again: modules before the edited layer, positions before the edited token, and the
tokens of the last block that a classification head does not read.

1. A model uses these optimisations only if a probe shows the loss and gradient of the full model, apart from rounding.
2. A model that fails the probe runs the full pass.

Not promised: the same bits as the full pass.

Shapes: B rows, T tokens, L length of a label, C classes or vocabulary, V width of a value.
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
    """How well the model predicts a label.

    Attributes:
        margin: The smallest lead, in logits, of a label's token over any other token.
        loss: Mean cross entropy over the label's tokens.
    """

    margin: float
    loss: float

    @property
    def predicts_target(self) -> bool:
        """True if the model chooses every token of the label."""
        return self.margin > 0


Optimisations = Literal["all", "no narrowing", "none"]
"""The optimisations of a pass: all, all but the [CLS]-only last block, or none."""


@dataclass(frozen=True, slots=True)
class SuffixPass:
    """The part of a forward pass that depends on the injected value and affects the logits; one row per correction.

    Attributes:
        target_pass: Arguments of the model, with labels.
        activations: Outputs of the modules that need not run again.
        cls_attention: Restricts the last block to the [CLS] token; None runs it for all tokens.
    """

    target_pass: TargetPass
    activations: ActivationCache
    cls_attention: ClsOnlyAttention | None = None

    def select_rows(self, indices: Sequence[int]) -> Self:
        """The suffix pass of some of its rows."""
        return replace_in(
            self, target_pass=self.target_pass.select_rows(indices), activations=self.activations.select_rows(indices)
        )


PASS_OVERHEAD_TOKENS = 32
"""The fixed cost of one more pass, in tokens of about the same cost."""


class SuffixRunner:
    """Runs the suffix passes of one model with one wrapped layer.

    Attributes:
        device: Device of the model.
        dtype: Dtype of the model's first parameter.
    """

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
        """The modules whose output may be cached; None before the probe."""
        self._padding_supported: bool | None = None

    def inspect(
        self, target_pass: TargetPass, codebook_lookup: CodebookLookup
    ) -> tuple[TargetCheck, AdaptorPass, SuffixPass]:
        """Check whether the edited model predicts the label.

        Returns the check, the adaptor's record of the pass, and the suffix pass for other values.
        """
        if self._optimisations is None:
            self._optimisations = self._verified_optimisations()
        batch = target_pass.batch
        serving = self._adaptor.with_codebook(
            batch, codebook_lookup, row_wording=self._task.wording_getter(batch), record_output=True
        )
        with torch.no_grad(), serving as adaptor_pass:
            logits, suffix = self._run_whole_pass(target_pass, self._optimisations)
        return check_target(logits[0], target_pass.labels[0])[0], adaptor_pass, suffix

    def supports_padding(self) -> bool:
        """True if rows of different lengths give the same results in one pass as alone, apart from rounding.

        A probe decides. It fails if padding affects other tokens, as in a convolution, or counts as a position.
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
        outputs = [self._layer_output(row) for row in rows]
        expected = [
            self._loss_and_grad(self.suffix_of([row]), output_V) for row, output_V in zip(rows, outputs, strict=True)
        ]
        try:
            suffix = self.suffix_of(rows)
            actual = self._losses_and_grads(suffix, torch.stack(outputs))
            actual += [self._loss_and_grad(suffix.select_rows([row]), outputs[row]) for row in range(len(rows))]
        except Exception as error:  # noqa: BLE001  (a model without padding may fail in any way)
            raise_if_device_lost(error)
            return False
        return all(
            self._is_close(row_actual, row_expected)
            for row_actual, row_expected in zip(actual, expected * 2, strict=True)
        )

    def _probe_label(self) -> Label:
        """A label for probes: one class, or three tokens."""
        return (0,) * (1 if isinstance(self._task, Classification) else 3)

    def _layer_output(self, target_pass: TargetPass) -> Tensor:
        """The module's own output (V) at the tokens of the first row that a value would replace."""
        with torch.no_grad(), self._adaptor.record_output(target_pass.batch) as adaptor_pass:
            self._task.logits(target_pass)
        return adaptor_pass.outputs_BV[0]

    def suffix_of(self, rows: Sequence[TargetPass]) -> SuffixPass:
        """Run one pass over several corrections and return its suffix pass."""
        target_pass = self._task.collate(rows)
        if self._optimisations is None:
            self._optimisations = self._verified_optimisations()
        with torch.no_grad(), self._adaptor.record_output(target_pass.batch):
            return self._run_whole_pass(target_pass, self._optimisations)[1]

    def suffix_by_length(self, rows: Sequence[TargetPass]) -> SuffixPass:
        """Like `suffix_of`, in two passes for short and long rows if that saves enough padding."""
        order = sorted(range(len(rows)), key=lambda row: rows[row].num_tokens)
        lengths = [rows[row].num_tokens for row in order]
        # Splitting after `count` rows saves padding in each of them: the longest row's length minus the length of the
        # longest row before the split. A split after the last row saves nothing, so `saved` is at least 0.
        saved, split = max((count * (lengths[-1] - lengths[count - 1]), count) for count in range(1, len(rows) + 1))
        if saved < PASS_OVERHEAD_TOKENS:
            return self.suffix_of(rows)
        parts = [self.suffix_of([rows[row] for row in indices]) for indices in (order[:split], order[split:])]
        target_pass = self._task.join_suffixes([part.target_pass for part in parts])
        activations = parts[0].activations.concatenate([part.activations for part in parts[1:]])
        if target_pass is None or activations is None:
            return self.suffix_of(rows)
        # The parts are sorted by length; put the rows back into the caller's order.
        return SuffixPass(target_pass, activations, parts[0].cls_attention).select_rows(
            [order.index(row) for row in range(len(rows))]
        )

    def _run_whole_pass(self, target_pass: TargetPass, optimisations: Optimisations) -> tuple[list[Tensor], SuffixPass]:
        """The logits of the full pass, and its suffix pass."""
        if optimisations == "none":
            return self._task.logits(target_pass), SuffixPass(target_pass, ActivationCache())
        activations = ActivationCache.for_layer(self._module, self._layer, self._batched_modules)
        with activations.record():
            logits, suffix = self._task.logits_and_suffix(target_pass, self._adaptor.replace)
        cls_attention = self._cls_attention if optimisations == "all" else None
        if suffix.past_key_values:
            # The suffix covers the last positions only: keys and values of the earlier ones are cached.
            activations.slice_tokens(slice(-suffix.batch.kwargs["input_ids"].shape[1], None))
        elif cls_attention is not None and cls_attention.layer_inside:
            if activations.contains(cls_attention.attention) and suffix.batch.mask_BT is not None:
                # The attention's output is cached, so the whole block can run for the first token only.
                activations.slice_tokens(slice(1))
                suffix = replace_in(suffix, batch=Batch(suffix.batch.kwargs, suffix.batch.mask_BT[:, :1]))
            cls_attention = None
        return logits, SuffixPass(suffix, activations, cls_attention)

    def _verified_optimisations(self) -> Optimisations:
        """The most extensive optimisations with the full model's loss and gradient on a probe, apart from rounding."""
        try:
            target_pass = self._task.make_target_pass(" ".join(PROBE_TEXTS[:3]), self._probe_label())
        except InputError:
            return "none"
        output_V = self._layer_output(target_pass)
        wave_V = torch.cos(torch.arange(len(output_V), device=self.device)) * output_V.abs().mean()
        expected = [
            self._loss_and_grad(SuffixPass(target_pass, ActivationCache()), value_V) for value_V in (output_V, wave_V)
        ]
        # Best first. The loss at the layer's own output cannot reveal a wrongly cached activation; `wave_V` can.
        choices: tuple[Optimisations, ...] = ("all", "no narrowing")
        for optimisations in choices:
            try:
                with torch.no_grad(), self._adaptor.record_output(target_pass.batch):
                    _, suffix = self._run_whole_pass(target_pass, optimisations)
                # The first pass shows which modules have an output per row; the second caches only those.
                if self._batched_modules is None:
                    self._batched_modules = suffix.activations.batched_modules()
                    with torch.no_grad(), self._adaptor.record_output(target_pass.batch):
                        _, suffix = self._run_whole_pass(target_pass, optimisations)
                actual = [self._loss_and_grad(suffix, value_V) for value_V in (output_V, wave_V)]
            except Exception as error:  # noqa: BLE001  (a model of another structure may fail in any way)
                raise_if_device_lost(error)
                continue
            if all(
                self._is_close(one_actual, one_expected)
                for one_actual, one_expected in zip(actual, expected, strict=True)
            ):
                return optimisations
        return "none"

    def _loss_and_grad(self, suffix: SuffixPass, value_V: Tensor) -> Tensor:
        """The loss with a value in place, followed by its gradient with respect to the value: (1 + V)."""
        return self._losses_and_grads(suffix, value_V[None])[0]

    def _losses_and_grads(self, suffix: SuffixPass, values_BV: Tensor) -> list[Tensor]:
        """Loss and gradient of each row: B tensors of (1 + V)."""
        values_BV = values_BV.clone().requires_grad_()
        with torch.enable_grad():
            losses_B = torch.stack([loss for _, loss in self.evaluate(suffix, values_BV)])
        (grads_BV,) = torch.autograd.grad(losses_B.sum(), values_BV)
        return list(torch.cat([losses_B.detach()[:, None], grads_BV], dim=1))

    def _is_close(self, actual: Tensor, expected: Tensor) -> bool:
        tolerance = 1e-3 if self._module.dtype in (torch.float32, torch.float64) else 0.05
        # Loss and gradient differ in scale, so each has its own tolerance, relative to its largest number.
        pairs = (actual[:1], expected[:1]), (actual[1:], expected[1:])
        return all(
            float((part - expected_part).abs().max()) <= tolerance * float(expected_part.abs().max())
            for part, expected_part in pairs
        )

    def evaluate(self, suffix: SuffixPass, values_BV: Tensor) -> list[tuple[TargetCheck, Tensor]]:
        """For each row, the check with its value in place, and the loss, which can be differentiated by the value."""
        return [
            check_target(*row)
            for row in zip(self._edited_logits(suffix, values_BV), suffix.target_pass.labels, strict=True)
        ]

    def _edited_logits(self, suffix: SuffixPass, values_BV: Tensor) -> list[Tensor]:
        """The logits (L, C) of each row at its label's positions, with its value in place."""
        cls_only = nullcontext() if suffix.cls_attention is None else suffix.cls_attention.enabled()
        with suffix.activations.reuse(), cls_only, self._adaptor.inject(suffix.target_pass.batch, values_BV):
            return self._task.logits(suffix.target_pass)

    def check_value(self, suffix: SuffixPass, value_V: Tensor) -> TargetCheck:
        """Check whether the model predicts the label with a value in place."""
        with torch.no_grad():
            return self.evaluate(suffix, value_V.to(self.device)[None])[0][0]

    def tokens_influenced(self, suffix: SuffixPass, value_V: Tensor) -> int:
        """The number of the label's tokens, up to the last one whose logits depend on the value.

        In a model's last block a value at the last prompt token influences at most one token.
        """
        value_V = value_V.to(self.device)
        with torch.no_grad():
            logits_LC, zero_logits_LC = (
                self._edited_logits(suffix, injected_V[None])[0] for injected_V in (value_V, torch.zeros_like(value_V))
            )
        influenced = (logits_LC != zero_logits_LC).any(dim=1).nonzero()
        return int(influenced.max()) + 1 if len(influenced) else 0


def check_target(logits_LC: Tensor, label_L: Tensor) -> tuple[TargetCheck, Tensor]:
    """The check of logits (L, C) against a label (L), and the mean cross entropy as a differentiable tensor."""
    loss = torch.nn.functional.cross_entropy(logits_LC, label_L)
    chosen_L = logits_LC.detach().gather(1, label_L[:, None])[:, 0]
    others_LC = logits_LC.detach().scatter(1, label_L[:, None], -torch.inf)
    return TargetCheck(margin=float((chosen_L - others_LC.amax(dim=1)).min()), loss=float(loss.detach())), loss
