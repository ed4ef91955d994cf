"""Causal language models."""

import inspect
from collections.abc import Sequence
from dataclasses import replace as replace_in
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from gracestream.pipeline.codebook import Label
from gracestream.pipeline.model.activation_cache import pad_and_concat
from gracestream.pipeline.model.adaptor import ReplacedTokens, last_token_positions
from gracestream.pipeline.model.batch import Batch, LastTurn, Prompt
from gracestream.pipeline.model.chat import ChatError, ChatTemplate
from gracestream.pipeline.model.tasks.base import InputError, Limits, TargetPass
from gracestream.pipeline.model.tasks.generation import Generation, label_logits
from gracestream.schemas.messages import Inputs, is_chat

POSITIONAL_INPUTS = ("input_ids", "position_ids")
"""Of a causal model's arguments those that tell nothing of the positions before."""


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
        return label_logits(found.logits, target_pass)

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
