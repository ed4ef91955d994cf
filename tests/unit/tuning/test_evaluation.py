"""A codebook is measured on cases: what is right, what stays, what an entry serves, and what comes out broken."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.tuning.evaluation import (
    EvaluationCase,
    EvaluationError,
    begins_with_target,
    evaluate,
    summarize,
)
from gracestream.schemas.deltas import EntryChange, Tensor
from tests.support.tiny_models import CODEBOOK, WORDS, correct, texts

TEXTS = texts(12, seed=23)
TARGETS = {"llama": WORDS[5], "bert": "neither", "t5-encoder": WORDS[5]}


@pytest.fixture(params=sorted(TARGETS))
def engine(request: pytest.FixtureRequest, _models: Any) -> EditEngine:
    """An engine of each kind of model with one edit, which reaches nothing but its own text."""
    model: EditableModel = _models(request.param)
    made = EditEngine(model, CODEBOOK, EditConfig(radius=1e-3, radius_unit="absolute"))
    made.apply(made.lead_delta({}))
    outcome, _ = correct(made, "f1", TEXTS[0], TARGETS[request.param], 0)
    assert outcome.status == "added", outcome
    return made


def target_of(engine: EditEngine) -> str:
    return engine.model.task.decode_label(engine.codebook.labels[0])


def test_each_case_gets_its_verdict_and_they_are_counted(engine: EditEngine) -> None:
    target = target_of(engine)
    cases = [
        EvaluationCase(TEXTS[0], target),
        EvaluationCase(TEXTS[1], unchanged=True),
        EvaluationCase(TEXTS[0], "soup"),
        EvaluationCase(TEXTS[0], unchanged=True),
    ]
    done: list[int] = []
    results = evaluate(engine.model, engine.codebook, cases, done.append)
    assert [result.verdict for result in results] == ["correct", "unchanged", "wrong", "changed"]
    assert [result.passed for result in results] == [True, True, False, False]
    right, same, *_ = results
    assert (right.answer, right.exact, right.entry_id, right.entry_target) == (target, True, "f1", target)
    assert right.unedited != target
    assert right.distance is not None
    assert right.radius is not None
    assert right.distance < right.radius
    assert (same.answer, same.entry_id, same.distance) == (same.unedited, None, None)
    assert msgspec.to_builtins(summarize(results)) == {
        "cases": 4, "passed": 2, "with_target": 2, "correct": 1, "exact": 1, "to_stay": 2, "unchanged": 1,
        "captured": 3, "broken": 0,
    }  # fmt: skip
    assert done[-1] == len(cases)


def test_a_case_is_judged_alike_alone_and_among_others(engine: EditEngine) -> None:
    cases = [EvaluationCase(text, unchanged=True) for text in TEXTS]
    together = evaluate(engine.model, engine.codebook, cases)
    for case, result in zip(cases, together, strict=True):
        (alone,) = evaluate(engine.model, engine.codebook, [case])
        assert (alone.answer, alone.verdict, alone.entry_id) == (result.answer, result.verdict, result.entry_id)


def test_output_that_is_neither_the_target_nor_the_unedited_answer_is_broken(engine: EditEngine) -> None:
    generator = np.random.default_rng(0)
    case, size = EvaluationCase(TEXTS[0], target_of(engine)), engine.codebook.values_NV.shape[1]
    for _ in range(20):
        value = Tensor.from_array(generator.normal(scale=20, size=(size,)).astype(np.float32))
        change = EntryChange(entry_id="f1", value=value, label=engine.codebook.labels[0])
        engine.apply(engine.next_delta("replace", entries=(change,)))
        (result,) = evaluate(engine.model, engine.codebook, [case])
        if result.answer not in (target_of(engine), result.unedited):
            break
        assert not result.broken
    assert result.broken
    assert summarize([result]).broken == 1


def test_without_an_entry_nothing_changes(engine: EditEngine) -> None:
    empty = Codebook(CODEBOOK, engine.model.fingerprint, engine.model.layer)
    results = evaluate(engine.model, empty, [EvaluationCase(text, unchanged=True) for text in TEXTS])
    assert all(result.passed and result.entry_id is None for result in results)


def test_a_codebook_of_another_model_is_rejected(engine: EditEngine) -> None:
    other = Codebook(CODEBOOK, "f" * 64, engine.model.layer)
    with pytest.raises(EvaluationError, match="GRACESTREAM_MODEL"):
        evaluate(engine.model, other, [EvaluationCase(TEXTS[0], unchanged=True)])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"inputs": "a"}, "either `target`"),
        ({"inputs": "a", "target": "b", "unchanged": True}, "either `target`"),
        ({"inputs": "a", "target": " "}, "`target` is empty"),
        ({"target": "b"}, "inputs"),
        ({"inputs": 1, "target": "b"}, "inputs"),
        ({"inputs": "a", "target": "b", "parameters": {"temperature": 1}}, "temperature"),
        ("a", "object"),
    ],
)
def test_what_is_no_case_is_rejected(fields: object, why: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=why):
        msgspec.convert(fields, EvaluationCase)


def test_a_line_of_feedback_is_a_case() -> None:
    line = {"v": 1, "feedback_id": "f1", "inputs": "a", "target": "b", "author": "ada"}
    assert msgspec.convert(line, EvaluationCase) == EvaluationCase("a", "b")
    assert msgspec.convert({"inputs": "a", "unchanged": True}, EvaluationCase).target is UNSET


@given(st.text(min_size=1), st.text())
def test_an_answer_begins_with_a_target_where_no_word_goes_on(target: str, rest: str) -> None:
    assert begins_with_target(target + rest, target) is not (rest[:1].isalnum())
    assert not begins_with_target("~" + target, target) or target.startswith("~")
