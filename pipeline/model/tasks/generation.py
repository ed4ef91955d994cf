"""Generation: causal language models and encoder-decoders, greedy, so that an answer can be reproduced.

Of a checkpoint's own generation settings only the special tokens count: sampling and penalties are the request's to ask
for. A target's label is its token ids and the end token, so an edited model says the target and stops.
"""

import copy
import inspect
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace as replace_in
from typing import Any

import torch
from msgspec import UNSET
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from gracestream.pipeline.codebook import Label
from gracestream.pipeline.model.adaptor import ReplacedTokens, last_token_positions
from gracestream.pipeline.model.batch import Batch, LastTurn, Prompt
from gracestream.pipeline.model.chat import ChatError, ChatTemplate
from gracestream.pipeline.model.layers import pad_and_concat
from gracestream.pipeline.model.tasks.base import InputError, Limits, ModelAnswer, ModelTask, TargetPass
from gracestream.pipeline.wording import extract_wording, mark_as_excerpt
from gracestream.schemas.messages import Inputs, Outputs, Parameters, is_chat

POSITIONAL_INPUTS = ("input_ids", "position_ids")
"""Of a causal model's arguments those that tell nothing of the positions before."""

ENCODER_OUTPUT = "encoded"
"""In place of the tokens of an encoder: what it made of them, (B, T, X)."""


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


