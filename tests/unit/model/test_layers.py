"""Layers have the paper's names, and the blocks before the edited one can be left out of later passes."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from gracestream.pipeline.model.activation_cache import ActivationCache
from gracestream.pipeline.model.adaptor import QueryToken
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.layers import (
    LayerError,
    enclosing_blocks,
    find_layer,
    is_in_decoder,
    linear_layers,
    normalize_path,
)
from tests.support.tiny_models import KINDS, editable, texts

TEXT = texts(1, seed=3)[0]


def logits(model: EditableModel, text: str = TEXT) -> torch.Tensor:
    target = "right" if "Bert" in type(model.module).__name__ else text.split(maxsplit=1)[0]
    with torch.no_grad():
        return model.task.logits(model.prepare_correction(text, target)[1])[0]


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        ("encoder.block[4].layer[1].DenseReluDense.wo", "encoder.block.4.layer.1.DenseReluDense.wo"),
        ("transformer.h[35].mlp.c_fc.weight", "transformer.h.35.mlp.c_fc"),
        ("bert.encoder.layer.10.output.dense.bias", "bert.encoder.layer.10.output.dense"),
        (" lm_head ", "lm_head"),
    ],
)
def test_the_papers_names_become_torchs(path: str, normal: str) -> None:
    assert normalize_path(path) == normal
    assert normalize_path(normal) == normal


def test_the_layer_at_a_path_is_the_module_of_that_name(model: EditableModel, kind: str) -> None:
    assert find_layer(model.module, KINDS[kind].layer) is dict(model.module.named_modules())[model.layer]


def test_the_linear_layers_of_the_blocks_are_listed_once_for_all_blocks(model: EditableModel) -> None:
    ranges = {found.path: found for found in linear_layers(model.module)}
    block = next(part for part in model.layer.split(".") if part.isdigit())
    listed = ranges[model.layer.replace(f".{block}.", ".*.", 1)]
    assert listed.count == 3
    assert listed.shape == tuple(model.module.get_parameter(f"{model.layer}.weight").shape)
    assert not any(name in ranges for name in ("lm_head", "classifier"))
    for path, found in ranges.items():
        for number in range(found.count):
            assert isinstance(find_layer(model.module, path.replace("*", str(number))), nn.Module)


@pytest.mark.parametrize(("path", "decoder"), [(KINDS[kind].layer, kind == "t5-decoder") for kind in KINDS])
def test_a_layer_of_a_decoder_is_told_by_its_name(path: str, decoder: bool) -> None:
    assert is_in_decoder(path) is decoder


def before(model: EditableModel) -> list[nn.Module]:
    blocks, number = enclosing_blocks(model.module, model.layer)
    return blocks[:number]


def test_the_blocks_are_those_of_the_same_stack_in_order() -> None:
    model = editable("t5-decoder").module
    assert enclosing_blocks(model, "decoder.block[2].layer[2].DenseReluDense.wo") == (list(model.decoder.block), 2)
    assert enclosing_blocks(model, "encoder.block[1].layer[1].DenseReluDense.wo") == (list(model.encoder.block), 1)
    assert enclosing_blocks(model, "encoder.block[0].layer[1].DenseReluDense.wo") == (list(model.encoder.block), 0)
    assert enclosing_blocks(model, "lm_head") == ([], 0)


def every_layer(kind: str, block: int) -> list[str]:
    """The linear maps of one block of each stack, in the order in which they run or nearly so."""
    return [each.path.replace("*", str(block)) for each in linear_layers(KINDS[kind].build()) if "*" in each.path]


@pytest.mark.slow
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_pass_without_what_runs_before_equals_the_whole_to_the_bit(kind: str, block: int) -> None:
    for path in every_layer(kind, block):
        model = editable(kind, path)
        prefix, ran = ActivationCache.for_layer(model.module, model.layer), list[int]()
        with prefix.record():
            whole = logits(model)
        with prefix.reuse():
            for module in before(model):
                first = next(child for child in module.modules() if isinstance(child, nn.Linear | nn.LayerNorm))
                first.register_forward_hook(lambda *_, ran=ran: ran.append(1))
            assert torch.equal(logits(model), whole), path
        assert not ran
        assert torch.equal(logits(model), whole), path
        assert bool(ran) is (block > 0)


def test_of_its_block_only_what_follows_the_layer_runs() -> None:
    model = editable("bert", "bert.encoder.layer.1.output.dense")
    ran: list[str] = []
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    prefix = ActivationCache.for_layer(model.module, model.layer)
    with prefix.record():
        logits(model)
    del ran[:]
    dense = model.module.get_submodule(model.layer)
    with prefix.reuse():
        assert dense.forward() is not None
        logits(model)
    assert {name for name in ran if ".layer.1." in name} == {model.layer}, "whose hooks run, and nothing of it else"


def test_after_skipping_the_blocks_run_again_even_after_an_error(kind: str) -> None:
    model = editable(kind)
    prefix = ActivationCache.for_layer(model.module, model.layer)
    with prefix.record():
        first = logits(model)
    with pytest.raises(ZeroDivisionError), prefix.reuse():
        raise ZeroDivisionError
    other = texts(1, seed=4)[0]
    assert not torch.equal(logits(model, f"{TEXT.split()[0]} {other}")[:1], first[:1])


def test_where_nothing_was_recorded_all_runs() -> None:
    model = editable("gpt2")
    whole = logits(model)
    with ActivationCache.for_layer(model.module, model.layer).reuse():
        assert torch.equal(logits(model), whole)


@pytest.mark.parametrize(
    ("kind", "layer", "query", "blind"),
    [
        ("llama", "model.layers.0.self_attn.q_proj", "last", True),
        ("llama", "model.layers.0.self_attn.q_proj", "mean", False),
        ("llama", "model.layers.0.self_attn.o_proj", "last", False),
        ("llama", "model.layers.2.mlp.down_proj", "first", True),
        ("gpt2", "transformer.h.0.attn.c_attn", "last", True),
        ("gpt2", "transformer.h.2.mlp.c_proj", "last", False),
        ("bert", "bert.encoder.layer.0.attention.self.query", "first", True),
        ("bert", "bert.encoder.layer.0.output.dense", "first", False),
        ("t5-decoder", "decoder.block.0.layer.0.SelfAttention.k", "last", True),
        ("t5-decoder", "decoder.block.0.layer.1.EncDecAttention.o", "last", False),
    ],
)
def test_a_query_that_sees_one_token_alone_is_rejected(
    tmp_path: Path, kind: str, layer: str, query: QueryToken, blind: bool
) -> None:
    model = editable(kind)
    for saved in (model.module, model.task.tokenizer):
        saved.save_pretrained(tmp_path)
    match = rf"^layer '{layer}': the {query} token has seen no other token of a prompt there, so an edit would"
    with pytest.raises(LayerError, match=match) if blind else nullcontext():
        EditableModel.load(str(tmp_path), layer, device="cpu", query=query)
