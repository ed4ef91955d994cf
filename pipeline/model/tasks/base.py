"""The three kinds of model: a sequence classifier, an encoder-decoder, a causal language model.

A task knows how inputs become tokens, how the model answers, what a target is as a label (token ids with the end token,
or a class index), and which forward pass tells whether the model gives that label. It never sees the codebook.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_in
from typing import Any, Self

import torch
from torch import Tensor

from gracestream.pipeline.codebook import Label, WordingGetter
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model.adaptor import QueryToken, ReplacedTokens
from gracestream.pipeline.model.batch import Batch, Prompt
from gracestream.pipeline.model.control_tokens import text_tokenizer
from gracestream.schemas.messages import Inputs, Outputs, Parameters, is_chat


class InputError(UserError):
    """Inputs, parameters or a target that this model cannot take; the text says why."""


TOKEN_TYPE_IDS = "token_type_ids"
"""The argument of models that tell the texts of a pair apart."""


@dataclass(frozen=True, slots=True)
class TargetPass:
    """Inputs with their labels, for one forward pass whose last logits should choose the labels.

    Attributes:
        batch: What goes through the model; each of its arguments is a tensor whose first dimension is that of the rows.
        labels: Of each row token ids, or a class index, (L).
        target_columns: At the end of a row's pass, for its label; as many as the longest label of all rows took.
        past_key_values: Of a causal model, the keys and values of each block at positions before the batch's first.
    """

    batch: Batch
    labels: tuple[Tensor, ...]
    target_columns: int
    past_key_values: tuple[tuple[Tensor, Tensor], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Of a row: each argument of the model is (B, T, ...)."""
        return int(next(iter(self.batch.kwargs.values())).shape[1])

    def select_rows(self, indices: Sequence[int]) -> Self:
        """Some of the rows."""
        rows = list(indices)
        kwargs = {name: argument[rows] for name, argument in self.batch.kwargs.items()}
        mask_BT = None if self.batch.mask_BT is None else self.batch.mask_BT[rows]
        earlier = tuple((keys[rows], values[rows]) for keys, values in self.past_key_values)
        return replace_in(
            self, batch=Batch(kwargs, mask_BT), labels=tuple(self.labels[row] for row in rows), past_key_values=earlier
        )


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """One row's answer."""

    outputs: Outputs
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens a prompt or a target may have, how many are generated where a request does not say, and at most."""

    max_input_tokens: int = 512
    max_target_tokens: int = 64
    max_new_tokens: int = 64
    new_tokens_limit: int = 512


class ModelTask(ABC):
    """What all kinds share: tokenising one text at a time with a clear error, and padding a batch."""

    query: QueryToken = "last"
    replace: ReplacedTokens = "last"
    padding_side = "right"

    def __init__(self, model: Any, tokenizer: Any, limits: Limits, is_decoder_layer: bool) -> None:
        self.model, self.tokenizer, self.limits = model, tokenizer, limits
        self._is_decoder_layer = is_decoder_layer
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        self._text_tokenizer = text_tokenizer(tokenizer)
        self.vocabulary_size: int = model.get_input_embeddings().num_embeddings
        self.context_length: int | None = getattr(model.config, "max_position_embeddings", None)
        self.max_prompt_tokens = min(limits.max_input_tokens, self.context_length or limits.max_input_tokens)

    def tokenize(self, inputs: Inputs) -> Prompt:
        """One prompt in tokens.

        Raises:
            InputError: a pair or a chat for a model that takes none, too long, or nothing left.
        """
        if is_chat(inputs):
            raise InputError("this model takes no messages of a chat; send `inputs` as one text")
        if not isinstance(inputs, str):
            raise InputError("this model takes one text, not a pair")
        return self._tokenize_texts(inputs)

    def _tokenize_texts(self, *texts: str) -> Prompt:
        found = self._text_tokenizer(*texts, add_special_tokens=True, verbose=False)
        return Prompt(tuple(self._check_token_ids(found["input_ids"])), tuple(found.get(TOKEN_TYPE_IDS, ())))

    def _check_token_ids(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise InputError("the prompt has no tokens")
        if len(token_ids) > self.max_prompt_tokens:
            ours = self.max_prompt_tokens == self.limits.max_input_tokens
            whose = "GRACESTREAM_MAX_INPUT_TOKENS" if ours else "the model's own"
            raise InputError(f"the prompt has {len(token_ids)} tokens; the limit is {self.max_prompt_tokens} ({whose})")
        if max(token_ids) >= self.vocabulary_size:
            raise InputError(f"token {max(token_ids)} is unknown to the model, which knows {self.vocabulary_size}")
        return token_ids

    def wording(self, prompt: Prompt) -> str:
        """What a prompt asks for (`pipeline.wording`); empty for models whose prompts are not compared by words."""
        del prompt
        return ""

    def wording_getter(self, batch: Batch) -> WordingGetter:
        """The wording of each row, taken from its tokens when it is asked for."""
        prompts: list[list[int]] = []

        def wording(row: int) -> str:
            if not prompts:
                prompts.extend(batch.prompt_token_ids())
            return self.wording(
                Prompt(tuple(prompts[row]), last_turn=batch.last_turns[row] if batch.last_turns else None)
            )

        return wording

    def batch(self, prompts: Sequence[Prompt]) -> Batch:
        """Pad tokenised prompts (`tokenize`) into one batch."""
        ids_BT = self._pad_rows([prompt.token_ids for prompt in prompts], int(self.tokenizer.pad_token_id))
        mask_BT = self._pad_rows([[1] * len(prompt) for prompt in prompts], 0)
        kwargs = {"input_ids": ids_BT, "attention_mask": mask_BT}
        return Batch(kwargs, None if self._is_decoder_layer else mask_BT, tuple(prompt.last_turn for prompt in prompts))

    def _pad_rows(self, rows: Sequence[Sequence[int]], pad_value: int) -> Tensor:
        """Numbers for each token of each prompt, padded on this task's side."""
        width = max(map(len, rows))
        rows_BT = torch.full((len(rows), width), pad_value)
        for place, row in enumerate(rows):
            rows_BT[place, slice(0, len(row)) if self.padding_side == "right" else slice(width - len(row), width)] = (
                torch.tensor(row)
            )
        return rows_BT.to(self.model.device)

    @abstractmethod
    def forward_prompt(self, batch: Batch) -> None:
        """One forward pass over the prompts, for what the wrapped module sees."""

    @abstractmethod
    def run(self, batch: Batch, parameters: Sequence[Parameters]) -> list[ModelAnswer]:
        """Answer a batch; its requests are of one group (`batch_key`)."""

    @abstractmethod
    def batch_key(self, prompt: Prompt, parameters: Parameters) -> object:
        """Requests for which this returns equal groups can share a batch.

        Raises:
            InputError: the model cannot answer this prompt with these parameters.
        """

    @abstractmethod
    def encode_target(self, inputs: Inputs, target: str) -> Label:
        """What a target is to this model.

        Raises:
            InputError: no such class, too long, or not expressible in the tokenizer's vocabulary.
        """

    @abstractmethod
    def decode_label(self, label: Label) -> str:
        """A label in words."""

    @abstractmethod
    def matches_target(self, answer: ModelAnswer, label: Label, parameters: Parameters) -> bool:
        """Whether an answer to a request with these parameters is the target that `encode_target` stands for."""

    @abstractmethod
    def make_target_pass(self, inputs: Inputs, label: Label) -> TargetPass:
        """The forward pass that tells whether the model gives `encode_target`; one row."""

    def collate(self, rows: Sequence[TargetPass]) -> TargetPass:
        """Several passes of one row each as one, padded on the right."""
        return self._pad_passes(rows, [0] * len(rows))

    def join_suffixes(self, parts: Sequence[TargetPass]) -> TargetPass | None:
        """What is left of several passes (`logits_and_suffix`) as one; None where the task cannot join them."""
        del self, parts
        return None

    def _pad_passes(self, rows: Sequence[TargetPass], offsets: Sequence[int]) -> TargetPass:
        """One pass over the rows, each after so many columns of padding."""
        names = rows[0].batch.kwargs
        kwargs = {
            name: _stack_with_offsets([row.batch.kwargs[name] for row in rows], offsets, self._pad_value(name))
            for name in names
        }
        masks = [row.batch.mask_BT for row in rows if row.batch.mask_BT is not None]
        mask_BT = _stack_with_offsets(masks, offsets, 0) if masks else None
        labels = tuple(label_L for row in rows for label_L in row.labels)
        return TargetPass(Batch(kwargs, mask_BT), labels, max(row.target_columns for row in rows))

    def _pad_value(self, name: str) -> int:
        if name.endswith("input_ids"):
            return int(self.tokenizer.pad_token_id)
        return int(self.tokenizer.pad_token_type_id) if name == TOKEN_TYPE_IDS else 0

    @abstractmethod
    def logits(self, target_pass: TargetPass) -> list[Tensor]:
        """Run it: of each row the float32 logits (L, C) at its label's positions."""

    def logits_and_suffix(self, target_pass: TargetPass, replace: ReplacedTokens) -> tuple[list[Tensor], TargetPass]:
        """Its logits, and the pass that is left of it for other values: what no value can change is kept."""
        del replace
        return self.logits(target_pass), target_pass


def _stack_with_offsets(rows: Sequence[Tensor], offsets: Sequence[int], pad_value: int) -> Tensor:
    """Tensors (1, T, ...) of several widths as one (B, T, ...), each after so many columns of padding."""
    width = max(lead + row.shape[1] for row, lead in zip(rows, offsets, strict=True))
    stacked = rows[0].new_full((len(rows), width, *rows[0].shape[2:]), pad_value)
    for place, (row, lead) in enumerate(zip(rows, offsets, strict=True)):
        stacked[place, lead : lead + row.shape[1]] = row[0]
    return stacked