class CausalGeneration(Generation):
    """A causal language model. Prompts are padded on the left: answers grow to the right."""

    padding_side = "left"

    def __init__(self, model: Any, tokenizer: Any, limits: Limits, is_decoder_layer: bool) -> None:
        super().__init__(model, tokenizer, limits, is_decoder_layer)
        self._chat_template = ChatTemplate(self.tokenizer, self._text_tokenizer)

    def tokenize(self, inputs: Inputs) -> Prompt:
        """One prompt in tokens; messages of a chat by the model's chat template."""
        if not is_chat(inputs):
            return super().tokenize(inputs)
        try:
            token_ids = self._check_token_ids(self._chat_template.token_ids(inputs))
        except ChatError as error:
            raise InputError(str(error)) from error
        follows = any(message.role != "system" for message in inputs[:-1])
        return Prompt(tuple(token_ids), last_turn=LastTurn(inputs[-1].content, follows))

    def forward_prompt(self, batch: Batch) -> None:
        """With positions counted from each row's first real token, as generation counts them."""
        positions_BT = (batch.kwargs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        extra = {"position_ids": positions_BT} if self._accepts_argument("position_ids") else {}
        self.model(**batch.kwargs, **extra, use_cache=False)

    def make_target_pass(self, inputs: Inputs, label: Label) -> TargetPass:
        """Prompt and target in one row; the last target token needs no forward pass of its own."""
        prompt = self.tokenize(inputs)
        if self.context_length is not None and len(prompt) + len(label) > self.context_length:
            tokens = len(prompt) + len(label)
            raise InputError(f"prompt and target have {tokens} tokens; the model has room for {self.context_length}")
        device = self.model.device
        ids_1T = torch.tensor([[*prompt.token_ids, *label[:-1]]], device=device)
        mask_1T = torch.ones_like(ids_1T)
        prompt_1T = mask_1T.clone()
        prompt_1T[:, len(prompt) :] = 0
        batch = Batch({"input_ids": ids_1T, "attention_mask": mask_1T}, prompt_1T, (prompt.last_turn,))
        return TargetPass(batch, (torch.tensor(label, device=device),), len(label))

    def collate(self, rows: Sequence[TargetPass]) -> TargetPass:
        """The last tokens of all prompts stand in one column; positions are counted from each row's first token."""
        prompts = [int(row.batch.mask_BT.sum()) for row in rows if row.batch.mask_BT is not None]
        padded = self._pad_passes(rows, [max(prompts) - tokens for tokens in prompts])
        if len(rows) > 1 and self._accepts_argument("position_ids"):
            positions_BT = (padded.batch.kwargs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
            padded.batch.kwargs["position_ids"] = positions_BT
        return padded

    def join_suffixes(self, parts: Sequence[TargetPass]) -> TargetPass | None:
        """Keys and values before the last prompt tokens are padded on the left, what follows on the right."""
        if not all(part.past_key_values for part in parts):
            return None
        masks = [part.batch.mask_BT for part in parts if part.batch.mask_BT is not None]
        before = [part.past_key_values[0][0].shape[-2] for part in parts]
        seen_BT = [part.batch.kwargs["attention_mask"] for part in parts]
        earlier_BT = pad_and_concat(
            [mask_BT[:, :tokens] for mask_BT, tokens in zip(seen_BT, before, strict=True)], 1, pad_left=True
        )
        later_BT = pad_and_concat([mask_BT[:, tokens:] for mask_BT, tokens in zip(seen_BT, before, strict=True)], 1)
        mask_BT = torch.cat([earlier_BT, later_BT], dim=1)
        ids = [part.batch.kwargs["input_ids"] for part in parts]
        kwargs = {
            "input_ids": pad_and_concat(ids, 1, pad_value=int(self.tokenizer.pad_token_id)),
            "attention_mask": mask_BT,
        }
        if self._accepts_argument("position_ids"):
            kwargs["position_ids"] = (mask_BT.cumsum(dim=1) - 1).clamp(min=0)[:, earlier_BT.shape[1] :]
        earlier = tuple(
            (
                pad_and_concat([keys for keys, _ in block], 2, pad_left=True),
                pad_and_concat([values for _, values in block], 2, pad_left=True),
            )
            for block in zip(*(part.past_key_values for part in parts), strict=True)
        )
        labels = tuple(label_L for part in parts for label_L in part.labels)
        return TargetPass(
            Batch(kwargs, pad_and_concat(masks, 1)), labels, max(part.target_columns for part in parts), earlier
        )

    def logits(self, target_pass: TargetPass) -> list[Tensor]:
        """Only the labels' positions go through the head, where the model allows it."""
        return self._run_with_cache(
            target_pass, _make_cache(target_pass.past_key_values) if target_pass.past_key_values else None
        )

    def logits_and_suffix(self, target_pass: TargetPass, replace: ReplacedTokens) -> tuple[list[Tensor], TargetPass]:
        """A value at the last prompt token changes nothing before it, so keys and values there are kept."""
        kwargs, mask_BT = target_pass.batch.kwargs, target_pass.batch.mask_BT
        assert mask_BT is not None
        before = int(last_token_positions(mask_BT)[0])
        if replace != "last" or before == 0 or not self._accepts_argument("past_key_values"):
            return self.logits(target_pass), target_pass
        cache = DynamicCache(config=self.model.config)
        logits = self._run_with_cache(target_pass, cache)
        # A block that keeps no more than a window, or a state in place of keys, or nothing, cannot be cut.
        tokens = kwargs["input_ids"].shape[1]
        if any(type(layer) is not DynamicLayer or layer.get_seq_length() != tokens for layer in cache.layers):
            return logits, target_pass
        earlier = tuple((keys[..., :before, :], values[..., :before, :]) for keys, values, _ in cache)
        # The mask goes on to tell of the positions before as well.
        later: dict[str, Any] = {name: kwargs[name][:, before:] for name in POSITIONAL_INPUTS if name in kwargs}
        batch = Batch({**kwargs, **later}, mask_BT[:, before:])
        return logits, replace_in(target_pass, batch=batch, past_key_values=earlier)

    def _run_with_cache(self, target_pass: TargetPass, cache: DynamicCache | None) -> list[Tensor]:
        extra = {"logits_to_keep": target_pass.target_columns} if self._accepts_argument("logits_to_keep") else {}
        kept = {} if cache is None else {"past_key_values": cache}
        found = self.model(**target_pass.batch.kwargs, **extra, **kept, use_cache=cache is not None)
        return _label_logits(found.logits, target_pass)

    def _target_ids(self, inputs: Inputs, target: str) -> list[int]:
        """A target is a word of its own: a space stands before it unless the prompt ends with white space.

        None stands before an answer in a chat whose template ends in a control token, either.
        """
        if is_chat(inputs):
            try:
                joined = self._chat_template.ends_at_word_boundary(inputs)
            except ChatError as error:
                raise InputError(str(error)) from error
        else:
            joined = isinstance(inputs, str) and inputs[-1:].isspace()
        return super()._target_ids(inputs, target if joined else f" {target}")

    def _num_leading_tokens(self, batch: Batch) -> int:
        prompt: Tensor = batch.kwargs["input_ids"]
        return prompt.shape[1]

    def _accepts_argument(self, name: str) -> bool:
        return name in inspect.signature(self.model.forward).parameters


class Seq2SeqGeneration(Generation):
    """An encoder-decoder."""

    def forward_prompt(self, batch: Batch) -> None:
        """Encoder, and the first token of the decoder."""
        start_B1 = torch.tensor(
            [self._decoder_start_ids[:1]] * len(batch.kwargs["input_ids"]), device=self.model.device
        )
        self.model(**batch.kwargs, decoder_input_ids=start_B1, use_cache=False)

    def make_target_pass(self, inputs: Inputs, label: Label) -> TargetPass:
        """The decoder sees the label shifted right by the tokens that it starts with."""
        batch = self.batch([self.tokenize(inputs)])
        decoder_1T = torch.tensor([[*self._decoder_start_ids, *label[:-1]]], device=self.model.device)
        kwargs = {**batch.kwargs, "decoder_input_ids": decoder_1T}
        labels = (torch.tensor(label, device=self.model.device),)
        return TargetPass(Batch(kwargs, batch.mask_BT), labels, len(label))

    def logits(self, target_pass: TargetPass) -> list[Tensor]:
        """The decoder's last positions are the label's."""
        kwargs = dict(target_pass.batch.kwargs)
        if (encoded_BTX := kwargs.pop(ENCODER_OUTPUT, None)) is not None:
            kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded_BTX)
        return _label_logits(self.model(**kwargs, use_cache=False).logits, target_pass)

    def logits_and_suffix(self, target_pass: TargetPass, replace: ReplacedTokens) -> tuple[list[Tensor], TargetPass]:
        """A value in the decoder changes nothing in the encoder, whose output is kept."""
        if not self._is_decoder_layer:
            return super().logits_and_suffix(target_pass, replace)
        kwargs = dict(target_pass.batch.kwargs)
        found = self.model.get_encoder()(kwargs.pop("input_ids"), attention_mask=kwargs["attention_mask"])
        kwargs[ENCODER_OUTPUT] = found.last_hidden_state
        left = replace_in(target_pass, batch=Batch(kwargs, target_pass.batch.mask_BT))
        return self.logits(left), left

    @property
    def _decoder_start_ids(self) -> list[int]:
        """What the decoder starts with: its start token, and the one that is forced on it after that, if any."""
        forced = self._config.forced_bos_token_id
        return [self._config.decoder_start_token_id, *([] if forced is None else [forced])]

    def _num_leading_tokens(self, batch: Batch) -> int:
        del batch
        return len(self._decoder_start_ids)


def _make_cache(past_key_values: Sequence[tuple[Tensor, Tensor]]) -> DynamicCache:
    """A cache that begins with these keys and values, by block.

    `DynamicCache` would copy each; most belong to blocks that do not run again, and the others copy them as they add.
    """
    cache = DynamicCache()
    for keys, values in past_key_values:
        layer = DynamicLayer()
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _label_logits(logits_BTC: Tensor, target_pass: TargetPass) -> list[Tensor]:
    """The logits of each row's label: all labels begin in one column."""
    first = logits_BTC.shape[1] - target_pass.target_columns
    return [
        row_TC[first : first + len(label_L)].float()
        for row_TC, label_L in zip(logits_BTC, target_pass.labels, strict=True)
    ]
