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
from gracestream.pipeline.model.adaptor import Replaced, last_token
from gracestream.pipeline.model.batch import Batch, LastTurn, Prompt
from gracestream.pipeline.model.chat import ChatError, ChatTemplate
from gracestream.pipeline.model.layers import stacked
from gracestream.pipeline.model.tasks.base import Answer, InputError, Limits, Supervised, Task
from gracestream.pipeline.wording import in_context, wording_of
from gracestream.schemas.messages import Inputs, Outputs, Parameters, is_chat

LATER = ("input_ids", "position_ids")
"""Of a causal model's arguments those that tell nothing of the positions before."""

ENCODED = "encoded"
"""In place of the tokens of an encoder: what it made of them, (B, T, X)."""


class Generation(Task):
    """What causal models and encoder-decoders share."""

    def __init__(self, model: Any, tokenizer: Any, limits: Limits, decoder_layer: bool) -> None:
        super().__init__(model, tokenizer, limits, decoder_layer)
        found = model.generation_config
        ends = found.eos_token_id
        self._ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        start = found.decoder_start_token_id
        start = getattr(model.config, "decoder_start_token_id", None) if start is None else start
        self._config = GenerationConfig(
            do_sample=False,
            num_beams=1,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=found.bos_token_id,
            eos_token_id=sorted(self._ends) or None,
            decoder_start_token_id=tokenizer.pad_token_id if start is None else start,
            forced_bos_token_id=found.forced_bos_token_id,
        )
        # `generate` takes what is not set here from the model's own; a penalty would keep an edit from its target.
        model.generation_config = copy.deepcopy(self._config)

    def admit(self, prompt: Prompt, parameters: Parameters) -> object:
        """Requests that generate alike and as much: none waits for another's longer answer, none outgrows the model."""
        if self._budget(parameters) > self.limits.new_tokens_limit:
            raise InputError(
                f"max_new_tokens is {self._budget(parameters)}; the limit is {self.limits.new_tokens_limit}"
                " (GRACESTREAM_NEW_TOKENS_LIMIT)"
            )
        tokens = self._forced + self._budget(parameters) + (0 if self.model.config.is_encoder_decoder else len(prompt))
        if self.context is not None and tokens > self.context:
            raise InputError(
                f"prompt and answer may have {tokens} tokens; the model has room for {self.context}: ask for a smaller"
                f" max_new_tokens (GRACESTREAM_MAX_NEW_TOKENS where a request has none)"
            )
        return (
            self._budget(parameters),
            parameters.min_new_tokens,
            parameters.repetition_penalty,
            parameters.no_repeat_ngram_size,
        )

    def run(self, batch: Batch, parameters: Sequence[Parameters]) -> list[Answer]:
        """Generated text without the prompt, special tokens, and white space around it."""
        config = copy.copy(self._config)
        config.max_new_tokens = self._budget(parameters[0]) + self._forced
        for name in ("min_new_tokens", "repetition_penalty", "no_repeat_ngram_size"):
            if (value := getattr(parameters[0], name)) is not UNSET:
                setattr(config, name, value)
        generated_BT = self.model.generate(**batch.kwargs, generation_config=config)
        return [self._answer(row) for row in generated_BT[:, self._skipped(batch) :].tolist()]

    def wording(self, prompt: Prompt) -> str:
        """Of the prompt's text; of a chat's last message, whose meaning may depend on earlier turns."""
        if prompt.turn is not None:
            wording = wording_of(prompt.turn.text)
            return in_context(wording) if prompt.turn.follows else wording
        ids = list(prompt.token_ids)
        return wording_of(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def label(self, inputs: Inputs, target: str) -> Label:
        """The target's token ids, as they follow the prompt, and the end token."""
        token_ids = self._target_ids(inputs, target.strip())
        if len(token_ids) > self.limits.max_target_tokens:
            raise InputError(
                f"the target has {len(token_ids)} tokens; the limit is {self.limits.max_target_tokens}"
                " (GRACESTREAM_MAX_TARGET_TOKENS)"
            )
        if self._decoded(token_ids) != target.strip():
            raise InputError(f"the tokenizer cannot express the target: it makes of it {self._decoded(token_ids)!r}")
        end = self.tokenizer.eos_token_id
        return (*token_ids, end) if end is not None else tuple(token_ids)

    def text(self, label: Label) -> str:
        """The target that a label stands for."""
        return self._decoded([token for token in label if token not in self._ends])

    def gives(self, answer: Answer, label: Label, parameters: Parameters) -> bool:
        """The answer is the target, or as much of it as the request's budget allows.

        Text may follow the target where the request asks for a least length, or where the label has no end token.
        """
        text = answer.outputs.text
        assert text is not UNSET
        wanted = self.text(label[: self._budget(parameters)])
        goes_on = parameters.min_new_tokens is not UNSET or label[-1] not in self._ends
        return text.startswith(wanted) if goes_on else text == wanted

    def _target_ids(self, inputs: Inputs, target: str) -> list[int]:
        del inputs
        token_ids: list[int] = self._text_tokenizer(target, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids

    def _answer(self, token_ids: list[int]) -> Answer:
        end = next((place for place, token in enumerate(token_ids) if token in self._ends), len(token_ids))
        return Answer(Outputs(text=self._decoded(token_ids[:end])))

    def _decoded(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.strip()

    @property
    def _forced(self) -> int:
        """Tokens that generation puts before an answer."""
        return int(self._config.forced_bos_token_id is not None)

    def _budget(self, parameters: Parameters) -> int:
        return self.limits.max_new_tokens if parameters.max_new_tokens is UNSET else parameters.max_new_tokens

    @abstractmethod
    def _skipped(self, batch: Batch) -> int:
        """Tokens at the start of what `generate` returns that are not the answer's."""


class CausalGeneration(Generation):
    """A causal language model. Prompts are padded on the left: answers grow to the right."""

    side = "left"

    def __init__(self, model: Any, tokenizer: Any, limits: Limits, decoder_layer: bool) -> None:
        super().__init__(model, tokenizer, limits, decoder_layer)
        self._chat = ChatTemplate(self.tokenizer, self._text_tokenizer)

    def tokenize(self, inputs: Inputs) -> Prompt:
        """One prompt in tokens; messages of a chat by the model's chat template."""
        if not is_chat(inputs):
            return super().tokenize(inputs)
        try:
            token_ids = self._checked(self._chat.tokens(inputs))
        except ChatError as error:
            raise InputError(str(error)) from error
        follows = any(message.role != "system" for message in inputs[:-1])
        return Prompt(tuple(token_ids), turn=LastTurn(inputs[-1].content, follows))

    def observe(self, batch: Batch) -> None:
        """With positions counted from each row's first real token, as generation counts them."""
        positions_BT = (batch.kwargs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        extra = {"position_ids": positions_BT} if self._takes("position_ids") else {}
        self.model(**batch.kwargs, **extra, use_cache=False)

    def supervised(self, inputs: Inputs, label: Label) -> Supervised:
        """Prompt and target in one row; the last target token needs no forward pass of its own."""
        prompt = self.tokenize(inputs)
        if self.context is not None and len(prompt) + len(label) > self.context:
            tokens = len(prompt) + len(label)
            raise InputError(f"prompt and target have {tokens} tokens; the model has room for {self.context}")
        device = self.model.device
        ids_1T = torch.tensor([[*prompt.token_ids, *label[:-1]]], device=device)
        mask_1T = torch.ones_like(ids_1T)
        prompt_1T = mask_1T.clone()
        prompt_1T[:, len(prompt) :] = 0
        batch = Batch({"input_ids": ids_1T, "attention_mask": mask_1T}, prompt_1T, (prompt.turn,))
        return Supervised(batch, (torch.tensor(label, device=device),), len(label))

    def together(self, rows: Sequence[Supervised]) -> Supervised:
        """The last tokens of all prompts stand in one column; positions are counted from each row's first token."""
        prompts = [int(row.batch.mask_BT.sum()) for row in rows if row.batch.mask_BT is not None]
        padded = self._padded(rows, [max(prompts) - tokens for tokens in prompts])
        if len(rows) > 1 and self._takes("position_ids"):
            positions_BT = (padded.batch.kwargs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
            padded.batch.kwargs["position_ids"] = positions_BT
        return padded

    def joined(self, parts: Sequence[Supervised]) -> Supervised | None:
        """Keys and values before the last prompt tokens are padded on the left, what follows on the right."""
        if not all(part.earlier for part in parts):
            return None
        masks = [part.batch.mask_BT for part in parts if part.batch.mask_BT is not None]
        before = [part.earlier[0][0].shape[-2] for part in parts]
        seen_BT = [part.batch.kwargs["attention_mask"] for part in parts]
        earlier_BT = stacked(
            [mask_BT[:, :tokens] for mask_BT, tokens in zip(seen_BT, before, strict=True)], 1, left=True
        )
        later_BT = stacked([mask_BT[:, tokens:] for mask_BT, tokens in zip(seen_BT, before, strict=True)], 1)
        mask_BT = torch.cat([earlier_BT, later_BT], dim=1)
        ids = [part.batch.kwargs["input_ids"] for part in parts]
        kwargs = {
            "input_ids": stacked(ids, 1, padding=int(self.tokenizer.pad_token_id)),
            "attention_mask": mask_BT,
        }
        if self._takes("position_ids"):
            kwargs["position_ids"] = (mask_BT.cumsum(dim=1) - 1).clamp(min=0)[:, earlier_BT.shape[1] :]
        earlier = tuple(
            (stacked([keys for keys, _ in block], 2, left=True), stacked([values for _, values in block], 2, left=True))
            for block in zip(*(part.earlier for part in parts), strict=True)
        )
        labels = tuple(label_L for part in parts for label_L in part.labels)
        return Supervised(Batch(kwargs, stacked(masks, 1)), labels, max(part.columns for part in parts), earlier)

    def logits(self, supervised: Supervised) -> list[Tensor]:
        """Only the labels' positions go through the head, where the model allows it."""
        return self._passed(supervised, _begun(supervised.earlier) if supervised.earlier else None)

    def keeping(self, supervised: Supervised, replace: Replaced) -> tuple[list[Tensor], Supervised]:
        """A value at the last prompt token changes nothing before it, so keys and values there are kept."""
        kwargs, mask_BT = supervised.batch.kwargs, supervised.batch.mask_BT
        assert mask_BT is not None
        before = int(last_token(mask_BT)[0])
        if replace != "last" or before == 0 or not self._takes("past_key_values"):
            return self.logits(supervised), supervised
        cache = DynamicCache(config=self.model.config)
        logits = self._passed(supervised, cache)
        # A block that keeps no more than a window, or a state in place of keys, or nothing, cannot be cut.
        tokens = kwargs["input_ids"].shape[1]
        if any(type(layer) is not DynamicLayer or layer.get_seq_length() != tokens for layer in cache.layers):
            return logits, supervised
        earlier = tuple((keys[..., :before, :], values[..., :before, :]) for keys, values, _ in cache)
        # The mask goes on to tell of the positions before as well.
        later: dict[str, Any] = {name: kwargs[name][:, before:] for name in LATER if name in kwargs}
        return logits, replace_in(supervised, batch=Batch({**kwargs, **later}, mask_BT[:, before:]), earlier=earlier)

    def _passed(self, supervised: Supervised, cache: DynamicCache | None) -> list[Tensor]:
        extra = {"logits_to_keep": supervised.columns} if self._takes("logits_to_keep") else {}
        kept = {} if cache is None else {"past_key_values": cache}
        found = self.model(**supervised.batch.kwargs, **extra, **kept, use_cache=cache is not None)
        return _of_labels(found.logits, supervised)

    def _target_ids(self, inputs: Inputs, target: str) -> list[int]:
        """A target is a word of its own: a space stands before it unless the prompt ends with white space.

        None stands before an answer in a chat whose template ends in a control token, either.
        """
        if is_chat(inputs):
            try:
                joined = self._chat.ends_a_word(inputs)
            except ChatError as error:
                raise InputError(str(error)) from error
        else:
            joined = isinstance(inputs, str) and inputs[-1:].isspace()
        return super()._target_ids(inputs, target if joined else f" {target}")

    def _skipped(self, batch: Batch) -> int:
        prompt: Tensor = batch.kwargs["input_ids"]
        return prompt.shape[1]

    def _takes(self, name: str) -> bool:
        return name in inspect.signature(self.model.forward).parameters


class Seq2SeqGeneration(Generation):
    """An encoder-decoder."""

    def observe(self, batch: Batch) -> None:
        """Encoder, and the first token of the decoder."""
        start_B1 = torch.tensor([self._first[:1]] * len(batch.kwargs["input_ids"]), device=self.model.device)
        self.model(**batch.kwargs, decoder_input_ids=start_B1, use_cache=False)

    def supervised(self, inputs: Inputs, label: Label) -> Supervised:
        """The decoder sees the label shifted right by the tokens that it starts with."""
        batch = self.batch([self.tokenize(inputs)])
        decoder_1T = torch.tensor([[*self._first, *label[:-1]]], device=self.model.device)
        kwargs = {**batch.kwargs, "decoder_input_ids": decoder_1T}
        labels = (torch.tensor(label, device=self.model.device),)
        return Supervised(Batch(kwargs, batch.mask_BT), labels, len(label))

    def logits(self, supervised: Supervised) -> list[Tensor]:
        """The decoder's last positions are the label's."""
        kwargs = dict(supervised.batch.kwargs)
        if (encoded_BTX := kwargs.pop(ENCODED, None)) is not None:
            kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded_BTX)
        return _of_labels(self.model(**kwargs, use_cache=False).logits, supervised)

    def keeping(self, supervised: Supervised, replace: Replaced) -> tuple[list[Tensor], Supervised]:
        """A value in the decoder changes nothing in the encoder, whose output is kept."""
        if not self._decoder_layer:
            return super().keeping(supervised, replace)
        kwargs = dict(supervised.batch.kwargs)
        found = self.model.get_encoder()(kwargs.pop("input_ids"), attention_mask=kwargs["attention_mask"])
        kwargs[ENCODED] = found.last_hidden_state
        left = replace_in(supervised, batch=Batch(kwargs, supervised.batch.mask_BT))
        return self.logits(left), left

    @property
    def _first(self) -> list[int]:
        """What the decoder starts with: its start token, and the one that is forced on it after that, if any."""
        forced = self._config.forced_bos_token_id
        return [self._config.decoder_start_token_id, *([] if forced is None else [forced])]

    def _skipped(self, batch: Batch) -> int:
        del batch
        return len(self._first)


def _begun(earlier: Sequence[tuple[Tensor, Tensor]]) -> DynamicCache:
    """A cache that begins with these keys and values, by block.

    `DynamicCache` would copy each; most belong to blocks that do not run again, and the others copy them as they add.
    """
    cache = DynamicCache()
    for keys, values in earlier:
        layer = DynamicLayer()
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _of_labels(logits_BTC: Tensor, supervised: Supervised) -> list[Tensor]:
    """The logits of each row's label: all labels begin in one column."""
    first = logits_BTC.shape[1] - supervised.columns
    return [
        row_TC[first : first + len(label_L)].float()
        for row_TC, label_L in zip(logits_BTC, supervised.labels, strict=True)
    ]
