"""Scores are those of the edited model as it is, whatever is asked together, and F1 is SQuAD's."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.experiments.editors.finetuning import FineTuning
from gracestream.pipeline.experiments.editors.grace import Grace
from gracestream.pipeline.experiments.evaluation import Evaluator, ExampleScore, word_f1
from gracestream.pipeline.experiments.tasks import Measure
from tests.support.tiny_models import KINDS, editable, texts
from tests.support.toy_corrections import examples_of

TEXTS = texts(12, seed=3)
WORDS = st.lists(st.sampled_from(["river", "train", "The", "a", "bridge!", "Water"]), max_size=6).map(" ".join)
PLAN = EditConfig(radius=1e-3, radius_unit="absolute", traffic_sample_size=4)


@pytest.mark.parametrize(
    ("said", "target", "expected"),
    [
        ("the River.", "river", 1.0),
        ("a river train", "river", 2 / 3),
        ("bridge", "river", 0.0),
        ("", "river", 0.0),
        ("the", "a", 1.0),
        ("river river", "river", 2 / 3),
        ("Łódź", "łódź", 1.0),
    ],
)
def test_f1_counts_words_without_case_articles_and_punctuation(said: str, target: str, expected: float) -> None:
    assert word_f1(said, target) == pytest.approx(expected)


@given(WORDS, WORDS)
def test_f1_lies_between_0_and_1_and_takes_no_side(said: str, target: str) -> None:
    assert 0 <= word_f1(said, target) == word_f1(target, said) <= 1
    assert word_f1(said, said) == 1


@pytest.mark.parametrize("kind", list(KINDS))
class TestGrace:
    @pytest.mark.slow
    def test_an_edit_is_exact_and_leaves_other_answers_as_they_were(self, kind: str) -> None:
        model, examples = editable(kind), examples_of(kind, TEXTS)
        grace, evaluation = Grace(model, PLAN, TEXTS[8:]), Evaluator(model, "accuracy" if kind == "bert" else "f1")
        before = evaluation.score(grace, examples)
        wrong = [place for place in range(6) if not before[place].exact]
        made = {place: grace.edit(place, examples[place]) for place in wrong}
        edited = [place for place, one in made.items() if one.status == "added"]  # not all can be said by these models
        assert len(edited) >= 2
        assert all(made[place].steps > 0 for place in edited)
        after = evaluation.score(grace, examples)
        assert all(after[place].exact and after[place].value == 1 for place in edited)
        assert grace.num_entries == len(edited)
        untouched = [place for place in range(len(examples)) if place not in edited]
        assert [after[place] for place in untouched] == [before[place] for place in untouched]

    def test_what_is_asked_together_is_scored_as_alone(self, kind: str) -> None:
        model, examples = editable(kind), examples_of(kind, TEXTS)
        grace = Grace(model, PLAN, TEXTS[8:])
        grace.edit(0, examples[0])
        together = Evaluator(model, "perplexity").score(grace, examples)
        for example, score in zip(examples, together, strict=True):
            (alone,) = Evaluator(model, "perplexity").score(grace, [example])
            assert score.exact == alone.exact
            assert score.loss == pytest.approx(alone.loss, rel=1e-3, abs=1e-5)
            assert score.value == pytest.approx(math.exp(score.loss))


def test_perplexity_is_of_the_sentence_and_not_of_its_end() -> None:
    model, (example, *_) = editable("llama"), examples_of("llama", TEXTS)
    (score,) = Evaluator(model, "perplexity").score(Grace(model, PLAN, []), [example])
    _, supervised = model.prepare_correction(example.inputs, example.target)
    with torch.no_grad():
        (logits_LC,) = model.task.logits(supervised)
    (label_L,) = supervised.labels
    assert int(label_L[-1]) == model.task.tokenizer.eos_token_id
    target_L = logits_LC.log_softmax(dim=1).gather(1, label_L[:, None])[:-1, 0]
    assert score.value == pytest.approx(math.exp(-float(target_L.mean())), rel=1e-4)


def test_what_did_not_change_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, examples = editable("llama"), examples_of("llama", TEXTS)
    grace, evaluation = Grace(model, PLAN, []), Evaluator(model, "perplexity")
    before = evaluation.score(grace, examples)
    grace.edit(0, examples[0])
    ran: list[int] = []
    logits = model.task.logits

    def counted(supervised: Any) -> list[torch.Tensor]:
        ran.append(len(supervised.labels))
        return logits(supervised)

    monkeypatch.setattr(model.task, "logits", counted)
    after = evaluation.score(grace, [*examples, examples[0]])
    assert ran == [1]
    assert after[1:-1] == before[1:]
    assert after[0] == after[-1] != before[0]


@pytest.mark.parametrize("measure", ["f1", "perplexity"])
def test_the_same_is_scored_of_an_answer_that_is_exact(measure: Measure) -> None:
    model, (example, *_) = editable("llama"), examples_of("llama", TEXTS)
    grace = Grace(model, PLAN, [])
    grace.edit(0, example)
    (score,) = Evaluator(model, measure).score(grace, [example])
    assert isinstance(score, ExampleScore)
    assert score.exact
    assert score.value == (1.0 if measure == "f1" else math.exp(score.loss))


@pytest.mark.parametrize("spoilt", [1e6, math.nan])
def test_of_a_model_that_an_editor_spoilt_the_perplexity_is_infinite(spoilt: float) -> None:
    model, examples = editable("llama"), examples_of("llama", TEXTS)
    evaluation = Evaluator(model, "perplexity")
    with FineTuning(model) as editor:
        evaluation.score(editor, examples)
        editor.restore()
        model.module.get_output_embeddings().weight.detach().mul_(spoilt)
        scores = evaluation.score(editor, examples)
    assert {score.value for score in scores if not score.exact} == {math.inf}
