"""Tokenised prompts, and the arguments of one forward pass over them.

Shapes: B rows, T tokens.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LastTurn:
    """The last message of a chat. A sentence encoder reads it instead of the whole prompt.

    Attributes:
        text: Content of the message.
        has_earlier_turns: True if messages other than system prompts come before it; its meaning may depend on them.
    """

    text: str
    has_earlier_turns: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenised prompt.

    Attributes:
        token_ids: Token ids, with those that the tokenizer's template adds.
        segments: The segment of each token (`token_type_ids`); empty if the tokenizer has no segments.
        last_turn: The last message of a chat; None for any other prompt.
    """

    token_ids: tuple[int, ...]
    segments: tuple[int, ...] = ()
    last_turn: LastTurn | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one forward pass.

    Attributes:
        kwargs: Keyword arguments of the model.
        mask_BT: The prompt's tokens, without padding, as the wrapped module sees them; None for a layer in a decoder.
        last_turns: The last message of each prompt that is a chat; empty if no query is computed from the batch.
    """

    kwargs: dict[str, Any]
    mask_BT: Tensor | None
    last_turns: tuple[LastTurn | None, ...] = ()

    def prompt_token_ids(self) -> list[list[int]]:
        """Each row's token ids, without padding and without tokens after the prompt."""
        mask_BT = (self.kwargs["attention_mask"] if self.mask_BT is None else self.mask_BT).cpu().bool()
        return [row_T[mask_T].tolist() for row_T, mask_T in zip(self.kwargs["input_ids"].cpu(), mask_BT, strict=True)]
