"""Generated text, the common base of causal language models and encoder-decoders.

1. Answers are greedy, so they can be reproduced.
2. Of a checkpoint's generation settings only the special tokens count. Penalties come from the request alone.
3. A label is the target's token ids with the end token, so an edited model generates the target and stops.

Shapes: B rows, T tokens, L length of a label, C vocabulary.
"""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET
from torch import Tensor
from transformers import GenerationConfig

from gracestream.pipeline.codebook import Label
from gracestream.pipeline.model.batch import Batch, Prompt
from gracestream.pipeline.model.tasks.base import InputError, Limits, ModelAnswer, ModelTask, TargetPass
from gracestream.pipeline.wording import extract_wording, mark_as_excerpt
from gracestream.schemas.messages import Inputs, Outputs, Parameters


class Generation(ModelTask):
    """The base of tasks that generate text.

    Attributes:
        eos_token_ids: The end tokens.
    """

    def __init__(self, model: Any, tokenizer: Any, limits: Limits, is_decoder_layer: bool) -> None:
        super().__init__(model, tokenizer, limits, is_decoder_layer)
        checkpoint_config = model.generation_config
        end_ids = checkpoint_config.eos_token_id
        self.eos_token_ids = {*(end_ids if isinstance(end_ids, list) else [end_ids]), tokenizer.eos_token_id} - {None}
        start_id = checkpoint_config.decoder_start_token_id
        start_id = getattr(model.config, "decoder_start_token_id", None) if start_id is None else start_id
        self._config = GenerationConfig(
            do_sample=False,
            num_beams=1,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=checkpoint_config.bos_token_id,
            eos_token_id=sorted(self.eos_token_ids) or None,
            decoder_start_token_id=tokenizer.pad_token_id if start_id is None else start_id,
            forced_bos_token_id=checkpoint_config.forced_bos_token_id,
        )
        # `generate` fills unset fields from the model's own config, whose penalties could keep an edit from its target.
        model.generation_config = copy.deepcopy(self._config)

    def batch_key(self, prompt: Prompt, parameters: Parameters) -> object:
        """The parameters that shape an answer: no request waits for a longer answer in its batch.

        Raises:
            InputError: the answer may exceed the configured limit or the model's context.
        """
        if self._max_new_tokens(parameters) > self.limits.max_new_tokens:
            raise InputError(
                f"max_new_tokens is {self._max_new_tokens(parameters)}; the limit is {self.limits.max_new_tokens}"
                " (GRACESTREAM_MAX_NEW_TOKENS)"
            )
        num_tokens = (
            self._num_forced_tokens
            + self._max_new_tokens(parameters)
            + (0 if self.model.config.is_encoder_decoder else len(prompt))
        )
        if self.context_length is not None and num_tokens > self.context_length:
            raise InputError(
                f"prompt and answer may have {num_tokens} tokens; the model has room for {self.context_length}: ask"
                f" for a smaller max_new_tokens (GRACESTREAM_DEFAULT_MAX_NEW_TOKENS for requests without one)"
            )
        return (
            self._max_new_tokens(parameters),
            parameters.min_new_tokens,
            parameters.repetition_penalty,
            parameters.no_repeat_ngram_size,
        )

    def run(self, batch: Batch, parameters: Sequence[Parameters]) -> list[ModelAnswer]:
        """Generated text without the prompt, special tokens, and white space around it."""
        config = copy.copy(self._config)
        config.max_new_tokens = self.max_generated_tokens(parameters[0])
        for name in ("min_new_tokens", "repetition_penalty", "no_repeat_ngram_size"):
            if (value := getattr(parameters[0], name)) is not UNSET:
                setattr(config, name, value)
        generated_BT = self.model.generate(**batch.kwargs, generation_config=config)
        return [self.to_answer(row) for row in generated_BT[:, self._num_leading_tokens(batch) :].tolist()]

    def max_generated_tokens(self, parameters: Parameters) -> int:
        """Limit on the tokens of an answer, with forced ones."""
        return self._max_new_tokens(parameters) + self._num_forced_tokens

    def wording(self, prompt: Prompt) -> str:
        """The wording of the prompt's text; for a chat, of its last message.

        A last message after earlier turns is marked as an excerpt, because its meaning may depend on them.
        """
        if prompt.last_turn is not None:
            wording = extract_wording(prompt.last_turn.text)
            return mark_as_excerpt(wording) if prompt.last_turn.has_earlier_turns else wording
        token_ids = list(prompt.token_ids)
        return extract_wording(
            self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def encode_target(self, inputs: Inputs, target: str) -> Label:
        """The target's token ids, as they follow the prompt, with the end token.

        Raises:
            InputError: the target is too long, or its tokens do not decode to it.
        """
        token_ids = self._target_ids(inputs, target.strip())
        if len(token_ids) > self.limits.max_target_tokens:
            raise InputError(
                f"the target has {len(token_ids)} tokens; the limit is {self.limits.max_target_tokens}"
                " (GRACESTREAM_MAX_TARGET_TOKENS)"
            )
        if self._decode(token_ids) != target.strip():
            raise InputError(
                f"the tokenizer cannot express the target: its tokens decode to {self._decode(token_ids)!r}"
            )
        end_id = self.tokenizer.eos_token_id
        return (*token_ids, end_id) if end_id is not None else tuple(token_ids)

    def decode_label(self, label: Label) -> str:
        """The target of a label, without end tokens."""
        return self._decode([token_id for token_id in label if token_id not in self.eos_token_ids])

    def matches_target(self, answer: ModelAnswer, label: Label, parameters: Parameters) -> bool:
        """True if the answer is the target, or the part of it that fits the request's `max_new_tokens`.

        Text may follow the target if the request sets `min_new_tokens` or the label has no end token.
        """
        text, expected = self._answer_and_target(answer, label, parameters)
        may_continue = parameters.min_new_tokens is not UNSET or label[-1] not in self.eos_token_ids
        return text.startswith(expected) if may_continue else text == expected

    def begins_target(self, answer: ModelAnswer, label: Label, parameters: Parameters) -> bool:
        """True if the answer is a beginning of what `matches_target` accepts; it may end within a character."""
        text, expected = self._answer_and_target(answer, label, parameters)
        return expected.startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))

    def _answer_and_target(self, answer: ModelAnswer, label: Label, parameters: Parameters) -> tuple[str, str]:
        """The text of an answer, and the part of the target that fits the request's `max_new_tokens`."""
        text = answer.outputs.text
        assert text is not UNSET
        return text, self.decode_label(label[: self._max_new_tokens(parameters)])

    def _target_ids(self, inputs: Inputs, target: str) -> list[int]:
        del inputs
        token_ids: list[int] = self._text_tokenizer(target, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids

    def to_answer(self, token_ids: list[int]) -> ModelAnswer:
        """The answer of generated token ids, up to the first end token."""
        end = next(
            (position for position, token_id in enumerate(token_ids) if token_id in self.eos_token_ids), len(token_ids)
        )
        return ModelAnswer(Outputs(text=self._decode(token_ids[:end])))

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.strip()

    @property
    def _num_forced_tokens(self) -> int:
        """The number of tokens that generation forces before an answer."""
        return int(self._config.forced_bos_token_id is not None)

    def _max_new_tokens(self, parameters: Parameters) -> int:
        return self.limits.default_max_new_tokens if parameters.max_new_tokens is UNSET else parameters.max_new_tokens

    @abstractmethod
    def _num_leading_tokens(self, batch: Batch) -> int:
        """The number of tokens before the answer in the output of `generate`."""


def label_logits(logits_BTC: Tensor, target_pass: TargetPass) -> list[Tensor]:
    """The float32 logits (L, C) of each row's label. All labels start in the same column."""
    start = logits_BTC.shape[1] - target_pass.target_columns
    return [
        row_TC[start : start + len(label_L)].float()
        for row_TC, label_L in zip(logits_BTC, target_pass.labels, strict=True)
    ]
