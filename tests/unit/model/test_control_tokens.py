"""Control tokens in a text are text, for each family of tokenizers, and other text has the tokens it always had."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertModel

from gracestream.pipeline.model.control_tokens import control_tokens, text_tokenizer
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.sentence_encoder import SentenceEncoder
from tests.support.tiny_models import KINDS, LIMITS, MODEL, editable
from tests.support.tokenizer_families import FAMILIES, PARTS, spellings, wordpiece

families = pytest.mark.parametrize("family", list(FAMILIES))


@cache
def made(family: str) -> tuple[Any, Any]:
    """The tokenizer of a family, and that for text."""
    tokenizer = FAMILIES[family]()
    return tokenizer, text_tokenizer(tokenizer)


@families
def test_control_tokens_in_a_text_are_text(family: str) -> None:
    tokenizer, ours = made(family)
    control = control_tokens(tokenizer)
    assert control
    for spelling in spellings(tokenizer):
        for text in (
            spelling,
            f" {spelling} ",
            f"The train{spelling}",
            f"The {spelling}{spelling} train",
            spelling * 3,
        ):
            plain = ours(text, add_special_tokens=False)["input_ids"]
            assert plain, text
            assert not control.keys() & set(plain), text
            around = ours("", add_special_tokens=True)["input_ids"]
            assert sorted(ours(text)["input_ids"]) == sorted([*plain, *around]), "the template's own are still there"


@families
def test_there_are_control_tokens_to_be_kept_out(family: str) -> None:
    """Without this the tests above would hold of any tokenizer."""
    tokenizer, _ = made(family)
    control = control_tokens(tokenizer)
    assert all(
        control.keys() & set(tokenizer(spelling, add_special_tokens=False)["input_ids"])
        for spelling in spellings(tokenizer)
    )


TEXT = st.lists(st.one_of(st.text(), PARTS, st.sampled_from(PROBE_TEXTS)), max_size=8).map("".join)


@families
@given(text=TEXT)
def test_other_text_has_the_tokens_that_it_always_had(family: str, text: str) -> None:
    tokenizer, ours = made(family)
    theirs = tokenizer(text)
    if any(spelling.lower() in text.lower() for spelling in spellings(tokenizer)):
        return
    found = tokenizer(text, add_special_tokens=False)["input_ids"]
    if control_tokens(tokenizer).keys() & set(found):  # spelled with other characters, such as fullwidth ones
        assert not control_tokens(tokenizer).keys() & set(ours(text, add_special_tokens=False)["input_ids"])
        return
    assert ours(text)["input_ids"] == theirs["input_ids"]


def test_a_normalised_spelling_is_text_too() -> None:
    tokenizer, ours = made("Unigram")
    fullwidth = "\N{FULLWIDTH LESS-THAN SIGN}/s>"
    assert 1 in tokenizer(fullwidth, add_special_tokens=False)["input_ids"]
    assert 1 not in ours(fullwidth, add_special_tokens=False)["input_ids"]


@families
def test_the_given_tokenizer_stays_as_it_is(family: str) -> None:
    tokenizer = FAMILIES[family]()
    texts = [*spellings(tokenizer), *PROBE_TEXTS]
    before = [tokenizer(text)["input_ids"] for text in texts]
    state = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else ""
    text_tokenizer(tokenizer)(texts)
    assert [tokenizer(text)["input_ids"] for text in texts] == before
    assert (tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else "") == state


@pytest.mark.parametrize("kind", list(KINDS))
def test_prompts_and_targets_of_each_kind_have_none(kind: str) -> None:
    model = editable(kind)
    control = control_tokens(model.task.tokenizer).keys()
    before = model.task.tokenize("The train").token_ids
    spelled = model.task.tokenize("The </s> [SEP] [CLS] [PAD] train").token_ids
    assert sum(token in control for token in spelled) == sum(token in control for token in before)
    if kind != "bert":
        assert not control & set(model.task._target_ids("The train", "[SEP]"))  # type: ignore[attr-defined]


def test_the_segments_of_a_pair_are_the_tokenizers_whatever_its_texts_say() -> None:
    model = editable("bert")
    plain = model.task.batch([model.task.tokenize(("The train", "leaves at"))]).kwargs["token_type_ids"]
    assert plain.tolist() == [[0, 0, 0, 0, 1, 1, 1]]
    spelled = model.task.tokenize(("The [SEP] train", "leaves at"))
    first = spelled.token_ids.index(3)
    assert spelled.segments == tuple([0] * (first + 1) + [1] * (len(spelled) - first - 1))
    longer = model.task.batch([spelled, model.task.tokenize("The")]).kwargs["token_type_ids"]
    assert longer[0].tolist() == list(spelled.segments)
    assert not longer[1].any()


def test_segments_are_padded_as_the_tokenizer_pads_them() -> None:
    with torch.random.fork_rng(devices=[]):
        module = KINDS["bert"].build()
    names = wordpiece()
    names._pad_token_type_id = 1
    model = EditableModel(module, names, KINDS["bert"].layer, limits=LIMITS, fingerprint=MODEL)
    batch = model.task.batch([model.task.tokenize(text) for text in ("a b c", "a")])
    assert batch.kwargs["token_type_ids"].tolist() == [[0] * 5, [0] * 3 + [1] * 2]


@pytest.mark.parametrize("family", ["WordPiece", "Unigram"])
def test_a_sentence_encoder_reads_them_as_text(family: str) -> None:
    tokenizer = FAMILIES[family]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=32,
        )  # fmt: skip
        module = BertModel(config, add_pooling_layer=False)
    seen: list[list[int]] = []
    module.register_forward_pre_hook(lambda _, __, given: seen.extend(given["input_ids"].tolist()), with_kwargs=True)
    encoder = SentenceEncoder(module, tokenizer, MODEL)
    del seen[:]
    control = control_tokens(tokenizer)
    encoder.embed(["The train"])
    (plain,) = seen
    for spelling in spellings(tokenizer):
        del seen[:]
        encoder.embed([f"The {spelling} train"])
        (spelled,) = seen
        assert sum(token in control for token in spelled) == sum(token in control for token in plain), spelling
