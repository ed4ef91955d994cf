"""Runs an encoder's last block for the [CLS] token only, the one token that a classification head reads.

A classifier of the BERT family reads its first token only, so the last block needs one attention query. No D x D map
then runs over all T tokens: with H heads, about 2 T D H multiplications replace 12 T D D. Training a value runs the
blocks after the edited layer many times, so the saving matters most for late layers.

Not promised: that the head reads the first token only. `SuffixRunner` verifies that on a probe.

Shapes: B rows, T tokens, D hidden width, H heads, A width of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from gracestream.pipeline.model.adaptor import ReplacedTokens
from gracestream.pipeline.model.layers import enclosing_blocks

ATTENTION_PROJECTIONS = ("query", "key", "value")
"""The linear maps of BERT's self-attention, by attribute."""


class ClsOnlyAttention:
    """Restricts the last block of one encoder to its first token.

    Attributes:
        attention: The block's attention, with its self-attention and output.
        layer_inside: True if the edited layer is in this block; it then runs after the attention.
    """

    def __init__(self, attention: Any, layer_inside: bool) -> None:
        self.attention, self.layer_inside = attention, layer_inside

    @classmethod
    def for_model(cls, model: Any, layer: str, replace: ReplacedTokens) -> Self | None:
        """The restriction for an encoder whose blocks are built like BERT's; None for other models.

        None also if the restricted pass would not run at the tokens that a value replaces.
        """
        blocks, _ = enclosing_blocks(model, layer)
        attention: Any = getattr(blocks[-1], "attention", None) if blocks else None
        self_attention: Any = getattr(attention, "self", None)
        # Rotary embeddings rotate each key by its position, so keys are not one linear map of the hidden states.
        if hasattr(self_attention, "rotary_embeddings") or not all(
            isinstance(getattr(self_attention, name, None), nn.Linear) for name in ATTENTION_PROJECTIONS
        ):
            return None
        edited = model.get_submodule(layer)
        layer_inside = any(module is edited for module in blocks[-1].modules())
        if layer_inside and (
            replace != "all" or any(edited is module for module in (blocks[-1], *attention.modules()))
        ):
            return None
        return cls(attention, layer_inside)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Inside this context, forward passes compute the first token only, from the last block's attention on."""
        self_attention = self.attention.self

        def attend(hidden_BTD: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
            # With one query q, neither keys nor values of the tokens x_t are needed:
            #   score:  q . (K x_t + k) = (K' q) . x_t + q . k; the last term is equal for all t, so softmax drops it
            #   output: sum_t w_t (V x_t + v) = V (sum_t w_t x_t) + v, because the weights w_t add up to 1
            heads = (self_attention.num_attention_heads, self_attention.attention_head_size)
            query_BHA = self_attention.query(hidden_BTD[:, 0]).unflatten(-1, heads) * self_attention.scaling
            key_space_query_BHD = torch.einsum("bha,had->bhd", query_BHA, self_attention.key.weight.unflatten(0, heads))
            scores_BHT = key_space_query_BHD @ hidden_BTD.transpose(1, 2)
            if attention_mask is not None:
                mask_BHT = attention_mask[:, :, 0]  # of the first query
                if mask_BHT.dtype == torch.bool:
                    scores_BHT = scores_BHT.masked_fill(~mask_BHT, -torch.inf)
                else:
                    scores_BHT = scores_BHT + mask_BHT
            weights_BHT = scores_BHT.softmax(dim=-1, dtype=torch.float32).to(hidden_BTD.dtype)
            mixed_BHD = weights_BHT @ hidden_BTD
            output_BHA = torch.einsum("bhd,had->bha", mixed_BHD, self_attention.value.weight.unflatten(0, heads))
            return output_BHA.flatten(1)[:, None] + self_attention.value.bias, None

        def keep_first_token(_module: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return args[0], args[1][:, :1]  # the residual connection adds the attention's input of one token

        self_attention.forward = attend
        handle = self.attention.output.register_forward_pre_hook(keep_first_token)
        try:
            yield
        finally:
            handle.remove()
            del self_attention.forward
