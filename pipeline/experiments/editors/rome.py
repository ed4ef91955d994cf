"""ROME: a rank-one update of a linear layer rewrites one association (Meng et al. 2022, section 3.1).

The layer is seen as an associative memory: its input at the last token of a subject is a key, its output there a value.
A correction takes two steps:

1. Optimise the value until the model predicts the target. A Kullback-Leibler term preserves the model's predictions
   about the subject's essence ("... is a").
2. Update the weights so that the key maps to the value, with the least change for other inputs.

The second moment of the layer's inputs is estimated on the traffic. The traffic has far fewer than the paper's 100,000
samples, so a ridge is added. If a prompt's subject is unknown, the prompt's last token takes its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gracestream.pipeline.experiments.editors.editor import EditorError
from gracestream.pipeline.experiments.editors.weights import LinearLayerEditor
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import (
    CausalGeneration,
    EditableModel,
    InputError,
    TargetPass,
    check_target,
    last_token_positions,
)

MAX_VALUE_STEPS = 20
"""Largest number of optimisation steps for one value."""

LEARNING_RATE = 0.5
"""Adam's learning rate for the value."""

SUBJECT_LOSS_WEIGHT = 0.0625
"""Weight of the Kullback-Leibler term in the loss."""

MAX_CHANGE_RATIO = 4.0
"""Largest norm of the change of a value, as a multiple of the original value's norm."""

SUFFICIENT_LOSS = 0.05
"""Loss of the target below which the optimisation of a value stops."""

NUM_PREFIXES, PREFIX_WORDS = 5, 8
"""Number and length of the text beginnings that precede further copies of a correction's prompt."""

RIDGE_FRACTION = 1e-2
"""Ridge on the diagonal of the second moment, as a share of the diagonal's mean."""


@dataclass(frozen=True, slots=True)
class _SubjectPass:
    """A pass over prompts with the position of each row's subject.

    Attributes:
        supervised: The pass.
        tokens_before_end_B: Tokens between the subject's last token and the prompt's last token, in each row.
    """

    supervised: TargetPass
    tokens_before_end_B: Tensor

    @property
    def subject_columns_B(self) -> Tensor:
        """The column of the subject's last token in each row; padding shifts it."""
        mask_BT = self.supervised.batch.mask_BT
        assert mask_BT is not None
        return last_token_positions(mask_BT) - self.tokens_before_end_B

    def select_subject(self, tokens_BTX: Tensor) -> Tensor:
        """The vectors (B, X) at each row's subject column."""
        return tokens_BTX[torch.arange(len(tokens_BTX), device=tokens_BTX.device), self.subject_columns_B]


