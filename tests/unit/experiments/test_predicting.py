"""Memory replaces what the layer puts out for every input, Defer only where its gate says so."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gracestream.pipeline.experiments.editors.predicting import DeferNetwork, MemoryNetwork, ValueNetworkEditor
from gracestream.pipeline.experiments.evaluation import Evaluator
from gracestream.pipeline.model.editable import EditableModel
from tests.support.tiny_models import KINDS, editable, texts
from tests.support.toy_corrections import examples_of

TEXTS = texts(24, seed=17)
OTHERS = TEXTS[8:]


def reluctant(model: EditableModel) -> DeferNetwork:
    """One whose gate is shut to all inputs, and can be opened."""
    editor = DeferNetwork(model, learning_rate=0.03)
    set_gate(editor, -1)
    return editor


def set_gate(editor: DeferNetwork, bias: float) -> None:
    """Open (above 0) or shut it to all inputs."""
    assert isinstance(editor.networks, nn.Linear)
    with torch.no_grad():
        editor.networks.weight[-1] = 0
        editor.networks.bias[-1] = bias


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda model: MemoryNetwork(model, learning_rate=0.3), reluctant], ids=["memory", "defer"]
)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_correction_that_is_told_to_hold_holds(
    kind: str, make: Callable[[EditableModel], ValueNetworkEditor]
) -> None:
    model = editable(kind)
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    editor, evaluation = make(model), Evaluator(model, "accuracy")
    statuses = []
    for number, example in enumerate(examples_of(kind, TEXTS[:6])):
        (was,) = evaluation.score(editor, [example])
        made = editor.edit(number, example)
        assert (made.status == "unchanged") == was.exact
        (score,) = evaluation.score(editor, [example])
        assert score.exact == (made.status != "failed")
        statuses.append(made.status)
    assert "added" in statuses
    assert all(torch.equal(value, before[key]) for key, value in model.module.state_dict().items())


@pytest.mark.parametrize("kind", list(KINDS))
def test_memory_answers_all_inputs_with_a_mean_of_its_vectors(kind: str) -> None:
    model = editable(kind)
    editor, evaluation = MemoryNetwork(model), Evaluator(model, "accuracy")
    assert not any(editor.state_keys(OTHERS)), "before the first correction"
    editor.edit(0, examples_of(kind, TEXTS)[1])
    assert None not in editor.state_keys(OTHERS)
    examples = examples_of(kind, OTHERS)
    assert isinstance(editor.networks, nn.Sequential)
    vectors_VN = editor.networks[2].get_parameter("weight").detach()
    with torch.no_grad():
        vectors_VN.copy_(vectors_VN[:, :1])  # all one, so that attention cannot tell
    supervised = [model.prepare_correction(example.inputs, example.target)[1] for example in examples]
    for one, score in zip(supervised, evaluation.score(editor, examples), strict=True):
        with torch.no_grad(), model.adaptor.inject(one.batch, vectors_VN[:, :1].T):
            assert tuple(model.task.logits(one)[0].argmax(dim=1).tolist()) == score.predicted_tokens


@pytest.mark.parametrize("kind", list(KINDS))
def test_defer_leaves_alone_what_its_gate_does_not_take(kind: str) -> None:
    model = editable(kind)
    examples = examples_of(kind, OTHERS)
    editor = reluctant(model)
    wrong = next(one for one in examples_of(kind, TEXTS) if editor.edit(0, one).status != "unchanged")
    assert wrong.inputs not in OTHERS
    set_gate(editor, -1)
    bare = Evaluator(model, "accuracy").score(editor, examples)
    assert editor.state_keys(OTHERS) == [None] * len(OTHERS)
    set_gate(editor, 1)
    assert None not in editor.state_keys(OTHERS)
    set_gate(editor, -1)
    supervised = [model.prepare_correction(example.inputs, example.target)[1] for example in examples]
    with torch.no_grad():
        chosen = [tuple(model.task.logits(one)[0].argmax(dim=1).tolist()) for one in supervised]
    assert [score.predicted_tokens for score in bare] == chosen
    assert editor.state_keys([]) == []


def test_its_gate_opens_to_what_is_corrected() -> None:
    model = editable("llama")
    editor = reluctant(model)
    assert not any(editor.state_keys(TEXTS))
    assert editor.edit(0, examples_of("llama", TEXTS)[1]).status == "added"
    assert editor.state_keys(TEXTS)[1] is not None


def test_equal_seeds_make_equal_networks() -> None:
    torch.manual_seed(1)
    states = []
    for seed in (0, 0, 1):
        editor = MemoryNetwork(editable("bert"), seed=seed)
        states.append(torch.cat([parameter.flatten() for parameter in editor.networks.parameters()]))
        torch.rand(3)
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
