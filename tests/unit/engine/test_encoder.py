"""A sentence encoder makes the queries, whatever the model and wherever a value goes: of the prompt, all of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

from pipeline.checkpoint import ModelError
from pipeline.editing import EditEngine
from pipeline.encoder import Encoder
from pipeline.plan import Plan
from schemas.messages import Parameters
from tests.unit.engine.tiny import CODEBOOK, KINDS, SIZE, WORDS, correct, editable, texts, tokenizer

INPUTS = texts(9, seed=3)
ROOM = 16
"""Tokens of the encoder's longest pass, two of them its own."""


class Counted(Encoder):
    """Says how often it was asked."""

    calls = 0

    def __call__(self, texts: Any) -> torch.Tensor:
        self.calls += 1
        return super().__call__(texts)


def module(seed: int = 0) -> BertModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=ROOM, initializer_range=0.3, pad_token_id=0,
        )  # fmt: skip
        return BertModel(config)


def encoder(seed: int = 0) -> Counted:
    return Counted(module(seed), tokenizer("bert"), f"encoder-{seed}")


def mean(made: BertModel, words: list[str]) -> torch.Tensor:
    """The sum of what the tokens of a text give that is short enough for one pass."""
    asked = tokenizer("bert")(" ".join(words), return_tensors="pt")
    with torch.no_grad():
        found: torch.Tensor = made.eval()(**asked).last_hidden_state[0].sum(dim=0)
    return found


def test_a_point_is_the_mean_over_the_tokens_at_a_length_of_one() -> None:
    sum_D = mean(module(), WORDS[:5])
    (point_D,) = encoder()([" ".join(WORDS[:5])])
    assert torch.allclose(point_D, sum_D / sum_D.norm(), atol=1e-6)


def test_a_text_is_the_same_point_alone_and_beside_longer_ones() -> None:
    asked = [" ".join(WORDS[:count]) for count in (1, 3, 40, 2)]
    together_ND = encoder()(asked)
    alone_ND = torch.cat([encoder()([text]) for text in asked])
    assert torch.allclose(together_ND, alone_ND, atol=1e-6)
    assert torch.allclose(together_ND.norm(dim=1), torch.ones(len(asked)))


def test_a_text_that_is_too_long_for_a_pass_is_read_in_parts_to_its_end() -> None:
    size = ROOM - 2
    parts = [WORDS[:size], WORDS[size : 2 * size], WORDS[2 * size : 2 * size + 3]]
    sum_D = sum(mean(module(), part) for part in parts)
    assert isinstance(sum_D, torch.Tensor)
    words = [word for part in parts for word in part]
    (point_D, other_D) = encoder()([" ".join(words), " ".join([*words[:-1], WORDS[-1]])])
    assert torch.allclose(point_D, sum_D / sum_D.norm(), atol=1e-6)
    assert float((point_D - other_D).norm()) > 1e-3


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_query_is_the_prompts_and_not_its_paddings_or_its_targets(kind: str) -> None:
    made = encoder()
    model = editable(kind, encoder=made)
    expected_BD = made(INPUTS)
    assert torch.allclose(model.queries([model.task.tokenize(text) for text in INPUTS]), expected_BD, atol=1e-6)
    engine = EditEngine(model, CODEBOOK, Plan())
    for text, expected_D in zip(INPUTS, expected_BD, strict=True):
        target = "wrong" if kind == "bert" else WORDS[7]
        _, session, _ = model.examine(model.supervised(text, target)[1], engine.codebook, engine.index)
        assert torch.allclose(session.queries_BD[0], expected_D, atol=1e-6)


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_edit_serves_its_prompt_in_any_batch_and_asks_the_encoder_once(kind: str) -> None:
    made = encoder()
    engine = EditEngine(editable(kind, encoder=made), CODEBOOK, Plan(radius=0.2, radius_unit="absolute", traffic=0))
    engine.apply(engine.lead({}))
    before = said(engine, INPUTS)
    target = next(target for target in ("right", "both") if target != before[0]) if kind == "bert" else WORDS[7]
    outcome, record = correct(engine, "f0", INPUTS[0], target)
    assert record is not None, outcome
    assert engine.codebook.keys_ND.shape == (1, 32)
    made.calls = 0
    assert said(engine, INPUTS) == [target, *before[1:]]
    assert made.calls == 1
    assert said(engine, INPUTS[:1]) == [target]


def said(engine: EditEngine, inputs: list[str]) -> list[str]:
    prompts = [engine.model.task.tokenize(text) for text in inputs]
    served = engine.model.answer(prompts, [Parameters()] * len(prompts), engine.codebook, engine.index)
    return [str(row.answer.outputs.text or row.answer.outputs.label) for row in served]


def test_another_encoder_is_another_key_space() -> None:
    made = [editable("bert"), editable("bert", encoder=encoder(0)), editable("bert", encoder=encoder(1))]
    assert len({model.fingerprint for model in made}) == len(made)


def test_a_loaded_encoder_is_told_by_what_is_read_of_it(tmp_path: Path) -> None:
    """BertModel draws a pooler where the checkpoint has none."""
    bare = BertModel(module().config, add_pooling_layer=False)
    bare.save_pretrained(tmp_path / "one")
    tokenizer("bert").save_pretrained(tmp_path / "one")
    first, second = (Encoder.load(str(tmp_path / "one"), device="cpu") for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert torch.equal(first(INPUTS), second(INPUTS))


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    module().save_pretrained(tmp_path)
    tokenizer("bert").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("encoder.layer.0.output.dense.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"has no encoder\.layer\.0\.output\.dense\.weight"):
        Encoder.load(str(tmp_path), device="cpu")


def test_what_is_no_sentence_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="it has a decoder"):
        Encoder(editable("t5-encoder").module, tokenizer("t5"), "t5")
    unpadded = tokenizer()
    unpadded.pad_token = None
    with pytest.raises(ModelError, match="cannot read long texts in parts, or not pad"):
        Encoder(GPT2Model(GPT2Config(vocab_size=SIZE, n_embd=8, n_layer=1, n_head=2)), unpadded, "gpt2")
    with pytest.raises(ModelError, match=r"the encoder .* there is no such folder; set GRACESTREAM_ENCODER"):
        Encoder.load(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"the encoder .* cannot be loaded"):
        Encoder.load(str(tmp_path / "empty"))
