"""Sequence classification: a label of the model's own for a text or a pair of texts."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gracestream.pipeline.codebook import Label
from gracestream.pipeline.model.adaptor import QueryToken
from gracestream.pipeline.model.batch import Batch, Prompt
from gracestream.pipeline.model.tasks.base import TOKEN_TYPE_IDS, InputError, Limits, ModelAnswer, ModelTask, TargetPass
from gracestream.schemas.messages import Inputs, Outputs, Parameters, is_chat


class Classification(ModelTask):
    """The value replaces all tokens, as the paper has it for classifiers; the query is the classification token's."""

    replace = "all"

    def __init__(self, model: Any, tokenizer: Any, limits: Limits, is_decoder_layer: bool) -> None:
        super().__init__(model, tokenizer, limits, is_decoder_layer)
        # The first token of a causal model has seen nothing but itself: every text that starts alike shares it.
        # Tokenizers without a separator name segments by default, which a GPT2 would read as words.
        parameters = inspect.signature(model.forward).parameters
        self._has_segments = TOKEN_TYPE_IDS in parameters and tokenizer.sep_token_id is not None
        self.query: QueryToken = "last" if tokenizer.cls_token_id is None else "first"

    def tokenize(self, inputs: Inputs) -> Prompt:
        """As for any task, and a pair is joined the way the tokenizer does."""
        if isinstance(inputs, str) or is_chat(inputs):
            return super().tokenize(inputs)
        return self._tokenize_texts(*(str(text) for text in inputs))

    def batch(self, prompts: Sequence[Prompt]) -> Batch:
        """With the segments that the tokenizer gave to the texts of a pair, for a model that has some."""
        batch = super().batch(prompts)
        if self._has_segments and all(prompt.segments for prompt in prompts):
            segments = [prompt.segments for prompt in prompts]
            batch.kwargs[TOKEN_TYPE_IDS] = self._pad_rows(segments, self._pad_value(TOKEN_TYPE_IDS))
        return batch

    def forward_prompt(self, batch: Batch) -> None:
        """The whole model; the adaptor's session may end it early."""
        self.model(**batch.kwargs)

    def batch_key(self, prompt: Prompt, parameters: Parameters) -> object:
        """A classifier has no parameters: all its requests are of one group."""
        del prompt
        if parameters != Parameters():
            raise InputError("a classifier takes no generation parameters")
        return None

    def run(self, batch: Batch, parameters: Sequence[Parameters]) -> list[ModelAnswer]:
        """The most probable label, with all probabilities; `score` is its probability."""
        del parameters
        probabilities_BC = self.model(**batch.kwargs).logits.float().softmax(dim=-1)
        if not torch.isfinite(probabilities_BC).all():
            raise InputError("the model's probabilities are not finite")
        answers = []
        for row_C in probabilities_BC.tolist():
            named = {self._class_name(index): probability for index, probability in enumerate(row_C)}
            best = max(range(len(row_C)), key=row_C.__getitem__)
            answers.append(ModelAnswer(Outputs(label=self._class_name(best), probabilities=named), score=row_C[best]))
        return answers

    def encode_target(self, inputs: Inputs, target: str) -> Label:
        """A label's name, or its index in digits."""
        del inputs
        names = {self._class_name(index): index for index in range(self.model.config.num_labels)}
        wanted = target.strip()
        if wanted in names:
            return (names[wanted],)
        if wanted.isdecimal() and len(wanted) <= len(str(len(names))) and int(wanted) < len(names):
            return (int(wanted),)
        raise InputError(f"the model has no label {wanted!r}; it has {', '.join(names)}")

    def decode_label(self, label: Label) -> str:
        """The label's name."""
        return self._class_name(label[0])

    def matches_target(self, answer: ModelAnswer, label: Label, parameters: Parameters) -> bool:
        """The most probable label is the target's."""
        del parameters
        return answer.outputs.label == self.decode_label(label)

    def make_target_pass(self, inputs: Inputs, label: Label) -> TargetPass:
        """One row; one decision."""
        return TargetPass(self.batch([self.tokenize(inputs)]), (torch.tensor(label, device=self.model.device),), 1)

    def logits(self, target_pass: TargetPass) -> list[Tensor]:
        """The classifier's logits, (1, C) a row."""
        logits_BC: Tensor = self.model(**target_pass.batch.kwargs).logits.float()
        return list(logits_BC[:, None])

    def _class_name(self, index: int) -> str:
        return str(self.model.config.id2label.get(index, index))
