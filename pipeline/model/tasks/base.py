"""The interface of model kinds: sequence classifiers, encoder-decoders and causal language models.

A task defines how inputs become tokens, how the model answers, and how a target becomes a label. A label is a tuple of
token ids with the end token, or one class index. The task also defines the forward pass that shows whether the model
predicts that label. It never accesses the codebook.

Shapes: B rows, T tokens, L length of a label, C classes or vocabulary, X any width.
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
    """Inputs, parameters or a target that this model cannot take. The message gives the reason."""


TOKEN_TYPE_IDS = "token_type_ids"
"""The argument of models that distinguish the two texts of a pair."""


@dataclass(frozen=True, slots=True)
class TargetPass:
    """Inputs with their labels, for one forward pass whose last logits predict the labels.

    Attributes:
        batch: Arguments of the model. Each is a tensor whose first dimension is B.
        labels: For each row token ids or a class index, (L).
        target_columns: Columns at the end of the pass for the labels: the length of the longest label.
        past_key_values: For a causal model, keys and values of each block at positions before the batch's first token.
    """

    batch: Batch
    labels: tuple[Tensor, ...]
    target_columns: int
    past_key_values: tuple[tuple[Tensor, Tensor], ...] = ()

    @property
    def num_tokens(self) -> int:
        """The number of tokens T of a row, from the first argument, (B, T, ...)."""
        return int(next(iter(self.batch.kwargs.values())).shape[1])

    def select_rows(self, indices: Sequence[int]) -> Self:
        """A pass over some of the rows."""
        rows = list(indices)
        kwargs = {name: argument[rows] for name, argument in self.batch.kwargs.items()}
        mask_BT = None if self.batch.mask_BT is None else self.batch.mask_BT[rows]
        past_key_values = tuple((keys[rows], values[rows]) for keys, values in self.past_key_values)
        return replace_in(
            self,
            batch=Batch(kwargs, mask_BT),
            labels=tuple(self.labels[row] for row in rows),
            past_key_values=past_key_values,
        )


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """One row's answer.

    Attributes:
        outputs: The answer as the prediction reports it.
        score: Probability of a classifier's answer; None for generated text.
    """

    outputs: Outputs
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the number of tokens.

    Attributes:
        max_input_tokens: Tokens of a prompt.
        max_target_tokens: Tokens of a target, without the end token.
        default_max_new_tokens: Tokens generated for a request without `max_new_tokens`.
        max_new_tokens: The largest `max_new_tokens` of a request.
    """

    max_input_tokens: int = 512
    max_target_tokens: int = 64
    default_max_new_tokens: int = 64
    max_new_tokens: int = 512


