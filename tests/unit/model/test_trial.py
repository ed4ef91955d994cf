"""The trial of a layer when a model is loaded: a layer that cannot be edited is rejected, any other serves edits."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.layers import LayerError, linear_layers
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.tasks.base import Limits
from gracestream.pipeline.model.trial import layer_fault
from gracestream.schemas.messages import Parameters
from tests.support.tiny_models import CODEBOOK, KINDS, LIMITS, WORDS, correct, editable

NOT_CALLED = "the model does not call it when it answers"
NOTHING = "a value there changes nothing in the model's answer"
OF_SOME_TOKENS = "it runs for some of a prompt's tokens only, as an LM head does"
NO_WIDTH = " does not map (batch, tokens, width) to the same layout: its input or output is "

REJECTED = [
    ("llama", "lm_head", OF_SOME_TOKENS),
    ("llama", "model", f"LlamaModel{NO_WIDTH}of shape (1, 7)"),
    ("llama", "model.embed_tokens", f"Embedding{NO_WIDTH}of shape (1, 7)"),
    ("gpt2", "lm_head", OF_SOME_TOKENS),
    ("gpt2", "transformer.wte", f"Embedding{NO_WIDTH}of shape (1, 7)"),
    ("gpt2", "transformer.wpe", f"Embedding{NO_WIDTH}of shape (1, 7)"),
    ("gpt2", "transformer.h.1.attn.attn_dropout", NOT_CALLED),
    ("t5-encoder", "lm_head", OF_SOME_TOKENS),
    ("t5-encoder", "shared", NOT_CALLED),
    ("t5-encoder", "encoder.embed_tokens", f"Embedding{NO_WIDTH}of shape (1, 6)"),
    ("t5-encoder", "decoder.block.1.layer.0.SelfAttention.q", NOTHING),
    ("bert", "bert.encoder", f"BertEncoder{NO_WIDTH}BaseModelOutputWithPastAndCrossAttentions"),
    ("bert", "bert.embeddings.word_embeddings", f"Embedding{NO_WIDTH}of shape (1, 7)"),
    ("bert", "bert.pooler.dense", f"Linear{NO_WIDTH}of shape (1, 48)"),
    ("bert", "classifier", f"Linear{NO_WIDTH}of shape (1, 48)"),
]


def saved(kind: str, folder: Path) -> str:
    model = editable(kind)
    for part in (model.module, model.task.tokenizer):
        part.save_pretrained(folder)
    return str(folder)


def load(folder: str, layer: str, limits: Limits = LIMITS) -> EditableModel:
    return EditableModel.load(folder, layer, device="cpu", limits=limits)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layer", "why"), REJECTED)
def test_a_layer_that_cannot_be_edited_is_rejected_with_some_that_can(
    tmp_path: Path, kind: str, layer: str, why: str
) -> None:
    folder = saved(kind, tmp_path)
    with pytest.raises(LayerError) as caught:
        load(folder, layer)
    said, _, others = str(caught.value).partition("; layers that can: ")
    assert said == f"layer {layer!r} cannot be edited: {why}"
    assert len(others.split(", ")) == 3
    for other in others.split(", "):
        assert load(folder, other).layer == other


def every_layer(kind: str) -> list[str]:
    ranges = linear_layers(KINDS[kind].build())
    return [layers.path.replace("*", str(block), 1) for layers in ranges for block in range(layers.count)]


@pytest.mark.slow
def test_every_linear_layer_of_a_block_is_taken_unless_it_has_no_effect(kind: str) -> None:
    rejected = {layer for layer in every_layer(kind) if fault_of(editable(kind, layer)) is not None}
    assert all("decoder" in layer and layer.endswith("SelfAttention.q") for layer in rejected)
    assert bool(rejected) is kind.startswith("t5")


def fault_of(model: EditableModel) -> str | None:
    return layer_fault(model.task, model.adaptor)


def parts_of_a_block(kind: str) -> list[str]:
    """All modules of the middle block of each stack, and the block itself."""
    modules = KINDS[kind].build().named_modules()
    names = [name for name, part in modules if not isinstance(part, nn.ModuleList)]
    return [name for name in names if re.match(r"\D*\.1(\.|$)", name)]


@pytest.mark.slow
def test_whatever_part_of_a_block_is_taken_can_be_edited_and_serves_in_batches(kind: str) -> None:
    """Also the whole block, which gives a tuple in some models."""
    taken = 0
    for layer in parts_of_a_block(kind):
        model = editable(kind, layer)
        if fault_of(model) is not None:
            continue
        taken += 1
        engine = EditEngine(model, CODEBOOK, EditConfig(recipe=ValueTrainingConfig(max_steps=4)))
        engine.apply(engine.lead_delta({}))
        outcome, _ = correct(engine, "f0", PROBE_TEXTS[0], "right" if kind == "bert" else WORDS[7])
        assert outcome.status in ("added", "unchanged", "rejected"), layer
        if outcome.status == "rejected":
            assert "no value was found" in str(outcome.reason), layer
        prompts = [model.task.tokenize(text) for text in (PROBE_TEXTS[0], "The train", PROBE_TEXTS[1])]
        served = model.answer(prompts, [Parameters()] * 3, engine.lookup)
        assert (served[0].served_by is not None) is (outcome.status == "added"), layer
    assert taken > 5


class Odd(nn.Module):
    """A layer beside others, as checkpoints of all sorts have them."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.unused, self.ignored = inner, nn.Linear(width, width), nn.LayerNorm(width)
        self.failing = Failing()
        self.weight = inner.weight  # which a T5 looks at

    def forward(self, hidden_BTX: Tensor) -> Any:
        self.ignored(hidden_BTX)
        return self.inner(self.failing(hidden_BTX))


