"""ROME writes one association into a linear layer, at the least cost to what it makes of other inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gracestream.pipeline.experiments.editors.editor import EditorError
from gracestream.pipeline.experiments.editors.rome import Rome
from gracestream.pipeline.experiments.evaluation import Evaluator
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model.editable import EditableModel
from tests.support.tiny_models import editable, texts
from tests.support.toy_corrections import examples_of

TEXTS = texts(60, seed=17)
TRAFFIC = TEXTS[20:]


def seen_by_layer(model: EditableModel, text: str) -> Tensor:
    """Its inputs at all tokens, (T, D)."""
    seen: list[Tensor] = []
    layer = model.module.get_submodule(model.layer)
    handle = layer.register_forward_hook(lambda _layer, args, _output: seen.append(args[0][0]))
    with torch.no_grad():
        model.task.forward_prompt(model.task.batch([model.task.tokenize(text)]))
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
class TestRome:
    @pytest.mark.slow
    def test_corrections_hold_and_the_weights_come_back(self, kind: str) -> None:
        model = editable(kind)
        before = {key: value.clone() for key, value in model.module.state_dict().items()}
        evaluation = Evaluator(model, "accuracy")
        with Rome(model, TRAFFIC, steps=200, prefixes=0) as editor:
            held = 0
            for number, example in enumerate(examples_of(kind, TEXTS[:6])):
                made = editor.edit(number, example)
                (score,) = evaluation.score(editor, [example])
                assert score.exact == (made.status != "failed")
                held += score.exact
            assert held >= 2
            changed = [key for key, value in model.module.state_dict().items() if not torch.equal(value, before[key])]
            assert changed == [f"{model.layer}.weight"]
        assert all(torch.equal(value, before[key]) for key, value in model.module.state_dict().items())

    def test_a_change_has_rank_one_and_spares_what_the_traffic_shows(self, kind: str) -> None:
        model = editable(kind)
        editor = Rome(model, TRAFFIC, steps=10, prefixes=0)
        was_VD = editor.weight_VD.clone()
        example = next(one for one in examples_of(kind, TEXTS) if editor.edit(0, one).status != "unchanged")
        change_VD = editor.weight_VD - was_VD
        lengths = torch.linalg.svdvals(change_VD)
        assert float(lengths[1]) < 1e-4 * float(lengths[0])
        key_D = seen_by_layer(model, example.inputs)[-1]
        moved_V = change_VD @ key_D
        others_TD = torch.cat([seen_by_layer(model, text) for text in TRAFFIC])
        plain_VD = torch.outer(moved_V, key_D / key_D.square().sum())  # puts the same value at the key
        spared = (others_TD @ change_VD.T).square().sum()
        assert 0 < float(spared) < 0.5 * float((others_TD @ plain_VD.T).square().sum())

    def test_a_prompt_gets_its_value_exactly_though_its_key_is_a_mean_over_prefixes(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = editable(kind)
        values: list[Tensor] = []
        found = Rome._optimise_value

        def kept(editor: Rome, *given: Any) -> tuple[Tensor, int]:
            value_V, steps = found(editor, *given)
            values.append(value_V)
            return value_V, steps

        monkeypatch.setattr(Rome, "_optimise_value", kept)
        with Rome(model, TRAFFIC, steps=3, prefixes=2) as editor:
            was_VD = editor.weight_VD.clone()
            example = next(one for one in examples_of(kind, TEXTS) if editor.edit(0, one).status != "unchanged")
            change_VD = editor.weight_VD - was_VD
        at = example.inputs.split().index(example.subject)
        torch.testing.assert_close(
            change_VD @ seen_by_layer(model, example.inputs)[at], values[-1], rtol=1e-3, atol=1e-5
        )
        with Rome(model, TRAFFIC, steps=3, prefixes=0) as plain:
            was_VD = plain.weight_VD.clone()
            plain.edit(0, example)
            alone_VD = plain.weight_VD - was_VD
        ours, theirs = (torch.linalg.svd(change).Vh[0] for change in (change_VD, alone_VD))
        assert float((ours @ theirs).abs()) < 1 - 1e-4, "other texts before it have a say in the direction"

    def test_the_subject_is_where_it_is_written(self, kind: str) -> None:
        """Before it nothing changes, for a causal model; it is at the last token where no subject is known."""
        model = editable(kind)
        words = TEXTS[0].split()
        changed = {}
        for subject in (" ".join(words[1:3]), "", "nowhere"):
            with Rome(model, TRAFFIC, steps=3, prefixes=0) as editor:
                was_VD = editor.weight_VD.clone()
                assert editor.edit(0, Example(TEXTS[0], "river", subject)).steps > 0
                change_VD = editor.weight_VD - was_VD
            shares_T = seen_by_layer(model, TEXTS[0]) @ torch.linalg.svd(change_VD).Vh[0]
            changed[subject] = int(shares_T.abs().argmax())
        assert changed[" ".join(words[1:3])] == 2
        assert changed[""] == changed["nowhere"] == len(words) - 1


@pytest.mark.parametrize("kind", ["bert", "t5-encoder"])
def test_other_models_are_rejected(kind: str) -> None:
    with pytest.raises(EditorError, match="causal"):
        Rome(editable(kind), TRAFFIC)


def test_it_needs_texts_and_a_linear_layer() -> None:
    with pytest.raises(EditorError, match="needs texts"):
        Rome(editable("llama"), [])
    with pytest.raises(EditorError, match="is not a linear layer"):
        Rome(editable("llama", layer="model.layers[1].mlp"), TRAFFIC)