class ModelTask(ABC):
    """The base of all tasks: tokenises inputs with clear errors, and pads batches.

    Attributes:
        query: The default query token.
        replace: The default tokens that take a value.
        padding_side: The side on which prompts are padded.
    """

    query: QueryToken = "last"
    replace: ReplacedTokens = "last"
    padding_side = "right"

    def __init__(self, model: Any, tokenizer: Any, limits: Limits, is_decoder_layer: bool) -> None:
        self.model, self.tokenizer, self.limits = model, tokenizer, limits
        self._is_decoder_layer = is_decoder_layer
        # Batches need a padding token; the attention mask hides it. transformers' classifiers of causal models also
        # find a row's last token by `config.pad_token_id`.
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        self._text_tokenizer = text_tokenizer(tokenizer)
        self.vocabulary_size: int = model.get_input_embeddings().num_embeddings
        self.context_length: int | None = getattr(model.config, "max_position_embeddings", None)
        self.max_prompt_tokens = min(limits.max_input_tokens, self.context_length or limits.max_input_tokens)

    def tokenize(self, inputs: Inputs) -> Prompt:
        """One tokenised prompt.

        Raises:
            InputError: the model takes no pair or no chat, or the inputs have too many tokens or none.
        """
        if is_chat(inputs):
            raise InputError("this model takes no messages of a chat; send `inputs` as one text")
        if not isinstance(inputs, str):
            raise InputError("this model takes one text, not a pair")
        return self._tokenize_texts(inputs)

    def _tokenize_texts(self, *texts: str) -> Prompt:
        encoded = self._text_tokenizer(*texts, add_special_tokens=True, verbose=False)
        return Prompt(tuple(self._check_token_ids(encoded["input_ids"])), tuple(encoded.get(TOKEN_TYPE_IDS, ())))

    def _check_token_ids(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise InputError("the prompt has no tokens")
        if len(token_ids) > self.max_prompt_tokens:
            configured = self.max_prompt_tokens == self.limits.max_input_tokens
            source = "GRACESTREAM_MAX_INPUT_TOKENS" if configured else "the model's own"
            raise InputError(
                f"the prompt has {len(token_ids)} tokens; the limit is {self.max_prompt_tokens} ({source})"
            )
        if max(token_ids) >= self.vocabulary_size:
            raise InputError(f"token {max(token_ids)} is unknown to the model, which knows {self.vocabulary_size}")
        return token_ids

    def wording(self, prompt: Prompt) -> str:
        """The request in comparable words (`pipeline.wording`); empty for models without a comparison by words."""
        del prompt
        return ""

    def wording_getter(self, batch: Batch) -> WordingGetter:
        """A function from row to wording, which decodes the batch's tokens at its first call."""
        prompts: list[list[int]] = []

        def wording(row: int) -> str:
            if not prompts:
                prompts.extend(batch.prompt_token_ids())
            return self.wording(
                Prompt(tuple(prompts[row]), last_turn=batch.last_turns[row] if batch.last_turns else None)
            )

        return wording

    def batch(self, prompts: Sequence[Prompt]) -> Batch:
        """Pad tokenised prompts into one batch."""
        ids_BT = self._pad_rows([prompt.token_ids for prompt in prompts], int(self.tokenizer.pad_token_id))
        mask_BT = self._pad_rows([[1] * len(prompt) for prompt in prompts], 0)
        kwargs = {"input_ids": ids_BT, "attention_mask": mask_BT}
        return Batch(kwargs, None if self._is_decoder_layer else mask_BT, tuple(prompt.last_turn for prompt in prompts))

    def _pad_rows(self, rows: Sequence[Sequence[int]], pad_value: int) -> Tensor:
        """Numbers per token as one tensor (B, T), padded on this task's side."""
        width = max(map(len, rows))
        rows_BT = torch.full((len(rows), width), pad_value)
        for index, row in enumerate(rows):
            rows_BT[index, slice(0, len(row)) if self.padding_side == "right" else slice(width - len(row), width)] = (
                torch.tensor(row)
            )
        return rows_BT.to(self.model.device)

    @abstractmethod
    def forward_prompt(self, batch: Batch) -> None:
        """Run one forward pass over the prompts, so that the wrapped module sees them."""

    @abstractmethod
    def run(self, batch: Batch, parameters: Sequence[Parameters]) -> list[ModelAnswer]:
        """Answer a batch whose requests share one `batch_key`."""

    @abstractmethod
    def batch_key(self, prompt: Prompt, parameters: Parameters) -> object:
        """A key that is equal for requests that can share a batch.

        Raises:
            InputError: the model cannot answer this prompt with these parameters.
        """

    @abstractmethod
    def encode_target(self, inputs: Inputs, target: str) -> Label:
        """The label of a target.

        Raises:
            InputError: the class does not exist, or the target is too long or not expressible in the vocabulary.
        """

    @abstractmethod
    def decode_label(self, label: Label) -> str:
        """The text of a label."""

    @abstractmethod
    def matches_target(self, answer: ModelAnswer, label: Label, parameters: Parameters) -> bool:
        """True if an answer to a request with these parameters is the label's target."""

    @abstractmethod
    def make_target_pass(self, inputs: Inputs, label: Label) -> TargetPass:
        """The forward pass over one row that shows whether the model predicts the label."""

    def collate(self, rows: Sequence[TargetPass]) -> TargetPass:
        """Several passes of one row each as one pass, padded on the right."""
        return self._pad_passes(rows, [0] * len(rows))

    def join_suffixes(self, parts: Sequence[TargetPass]) -> TargetPass | None:
        """The suffix passes of several passes (`logits_and_suffix`) as one; None if the task cannot join them."""
        del self, parts
        return None

    def _pad_passes(self, rows: Sequence[TargetPass], offsets: Sequence[int]) -> TargetPass:
        """One pass over all rows, each after its offset in columns of padding."""
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
        """Run the pass and return for each row the float32 logits (L, C) at its label's positions."""

    def logits_and_suffix(self, target_pass: TargetPass, replace: ReplacedTokens) -> tuple[list[Tensor], TargetPass]:
        """The logits, and the suffix pass: the part that must run again when only the injected value changes.

        The default suffix pass is the whole pass.
        """
        del replace
        return self.logits(target_pass), target_pass


def _stack_with_offsets(rows: Sequence[Tensor], offsets: Sequence[int], pad_value: int) -> Tensor:
    """Tensors (1, T, ...) of several widths as one (B, T, ...); row i starts after `offsets[i]` columns of padding."""
    width = max(offset + row.shape[1] for row, offset in zip(rows, offsets, strict=True))
    stacked = rows[0].new_full((len(rows), width, *rows[0].shape[2:]), pad_value)
    for index, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
        stacked[index, offset : offset + row.shape[1]] = row[0]
    return stacked
