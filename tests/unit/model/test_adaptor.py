"""An edited model answers a request the same alone, in any batch and under any padding, and writes nothing."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from torch import nn

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex, NearestKeys
from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.codebook.policy import match_tolerance
from gracestream.pipeline.model.adaptor import Adaptor, last_token_positions
from gracestream.pipeline.model.batch import Batch, Prompt
from gracestream.pipeline.model.editable import EditableModel, ServedAnswer
from gracestream.pipeline.model.layers import LayerError
from gracestream.schemas.deltas import EntryChange
from gracestream.schemas.messages import Parameters
from tests.support.tiny_models import KINDS, added, editable, index_of, new_codebook, sealed, texts

GENERATORS = [kind for kind in KINDS if kind != "bert"]
INPUTS = texts(33, seed=5)


def edited(model: EditableModel, inputs: list[str], radius: float = 0.01) -> tuple[Codebook, KeyIndex]:
    """A codebook with a loud random value for each of the inputs."""
    codebook = new_codebook(model.fingerprint, model.layer)
    queries_BD = model.queries([model.task.tokenize(text) for text in inputs]).cpu().numpy()
    values_BV = np.random.default_rng(0).standard_normal((len(inputs), model.module.config.hidden_size))
    for number, (query_D, value_V) in enumerate(zip(queries_BD, values_BV, strict=True)):
        codebook.apply(sealed(codebook, added(f"e{number}", query_D, radius, value=20 * value_V)))
    return codebook, index_of(codebook)


def ask(
    model: EditableModel, inputs: list[str], codebook: Codebook, index: KeyIndex, **fields: int
) -> list[ServedAnswer]:
    prompts = [model.task.tokenize(text) for text in inputs]
    return model.answer(prompts, [Parameters(**fields)] * len(prompts), CodebookLookup(codebook, index))


def said(row: ServedAnswer) -> str:
    outputs = row.answer.outputs
    return str(outputs.text if outputs.label is UNSET else outputs.label)


def test_fault_batches_over_one_fail_and_one_pad_token_moves_the_query(model: EditableModel) -> None:
    """The same request alone and among 32 others of other lengths: the same query, entry and answer."""
    codebook, index = edited(model, INPUTS[:8])
    together = ask(model, INPUTS, codebook, index)
    queries_BD = model.queries([model.task.tokenize(text) for text in INPUTS])
    for row, text in enumerate(INPUTS[:12]):
        alone = ask(model, [text], codebook, index)[0]
        query_D = model.queries([model.task.tokenize(text)])[0]
        assert float((query_D - queries_BD[row]).norm()) <= match_tolerance(float(query_D.norm()), "float32")
        assert said(alone) == said(together[row])
        assert (alone.served_by is None) == (together[row].served_by is None) == (row >= 8)
        if alone.served_by is not None:
            assert alone.served_by.entry_id == f"e{row}"


def test_an_entry_changes_answers_within_its_radius_only(model: EditableModel) -> None:
    nothing = new_codebook(model.fingerprint, model.layer)
    before = [said(row) for row in ask(model, INPUTS, nothing, index_of(nothing))]
    after = [said(row) for row in ask(model, INPUTS, *edited(model, INPUTS[:8]))]
    assert after[8:] == before[8:]
    assert after[:8] != before[:8]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_gives_the_same_query_entry_and_answer(
    model: EditableModel, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where absolute positions are counted from the mask, or for the side that the task pads."""
    codebook, index = edited(model, INPUTS[:2])
    plain = [said(row) for row in ask(model, INPUTS[:2], codebook, index)]
    monkeypatch.setattr(model.task.tokenizer, "padding_side", side)
    assert [said(row) for row in ask(model, INPUTS[:6], codebook, index)][:2] == plain


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pads", [1, 7])
def test_fault_one_pad_token_moves_the_query_off_its_key(kind: str, side: str, pads: int) -> None:
    """Explicit masks, the model called as it is: the query is found from the mask, never at position -1."""
    model = editable(kind)
    prompt = model.task.tokenize(INPUTS[0])
    key_D = model.queries([prompt])[0]
    ids, mask = [0] * pads + [*prompt.token_ids], [0] * pads + [1] * len(prompt)
    if side == "right":
        ids, mask = [*prompt.token_ids] + [0] * pads, [1] * len(prompt) + [0] * pads
    mask_1T = torch.tensor([mask])
    positions_1T = (mask_1T.cumsum(dim=1) - 1).clamp(min=0)
    kwargs = {"input_ids": torch.tensor([ids]), "attention_mask": mask_1T, "position_ids": positions_1T}
    with torch.no_grad(), model.adaptor.record_query(Batch(kwargs, mask_1T)) as session:
        model.module(**kwargs)
    assert float((session.queries_BD[0] - key_D).norm()) <= match_tolerance(float(key_D.norm()), "float32")


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_kv_cache_changes_no_answer_of_an_edited_model(
    model: EditableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    codebook, index = edited(model, INPUTS[:4])
    wanted = {"max_new_tokens": 20, "min_new_tokens": 20}
    cached = ask(model, INPUTS[:6], codebook, index, **wanted)
    monkeypatch.setattr(model.task._config, "use_cache", False)  # type: ignore[attr-defined]
    assert [said(row) for row in ask(model, INPUTS[:6], codebook, index, **wanted)] == [said(row) for row in cached]
    assert all(row.served_by for row in cached[:4])


class CountingIndex(KeyIndex):
    """Counts lookups."""

    count = 0

    def nearest_within_radius(self, queries_BD: torch.Tensor) -> NearestKeys:
        self.count += 1
        return super().nearest_within_radius(queries_BD)


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("inputs", [INPUTS[:3], ["Which"]], ids=["batch", "a prompt of one token"])
def test_fault_every_token_generated_queries_the_codebook(
    model: EditableModel, use_cache: bool, inputs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codebook, _ = edited(model, inputs)
    index = CountingIndex(codebook, torch.device("cpu"))
    monkeypatch.setattr(model.task._config, "use_cache", use_cache)  # type: ignore[attr-defined]
    ask(model, inputs, codebook, index, max_new_tokens=12, min_new_tokens=12)
    assert index.count == 1


def test_fault_inference_adds_keys_or_draws_random_numbers(kind: str) -> None:
    """Serving leaves codebook, weights and every global generator alone, even where the checkpoint says `do_sample`."""
    model = editable(kind)
    if kind in GENERATORS:
        model.module.generation_config.do_sample = True
        model.module.generation_config.temperature = 2.0
        model = EditableModel(model.module, model.task.tokenizer, model.layer, limits=model.task.limits)
    codebook, index = edited(model, INPUTS[:4])
    weights = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    entries, torch_state, numpy_state = codebook.state_digest(), torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    python_state = random.getstate()
    answers = [[said(row) for row in ask(model, INPUTS, codebook, index)] for _ in range(2)]
    assert answers[0] == answers[1]
    assert codebook.state_digest() == entries
    assert len(codebook) == 4
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert str(np.random.get_state()) == str(numpy_state)  # noqa: NPY002
    assert random.getstate() == python_state


def test_an_entry_answers_only_a_query_strictly_within_its_radius(model: EditableModel) -> None:
    codebook, index = edited(model, INPUTS[:1], radius=0.0)
    assert ask(model, INPUTS[:1], codebook, index)[0].served_by is None
    codebook.apply(sealed(codebook, EntryChange(entry_id="e0", radius=1e-3)))
    served_by = ask(model, INPUTS[:1], codebook, index)[0].served_by
    assert served_by is not None
    assert served_by.entry_id == "e0"
    assert served_by.radius == pytest.approx(1e-3)
    assert served_by.distance < 1e-3


@pytest.mark.parametrize(("kind", "layer"), [(kind, KINDS[kind].layer) for kind in KINDS])
def test_the_papers_names_of_layers_are_understood(kind: str, layer: str) -> None:
    assert editable(kind, f" {layer.removesuffix('.weight')}.weight").layer == editable(kind, layer).layer


@pytest.mark.parametrize(
    ("kind", "layer", "named"),
    [
        ("gpt2", "transformer.h.99.mlp", "transformer.h.0 … transformer.h.2"),
        ("bert", "bert.encoder.layer[1].output.nothing", "bert.encoder.layer.1.output.dense"),
        ("llama", "nonsense", "model"),
        ("t5-encoder", "encoder.block[1].layer[7]", "encoder.block.1.layer.0 … encoder.block.1.layer.1"),
        ("gpt2", "transformer.h", "transformer.h.0 … .2"),
    ],
)
def test_an_unknown_layer_is_rejected_with_the_names_of_those_there_are(kind: str, layer: str, named: str) -> None:
    with pytest.raises(LayerError) as raised:
        editable(kind, layer)
    assert named in str(raised.value)
    assert layer in str(raised.value)


def test_a_module_of_another_shape_cannot_be_edited_and_says_so() -> None:
    model = editable("bert", "classifier")
    with pytest.raises(LayerError, match=r"Linear does not map \(batch, tokens, width\)"):
        model.queries([model.task.tokenize(INPUTS[0])])


def test_a_removed_adaptor_leaves_the_model_as_it_was() -> None:
    model = editable("bert")
    codebook, index = edited(model, INPUTS[:1])
    model.adaptor.remove()
    batch = model.task.batch([model.task.tokenize(INPUTS[0])])
    with (
        torch.no_grad(),
        model.adaptor.with_codebook(
            batch, CodebookLookup(codebook, index), row_wording=model.task.wording_getter(batch)
        ) as session,
    ):
        model.module(**batch.kwargs)
    assert session.serving_entries == []


def test_a_failed_batch_leaves_the_adaptor_usable(model: EditableModel) -> None:
    codebook, index = edited(model, INPUTS[:2])
    prompt = model.task.tokenize(INPUTS[0])
    good = said(ask(model, INPUTS[:1], codebook, index)[0])
    with pytest.raises(IndexError):
        model.answer([prompt, Prompt((10**6,))], [Parameters()] * 2, CodebookLookup(codebook, index))
    assert said(ask(model, INPUTS[:1], codebook, index)[0]) == good


def test_outside_a_session_the_model_runs_as_it_always_did(kind: str) -> None:
    wrapped, plain = editable(kind), KINDS[kind]
    edited(wrapped, INPUTS[:1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        bare = plain.build().eval()
    kwargs = wrapped.task.batch([wrapped.task.tokenize(INPUTS[0])]).kwargs
    if "t5" in kind:
        kwargs = {**kwargs, "decoder_input_ids": torch.zeros(1, 1, dtype=torch.long)}
    bare.load_state_dict(wrapped.module.state_dict())
    with torch.no_grad():
        assert torch.equal(wrapped.module(**kwargs).logits, bare(**kwargs).logits)


def test_two_batches_at_once_are_rejected() -> None:
    adaptor = Adaptor(nn.Linear(2, 2), "last", "last")
    one = Batch({}, None)
    with (
        adaptor.record_query(one),
        pytest.raises(RuntimeError, match="one batch at a time"),
        adaptor.record_query(one),
    ):
        pass


def test_pairs_of_texts_have_the_segments_that_their_tokenizer_gives_them() -> None:
    model = editable("bert")
    pairs = [(INPUTS[0], INPUTS[1]), (INPUTS[2], INPUTS[3])]
    ours = model.task.batch([model.task.tokenize(pair) for pair in pairs]).kwargs
    firsts, seconds = [first for first, _ in pairs], [second for _, second in pairs]
    theirs = model.task.tokenizer(firsts, seconds, padding=True, return_tensors="pt")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("mask", "last"), [([1, 1, 0, 0], 1), ([0, 0, 1, 1], 3), ([1, 0, 0, 0], 0), ([0, 1, 1, 0], 2)])
def test_the_last_real_token_is_found_wherever_the_padding_is(mask: list[int], last: int) -> None:
    assert last_token_positions(torch.tensor([mask])).tolist() == [last]


@pytest.mark.parametrize(("query", "expected"), [("first", 2.0), ("last", 4.0), ("mean", 3.0)])
@pytest.mark.parametrize("replace", ["last", "all"])
def test_query_and_replaced_tokens_are_the_settings_and_never_padding(
    query: Any, replace: Any, expected: float
) -> None:
    module = nn.Identity()
    adaptor = Adaptor(module, query, replace)
    tokens_1TD = torch.tensor([[[9.0], [2.0], [3.0], [4.0], [9.0]]])
    batch = Batch({}, torch.tensor([[0, 1, 1, 1, 0]]))
    with adaptor.record_query(batch) as session:
        module(tokens_1TD)
    assert session.queries_BD.tolist() == [[expected]]
    with adaptor.inject(batch, torch.tensor([[7.0]])):
        out = module(tokens_1TD)[0, :, 0].tolist()
    assert out == ([9, 7, 7, 7, 9] if replace == "all" else [9, 2, 3, 7, 9])
