"""Tokenised prompts, as a model is called with them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LastTurn:
    """The last message of a chat, which a sentence encoder reads in place of the whole prompt.

    Attributes:
        text: Its content.
        has_earlier_turns: Whether earlier turns stand before it, on which its meaning may depend.
    """

    text: str
    has_earlier_turns: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenised prompt.

    Attributes:
        token_ids: With those that the tokenizer's template adds.
        segments: The segment of each token (`token_type_ids`); none where the tokenizer has no segments.
        last_turn: Of a chat its last message; None of any other prompt.
    """

    token_ids: tuple[int, ...]
    segments: tuple[int, ...] = ()
    last_turn: LastTurn | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch.

    Attributes:
        kwargs: What the model is called with.
        mask_BT: Real prompt tokens, as the wrapped module sees them; None where it lies in a decoder.
        last_turns: The last message of each prompt that is a chat; empty where no query is taken from the batch.
    """

    kwargs: dict[str, Any]
    mask_BT: Tensor | None
    last_turns: tuple[LastTurn | None, ...] = ()

    def prompt_token_ids(self) -> list[list[int]]:
        """Each row's token ids, without padding and what comes after the prompt."""
        mask_BT = (self.kwargs["attention_mask"] if self.mask_BT is None else self.mask_BT).cpu().bool()
        return [row_T[mask_T].tolist() for row_T, mask_T in zip(self.kwargs["input_ids"].cpu(), mask_BT, strict=True)]
