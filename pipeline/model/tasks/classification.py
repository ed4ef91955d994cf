"""Sequence classification: one of the model's labels for a text or a pair of texts.

Shapes: B rows, C classes.
"""

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
    """A sequence classifier. As in the GRACE paper, the value replaces all tokens; the query is one token's."""

    replace = "all"

    def __init__(self, model: Any, tokenizer: Any, limits: Limits, is_decoder_layer: bool) -> None:
        super().__init__(model, tokenizer, limits, is_decoder_layer)
        # Tokenizers without a separator return segments by default; GPT-2 would look these numbers up as words.
        parameters = inspect.signature(model.forward).parameters
        self._has_segments = TOKEN_TYPE_IDS in parameters and tokenizer.sep_token_id is not None
        # Without a classification token the model is taken as causal: its first token sees only itself, its last one
        # all tokens.
        self.query: QueryToken = "last" if tokenizer.cls_token_id is None else "first"

    def tokenize(self, inputs: Inputs) -> Prompt:
        """One tokenised prompt; a pair is joined in the tokenizer's way.

        Raises:
            InputError: the inputs are a chat, or they have too many tokens or none.
        """
        if isinstance(inputs, str) or is_chat(inputs):
            return super().tokenize(inputs)
        return self._tokenize_texts(*(str(text) for text in inputs))

    def batch(self, prompts: Sequence[Prompt]) -> Batch:
        """Pad prompts into one batch, with segments if the model and the tokenizer have them."""
        batch = super().batch(prompts)
        if self._has_segments and all(prompt.segments for prompt in prompts):
            segments = [prompt.segments for prompt in prompts]
            batch.kwargs[TOKEN_TYPE_IDS] = self._pad_rows(segments, self._pad_value(TOKEN_TYPE_IDS))
        return batch

    def forward_prompt(self, batch: Batch) -> None:
        """Run the whole model. The adaptor ends the pass earlier if it only records queries."""
        self.model(**batch.kwargs)

    def batch_key(self, prompt: Prompt, parameters: Parameters) -> object:
        """None for every request: a classifier takes no parameters, so all requests can share a batch.

        Raises:
            InputError: the request has generation parameters.
        """
        del prompt
        if parameters != Parameters():
            raise InputError("a classifier takes no generation parameters")
        return None

    def run(self, batch: Batch, parameters: Sequence[Parameters]) -> list[ModelAnswer]:
        """The most probable label with all probabilities; `score` is its probability.

        Raises:
            InputError: a probability is not finite.
        """
        del parameters
        probabilities_BC = self.model(**batch.kwargs).logits.float().softmax(dim=-1)
        if not torch.isfinite(probabilities_BC).all():
            raise InputError("the model's probabilities are not finite")
        answers = []
        for row_C in probabilities_BC.tolist():
            by_name = {self._class_name(index): probability for index, probability in enumerate(row_C)}
            best_index = max(range(len(row_C)), key=row_C.__getitem__)
            answers.append(
                ModelAnswer(Outputs(label=self._class_name(best_index), probabilities=by_name), score=row_C[best_index])
            )
        return answers

    def encode_target(self, inputs: Inputs, target: str) -> Label:
        """The class index of a label's name, or of an index in decimal digits.

        Raises:
            InputError: the model has no such label.
        """
        del inputs
        index_by_name = {self._class_name(index): index for index in range(self.model.config.num_labels)}
        name = target.strip()
        if name in index_by_name:
            return (index_by_name[name],)
        if name.isdecimal() and len(name) <= len(str(len(index_by_name))) and int(name) < len(index_by_name):
            return (int(name),)
        raise InputError(f"the model has no label {name!r}; it has {', '.join(index_by_name)}")

    def decode_label(self, label: Label) -> str:
        """The name of the label."""
        return self._class_name(label[0])

    def matches_target(self, answer: ModelAnswer, label: Label, parameters: Parameters) -> bool:
        """True if the most probable label is the target's."""
        del parameters
        return answer.outputs.label == self.decode_label(label)

    def make_target_pass(self, inputs: Inputs, label: Label) -> TargetPass:
        """A pass of one row with one label position."""
        return TargetPass(self.batch([self.tokenize(inputs)]), (torch.tensor(label, device=self.model.device),), 1)

    def logits(self, target_pass: TargetPass) -> list[Tensor]:
        """The classifier's logits, (1, C) per row."""
        logits_BC: Tensor = self.model(**target_pass.batch.kwargs).logits.float()
        return list(logits_BC[:, None])

    def _class_name(self, index: int) -> str:
        return str(self.model.config.id2label.get(index, index))
