"""Candidate layers for trial edits: the output projections of attention and MLP in the later half of a model.

Earlier layers have combined too little of a request. A value in the last block of a causal model is excluded, too: no
later attention layer passes it on to the later tokens of an answer.
"""

from collections.abc import Iterator
from typing import Any

from gracestream.pipeline.model import RepeatedLayer, is_in_decoder, linear_layers

OUTPUT_LAYER_NAMES = frozenset({
    "o", "o_proj", "out_proj", "out_lin", "c_proj", "dense", "down_proj", "fc2", "wo", "Wo", "lin2", "dense_4h_to_h",
})  # fmt: skip
"""Names of the linear layers through which attention and MLP write to the residual stream."""

DEPTH_SHARES = (2 / 3, 5 / 6, 1 / 2)
"""Depths of the candidates as shares of the model's blocks, the most promising first."""


def candidate_layers(model: Any) -> list[str]:
    """Paths of the layers to try, the most promising first; empty if no layer has a known name."""
    ranges = [layers for layers in linear_layers(model) if _writes_to_residual(model, layers)]
    paths = (
        layers.path.replace("*", str(block), 1)
        for depth in DEPTH_SHARES
        for layers, block in _layers_at_depth(model, ranges, depth)
    )
    return list(dict.fromkeys(paths))


def _writes_to_residual(model: Any, layers: RepeatedLayer) -> bool:
    """Whether these layers write to the residual stream; in an encoder-decoder model, to the encoder's."""
    # transformers' Conv1D stores its weight as (in, out), nn.Linear as (out, in).
    output_dim = layers.shape[-1] if layers.kind == "Conv1D" else layers.shape[0]
    has_output_name = layers.path.rpartition(".")[2] in OUTPUT_LAYER_NAMES and output_dim == model.config.hidden_size
    return has_output_name and not (model.config.is_encoder_decoder and is_in_decoder(layers.path))


def _layers_at_depth(model: Any, ranges: list[RepeatedLayer], depth: float) -> Iterator[tuple[RepeatedLayer, int]]:
    """Each of the repeated layers with the number of the block at this depth."""
    # `count - 1` is the last block; a decoder-only generator spares it (see the module's docstring).
    offset_from_end = 2 if model.can_generate() and not model.config.is_encoder_decoder else 1
    for layers in ranges:
        yield layers, max(0, min(round(depth * layers.count), layers.count - offset_from_end))
