"""Finetuning makes the model right where it is corrected; what else becomes of it differs between the three."""

from collections.abc import Callable

import pytest
import torch

from gracestream.pipeline.experiments.editors.finetuning import (
    MAX_FISHER_TEXTS,
    ElasticWeights,
    FineTuning,
    PeriodicRetraining,
)
from gracestream.pipeline.experiments.evaluation import Evaluator
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model.editable import EditableModel
from tests.support.tiny_models import KINDS, editable, texts
from tests.support.toy_corrections import examples_of

TEXTS = texts(40, seed=17)
MAKE: dict[str, Callable[[EditableModel], FineTuning]] = {
    "ft": FineTuning,
    "ewc": lambda model: ElasticWeights(model, TEXTS[30:], strength=1.0),
    "retrain": lambda model: PeriodicRetraining(model, interval=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind", list(KINDS))
def test_each_correction_holds_once_it_is_made_and_the_weights_come_back(kind: str, name: str) -> None:
    model = editable(kind)
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    evaluation = Evaluator(model, "accuracy")
    with MAKE[name](model) as editor:
        held = []
        for number, example in enumerate(examples_of(kind, TEXTS[:6])):
            (was,) = evaluation.score(editor, [example])
            made = editor.edit(number, example)
            assert (made.status == "unchanged") == was.exact
            assert (made.steps > 0) == (not was.exact)
            (score,) = evaluation.score(editor, [example])
            assert score.exact == (made.status != "failed")
            held.append(score.exact)
        assert sum(held) >= 4
        layer = model.module.get_submodule(model.layer)
        assert not any(weight.requires_grad for weight in layer.parameters())
        changed = [key for key, value in model.module.state_dict().items() if not torch.equal(value, before[key])]
        assert changed
        assert {key.rpartition(".")[0] for key in changed} == {model.layer}
    assert all(torch.equal(value, before[key]) for key, value in model.module.state_dict().items())


def test_elastic_weights_move_less_where_they_count() -> None:
    """By the Fisher information of before, as the penalty weighs it."""
    moved = {}
    for strength in (0.0, 1e3):
        model = editable("bert")
        with ElasticWeights(model, TEXTS[30:], strength=strength, learning_rate=1e-3) as editor:
            before, fisher = [weight.clone() for weight in editor.weights], editor.fisher
            targets = ("right", "wrong", "both")
            made = [editor.edit(0, Example(TEXTS[0], target)).status for target in targets]
            assert made.count("added") >= 2
            parts = zip(editor.weights, before, fisher, strict=True)
            moved[strength] = sum(float((count * (now - was).square()).sum()) for now, was, count in parts)
    assert 0 < moved[1e3] < moved[0.0]


def test_fisher_information_is_of_answers_as_the_model_gives_them() -> None:
    """The mean of squared slopes under its own answers, and not that under the likeliest alone."""
    model = editable("bert")
    with ElasticWeights(model, TEXTS[:1] * MAX_FISHER_TEXTS) as editor:
        shares_C = model.task.logits(model.task.make_target_pass(TEXTS[0], (0,)))[0][0].softmax(dim=0)
        passes = [model.task.make_target_pass(TEXTS[0], (label,)) for label in range(len(shares_C))]
        squares = []
        for weight in editor.weights:
            weight.requires_grad_(True)
        for supervised in passes:
            with torch.enable_grad():
                loss = torch.nn.functional.cross_entropy(model.task.logits(supervised)[0], supervised.labels[0])
                slopes = torch.autograd.grad(loss, editor.weights)
            squares.append(sum(float(slope.square().sum()) for slope in slopes))
        found = sum(float(part.sum()) for part in editor.fisher)
    expected = sum(share * square for share, square in zip(shares_C.tolist(), squares, strict=True))
    assert found == pytest.approx(expected, rel=0.2)
    assert squares[int(shares_C.argmax())] != pytest.approx(expected, rel=0.4)


def test_a_correction_that_failed_is_not_held_on_to() -> None:
    model = editable("bert")
    with ElasticWeights(model, TEXTS[30:], steps=0) as editor:
        before = [fisher.clone() for fisher in editor.fisher]
        statuses = {editor.edit(0, example).status for example in examples_of("bert", TEXTS[:6])}
        assert "failed" in statuses
        assert all(torch.equal(was, now) for was, now in zip(before, editor.fisher, strict=True))


def test_without_resistance_elastic_weights_are_finetuning() -> None:
    weights = []
    for make in (FineTuning, lambda model: ElasticWeights(model, TEXTS[30:], strength=0.0)):
        model = editable("bert")
        with make(model) as editor:
            for number, example in enumerate(examples_of("bert", TEXTS[:6])):
                editor.edit(number, example)
            weights.append([weight.clone() for weight in editor.weights])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*weights, strict=True))


def test_retraining_brings_back_what_finetuning_forgets() -> None:
    exact = {}
    for name in ("ft", "retrain"):
        model = editable("bert")
        examples = examples_of("bert", TEXTS[:30])
        with MAKE[name](model) as editor:
            for number, example in enumerate(examples):
                editor.edit(number, example)
            exact[name] = sum(score.exact for score in Evaluator(model, "accuracy").score(editor, examples))
    assert exact["ft"] < exact["retrain"]
