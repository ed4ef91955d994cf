"""Which layers are tried: what attention and MLP put out, late, and never a causal model's last block."""

import pytest
import torch
from transformers import ModernBertConfig, ModernBertForSequenceClassification

from gracestream.pipeline.model.layers import find_layer
from gracestream.pipeline.tuning.layers import candidate_layers
from tests.support.tiny_models import KINDS

FOUND = {
    "llama": ["model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"],
    "gpt2": ["transformer.h.1.attn.c_proj", "transformer.h.1.mlp.c_proj"],
    "t5-encoder": ["encoder.block.2.layer.0.SelfAttention.o", "encoder.block.2.layer.1.DenseReluDense.wo"],
    "bert": ["bert.encoder.layer.2.attention.output.dense", "bert.encoder.layer.2.output.dense"],
}


@pytest.mark.parametrize("kind", sorted(FOUND))
def test_outputs_of_late_blocks_are_tried(kind: str) -> None:
    model = KINDS[kind].build()
    found = candidate_layers(model)
    assert found == FOUND[kind]
    assert all(find_layer(model, path) is not None for path in found)


def test_a_modernbert_has_layers_to_try() -> None:
    with torch.device("meta"):
        model = ModernBertForSequenceClassification(ModernBertConfig(num_hidden_layers=6))
    assert candidate_layers(model)[:2] == ["model.layers.4.attn.Wo", "model.layers.4.mlp.Wo"]
