"""Which layers are worth trial edits: outputs of attention and MLP in the later half of a model.

Earlier layers see too little of a request. The last block of a causal model reaches only the first token of an answer.
"""

from collections.abc import Iterator
from typing import Any

from gracestream.pipeline.model import RepeatedLayer, is_in_decoder, linear_layers

OUTPUT_LAYER_NAMES = frozenset({
    "o", "o_proj", "out_proj", "out_lin", "c_proj", "dense", "down_proj", "fc2", "wo", "lin2", "dense_4h_to_h",
})  # fmt: skip
"""Names of the linear maps by which attention and MLP write to the residual stream."""

DEPTH_SHARES = (2 / 3, 5 / 6, 1 / 2)
"""Shares of the depth, the most promising first."""


def candidate_layers(model: Any) -> list[str]:
    """Paths of the layers to try, the most promising first; none where no layer has a known name."""
    ranges = [layers for layers in linear_layers(model) if _writes_to_residual(model, layers)]
    found = (
        layers.path.replace("*", str(block), 1)
        for depth in DEPTH_SHARES
        for layers, block in _layers_at_depth(model, ranges, depth)
    )
    return list(dict.fromkeys(found))


def _writes_to_residual(model: Any, layers: RepeatedLayer) -> bool:
    """Whether these layers write to the residual stream, of the encoder where there is one."""
    out = layers.shape[-1] if layers.kind == "Conv1D" else layers.shape[0]
    known = layers.path.rpartition(".")[2] in OUTPUT_LAYER_NAMES and out == model.config.hidden_size
    return known and not (model.config.is_encoder_decoder and is_in_decoder(layers.path))


def _layers_at_depth(model: Any, ranges: list[RepeatedLayer], depth: float) -> Iterator[tuple[RepeatedLayer, int]]:
    """Each of the layers with the number of its block at this depth."""
    spared = 2 if model.can_generate() and not model.config.is_encoder_decoder else 1
    for layers in ranges:
        yield layers, max(0, min(round(depth * layers.count), layers.count - spared))