class Failing(nn.Module):
    """Hands its input on, whose hook finds that its answer is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Identity()

    def forward(self, hidden_BTX: Tensor) -> Tensor:
        found: Tensor = self.after(hidden_BTX)
        if not torch.equal(found, hidden_BTX):
            raise ArithmeticError("not the same")
        return found


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("unused", NOT_CALLED),
        ("ignored", NOTHING),
        ("failing.after", "the model fails with a value there (not the same)"),
        ("inner", None),
    ],
)
def test_a_part_that_is_unused_ignored_or_checked_is_rejected(kind: str, part: str, why: str | None) -> None:
    plain = editable(kind)
    parent, _, name = plain.layer.rpartition(".")
    inner = plain.module.get_submodule(plain.layer)
    width = inner.weight.shape[0] if kind == "gpt2" else inner.weight.shape[1]  # a Conv1D has its weight transposed
    setattr(plain.module.get_submodule(parent), name, Odd(inner, width))
    plain.adaptor.remove()
    model = EditableModel(plain.module, plain.task.tokenizer, f"{plain.layer}.{part}", limits=LIMITS, fingerprint="f")
    assert fault_of(model) == why


def test_it_takes_three_short_passes_at_most_and_leaves_no_trace(kind: str) -> None:
    model = editable(kind)
    state, ran = torch.random.get_rng_state(), []
    model.module.register_forward_hook(lambda *_: ran.append(1))
    before = model.queries([model.task.tokenize(PROBE_TEXTS[0])])
    del ran[:]
    assert fault_of(model) is None
    assert len(ran) == (2 if kind == "bert" else 3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(model.queries([model.task.tokenize(PROBE_TEXTS[0])]), before)


def test_a_model_that_takes_very_few_tokens_is_tried_too(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    limits = Limits(max_input_tokens=1, max_target_tokens=6, default_max_new_tokens=1)
    assert load(folder, "model.layers.2.mlp.down_proj", limits).task.limits == limits
    with pytest.raises(LayerError, match=r"'model\.embed_tokens' cannot be edited: Embedding does not map"):
        load(folder, "model.embed_tokens", limits)
