"""ROME: one association of a linear layer is rewritten by a change of rank one (Meng et al. 2022, section 3.1).

The layer is taken for a memory of pairs: what it sees at the last token of a subject is a key, what it puts out there a
value. A correction finds the value that makes the model give the target, at the least change of what it says of the
subject otherwise, and the change of the weights that puts it there while it moves what the layer made of other inputs
the least. How inputs vary is told by the traffic, of which there is far less than the paper's 100,000 samples, so a
ridge is added to their second moment. Where a prompt has no subject that is known, its last token counts.
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
LEARNING_RATE = 0.5
SUBJECT_LOSS_WEIGHT = 0.0625
"""Of what the model says of the subject otherwise, in the loss."""

MAX_CHANGE_RATIO = 4.0
"""Times the length of the value that was there: a change is no longer."""

SUFFICIENT_LOSS = 0.05
"""A loss of the target at which a value is good."""

NUM_PREFIXES, PREFIX_WORDS = 5, 8
"""Beginnings of other texts, and their words, before which a correction's prompt is looked at as well."""

RIDGE_FRACTION = 1e-2
"""Added to the second moment's diagonal, in shares of its mean."""


@dataclass(frozen=True, slots=True)
class _SubjectPass:
    """Passes over prompts, and in each row how many tokens before the prompt's last one the subject ends."""

    supervised: TargetPass
    tokens_before_end_B: Tensor

    @property
    def subject_columns_B(self) -> Tensor:
        """Where the subject ends."""
        mask_BT = self.supervised.batch.mask_BT
        assert mask_BT is not None
        return last_token_positions(mask_BT) - self.tokens_before_end_B

    def select_subject(self, tokens_BTX: Tensor) -> Tensor:
        """What stands there of each row: (B, X)."""
        return tokens_BTX[torch.arange(len(tokens_BTX), device=tokens_BTX.device), self.subject_columns_B]


class Rome(LinearLayerEditor):
    """Of causal language models, with texts that tell how the layer's inputs vary.

    Raises:
        EditorError: the model is none, the layer is not linear, or there are no texts.
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
        """Whether it can edit this model."""
        if not isinstance(model.task, CausalGeneration):
            raise EditorError("this editor is for causal language models, which this model is not")
        super().require_editable(model)

    def _second_moment(self, texts: Sequence[str]) -> Tensor:
        """The mean over all tokens of the outer product of what the layer sees with itself."""
        task = self._model.task
        width = self.weight_VD.shape[1]
        moment_DD, tokens = torch.zeros(width, width, device=self._model.device), 0

        def watched(seen_BTD: Tensor, _output: Tensor) -> None:
            seen_TD = seen_BTD[0].float()
            moment_DD.add_(seen_TD.T @ seen_TD)

        with torch.no_grad(), self._with_output_hook(watched):
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
            except InputError:  # with the prefix it is too long
                continue
        parts = [self._collate(rows)] if self._model.suffix_runner.supports_padding() else rows
        keys_BD = torch.cat([self._subject_activations(part)[0] for part in parts])
        change_V, steps = self._optimise_value(example, parts, self._subject_activations(rows[0])[1][0])
        direction_D = torch.cholesky_solve(keys_BD.mean(dim=0)[:, None], self._cholesky_DD)[:, 0]
        # The prompt as it stands is given its value exactly.
        self.weight_VD.add_(torch.outer(change_V, direction_D / (direction_D @ keys_BD[0])))
        return steps

    def _optimise_value(
        self, example: Example, parts: Sequence[_SubjectPass], original_V: Tensor
    ) -> tuple[Tensor, int]:
        """How the value has to change, from what it was, and the steps that it took to find out."""
        essence, usual_C = self._essence_pass(example)
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
                told = torch.stack([check_target(*row)[1] for row in logits]).mean()
                loss = told
                if essence is not None:
                    now_C = torch.log_softmax(self._logits_with_change(essence, change_V)[0][0], dim=0)
                    kept = torch.nn.functional.kl_div(usual_C, now_C, log_target=True, reduction="sum")
                    loss = loss + SUBJECT_LOSS_WEIGHT * kept
            if told.item() < SUFFICIENT_LOSS:
                return change_V.detach(), step
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.no_grad():
                change_V.mul_((MAX_CHANGE_RATIO * original_V.norm() / change_V.norm().clamp(min=1e-30)).clamp(max=1))
        return change_V.detach(), self._steps

    def _essence_pass(self, example: Example) -> tuple[_SubjectPass | None, Tensor]:
        """A prompt that asks what the subject is, and the log probabilities (C) of what the model says next."""
        if not example.subject:
            return None, torch.empty(0)
        text = f"{example.subject} is a"
        try:
            asked = self._subject_pass(text, example.subject, self._model.task.make_target_pass(text, (0,)))
        except InputError:  # no room for it
            return None, torch.empty(0)
        with torch.no_grad():
            (logits_1C,) = self._model.task.logits(asked.supervised)
        return asked, torch.log_softmax(logits_1C[0], dim=0)

    def _subject_pass(self, text: str, subject: str, supervised: TargetPass) -> _SubjectPass:
        task, found = self._model.task, text.rfind(subject) if subject else -1
        prompt = len(task.tokenize(text))
        end = prompt if found < 0 else len(task.tokenize(text[: found + len(subject)]))
        return _SubjectPass(supervised, torch.tensor([max(prompt - end, 0)], device=self._model.device))

    def _collate(self, rows: Sequence[_SubjectPass]) -> _SubjectPass:
        supervised = self._model.task.collate([row.supervised for row in rows])
        return _SubjectPass(supervised, torch.cat([row.tokens_before_end_B for row in rows]))

    def _subject_activations(self, subject_pass: _SubjectPass) -> tuple[Tensor, Tensor]:
        """What the layer sees (B, D) and puts out (B, V) where the subject ends."""
        seen: list[Tensor] = []

        def watched(seen_BTD: Tensor, output_BTV: Tensor) -> None:
            seen.extend(
                (subject_pass.select_subject(seen_BTD).float(), subject_pass.select_subject(output_BTV).float())
            )

        with torch.no_grad(), self._with_output_hook(watched):
            self._model.task.logits(subject_pass.supervised)
        return seen[0], seen[1]

    def _logits_with_change(self, subject_pass: _SubjectPass, change_V: Tensor) -> list[Tensor]:
        """Of the model whose value at the subject's end is changed."""

        def changed(_seen: Tensor, output_BTV: Tensor) -> Tensor:
            columns_T = torch.arange(output_BTV.shape[1], device=output_BTV.device)
            where_BT1 = (columns_T == subject_pass.subject_columns_B[:, None])[..., None]
            return output_BTV + where_BT1 * change_V.to(output_BTV.dtype)

        with self._with_output_hook(changed):
            return self._model.task.logits(subject_pass.supervised)
