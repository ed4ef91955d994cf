"""Generation: causal language models and encoder-decoders, greedy, so that an answer can be reproduced.

Of a checkpoint's own generation settings only the special tokens count: sampling and penalties are the request's to ask
for. A target's label is its token ids and the end token, so an edited model says the target and stops.
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
    """What causal models and encoder-decoders share."""

    def __init__(self, model: Any, tokenizer: Any, limits: Limits, is_decoder_layer: bool) -> None:
        super().__init__(model, tokenizer, limits, is_decoder_layer)
        found = model.generation_config
        ends = found.eos_token_id
        self._eos_token_ids = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        start = found.decoder_start_token_id
        start = getattr(model.config, "decoder_start_token_id", None) if start is None else start
        self._config = GenerationConfig(
            do_sample=False,
            num_beams=1,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=found.bos_token_id,
            eos_token_id=sorted(self._eos_token_ids) or None,
            decoder_start_token_id=tokenizer.pad_token_id if start is None else start,
            forced_bos_token_id=found.forced_bos_token_id,
        )
        # `generate` takes what is not set here from the model's own; a penalty would keep an edit from its target.
        model.generation_config = copy.deepcopy(self._config)

    def batch_key(self, prompt: Prompt, parameters: Parameters) -> object:
        """Requests that generate alike and as much: none waits for another's longer answer, none outgrows the model."""
        if self._max_new_tokens(parameters) > self.limits.new_tokens_limit:
            raise InputError(
                f"max_new_tokens is {self._max_new_tokens(parameters)}; the limit is {self.limits.new_tokens_limit}"
                " (GRACESTREAM_NEW_TOKENS_LIMIT)"
            )
        tokens = (
            self._num_forced_tokens
            + self._max_new_tokens(parameters)
            + (0 if self.model.config.is_encoder_decoder else len(prompt))
        )
        if self.context_length is not None and tokens > self.context_length:
            raise InputError(
                f"prompt and answer may have {tokens} tokens; the model has room for {self.context_length}: ask for a"
                f" smaller max_new_tokens (GRACESTREAM_MAX_NEW_TOKENS where a request has none)"
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
        config.max_new_tokens = self._max_new_tokens(parameters[0]) + self._num_forced_tokens
        for name in ("min_new_tokens", "repetition_penalty", "no_repeat_ngram_size"):
            if (value := getattr(parameters[0], name)) is not UNSET:
                setattr(config, name, value)
        generated_BT = self.model.generate(**batch.kwargs, generation_config=config)
        return [self._to_answer(row) for row in generated_BT[:, self._num_leading_tokens(batch) :].tolist()]

    def wording(self, prompt: Prompt) -> str:
        """Of the prompt's text; of a chat's last message, whose meaning may depend on earlier turns."""
        if prompt.last_turn is not None:
            wording = extract_wording(prompt.last_turn.text)
            return mark_as_excerpt(wording) if prompt.last_turn.has_earlier_turns else wording
        ids = list(prompt.token_ids)
        return extract_wording(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def encode_target(self, inputs: Inputs, target: str) -> Label:
        """The target's token ids, as they follow the prompt, and the end token."""
        token_ids = self._target_ids(inputs, target.strip())
        if len(token_ids) > self.limits.max_target_tokens:
            raise InputError(
                f"the target has {len(token_ids)} tokens; the limit is {self.limits.max_target_tokens}"
                " (GRACESTREAM_MAX_TARGET_TOKENS)"
            )
        if self._decode(token_ids) != target.strip():
            raise InputError(f"the tokenizer cannot express the target: it makes of it {self._decode(token_ids)!r}")
        end = self.tokenizer.eos_token_id
        return (*token_ids, end) if end is not None else tuple(token_ids)

    def decode_label(self, label: Label) -> str:
        """The target that a label stands for."""
        return self._decode([token for token in label if token not in self._eos_token_ids])

    def matches_target(self, answer: ModelAnswer, label: Label, parameters: Parameters) -> bool:
        """The answer is the target, or as much of it as the request's budget allows.

        Text may follow the target where the request asks for a least length, or where the label has no end token.
        """
        text = answer.outputs.text
        assert text is not UNSET
        wanted = self.decode_label(label[: self._max_new_tokens(parameters)])
        goes_on = parameters.min_new_tokens is not UNSET or label[-1] not in self._eos_token_ids
        return text.startswith(wanted) if goes_on else text == wanted

    def _target_ids(self, inputs: Inputs, target: str) -> list[int]:
        del inputs
        token_ids: list[int] = self._text_tokenizer(target, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids

    def _to_answer(self, token_ids: list[int]) -> ModelAnswer:
        end = next((place for place, token in enumerate(token_ids) if token in self._eos_token_ids), len(token_ids))
        return ModelAnswer(Outputs(text=self._decode(token_ids[:end])))

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.strip()

    @property
    def _num_forced_tokens(self) -> int:
        """Tokens that generation puts before an answer."""
        return int(self._config.forced_bos_token_id is not None)

    def _max_new_tokens(self, parameters: Parameters) -> int:
        return self.limits.max_new_tokens if parameters.max_new_tokens is UNSET else parameters.max_new_tokens

    @abstractmethod
    def _num_leading_tokens(self, batch: Batch) -> int:
        """Tokens at the start of what `generate` returns that are not the answer's."""


def label_logits(logits_BTC: Tensor, target_pass: TargetPass) -> list[Tensor]:
    """The logits of each row's label: all labels begin in one column."""
    first = logits_BTC.shape[1] - target_pass.target_columns
    return [
        row_TC[first : first + len(label_L)].float()
        for row_TC, label_L in zip(logits_BTC, target_pass.labels, strict=True)
    ]
