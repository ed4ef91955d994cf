"""Forms of a correction's inputs: which there are, and that values are trained on over them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.forms import MAX_FORM_TOKENS, make_forms, supervised_forms
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.editing.value_training import (
    CORRECTION_MARGIN,
    TrainingTexts,
    ValueTrainingConfig,
    train_further,
    train_value,
)
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.suffix_pass import SuffixRunner
from gracestream.pipeline.model.tasks.base import Limits, TargetPass
from gracestream.schemas.deltas import Delta, decode_delta
from gracestream.schemas.messages import ChatMessage, Feedback, Inputs, encode
from tests.support.recorded_history import Recorded
from tests.support.tiny_models import CHAT, CODEBOOK, KINDS, WORDS, editable, texts

PLAN = EditConfig(traffic_sample_size=0, radius=0.01)
ONE_PROMPT = replace(PLAN, train_prompt_forms=False)
TARGET = WORDS[7]


def user(content: str) -> ChatMessage:
    return ChatMessage("user", content)


def a_text(number: int = 0) -> str:
    """Words that the tiny tokenizer knows in small letters, too, after one that it does not change."""
    return texts(8, seed=4)[number]


def chatty(kind: str = "gpt2", **model: Any) -> EditableModel:
    return editable(kind, chat_template=CHAT, **model)


@pytest.mark.parametrize(
    ("inputs", "some"),
    [
        ("Who is it?", ["Question: Who is it?\nAnswer:", "Who is it?\n", "Who is it? ", "WHO IS IT?", "who is it?"]),
        ("Question: Who is it? Answer:", ["Who is it?", "Question: Who is it? Answer:\n", (user("Who is it?"),)]),
        ("Q: Who is it?\nA: ", ["Who is it?", "Q: Who is it?\nA:", "Q: Who is it?\nA:\n", (user("Who is it?"),)]),
        ((user("Who is it?"),), ["Who is it?", "Question: Who is it?\nAnswer:", (user("WHO IS IT?"),)]),
        (
            (ChatMessage("system", "Be brief."), user("Who?")),
            ["Who?", (user("Who?"),), (ChatMessage("system", "Be brief."), user("WHO?"))],
        ),
    ],
)
def test_frames_ends_capitals_and_chats_are_other_forms(inputs: Inputs, some: list[Inputs]) -> None:
    found = make_forms(inputs)
    assert [form for form in some if form not in found] == []


@pytest.mark.parametrize("inputs", [("A", "B"), (user("Who?"), ChatMessage("assistant", "Ann"), user("When?"))])
def test_pairs_and_later_turns_have_no_forms(inputs: Inputs) -> None:
    assert make_forms(inputs) == []


@given(st.text(min_size=1).filter(lambda text: bool(text.strip())))
def test_forms_are_inputs_and_the_same_every_time(text: str) -> None:
    found = make_forms(text)
    assert found == make_forms(text)
    for form in found:
        encode(make_correction("a", form, "b"))


def prompts(model: EditableModel, rows: list[TargetPass]) -> list[tuple[int, ...]]:
    """The prompts of passes, without the label that follows."""
    found = []
    for row in rows:
        assert row.batch.mask_BT is not None
        found.append(tuple(row.batch.kwargs["input_ids"][0][row.batch.mask_BT[0].bool()].tolist()))
    return found


def test_no_form_repeats_a_prompt_or_has_unknown_words_that_the_correction_has_not() -> None:
    model, text = chatty(), a_text()
    found = prompts(model, supervised_forms(model, text, TARGET))
    own = model.task.tokenize(text).token_ids
    assert model.task.tokenize((user(text),)).token_ids in found
    assert len({own, *found}) == len(found) + 1
    assert all(model.task.tokenizer.unk_token_id not in prompt for prompt in found)
    assert len(supervised_forms(model, f"unheard-of {text}", TARGET)) > len(found), "it has an unknown word itself"


def test_forms_that_the_model_cannot_take_are_left_out() -> None:
    text = a_text()
    tokens = len(chatty().task.tokenize(text))
    assert supervised_forms(editable("gpt2"), text, TARGET) == [], "it has no chat template"
    assert supervised_forms(chatty(limits=Limits(max_input_tokens=tokens)), text, TARGET) == []
    assert len(supervised_forms(chatty(limits=Limits(max_input_tokens=tokens + 1)), text, TARGET)) == 1


def test_a_batch_of_forms_is_bounded() -> None:
    model = chatty(limits=Limits(max_input_tokens=4 * MAX_FORM_TOKENS))
    model.task.max_prompt_tokens, model.task.context_length = 4 * MAX_FORM_TOKENS, None
    for words in (4, 40, MAX_FORM_TOKENS // 2 - 2, MAX_FORM_TOKENS):
        text = " ".join(["unheard-of", *WORDS * 9][:words])
        found = prompts(model, supervised_forms(model, text, TARGET))
        longest = max(map(len, [model.task.tokenize(text).token_ids, *found]))
        assert not found or longest * (len(found) + 1) <= MAX_FORM_TOKENS
        assert bool(found) is (words < MAX_FORM_TOKENS)


@pytest.mark.parametrize("kind", ["t5-encoder", "t5-decoder", "bert"])
def test_other_models_than_causal_ones_have_no_forms(kind: str) -> None:
    assert supervised_forms(editable(kind), a_text(), "1" if kind == "bert" else TARGET) == []


def edited(model: EditableModel, plan: EditConfig, inputs: Inputs, target: str = TARGET) -> Delta:
    made = EditEngine(model, CODEBOOK, plan)
    made.apply(made.lead_delta({}))
    record = made.edit(make_correction("a", inputs, target), 0).delta_record
    assert record is not None
    return decode_delta(record)


def value(delta: Delta) -> torch.Tensor:
    assert delta.entries[0].value is not UNSET
    return torch.from_numpy(delta.entries[0].value.array().copy())


def served(model: EditableModel, value_V: torch.Tensor, inputs: Inputs, target: str = TARGET) -> bool:
    return model.suffix_runner.check_value(
        model.suffix_runner.suffix_of([model.prepare_correction(inputs, target)[1]]), value_V
    ).predicts_target


def test_a_value_gives_the_target_at_forms_at_which_that_of_one_prompt_fails() -> None:
    model = chatty()
    gained = 0
    for number in range(4):
        text = a_text(number)
        for inputs, form in ((text, (user(text),)), ((user(text),), text)):
            alone, robust = (value(edited(model, plan, inputs)) for plan in (ONE_PROMPT, PLAN))
            assert served(model, alone, inputs)
            assert served(model, robust, inputs)
            assert served(model, robust, form) >= served(model, alone, form)
            gained += served(model, robust, form) > served(model, alone, form)
    assert gained >= 2


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_model_in_half_precision_too(kind: str) -> None:
    target = "1" if kind == "bert" else TARGET
    model = editable(kind, dtype=torch.float16, chat_template=CHAT)
    recipe = ValueTrainingConfig(learning_rate=0.5)
    delta = edited(model, replace(PLAN, recipe=recipe), a_text(), target)
    assert served(model, value(delta), a_text(), target)


def test_a_form_that_fails_rejects_nothing_and_leaves_the_value_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms that cannot be reached: each has another target than the correction."""
    model, text = chatty(), a_text()

    def other(_model: EditableModel, inputs: Inputs, _target: str) -> list[TargetPass]:
        return [model.prepare_correction(inputs, WORDS[number])[1] for number in (20, 21)]

    usual = edited(model, ONE_PROMPT, text)
    monkeypatch.setattr("gracestream.pipeline.editing.rephrases.supervised_forms", other)
    assert torch.equal(value(edited(model, PLAN, text)), value(usual))


