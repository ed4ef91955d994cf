"""Generation by causal language models: decoder-only, with prompt and answer in one sequence.

Shapes: B rows, T tokens, L length of a label.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace as replace_in
from typing import Any

import torch
from msgspec import UNSET
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList
from transformers.cache_utils import DynamicLayer
from transformers.generation import (
    ForcedBOSTokenLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from gracestream.pipeline.codebook import Label
from gracestream.pipeline.model.activation_cache import pad_and_concat
from gracestream.pipeline.model.adaptor import ReplacedTokens, last_token_positions
from gracestream.pipeline.model.batch import Batch, LastTurn, Prompt
from gracestream.pipeline.model.chat import ChatError, ChatTemplate
from gracestream.pipeline.model.tasks.base import InputError, Limits, TargetPass
from gracestream.pipeline.model.tasks.generation import Generation, label_logits
from gracestream.schemas.messages import Inputs, Parameters, is_chat

POSITIONAL_INPUTS = ("input_ids", "position_ids")
"""The arguments that describe only their own positions; the attention mask also covers cached positions."""


class CausalGeneration(Generation):
    """A causal language model. Prompts are padded on the left, because answers grow on the right."""

    padding_side = "left"

    def __init__(self, model: Any, tokenizer: Any, limits: Limits, is_decoder_layer: bool) -> None:
        super().__init__(model, tokenizer, limits, is_decoder_layer)
        self._chat_template = ChatTemplate(self.tokenizer, self._text_tokenizer)

    def tokenize(self, inputs: Inputs) -> Prompt:
        """One tokenised prompt; a chat is rendered by the model's chat template.

        Raises:
            InputError: the inputs are a pair, have too many tokens or none, or are a chat that the template rejects.
        """
        if not is_chat(inputs):
            return super().tokenize(inputs)
        try:
            token_ids = self._check_token_ids(self._chat_template.token_ids(inputs))
        except ChatError as error:
            raise InputError(str(error)) from error
        has_earlier_turns = any(message.role != "system" for message in inputs[:-1])
        return Prompt(tuple(token_ids), last_turn=LastTurn(inputs[-1].content, has_earlier_turns))

    def forward_prompt(self, batch: Batch) -> None:
        """Run one pass with positions counted from each row's first unpadded token, as in generation."""
        positions_BT = _positions(batch.kwargs["attention_mask"])
        position_kwargs = {"position_ids": positions_BT} if self._accepts_argument("position_ids") else {}
        self.model(**batch.kwargs, **position_kwargs, use_cache=False)

    def prefill(self, batch: Batch) -> tuple[Tensor, DynamicCache]:
        """Run one pass over prompts: float32 logits (B, C) of the next tokens, and all keys and values."""
        cache = DynamicCache()
        logits_BC = self._next_logits(
            input_ids=batch.kwargs["input_ids"],
            attention_mask=batch.kwargs["attention_mask"],
            position_ids=_positions(batch.kwargs["attention_mask"]),
            past_key_values=cache,
        )
        return logits_BC, cache

    def decode(self, tokens_B: Sequence[int], mask_BT: Tensor, positions_B1: Tensor, cache: DynamicCache) -> Tensor:
        """Run one pass over one token of each row after cached ones: float32 logits (B, C) of the next tokens.

        Args:
            tokens_B: Token ids.
            mask_BT: The cached tokens and the new one.
            positions_B1: Position of each new token.
            cache: Keys and values of the cached tokens. The pass adds those of the new ones.
        """
        device = self.model.device
        return self._next_logits(
            input_ids=torch.tensor(tokens_B, device=device)[:, None],
            attention_mask=mask_BT.to(device),
            position_ids=positions_B1.to(device),
            past_key_values=cache,
        )

    def logits_processors(self, parameters: Parameters, num_prompt_tokens: int) -> LogitsProcessorList:
        """What `generate` does to the logits of a request with these parameters, in the same order."""
        processors = LogitsProcessorList()
        if parameters.repetition_penalty not in (UNSET, 1.0):
            processors.append(RepetitionPenaltyLogitsProcessor(parameters.repetition_penalty))
        if parameters.no_repeat_ngram_size:
            processors.append(NoRepeatNGramLogitsProcessor(parameters.no_repeat_ngram_size))
        if parameters.min_new_tokens and self.eos_token_ids:
            processors.append(
                MinNewTokensLengthLogitsProcessor(
                    num_prompt_tokens, parameters.min_new_tokens, sorted(self.eos_token_ids), self.model.device
                )
            )
        if self._config.forced_bos_token_id is not None:
            processors.append(ForcedBOSTokenLogitsProcessor(self._config.forced_bos_token_id))
        return processors

    def _next_logits(self, position_ids: Tensor, **kwargs: Any) -> Tensor:
        """The logits of the last token of each row, in one pass with a cache."""
        if self._accepts_argument("position_ids"):
            kwargs["position_ids"] = position_ids
        if self._accepts_argument("logits_to_keep"):
            kwargs["logits_to_keep"] = 1
        logits_BTC: Tensor = self.model(**kwargs, use_cache=True).logits
        return logits_BTC[:, -1].float()

    def make_target_pass(self, inputs: Inputs, label: Label) -> TargetPass:
        """Prompt and target in one row. The last target token predicts nothing, so it is left out.

        Raises:
            InputError: prompt and target exceed the model's context.
        """
        prompt = self.tokenize(inputs)
        if self.context_length is not None and len(prompt) + len(label) > self.context_length:
            num_tokens = len(prompt) + len(label)
            raise InputError(
                f"prompt and target have {num_tokens} tokens; the model has room for {self.context_length}"
            )
        device = self.model.device
        ids_1T = torch.tensor([[*prompt.token_ids, *label[:-1]]], device=device)
        mask_1T = torch.ones_like(ids_1T)
        prompt_1T = mask_1T.clone()
        prompt_1T[:, len(prompt) :] = 0
        batch = Batch({"input_ids": ids_1T, "attention_mask": mask_1T}, prompt_1T, (prompt.last_turn,))
        return TargetPass(batch, (torch.tensor(label, device=device),), len(label))

    def collate(self, rows: Sequence[TargetPass]) -> TargetPass:
        """Several passes as one, with the last prompt tokens in one column.

        Positions count from each row's first token.
        """
        prompt_lengths = [int(row.batch.mask_BT.sum()) for row in rows if row.batch.mask_BT is not None]
        target_pass = self._pad_passes(rows, [max(prompt_lengths) - length for length in prompt_lengths])
        if len(rows) > 1 and self._accepts_argument("position_ids"):
            positions_BT = (target_pass.batch.kwargs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
            target_pass.batch.kwargs["position_ids"] = positions_BT
        return target_pass

    def join_suffixes(self, parts: Sequence[TargetPass]) -> TargetPass | None:
        """The suffix passes as one: cached keys and values are padded on the left, later tokens on the right.

        None if a part has no cached keys and values.
        """
        if not all(part.past_key_values for part in parts):
            return None
        masks = [part.batch.mask_BT for part in parts if part.batch.mask_BT is not None]
        cached_lengths = [part.past_key_values[0][0].shape[-2] for part in parts]
        attention_masks = [part.batch.kwargs["attention_mask"] for part in parts]
        # The attention mask of a suffix covers its cached positions first, then its own.
        cached_mask_BT = pad_and_concat(
            [mask_BT[:, :length] for mask_BT, length in zip(attention_masks, cached_lengths, strict=True)],
            1,
            pad_left=True,
        )
        suffix_mask_BT = pad_and_concat(
            [mask_BT[:, length:] for mask_BT, length in zip(attention_masks, cached_lengths, strict=True)], 1
        )
        mask_BT = torch.cat([cached_mask_BT, suffix_mask_BT], dim=1)
        ids = [part.batch.kwargs["input_ids"] for part in parts]
        kwargs = {
            "input_ids": pad_and_concat(ids, 1, pad_value=int(self.tokenizer.pad_token_id)),
            "attention_mask": mask_BT,
        }
        if self._accepts_argument("position_ids"):
            kwargs["position_ids"] = (mask_BT.cumsum(dim=1) - 1).clamp(min=0)[:, cached_mask_BT.shape[1] :]
        past_key_values = tuple(
            (
                pad_and_concat([keys for keys, _ in block], 2, pad_left=True),
                pad_and_concat([values for _, values in block], 2, pad_left=True),
            )
            for block in zip(*(part.past_key_values for part in parts), strict=True)
        )
        labels = tuple(label_L for part in parts for label_L in part.labels)
        return TargetPass(
            Batch(kwargs, pad_and_concat(masks, 1)), labels, max(part.target_columns for part in parts), past_key_values
        )

    def logits(self, target_pass: TargetPass) -> list[Tensor]:
        """The labels' logits. Only their columns go through the LM head if the model supports that."""
        return self._run_with_cache(
            target_pass, _make_cache(target_pass.past_key_values) if target_pass.past_key_values else None
        )

    def logits_and_suffix(self, target_pass: TargetPass, replace: ReplacedTokens) -> tuple[list[Tensor], TargetPass]:
        """The logits, and a suffix pass from the last prompt token on.

        A value at the last prompt token affects no earlier position, so keys and values of earlier positions are
        cached. The suffix pass is the whole pass if values replace all tokens, or if the model's cache cannot be
        sliced.
        """
        kwargs, mask_BT = target_pass.batch.kwargs, target_pass.batch.mask_BT
        assert mask_BT is not None
        num_cached = int(last_token_positions(mask_BT)[0])
        if replace != "last" or num_cached == 0 or not self._accepts_argument("past_key_values"):
            return self.logits(target_pass), target_pass
        cache = DynamicCache(config=self.model.config)
        logits = self._run_with_cache(target_pass, cache)
        # A block with a sliding window, a recurrent state or no cache has no keys of all positions to slice.
        num_tokens = kwargs["input_ids"].shape[1]
        if any(type(layer) is not DynamicLayer or layer.get_seq_length() != num_tokens for layer in cache.layers):
            return logits, target_pass
        past_key_values = tuple((keys[..., :num_cached, :], values[..., :num_cached, :]) for keys, values, _ in cache)
        # The attention mask still covers the cached positions.
        suffix_kwargs: dict[str, Any] = {
            name: kwargs[name][:, num_cached:] for name in POSITIONAL_INPUTS if name in kwargs
        }
        batch = Batch({**kwargs, **suffix_kwargs}, mask_BT[:, num_cached:])
        return logits, replace_in(target_pass, batch=batch, past_key_values=past_key_values)

    def _run_with_cache(self, target_pass: TargetPass, cache: DynamicCache | None) -> list[Tensor]:
        logits_kwargs = (
            {"logits_to_keep": target_pass.target_columns} if self._accepts_argument("logits_to_keep") else {}
        )
        cache_kwargs = {} if cache is None else {"past_key_values": cache}
        output = self.model(**target_pass.batch.kwargs, **logits_kwargs, **cache_kwargs, use_cache=cache is not None)
        return label_logits(output.logits, target_pass)

    def _target_ids(self, inputs: Inputs, target: str) -> list[int]:
        """The target's token ids, with a space before the target unless it starts at a word boundary.

        A word boundary is white space at the prompt's end, or a control token at the end of a chat template.

        Raises:
            InputError: the chat template rejects the messages.
        """
        if is_chat(inputs):
            try:
                at_word_boundary = self._chat_template.ends_at_word_boundary(inputs)
            except ChatError as error:
                raise InputError(str(error)) from error
        else:
            at_word_boundary = isinstance(inputs, str) and inputs[-1:].isspace()
        return super()._target_ids(inputs, target if at_word_boundary else f" {target}")

    def _num_leading_tokens(self, batch: Batch) -> int:
        prompt: Tensor = batch.kwargs["input_ids"]
        return prompt.shape[1]

    def _accepts_argument(self, name: str) -> bool:
        return name in inspect.signature(self.model.forward).parameters


def _positions(mask_BT: Tensor) -> Tensor:
    """The position of each token, counted from its row's first unpadded token."""
    return (mask_BT.cumsum(dim=1) - 1).clamp(min=0)


def _make_cache(past_key_values: Sequence[tuple[Tensor, Tensor]]) -> DynamicCache:
    """A cache with these keys and values per block.

    `DynamicCache` would copy them all. Most belong to blocks that do not run again, and a block that runs copies its
    own when it appends to them.
    """
    cache = DynamicCache()
    for keys, values in past_key_values:
        layer = DynamicLayer()
        # The state that `DynamicLayer` has after its first update.
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache
