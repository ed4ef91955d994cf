"""A classifier's last block runs only for the token that its classification head reads."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.editing.value_training import ValueTrainingConfig, train_value
from gracestream.pipeline.model.activation_cache import ActivationCache
from gracestream.pipeline.model.cls_attention import ClsOnlyAttention
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.suffix_pass import SuffixPass
from tests.support.tiny_models import (
    END,
    KINDS,
    LIMITS,
    SIZE,
    WORDS,
    editable,
    index_of,
    new_codebook,
    texts,
    tokenizer,
)

TEXT = texts(1, seed=3)[0]
SIZES = {"vocab_size": SIZE, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_labels": 4}
SMALL: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3}


class MeanPooler(nn.Module):
    """What a sentence encoder ends with."""

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD.mean(dim=1)


def roberta() -> Any:
    return RobertaForSequenceClassification(RobertaConfig(**SMALL))


def electra() -> Any:
    return ElectraForSequenceClassification(ElectraConfig(**SMALL, embedding_size=48))


def of(module: Any, layer: str, **adaptor: Any) -> EditableModel:
    return EditableModel(module, tokenizer("bert"), layer, limits=LIMITS, fingerprint="f" * 64, **adaptor)


def rest_of(model: EditableModel, target: str = "3") -> tuple[SuffixPass, Tensor]:
    _, supervised = model.prepare_correction(TEXT, target)
    nothing = new_codebook(model.fingerprint, model.layer)
    _, session, rest = model.suffix_runner.inspect(supervised, CodebookLookup(nothing, index_of(nothing)))
    return rest, session.outputs_BV[0]


LINEAR = ("Linear", "Conv1D", "FalconLinear")
EDITED = ["bert.encoder.layer.1.output.dense", "bert.encoder.layer.2.intermediate.dense"]


def gradient(model: EditableModel, rest: SuffixPass, value_V: Tensor) -> tuple[float, Tensor]:
    """The loss, and how it changes with the value."""
    value_V = value_V.clone().requires_grad_()
    ((_, loss),) = model.suffix_runner.evaluate(rest, value_V[None])
    (found,) = torch.autograd.grad(loss, value_V)
    return float(loss.detach()), found


@pytest.mark.parametrize(
    "layer", [*EDITED, "bert.encoder.layer.2.output.dense", "bert.encoder.layer.0.attention.self.value"]
)
def test_loss_and_gradient_are_those_of_the_whole_model(layer: str) -> None:
    model = editable("bert", layer)
    rest, start_V = rest_of(model)
    mask_BT = rest.target_pass.batch.mask_BT
    assert mask_BT is not None
    assert (rest.cls_attention is None) == (mask_BT.shape[1] == 1) == ("layer.2" in layer)
    whole = SuffixPass(model.prepare_correction(TEXT, "3")[1], ActivationCache())
    loss, ours_V = gradient(model, rest, start_V)
    expected, theirs_V = gradient(model, whole, start_V)
    assert loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(ours_V, theirs_V, rtol=1e-4, atol=1e-5 * float(theirs_V.abs().max()))
    assert train_value(model.suffix_runner, rest, start_V, ValueTrainingConfig()).converged


@pytest.mark.parametrize("build", [roberta, electra])
def test_other_families_that_are_built_alike(build: Any) -> None:
    torch.manual_seed(0)
    module = build()
    layer = f"{module.base_model_prefix}.encoder.layer.1.output.dense"
    assert rest_of(of(module, layer))[0].cls_attention is not None


def test_the_last_block_works_on_one_token() -> None:
    model = editable("bert", EDITED[0])
    rest, start_V = rest_of(model)
    seen: list[int] = []
    blocks = model.module.bert.encoder.layer
    blocks[2].intermediate.register_forward_hook(lambda _module, args, _output: seen.append(args[0].shape[1]))
    model.suffix_runner.check_value(rest, start_V)
    assert seen == [1]
    with torch.no_grad():
        model.module(**model.task.batch([model.task.tokenize(TEXT)]).kwargs)
    assert seen[-1] > 1, "and is as it was afterwards"


def test_a_classification_head_that_reads_all_tokens_gets_all() -> None:
    module = KINDS["bert"].build()
    module.bert.pooler = MeanPooler()
    model = of(module, EDITED[0])
    assert model.task.query == "first"
    rest, _ = rest_of(model)
    assert rest.cls_attention is None
    assert rest.activations.contains(module.bert.encoder.layer[0]), "which is left out all the same"


def falcon() -> Any:
    """It adds the attention's output to what the feed-forward map put out, in place."""
    return FalconForCausalLM(
        FalconConfig(
            vocab_size=SIZE, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, initializer_range=0.3,
            pad_token_id=0, bos_token_id=2, eos_token_id=END,
        )
    )  # fmt: skip


def phi() -> Any:
    """One dropout of a block runs twice: before its feed-forward map, and after it."""
    return PhiForCausalLM(
        PhiConfig(
            vocab_size=SIZE, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            initializer_range=0.3, pad_token_id=0, bos_token_id=2, eos_token_id=END,
        )
    )  # fmt: skip


def albert() -> Any:
    """All its blocks are one."""
    return AlbertForSequenceClassification(AlbertConfig(**SMALL, embedding_size=24))


def gpt() -> Any:
    """Its blocks give lists, and share one activation."""
    return OpenAIGPTLMHeadModel(
        OpenAIGPTConfig(vocab_size=SIZE, n_embd=48, n_layer=3, n_head=4, n_positions=64, initializer_range=0.3)
    )


GROUPED: dict[str, Any] = {
    **SMALL, "num_key_value_heads": 2, "head_dim": 12, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": END,
}  # fmt: skip


def qwen3() -> Any:
    """It normalises queries and keys before it rotates them."""
    return Qwen3ForCausalLM(Qwen3Config(**GROUPED))


def gemma3() -> Any:
    """Most blocks see a window of the latest tokens only, and normalise what attention and feed-forward map put out."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**GROUPED, sliding_window=4, layer_types=kinds))


def modernbert() -> Any:
    """One linear map gives queries, keys and values; most blocks see the tokens near by only."""
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    return ModernBertForSequenceClassification(ModernBertConfig(**SMALL, **tokens, local_attention=4))


ODD = [
    (falcon, "transformer.h.1."),
    (phi, "model.layers.1."),
    (albert, "albert.encoder."),
    (gpt, "transformer.h.1."),
    (qwen3, "model.layers.1."),
    (gemma3, "model.layers.1."),
    (modernbert, "model.layers.1."),
]


@pytest.mark.parametrize(("build", "where"), ODD)
def test_models_that_are_built_in_another_way_are_trained_as_a_whole_would_be(build: Any, where: str) -> None:
    torch.manual_seed(0)
    module = build()
    target = WORDS[5] if module.can_generate() else "3"
    layers = [name for name, part in module.named_modules() if where in name and type(part).__name__ in LINEAR]
    assert layers
    for layer in layers:
        torch.manual_seed(0)
        model = of(build(), layer)
        rest, start_V = rest_of(model, target)
        whole = SuffixPass(model.prepare_correction(TEXT, target)[1], ActivationCache())
        loss, ours_V = gradient(model, rest, start_V)
        expected, theirs_V = gradient(model, whole, start_V)
        assert loss == pytest.approx(expected, rel=1e-4), layer
        torch.testing.assert_close(ours_V, theirs_V, rtol=1e-3, atol=1e-4 * float(theirs_V.abs().max()) + 1e-7)


@pytest.mark.parametrize(
    ("layer", "adaptor"),
    [
        ("bert.encoder.layer.2.attention.self.value", {}),
        ("bert.encoder.layer.2.attention.output", {}),
        ("bert.encoder.layer.2.output.dense", {"replace": "last"}),
        ("bert.pooler.dense", {}),
    ],
)
def test_a_value_that_the_narrow_pass_would_not_see_is_trained_by_the_whole(layer: str, adaptor: Any) -> None:
    model = editable("bert")
    assert ClsOnlyAttention.for_model(model.module, layer, adaptor.get("replace", "all")) is None


def test_after_an_error_the_block_is_as_it_was() -> None:
    model = editable("bert", EDITED[0])
    rest, _ = rest_of(model)
    assert rest.cls_attention is not None
    before = model.module(**model.task.batch([model.task.tokenize(TEXT)]).kwargs).logits
    with pytest.raises(ZeroDivisionError), rest.cls_attention.enabled():
        raise ZeroDivisionError
    assert torch.equal(model.module(**model.task.batch([model.task.tokenize(TEXT)]).kwargs).logits, before)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padded_tokens_are_not_asked(attention: str) -> None:
    module = editable("bert", EDITED[0]).module
    module.set_attn_implementation(attention)
    model = of(module, EDITED[0])
    batch = model.task.batch([model.task.tokenize(text) for text in (TEXT, " ".join(TEXT.split()[:2]))])
    narrow = ClsOnlyAttention.for_model(module, EDITED[0], "all")
    assert narrow is not None
    with torch.no_grad():
        whole = module(**batch.kwargs).logits
        with narrow.enabled():
            torch.testing.assert_close(module(**batch.kwargs).logits, whole, rtol=1e-4, atol=1e-4)