class Rome(LinearLayerEditor):
    """Edits a causal language model; the second moment of the layer's inputs is estimated on `traffic`.

    Raises:
        EditorError: the model is not a causal language model, the layer is not linear, or there is no traffic.
    """

    def __init__(
        self,
        model: EditableModel,
        traffic: Sequence[str],
        learning_rate: float = LEARNING_RATE,
        steps: int = MAX_VALUE_STEPS,
        prefixes: int = NUM_PREFIXES,
    ) -> None:
        if not traffic:
            raise EditorError("this editor needs texts that tell how the layer's inputs vary")
        super().__init__(model)
        self.learning_rate, self._steps = learning_rate, steps
        self._prefixes = [" ".join(text.split()[:PREFIX_WORDS]) for text in traffic[:prefixes]]
        moment_DD = self._second_moment(traffic)
        ridge = RIDGE_FRACTION * moment_DD.diagonal().mean() * torch.eye(len(moment_DD), device=moment_DD.device)
        self._cholesky_DD = torch.linalg.cholesky(moment_DD + ridge)

    @classmethod
    def require_editable(cls, model: EditableModel) -> None:
        """Check that the model is a causal language model and its layer is linear.

        Raises:
            EditorError: it is not.
        """
        if not isinstance(model.task, CausalGeneration):
            raise EditorError("this editor is for causal language models, which this model is not")
        super().require_editable(model)

    def _second_moment(self, texts: Sequence[str]) -> Tensor:
        """The mean over all tokens of the outer product of the layer's input with itself (D, D)."""
        task = self._model.task
        input_dim = self.weight_VD.shape[1]
        moment_DD, tokens = torch.zeros(input_dim, input_dim, device=self._model.device), 0

        def add_inputs(input_BTD: Tensor, _output: Tensor) -> None:
            input_TD = input_BTD[0].float()
            moment_DD.add_(input_TD.T @ input_TD)

        with torch.no_grad(), self._with_output_hook(add_inputs):
            for text in texts:
                prompt = task.tokenize(text)
                task.forward_prompt(task.batch([prompt]))
                tokens += len(prompt)
        return moment_DD / tokens

    def _apply_correction(self, example: Example, supervised: TargetPass) -> int:
        rows = [self._subject_pass(example.inputs, example.subject, supervised)]
        for prefix in self._prefixes:
            try:
                text = f"{prefix}. {example.inputs}"
                rows.append(
                    self._subject_pass(text, example.subject, self._model.prepare_correction(text, example.target)[1])
                )
            except InputError:  # the prompt is too long with this prefix
                continue
        parts = [self._collate(rows)] if self._model.suffix_runner.supports_padding() else rows
        keys_BD = torch.cat([self._subject_activations(part)[0] for part in parts])
        change_V, steps = self._optimise_value(example, parts, self._subject_activations(rows[0])[1][0])
        direction_D = torch.cholesky_solve(keys_BD.mean(dim=0)[:, None], self._cholesky_DD)[:, 0]
        # The direction comes from the mean key, and the scale from the prompt's own key without a prefix (row 0): its
        # output changes by `change_V`, because (change ⊗ direction / (direction · key)) key = change.
        self.weight_VD.add_(torch.outer(change_V, direction_D / (direction_D @ keys_BD[0])))
        return steps

    def _optimise_value(
        self, example: Example, parts: Sequence[_SubjectPass], original_V: Tensor
    ) -> tuple[Tensor, int]:
        """The change of the value (V) that makes the model predict the target, and the number of steps."""
        essence, original_C = self._essence_pass(example)
        change_V = torch.zeros_like(original_V).requires_grad_()
        optimizer = torch.optim.Adam([change_V], lr=self.learning_rate)
        for step in range(self._steps):
            with torch.enable_grad():
                logits = [
                    (row_LC, label_L)
                    for part in parts
                    for row_LC, label_L in zip(
                        self._logits_with_change(part, change_V), part.supervised.labels, strict=True
                    )
                ]
                target_loss = torch.stack([check_target(*row)[1] for row in logits]).mean()
                loss = target_loss
                if essence is not None:
                    edited_C = torch.log_softmax(self._logits_with_change(essence, change_V)[0][0], dim=0)
                    divergence = torch.nn.functional.kl_div(original_C, edited_C, log_target=True, reduction="sum")
                    loss = loss + SUBJECT_LOSS_WEIGHT * divergence
            if target_loss.item() < SUFFICIENT_LOSS:
                return change_V.detach(), step
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.no_grad():
                change_V.mul_((MAX_CHANGE_RATIO * original_V.norm() / change_V.norm().clamp(min=1e-30)).clamp(max=1))
        return change_V.detach(), self._steps

    def _essence_pass(self, example: Example) -> tuple[_SubjectPass | None, Tensor]:
        """A prompt about the subject's essence, and the unedited log probabilities (C) of the next token.

        None if the subject is unknown or its prompt is too long.
        """
        if not example.subject:
            return None, torch.empty(0)
        text = f"{example.subject} is a"
        try:
            essence = self._subject_pass(text, example.subject, self._model.task.make_target_pass(text, (0,)))
        except InputError:  # the subject's prompt is too long
            return None, torch.empty(0)
        with torch.no_grad():
            (logits_1C,) = self._model.task.logits(essence.supervised)
        return essence, torch.log_softmax(logits_1C[0], dim=0)

    def _subject_pass(self, text: str, subject: str, supervised: TargetPass) -> _SubjectPass:
        """The pass with the position of the subject's last occurrence in the text, or else of the last token."""
        task, start = self._model.task, text.rfind(subject) if subject else -1
        prompt_length = len(task.tokenize(text))
        subject_length = prompt_length if start < 0 else len(task.tokenize(text[: start + len(subject)]))
        return _SubjectPass(
            supervised, torch.tensor([max(prompt_length - subject_length, 0)], device=self._model.device)
        )

    def _collate(self, rows: Sequence[_SubjectPass]) -> _SubjectPass:
        supervised = self._model.task.collate([row.supervised for row in rows])
        return _SubjectPass(supervised, torch.cat([row.tokens_before_end_B for row in rows]))

    def _subject_activations(self, subject_pass: _SubjectPass) -> tuple[Tensor, Tensor]:
        """The layer's inputs (B, D) and outputs (B, V) at the subjects' last tokens."""
        recorded: list[Tensor] = []

        def record(input_BTD: Tensor, output_BTV: Tensor) -> None:
            recorded.extend(
                (subject_pass.select_subject(input_BTD).float(), subject_pass.select_subject(output_BTV).float())
            )

        with torch.no_grad(), self._with_output_hook(record):
            self._model.task.logits(subject_pass.supervised)
        return recorded[0], recorded[1]

    def _logits_with_change(self, subject_pass: _SubjectPass, change_V: Tensor) -> list[Tensor]:
        """The model's logits with the layer's output changed at the subjects' last tokens."""

        def add_change(_input: Tensor, output_BTV: Tensor) -> Tensor:
            columns_T = torch.arange(output_BTV.shape[1], device=output_BTV.device)
            is_subject_BT1 = (columns_T == subject_pass.subject_columns_B[:, None])[..., None]
            return output_BTV + is_subject_BT1 * change_V.to(output_BTV.dtype)

        with self._with_output_hook(add_change):
            return self._model.task.logits(subject_pass.supervised)
