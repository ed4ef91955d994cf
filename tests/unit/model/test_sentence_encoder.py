"""A sentence encoder makes the queries, whatever the model and wherever a value goes: of the prompt, all of it."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import BertModel, GPT2Config, GPT2Model

from gracestream.pipeline.codebook.policy import match_tolerance
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.model.checkpoint import ModelError
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.sentence_encoder import (
    PROMPT_HASH_DIM,
    PROMPT_HASH_NORM,
    SentenceEncoder,
    prompt_hash_vectors,
)
from gracestream.schemas.messages import Inputs, Parameters
from tests.support.tiny_encoder import ROOM, Counted, chat, encoder, module
from tests.support.tiny_models import CHAT, CODEBOOK, KINDS, SIZE, WORDS, correct, editable, texts, tokenizer

INPUTS = texts(9, seed=3)


def mean(made: BertModel, words: list[str]) -> torch.Tensor:
    """The sum of what the tokens of a text give that is short enough for one pass."""
    asked = tokenizer("bert")(" ".join(words), return_tensors="pt")
    with torch.no_grad():
        found: torch.Tensor = made.eval()(**asked).last_hidden_state[0].sum(dim=0)
    return found


def test_a_point_is_the_mean_over_the_tokens_at_a_length_of_one() -> None:
    sum_D = mean(module(), WORDS[:5])
    (point_D,), _ = encoder().embed([" ".join(WORDS[:5])])
    assert torch.allclose(point_D, sum_D / sum_D.norm(), atol=1e-6)


def test_a_text_is_the_same_point_alone_and_beside_longer_ones() -> None:
    asked = [" ".join(WORDS[:count]) for count in (1, 3, 40, 2)]
    together_ND, _ = encoder().embed(asked)
    alone_ND = torch.cat([encoder().embed([text])[0] for text in asked])
    assert torch.allclose(together_ND, alone_ND, atol=1e-6)
    assert torch.allclose(together_ND.norm(dim=1), torch.ones(len(asked)))


def test_a_text_that_is_too_long_for_a_pass_is_read_in_parts_to_its_end() -> None:
    size = ROOM - 2
    parts = [WORDS[:size], WORDS[size : 2 * size], WORDS[2 * size : 2 * size + 3]]
    sum_D = sum(mean(module(), part) for part in parts)
    assert isinstance(sum_D, torch.Tensor)
    words = [word for part in parts for word in part]
    (point_D, other_D), _ = encoder().embed([" ".join(words), " ".join([*words[:-1], WORDS[-1]])])
    assert torch.allclose(point_D, sum_D / sum_D.norm(), atol=1e-6)
    assert float((point_D - other_D).norm()) > 1e-3


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_query_is_the_prompts_and_not_its_paddings_or_its_targets(kind: str) -> None:
    made = encoder()
    model = editable(kind, encoder=made)
    expected_BD = made([model.task.tokenize(text).token_ids for text in INPUTS], INPUTS)
    assert torch.allclose(model.queries([model.task.tokenize(text) for text in INPUTS]), expected_BD, atol=1e-6)
    engine = EditEngine(model, CODEBOOK, EditConfig())
    for text, expected_D in zip(INPUTS, expected_BD, strict=True):
        target = "wrong" if kind == "bert" else WORDS[7]
        _, session, _ = model.suffix_runner.inspect(model.prepare_correction(text, target)[1], engine.lookup)
        assert torch.allclose(session.queries_BD[0], expected_D, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_prompts_are_read_from_their_masks(kind: str) -> None:
    """Beside a longer one each has padding, here of tokens that are words."""
    model = editable(kind, encoder=encoder())
    prompts = [model.task.tokenize(text) for text in INPUTS]
    model.task.tokenizer.pad_token = WORDS[3]
    assert model.task.batch(prompts).prompt_token_ids() == [list(prompt.token_ids) for prompt in prompts]


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_edit_serves_its_prompt_in_any_batch_and_asks_the_encoder_once(kind: str) -> None:
    made = encoder()
    engine = EditEngine(
        editable(kind, encoder=made), CODEBOOK, EditConfig(radius=0.2, radius_unit="absolute", traffic_sample_size=0)
    )
    engine.apply(engine.lead_delta({}))
    before = said(engine, INPUTS)
    target = next(target for target in ("right", "both") if target != before[0]) if kind == "bert" else WORDS[7]
    outcome, record = correct(engine, "f0", INPUTS[0], target)
    assert record is not None, outcome
    assert engine.codebook.keys_ND.shape == (1, 32 + PROMPT_HASH_DIM)
    made.calls = 0
    assert said(engine, INPUTS) == [target, *before[1:]]
    assert made.calls == 1
    assert said(engine, INPUTS[:1]) == [target]


def said(engine: EditEngine, inputs: list[str]) -> list[str]:
    prompts = [engine.model.task.tokenize(text) for text in inputs]
    served = engine.model.answer(prompts, [Parameters()] * len(prompts), engine.lookup)
    return [str(row.answer.outputs.text or row.answer.outputs.label) for row in served]


def test_prompts_that_the_encoder_cannot_tell_apart_are_corrected_each_in_its_own_way() -> None:
    """As texts that differ in capitals, for one that reads none."""

    class Deaf(Counted):
        def embed(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
            return super().embed([WORDS[0]] * len(texts))

    engine = EditEngine(
        editable("llama", encoder=Deaf(module(), tokenizer("bert"), "deaf")),
        CODEBOOK,
        EditConfig(traffic_sample_size=0),
    )
    engine.apply(engine.lead_delta({}))
    targets = dict(zip(INPUTS[:4], (WORDS[7], WORDS[9], WORDS[11], WORDS[7]), strict=True))
    for number, (text, target) in enumerate(targets.items()):
        correct(engine, f"f{number}", text, target, number)
        done = list(targets)[: number + 1]
        assert said(engine, done) == [targets[one] for one in done]
    assert correct(engine, "again", INPUTS[0], WORDS[13], 9)[0].status == "replaced"
    assert said(engine, INPUTS[:4]) == [WORDS[13], *list(targets.values())[1:]]


def test_pairs_that_read_alike_are_different_prompts() -> None:
    model = editable("bert", encoder=encoder())
    one, two, three = WORDS[:3]
    pairs = [(f"{one} {two}", three), (one, f"{two} {three}")]
    first_D, second_D = model.queries([model.task.tokenize(pair) for pair in pairs])
    assert 0 < float((first_D - second_D).norm()) <= 2 * PROMPT_HASH_NORM


def test_what_the_encoder_cannot_read_serves_nothing_but_itself() -> None:
    """To many encoders a text in another script, or a long word, is one unknown word."""
    names = json.loads(tokenizer("bert").backend_tokenizer.to_str())
    names["model"]["vocab"] = {word: row for word, row in names["model"]["vocab"].items() if row < SIZE - 4}
    few = tokenizer("bert")
    few._tokenizer = Tokenizer.from_str(json.dumps(names))
    one, *strange = WORDS[-5:]
    made = SentenceEncoder(module(), few, "of few words")
    engine = EditEngine(
        editable("bert", encoder=made), CODEBOOK, EditConfig(radius=1.0, radius_unit="absolute", traffic_sample_size=0)
    )
    engine.apply(engine.lead_delta({}))
    inputs = [strange[0], strange[1], f"{one} {strange[2]} {one}", f"{one} {strange[3]} {one}", f"{one} {one}"]
    assert made.embed(inputs)[1].tolist() == [False, False, False, False, True]
    before = said(engine, inputs)
    for number, place in enumerate((0, 2)):
        target = next(target for target in ("right", "both") if target != before[place])
        correct(engine, f"f{number}", inputs[place], target, number)
        before[place] = target
        assert said(engine, inputs) == before


def test_a_tokenizer_without_a_token_for_unknown_words_reads_all() -> None:
    """As that of GPT-2, which names its end for it, with which shorter texts are padded as well."""
    names = tokenizer("bert")
    names.unk_token = names.pad_token = names.eos_token
    assert SentenceEncoder(module(), names, "reads").embed([WORDS[0], " ".join(WORDS[:4])])[1].all()


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=6), min_size=2, max_size=9, unique_by=tuple))
def test_marks_are_short_and_no_two_prompts_share_one(prompts: list[list[int]]) -> None:
    found_NM = prompt_hash_vectors(prompts)
    assert torch.equal(found_NM, torch.cat([prompt_hash_vectors([prompt]) for prompt in prompts]))
    assert torch.allclose(found_NM.norm(dim=1), torch.tensor(1.0))
    assert PROMPT_HASH_NORM * float((found_NM[0] - found_NM[1:]).norm(dim=1).min()) > 50 * match_tolerance(
        1.0, "float32"
    )


def test_another_encoder_is_another_key_space() -> None:
    shorter = SentenceEncoder(module(), tokenizer("bert"), "encoder-0", ROOM // 2)
    made = [editable("bert"), *(editable("bert", encoder=one) for one in (encoder(0), encoder(1), shorter))]
    assert len({model.fingerprint for model in made}) == len(made)
    with pytest.raises(ValueError, match="query='last' and an encoder are both given"):
        editable("bert", encoder=encoder(), query="last")


def test_noise_of_queries_is_the_encoders_and_not_that_of_the_models_weights() -> None:
    half = EditEngine(editable("bert", encoder=encoder()), CODEBOOK, EditConfig())
    half.model.dtype = "bfloat16"
    assert half.tolerance(np.ones(2, np.float32)) == match_tolerance(2**0.5, "float32")


def test_a_loaded_encoder_is_told_by_what_is_read_of_it(tmp_path: Path) -> None:
    """BertModel draws a pooler where the checkpoint has none."""
    module(pooler=False).save_pretrained(tmp_path / "one")
    tokenizer("bert").save_pretrained(tmp_path / "one")
    first, second = (SentenceEncoder.load(str(tmp_path / "one"), device="cpu") for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert torch.equal(first.embed(INPUTS)[0], second.embed(INPUTS)[0])


def test_a_folder_that_is_model_and_encoder_has_a_fingerprint_of_each(tmp_path: Path) -> None:
    model = editable("bert")
    for saved in (model.module, model.task.tokenizer):
        saved.save_pretrained(tmp_path / "both")
    folder, fingerprints = str(tmp_path / "both"), []
    for cache in (tmp_path / "cache", None):
        SentenceEncoder.load(folder, device="cpu", cache=cache)
        fingerprints.append(EditableModel.load(folder, model.layer, device="cpu", cache=cache).fingerprint)
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize(
    ("file", "said", "match"),
    [
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
            "is not the mean",
        ),
        (
            "modules.json",
            [{"type": "sentence_transformers.models.Dense"}],
            "is not the mean of its tokens, but .*Dense",
        ),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}, ""),
        ("sentence_bert_config.json", {"max_seq_length": 8}, ""),
        ("1_Pooling/config.json", [1], "the encoder .* cannot be loaded: Expected `object`, got `array`"),
        ("sentence_bert_config.json", {"max_seq_length": 2}, "cannot be loaded: Expected `int` >= 8"),
    ],
    ids=["first token", "dense", "mean", "shorter", "no object", "too short"],
)
def test_what_sentence_transformers_say_of_an_encoder_is_heeded(
    tmp_path: Path, file: str, said: object, match: str
) -> None:
    for saved in (module(), tokenizer("bert")):
        saved.save_pretrained(tmp_path)
    plain = SentenceEncoder.load(str(tmp_path), device="cpu")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(said))
    if match:
        with pytest.raises(ModelError, match=match):
            SentenceEncoder.load(str(tmp_path), device="cpu")
        return
    encoder = SentenceEncoder.load(str(tmp_path), device="cpu")
    text = " ".join(WORDS[:20])
    assert torch.allclose(encoder.embed([text])[0], plain.embed([text])[0], atol=1e-3) is ("Pooling" in file)
    assert (encoder.fingerprint == plain.fingerprint) is ("Pooling" in file)


def test_an_encoder_without_its_tokenizer_is_rejected(tmp_path: Path) -> None:
    """Transformers make up one of five tokens, to which every word is unknown."""
    module().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be"):
        SentenceEncoder.load(str(tmp_path), device="cpu")


def test_a_language_model_is_no_encoder(tmp_path: Path) -> None:
    model = editable("llama")
    for saved in (model.module, model.task.tokenizer):
        saved.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="it is a language model, not a sentence encoder"):
        SentenceEncoder.load(str(tmp_path), device="cpu")


@pytest.mark.parametrize("broken", ["cut off", "of other sizes"])
def test_a_broken_checkpoint_is_one_sentence(tmp_path: Path, broken: str) -> None:
    for saved in (module(), tokenizer("bert")):
        saved.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    if broken == "cut off":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        tensors = load_file(weights)
        tensors["embeddings.LayerNorm.weight"] = torch.ones(3)
        save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ModelError, match=r"^the encoder .* cannot be "):
        SentenceEncoder.load(str(tmp_path), device="cpu")


def test_a_checkpoint_that_lacks_weights_is_rejected(tmp_path: Path) -> None:
    module().save_pretrained(tmp_path)
    tokenizer("bert").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("encoder.layer.0.output.dense.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"has no encoder\.layer\.0\.output\.dense\.weight"):
        SentenceEncoder.load(str(tmp_path), device="cpu")


def test_what_is_no_sentence_encoder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has a decoder"):
        SentenceEncoder(editable("t5-encoder").module, tokenizer("t5"), "t5")
    unpadded = tokenizer()
    unpadded.pad_token = None
    with pytest.raises(ModelError, match="its tokenizer cannot split long texts into parts"):
        SentenceEncoder(GPT2Model(GPT2Config(vocab_size=SIZE, n_embd=8, n_layer=1, n_head=2)), unpadded, "gpt2")
    with pytest.raises(ModelError, match="does not read 64 tokens"):
        SentenceEncoder(editable("llama").module, tokenizer(), "llama")
    with pytest.raises(ModelError, match=r"the encoder .* there is no such folder; choose another GRACESTREAM_ENCODER"):
        SentenceEncoder.load(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"the encoder .* cannot be loaded"):
        SentenceEncoder.load(str(tmp_path / "empty"))


def test_a_correction_of_a_text_serves_a_chat_of_it_under_any_system_prompt_and_the_other_way_round() -> None:
    """A chat that goes on is served by its own entry alone: its last words may mean something else."""
    asked = " ".join(WORDS[:5])
    first, other = chat(asked), chat(asked, system=" ".join(WORDS[9:13]))
    later, elsewhere = chat(WORDS[20], WORDS[21], asked), chat(WORDS[22], WORDS[23], asked)
    forms: list[Inputs] = [asked, first, other]
    for corrected in forms:
        engine = chat_engine()
        outcome, _ = correct(engine, "f0", corrected, WORDS[7])
        assert outcome.status == "added"
        assert served(engine, [*forms, later, elsewhere]) == ["f0", "f0", "f0", None, None]
    engine = chat_engine()
    outcome, _ = correct(engine, "f0", later, WORDS[7])
    assert outcome.status == "added"
    assert served(engine, [*forms, later, elsewhere]) == [None, None, None, "f0", None]


def chat_engine() -> EditEngine:
    model = editable("llama", encoder=encoder(), chat_template=CHAT)
    engine = EditEngine(model, CODEBOOK, EditConfig(radius=0.2, radius_unit="absolute", traffic_sample_size=0))
    engine.apply(engine.lead_delta({}))
    return engine


def served(engine: EditEngine, inputs: list[Inputs]) -> list[str | None]:
    """The entry that serves each, in one batch."""
    prompts = [engine.model.task.tokenize(one) for one in inputs]
    rows = engine.model.answer(prompts, [Parameters()] * len(prompts), engine.lookup)
    assert torch.equal(engine.model.queries(prompts).isfinite().all(dim=1), torch.ones(len(inputs), dtype=torch.bool))
    return [None if row.served_by is None else row.served_by.entry_id for row in rows]
