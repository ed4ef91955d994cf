"""The last block of an encoder, run for the one token that a classifier's head reads.

A classifier of the BERT family reads its first token and nothing else. So the last block has one query, and none of its
D x D maps needs to run over all T tokens: T D H multiplications are left of 12 T D D, with H heads. A value is trained
over many passes of the blocks after the edited layer, so this counts most where that layer is a late one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from gracestream.pipeline.model.adaptor import ReplacedTokens
from gracestream.pipeline.model.layers import enclosing_blocks

ATTENTION_PROJECTIONS = ("query", "key", "value")


class ClsOnlyAttention:
    """Narrows the last block. `layer_inside`: the edited layer is in it, and comes after its `attention`."""

    def __init__(self, attention: Any, layer_inside: bool) -> None:
        self.attention, self.layer_inside = attention, layer_inside

    @classmethod
    def for_model(cls, model: Any, layer: str, replace: ReplacedTokens) -> Self | None:
        """For an encoder whose blocks are built as BERT's; the model's probe tells what its head reads.

        None for any other, and where the narrow pass would not see what a value replaces.
        """
        blocks, _ = enclosing_blocks(model, layer)
        attention: Any = getattr(blocks[-1], "attention", None) if blocks else None
        inner: Any = getattr(attention, "self", None)
        if hasattr(inner, "rotary_embeddings") or not all(
            isinstance(getattr(inner, name, None), nn.Linear) for name in ATTENTION_PROJECTIONS
        ):
            return None
        wrapped = model.get_submodule(layer)
        inside = any(module is wrapped for module in blocks[-1].modules())
        if inside and (replace != "all" or any(wrapped is part for part in (blocks[-1], *attention.modules()))):
            return None
        return cls(attention, inside)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Forward passes inside compute the first token alone, from the last block's attention on."""
        inner = self.attention.self

        def attend(hidden_BTD: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
            # One query asks all tokens: its product with the keys' map, and the values' map of what it takes, need no
            # key and no value of each token. What the bias of the keys adds is the same for all, so softmax drops it.
            heads = (inner.num_attention_heads, inner.attention_head_size)
            query_BHA = inner.query(hidden_BTD[:, 0]).unflatten(-1, heads) * inner.scaling
            asked_BHD = torch.einsum("bha,had->bhd", query_BHA, inner.key.weight.unflatten(0, heads))
            scores_BHT = asked_BHD @ hidden_BTD.transpose(1, 2)
            if attention_mask is not None:
                mask_BHT = attention_mask[:, :, 0]
                if mask_BHT.dtype == torch.bool:
                    scores_BHT = scores_BHT.masked_fill(~mask_BHT, -torch.inf)
                else:
                    scores_BHT = scores_BHT + mask_BHT
            shares_BHT = scores_BHT.softmax(dim=-1, dtype=torch.float32).to(hidden_BTD.dtype)
            taken_BHD = shares_BHT @ hidden_BTD
            found_BHA = torch.einsum("bhd,had->bha", taken_BHD, inner.value.weight.unflatten(0, heads))
            return found_BHA.flatten(1)[:, None] + inner.value.bias, None

        def first(_module: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return args[0], args[1][:, :1]

        inner.forward = attend
        handle = self.attention.output.register_forward_pre_hook(first)
        try:
            yield
        finally:
            handle.remove()
            del inner.forward
