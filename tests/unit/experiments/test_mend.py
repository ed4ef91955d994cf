"""MEND starts from the gradient's own outer products, and its change makes the model right."""

import pytest
import torch
from torch import Tensor

from gracestream.pipeline.experiments.editors.editor import EditorError
from gracestream.pipeline.experiments.editors.mend import INITIAL_STEP_SIZE, Mend
from gracestream.pipeline.experiments.evaluation import Evaluator
from tests.support.tiny_models import KINDS, editable, texts
from tests.support.toy_corrections import examples_of

TEXTS = texts(24, seed=17)


@pytest.mark.parametrize("kind", list(KINDS))
def test_each_correction_holds_once_it_is_made_and_the_weights_come_back(kind: str) -> None:
    model = editable(kind)
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    evaluation = Evaluator(model, "accuracy")
    with Mend(model) as editor:
        for number, example in enumerate(examples_of(kind, TEXTS[:6])):
            made = editor.edit(number, example)
            (score,) = evaluation.score(editor, [example])
            assert score.exact == (made.status != "failed")
            assert made.status == "added"
        changed = [key for key, value in model.module.state_dict().items() if not torch.equal(value, before[key])]
        assert {key.rpartition(".")[0] for key in changed} == {model.layer}
    assert all(torch.equal(value, before[key]) for key, value in model.module.state_dict().items())


@pytest.mark.parametrize("kind", list(KINDS))
def test_untrained_it_goes_along_the_tokens_share_of_the_gradient(kind: str) -> None:
    """By hand: the gradient of the weights is the sum over tokens; at a length of one each, it is this change."""
    model = editable(kind)
    example = next(one for one in examples_of(kind, TEXTS) if Mend(model, steps=0).edit(0, one).status != "unchanged")
    model = editable(kind)
    editor = Mend(model, steps=0)
    was_VD = editor.weight_VD.clone()
    _, supervised = model.prepare_correction(example.inputs, example.target)
    passed: list[tuple[Tensor, Tensor]] = []
    layer = model.module.get_submodule(model.layer)
    weight = layer.get_parameter("weight").requires_grad_(True)
    handle = layer.register_forward_hook(lambda _layer, args, output: passed.append((args[0], output)))
    loss = torch.nn.functional.cross_entropy(model.task.logits(supervised)[0], supervised.labels[0])
    handle.remove()
    ((seen_1TD, output_1TV),) = passed
    gradient, slopes_1TV = torch.autograd.grad(loss, [weight, output_1TV])
    weight.requires_grad_(False)
    seen_TD, slopes_TV = seen_1TD[0].detach(), slopes_1TV[0]
    gradient_VD = gradient.T if kind == "gpt2" else gradient
    torch.testing.assert_close(slopes_TV.T @ seen_TD, gradient_VD, rtol=1e-4, atol=1e-6)
    editor.edit(0, example)
    change_VD = editor.weight_VD - was_VD
    unit_TD = seen_TD / seen_TD.norm(dim=1, keepdim=True)
    expected_VD = -INITIAL_STEP_SIZE * (slopes_TV / slopes_TV.norm(dim=1).max()).T @ unit_TD
    torch.testing.assert_close(change_VD, expected_VD, rtol=1e-3, atol=1e-6)


def test_what_it_learned_serves_the_next_correction() -> None:
    """Of a correction that is made, forgotten and made again: the network goes on from what it was."""
    model = editable("llama")
    example = examples_of("llama", TEXTS)[1]
    editor = Mend(model)
    first = editor.edit(0, example)
    assert first.steps > 0
    steps = []
    for number in range(4):
        editor.restore()
        steps.append(editor.edit(number, example).steps)
    assert max(steps) < first.steps


def test_a_layer_that_is_not_linear_is_named() -> None:
    with pytest.raises(EditorError, match=r"model\.layers\.1\.mlp is not a linear layer but LlamaMLP"):
        Mend(editable("llama", layer="model.layers[1].mlp"))
