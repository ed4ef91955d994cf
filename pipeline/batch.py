"""Tokenised prompts, as a model is called with them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenised prompt.

    Attributes:
        token_ids: With those that the tokenizer's template adds.
        segments: The segment of each token (`token_type_ids`); none where the tokenizer has no segments.
    """

    token_ids: tuple[int, ...]
    segments: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch.

    Attributes:
        kwargs: What the model is called with.
        mask_BT: Real prompt tokens, as the wrapped module sees them; None where it lies in a decoder.
    """

    kwargs: dict[str, Any]
    mask_BT: Tensor | None

    def prompts(self) -> list[list[int]]:
        """Each row's token ids, without padding and what comes after the prompt."""
        mask_BT = (self.kwargs["attention_mask"] if self.mask_BT is None else self.mask_BT).cpu().bool()
        return [row_T[mask_T].tolist() for row_T, mask_T in zip(self.kwargs["input_ids"].cpu(), mask_BT, strict=True)]