def test_a_model_that_takes_no_padding_trains_at_one_prompt() -> None:
    model = chatty()
    model.suffix_runner._padding_supported = False
    assert edited(model, PLAN, a_text()).entries == edited(model, ONE_PROMPT, a_text()).entries


def test_the_same_correction_gives_the_same_value_whatever_the_random_state() -> None:
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        found.append(edited(chatty(), PLAN, a_text()))
    assert found[0].entries == found[1].entries


def train_on_forms(model: EditableModel, inputs: Inputs, recipe: ValueTrainingConfig) -> tuple[TrainingTexts, Any]:
    own = model.prepare_correction(inputs, TARGET)[1]
    rest = model.suffix_runner.suffix_of([own])
    start_V = model.suffix_runner._layer_output(own)
    trained = train_value(model.suffix_runner, rest, start_V, recipe)
    made = TrainingTexts(trained, own, rest, form_passes=tuple(supervised_forms(model, inputs, TARGET)))
    return made, train_further(model.suffix_runner, [made], recipe)[0]


def test_the_correction_keeps_a_margin_and_the_steps_are_counted() -> None:
    model = chatty()
    gained = 0
    for number in range(4):
        made, found = train_on_forms(model, a_text(number), ValueTrainingConfig())
        assert found.converged
        if found is not made.trained:
            gained += 1
            assert found.steps > made.trained.steps
            assert found.target_check.margin >= CORRECTION_MARGIN
    assert gained


