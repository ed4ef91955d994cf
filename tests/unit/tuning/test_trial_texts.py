"""A user's requests become trials, traffic and held-out requests, and nothing is two of these."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gracestream.pipeline.editing.calibration import CalibrationError, LabelledRequest
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.tasks.base import InputError
from gracestream.pipeline.tuning.trial_texts import (
    INVENTED_NAMES,
    TargetMaker,
    UserRequests,
    same_subject_requests,
    surface_forms,
    usable_inputs,
)
from gracestream.schemas.messages import ChatMessage
from tests.support.tiny_models import WORDS, editable

words = st.text("abcde", min_size=1, max_size=3)
samples = st.lists(
    st.builds(LabelledRequest, words, st.one_of(st.just(UNSET), words), st.one_of(st.just(UNSET), words)), max_size=30
)


@given(samples, st.integers(1, 20))
def test_a_request_has_one_use_and_no_rephrase_of_a_trial_is_held_out(
    given_samples: list[LabelledRequest], count: int
) -> None:
    requests = UserRequests.from_labelled(given_samples)
    distinct = {sample.inputs for sample in given_samples}
    assert requests.rephrases.keys() == distinct
    if len(distinct) < 2:
        with pytest.raises(CalibrationError, match="add lines"):
            requests.divide(count)
        return
    divided = requests.divide(count)
    uses = [*divided.trial_requests, *divided.held_out, *divided.traffic]
    reworded = {other for one in divided.trial_requests for other in requests.rephrases[one]}
    assert len(divided.trial_requests) == min(count, len(distinct) // 2)
    assert len(uses) == len(set(uses))
    assert set(uses) | reworded >= distinct
    assert not reworded & {*divided.held_out, *divided.traffic}


@given(samples.flatmap(lambda some: st.tuples(st.just(some), st.permutations(some))), st.integers(1, 20))
def test_the_order_of_lines_is_of_no_account(orders: Any, count: int) -> None:
    given_samples, shuffled = orders
    if len({sample.inputs for sample in given_samples}) >= 2:
        one, other = (UserRequests.from_labelled(some).divide(count) for some in (given_samples, shuffled))
        assert (set(one.trial_requests), one.held_out, one.traffic) == (
            set(other.trial_requests),
            other.held_out,
            other.traffic,
        )


def test_requests_with_rephrases_become_trials_first_and_have_all_of_them() -> None:
    lines = [LabelledRequest(f"request {number}") for number in range(10)]
    lines += [
        LabelledRequest("request 7", "other words"),
        LabelledRequest("request 7", "third words"),
        LabelledRequest("request 7", "request 7"),
    ]
    requests = UserRequests.from_labelled([*lines, LabelledRequest("request 3", target=" right ")])
    assert requests.divide(1).trial_requests == ["request 7"]
    assert requests.rephrases["request 7"] == ("other words", "third words")
    assert requests.divide(2).trial_requests == ["request 7", "request 3"]
    assert requests.targets == {"request 3": "right"}


def test_an_empty_target_is_rejected() -> None:
    with pytest.raises(msgspec.ValidationError, match="`target` is empty"):
        msgspec.convert({"inputs": "a", "target": " "}, LabelledRequest)


@pytest.fixture(scope="module")
def llama() -> EditableModel:
    return editable("llama")


@pytest.fixture(scope="module")
def bert() -> EditableModel:
    return editable("bert")


def test_targets_of_trials_differ_and_are_none_that_the_model_gives(llama: EditableModel) -> None:
    targets = TargetMaker(llama.task, [WORDS[0], WORDS[1]], [" ".join(WORDS[2:6])])
    made = [targets.make_target(number, "the river", WORDS[0]) for number in range(4)]
    assert len(set(made)) == 4
    assert WORDS[0] not in made
    assert not set(made) & set(INVENTED_NAMES), "the tiny tokenizer has no word for these"


def test_a_classifiers_target_is_another_of_its_labels(bert: EditableModel) -> None:
    targets = TargetMaker(bert.task, ["wrong"], ["the river"])
    made = {targets.make_target(number, "the river", "wrong") for number in range(6)}
    assert made == {"right", "neither", "both"}


def test_where_no_target_can_be_taught_the_user_is_asked_for_one(llama: EditableModel) -> None:
    with pytest.raises(InputError, match="give a `target`"):
        TargetMaker(llama.task, [], []).make_target(0, "the river", "")


def test_forms_differ_in_spaces_capitals_and_the_last_mark_and_a_generators_in_frames(
    llama: EditableModel, bert: EditableModel
) -> None:
    text = "Where is it?"
    generators = surface_forms(llama.task, text)
    assert {"Where is it?\n", "Where is it? ", "WHERE IS IT?", "where is it?", "Where is it"} <= set(generators)
    assert "Question: Where is it?\nAnswer:" in generators
    assert all(isinstance(form, str) for form in generators)
    assert set(surface_forms(bert.task, text)) <= set(generators)
    assert not any("Question" in str(form) for form in surface_forms(bert.task, text))
    assert surface_forms(bert.task, ("a", "pair")) == []
    chat = surface_forms(llama.task, (ChatMessage("user", text),))
    assert chat
    assert all(not isinstance(form, str) for form in chat)


def test_texts_with_the_same_tokens_count_once(llama: EditableModel) -> None:
    one, other = WORDS[:2]
    found = usable_inputs(llama.task, [one, f"{one} ", other, f" {other}", "x y"], lambda text: text != "x y")
    assert found == (other,)


def test_a_classifier_has_no_requests_about_a_subject(llama: EditableModel, bert: EditableModel) -> None:
    text = "What is the capital of Mongolia?"
    about = same_subject_requests(llama.task, text)
    assert about
    assert all("Mongolia" in str(one) for one in about)
    assert same_subject_requests(bert.task, text) == []
