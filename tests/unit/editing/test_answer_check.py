"""A prompt that an entry serves gets the entry's target or the unedited answer, and nothing else."""

from typing import Any

import numpy as np
import pytest

from gracestream.pipeline.codebook.codebook import Label
from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.model.editable import EditableModel, ServedAnswer
from gracestream.pipeline.model.tasks.base import ModelAnswer
from gracestream.pipeline.model.tasks.generation import Generation
from gracestream.schemas.messages import Outputs, Parameters
from tests.support.tiny_models import KINDS, added, correct, editable, index_of, new_codebook, sealed, texts

GENERATORS = [kind for kind in KINDS if kind != "bert"]
RIGHT, WRONG, OTHER = texts(3, seed=5)
TARGET = "train"


def ask(engine: EditEngine, *inputs: str, checked: bool = True, **fields: Any) -> list[ServedAnswer]:
    model = engine.model
    prompts = [model.task.tokenize(text) for text in inputs]
    parameters = [Parameters(**fields)] * len(prompts)
    return model.answer(prompts, parameters, engine.lookup, check_answers=checked)


def said(row: ServedAnswer) -> tuple[object, object]:
    """Text or label; probabilities differ by rounding between batches."""
    return row.answer.outputs.text, row.answer.outputs.label


def loud(model: EditableModel, before: ServedAnswer) -> tuple[np.ndarray, np.ndarray, ServedAnswer]:
    """The query of a prompt, a random value that changes its answer, and what is served with it."""
    prompt = model.task.tokenize(WRONG)
    (query_D,) = model.queries([prompt]).cpu().numpy()
    for seed in range(50):
        codebook = new_codebook(model.fingerprint, model.layer)
        value_V = 20 * np.random.default_rng(seed).standard_normal(model.module.config.hidden_size)
        codebook.apply(sealed(codebook, added("loud", query_D, 0.01, value=value_V)))
        (served,) = model.answer([prompt], [Parameters()], CodebookLookup(codebook, index_of(codebook)))
        if said(served) != said(before):
            return query_D, value_V, served
    raise AssertionError("no random value changes the answer")


def edited(kind: str) -> tuple[EditEngine, list[ServedAnswer]]:
    """Two entries: `right` gives its target and `wrong` another answer; and the unedited answers to all prompts."""
    model = editable(kind)
    engine = EditEngine(model, "default")
    engine.apply(engine.lead_delta({}))
    before = ask(engine, RIGHT, WRONG, OTHER)
    query_D, value_V, after = loud(model, before[1])
    label: Label
    if kind == "bert":
        names = list(model.module.config.id2label.values())
        target = next(name for name in names if name != before[0].answer.outputs.label)
        label = model.task.encode_target(WRONG, next(name for name in names if name != after.answer.outputs.label))
    else:
        target, label = TARGET, model.task.encode_target(WRONG, TARGET)
    outcome, _ = correct(engine, "right", RIGHT, target)
    assert outcome.status == "added", outcome
    engine.apply(sealed(engine.codebook, added("wrong", query_D, 0.01, label, value_V)))
    return engine, before


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_served_prompt_gets_the_target_or_the_unedited_answer(kind: str) -> None:
    engine, before = edited(kind)
    right, wrong, other = ask(engine, RIGHT, WRONG, OTHER)
    assert right.served_by is not None
    assert right.served_by.entry_id == "right"
    assert right.near_miss is None
    assert said(right) != said(before[0])
    assert wrong.served_by is None
    assert wrong.near_miss is not None
    assert wrong.near_miss.entry_id == "wrong"
    assert said(wrong) == said(before[1])
    assert other.served_by is None
    assert other.near_miss is None
    assert said(other) == said(before[2])
    (alone,) = ask(engine, WRONG)
    assert said(alone) == said(wrong), "its answer depends on no neighbour"
    assert alone.near_miss is not None


@pytest.mark.parametrize("kind", list(KINDS))
def test_without_the_check_a_failing_entry_answers(kind: str) -> None:
    engine, before = edited(kind)
    _, wrong = ask(engine, RIGHT, WRONG, checked=False)
    assert wrong.served_by is not None
    assert wrong.near_miss is None
    assert said(wrong) != said(before[1])


@pytest.mark.parametrize("kind", GENERATORS)
def test_an_answer_is_compared_with_as_much_of_the_target_as_its_budget_allows(kind: str) -> None:
    task = editable(kind).task
    label = task.encode_target(RIGHT, "train violin")

    def gives(text: str, budget: int) -> bool:
        return task.matches_target(ModelAnswer(Outputs(text=text)), label, Parameters(max_new_tokens=budget))

    assert gives("train violin", 8)
    assert not gives("train", 8)
    assert not gives("train violin museum", 8)
    assert not gives("", 8)
    whole = len(label) - 1
    assert gives("train violin", whole)
    assert gives(task.decode_label(label[:1]), 1)
    assert not gives("train violin", 1)


@pytest.mark.parametrize("kind", GENERATORS)
def test_an_incomplete_answer_is_compared_with_the_beginning_of_the_target(kind: str) -> None:
    task = editable(kind).task
    assert isinstance(task, Generation)
    label = task.encode_target(RIGHT, "train violin")

    def begins(text: str, budget: int = 8) -> bool:
        answer, parameters = ModelAnswer(Outputs(text=text)), Parameters(max_new_tokens=budget)
        return task.begins_target(answer, label, parameters)

    assert begins("")
    assert begins("trai\N{REPLACEMENT CHARACTER}"), "the last token ends within a character"
    assert begins("train violin")
    assert not begins("train violin museum")
    assert not begins("violin")
    assert not begins("train violin", budget=1)


@pytest.mark.parametrize("kind", GENERATORS)
def test_text_may_follow_a_target_where_the_request_asks_for_a_least_length(kind: str) -> None:
    engine, _ = edited(kind)
    (served,) = ask(engine, RIGHT, min_new_tokens=6, max_new_tokens=8)
    assert served.served_by is not None
    assert str(served.answer.outputs.text).startswith(TARGET)
