"""A prompt within an entry's radius is served only where the wordings can ask for the same."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.codebook_file import load, save
from pipeline.editing import EditEngine
from pipeline.evaluation import EvaluationCase, evaluate
from pipeline.model import Served
from pipeline.plan import Plan
from pipeline.traffic import Traffic
from pipeline.wording import disagreement, wording_of
from schemas.messages import Parameters
from tests.unit.engine import points
from tests.unit.engine.tiny import KINDS, correct, editable, index_of, texts

GENERATORS = [kind for kind in KINDS if kind != "bert"]
EDITED, OTHER = texts(2, seed=11)
SAME = f"{EDITED} "
TARGET = "train"
FAR = 1e6
"""A radius that holds every prompt."""


def started(kind: str, **plan: Any) -> EditEngine:
    engine = EditEngine(editable(kind), "default", Plan(radius=FAR, radius_unit="absolute", traffic=0, **plan))
    engine.apply(engine.lead({}))
    return engine


def ask(engine: EditEngine, *inputs: str) -> list[Served]:
    prompts = [engine.model.task.tokenize(text) for text in inputs]
    return engine.model.answer(prompts, [Parameters()] * len(prompts), engine.codebook, engine.index)


def test_the_prompts_of_these_tests_disagree() -> None:
    assert disagreement(wording_of(EDITED), wording_of(OTHER))


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_prompt_with_other_words_gets_the_unedited_answer_and_the_reason(kind: str) -> None:
    engine = started(kind)
    before = ask(engine, EDITED, OTHER)
    outcome, _ = correct(engine, "a", EDITED, TARGET)
    assert outcome.status == "added", outcome
    assert engine.codebook.wordings == [wording_of(EDITED)]
    edited, other, same = ask(engine, EDITED, OTHER, SAME)
    assert edited.hit is not None
    assert same.hit is not None
    assert other.hit is None
    assert other.missed is not None
    assert other.missed.entry_id == "a"
    assert other.missed.disagreement == disagreement(wording_of(EDITED), wording_of(OTHER))
    assert other.answer.outputs == before[1].answer.outputs
    assert edited.answer.outputs.text == TARGET


@pytest.mark.parametrize("kind", GENERATORS)
def test_without_the_check_every_prompt_within_the_radius_is_served(kind: str) -> None:
    engine = started(kind, wording=False)
    correct(engine, "a", EDITED, TARGET)
    assert engine.codebook.wordings == [""]
    (other,) = ask(engine, OTHER)
    assert other.hit is not None
    assert other.missed is None


def test_a_classifier_compares_no_words() -> None:
    engine = started("bert")
    names = list(engine.model.module.config.id2label.values())
    (before,) = ask(engine, EDITED)
    correct(engine, "a", EDITED, next(name for name in names if name != before.answer.outputs.label))
    assert engine.codebook.wordings == [""]
    (other,) = ask(engine, OTHER)
    assert other.hit is not None


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_same_target_for_other_words_gets_a_key_of_its_own(kind: str) -> None:
    """An entry that has the target already could not serve them."""
    engine = started(kind)
    correct(engine, "a", EDITED, TARGET)
    outcome, _ = correct(engine, "b", OTHER, TARGET)
    assert outcome.entry_id == "b", outcome
    assert [served.hit.entry_id for served in ask(engine, EDITED, OTHER) if served.hit is not None] == ["a", "b"]


@pytest.mark.parametrize("kind", GENERATORS)
def test_traffic_with_other_words_bounds_no_radius(kind: str) -> None:
    engine, worded, free = (started(kind, **plan) for plan in ({"wording": False}, {}, {}))
    prompt = engine.model.task.tokenize(OTHER)
    (query_D,) = engine.model.queries([prompt]).cpu().numpy()
    for made in (engine, worded):
        made.traffic = Traffic(8, 0)
        made.observe(1.0, query_D, made.model.task.wording(prompt))
    for made in (engine, worded, free):
        correct(made, "a", EDITED, TARGET)
    radius, with_words, without_traffic = (
        float(made.codebook.radii_N[made.codebook.slot("a")]) for made in (engine, worded, free)
    )
    assert radius < with_words == without_traffic


def test_a_kept_input_with_other_words_bounds_no_radius() -> None:
    radii = []
    for worded in (False, True):
        made = points.engine(Plan(radius=3.0, radius_unit="absolute", traffic=0), worded=worded)
        outcome, _ = correct(made, "kept", points.at(0, 0), "0")
        assert outcome.status == "unchanged"
        correct(made, "a", points.at(0.1, 0), "1")
        radii.append(float(made.codebook.radii_N[0]))
        assert (points.answer(made, 0, 0), points.answer(made, 0.1, 0)) == (0, 1)
    assert radii == [pytest.approx(0.08), 3.0]


def test_a_saved_codebook_compares_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started("llama")
    correct(engine, "a", EDITED, TARGET)
    save(engine.codebook, tmp_path / "codebook.safetensors")
    loaded = load(tmp_path / "codebook.safetensors")
    assert loaded.wordings == [wording_of(EDITED)]
    assert loaded.state_digest() == engine.codebook.state_digest()
    before = loaded.state_digest()
    with monkeypatch.context() as changed:
        changed.setattr("pipeline.codebook.rules", lambda: "other rules")
        assert loaded.state_digest() != before, "a replica with other rules answers differently"
    loaded.wordings[0] = ""
    assert loaded.state_digest() != engine.codebook.state_digest(), "they answer differently"
    prompts = [engine.model.task.tokenize(OTHER)]
    (served,) = engine.model.answer(prompts, [Parameters()], loaded, index_of(loaded))
    assert served.hit is not None


def test_a_case_with_other_words_counts_as_not_served() -> None:
    engine = started("llama")
    correct(engine, "a", EDITED, TARGET)
    cases = [EvaluationCase(EDITED, TARGET), EvaluationCase(OTHER, unchanged=True)]
    edited, other = evaluate(engine.model, engine.codebook, cases)
    assert (edited.verdict, edited.entry_id) == ("correct", "a")
    assert (other.verdict, other.entry_id, other.broken) == ("unchanged", None, False)