def test_what_runs_before_the_layer_runs_once_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chatty()
    rows: list[int] = []
    rest_of: Callable[..., Any] = SuffixRunner.suffix_of

    def counted(self: SuffixRunner, given_rows: list[TargetPass]) -> Any:
        rows.append(len(given_rows))
        return rest_of(self, given_rows)

    model.suffix_runner.supports_padding()
    monkeypatch.setattr(SuffixRunner, "suffix_of", counted)
    made, _ = train_on_forms(model, a_text(), ValueTrainingConfig())
    assert sum(rows[1:]) == 1 + len(made.form_passes)


@pytest.mark.parametrize("kind", list(KINDS))
def test_rows_of_unequal_lengths_that_pass_apart_are_those_of_one_pass(kind: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("gracestream.pipeline.model.suffix_pass.PASS_OVERHEAD_TOKENS", 1)
    model = editable(kind)
    given_texts = [" ".join(WORDS[:words]) for words in (30, 3, 20, 4)]
    targets = ["1"] * 4 if kind == "bert" else [" ".join(WORDS[5 : 6 + number]) for number in range(4)]
    rows = [model.prepare_correction(*pair)[1] for pair in zip(given_texts, targets, strict=True)]
    values_BV = torch.stack([model.suffix_runner._layer_output(row) for row in rows])
    one, apart = model.suffix_runner.suffix_of(rows), model.suffix_runner.suffix_by_length(rows)
    for ours, theirs in zip(
        model.suffix_runner._losses_and_grads(apart, values_BV),
        model.suffix_runner._losses_and_grads(one, values_BV),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    kept = apart.select_rows([2, 0])
    assert [label_L.tolist() for label_L in kept.target_pass.labels] == [rows[row].labels[0].tolist() for row in (2, 0)]


def given_feedback() -> list[Feedback]:
    inputs: list[Inputs] = [a_text(0), (user(a_text(1)),), a_text(2), a_text(3), a_text(4), a_text(5)]
    return [make_correction(f"f{number}", one, WORDS[9 + number]) for number, one in enumerate(inputs)]


def test_waiting_corrections_are_trained_on_for_their_forms_together() -> None:
    model = chatty()
    made = EditEngine(model, CODEBOOK, PLAN)
    made.apply(made.lead_delta({}))
    ahead = made.draft_values([(one, offset) for offset, one in enumerate(given_feedback())])
    assert len(ahead) > 4
    right = {
        offset: [
            model.suffix_runner.check_value(
                model.suffix_runner.suffix_of([form]), torch.from_numpy(found.trained.value_V.copy())
            ).predicts_target
            for form in supervised_forms(model, one.inputs, str(one.target))
        ]
        for (offset, found), one in zip(sorted(ahead.items()), given_feedback(), strict=True)
        if one.inputs is not UNSET
    }
    found = [one for of_form in right.values() for one in of_form]
    assert sum(found) > 0.7 * len(found)


@pytest.mark.parametrize("plan", [PLAN, ONE_PROMPT])
def test_a_history_with_forms_is_reproduced_to_the_bit(plan: EditConfig) -> None:
    """Some corrections waited together, and one came alone; the plan of a term says whether forms are trained on."""
    made = Recorded(plan, model=chatty)
    *waiting, last = given_feedback()
    made.send(*map(encode, waiting))
    made.send(encode(last))
    rephrased = Feedback(v=1, feedback_id="r", inputs=a_text(6), target=TARGET, rephrases=(a_text(7),))
    made.send(encode(rephrased))
    deltas = [decode_delta(record) for record in made.deltas]
    assert any(delta.cause is not UNSET and len(delta.cause.together) > 1 for delta in deltas)
    assert deltas[0].environment is not UNSET
    assert deltas[0].environment["forms"] == str(plan.train_prompt_forms)
    again = made.reproduced()
    assert again.report.other_environment == {}
    assert again.report.first_difference is None
    assert again.records == made.deltas
