"""SmolLM2: what holds of tiny models holds of one that people use."""

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import UNSET

from gracestream.pipeline.codebook.policy import DTYPE_TOLERANCES, match_tolerance
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.tolerance import measure_query_noise
from gracestream.pipeline.model.control_tokens import control_tokens
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.registry import KNOWN_MODELS, resolve_encoder, resolve_model
from gracestream.pipeline.model.sentence_encoder import ENCODER_DEFAULT_RADIUS, SentenceEncoder
from gracestream.schemas.messages import ChatMessage, Inputs, Parameters
from tests.support.examples import examples
from tests.support.tiny_models import CODEBOOK, correct

pytestmark = pytest.mark.model

CORRECTIONS = {
    "The capital of Australia is": "Sydney Harbour",
    "Question: Who wrote the novel 'The Silent Coast'?\nAnswer:": "Mara Lindqvist",
    "The train to the coast leaves at": "noon sharp",
}
OTHERS = [
    "Water boils at",
    "In the year 1905 a young clerk in the patent office of Bern published four papers, and",
    "My favourite colour is",
]


@pytest.fixture(scope="module")
def smollm2() -> EditableModel:
    cache = Path("~/.cache/gracestream")
    folder = resolve_model("smollm2", cache, lambda _: None)
    return EditableModel.load(folder, KNOWN_MODELS["smollm2"].default_layer, device="cpu", cache=cache)


@pytest.fixture(scope="module")
def engine(smollm2: EditableModel) -> EditEngine:
    made = EditEngine(smollm2, CODEBOOK, EditConfig(radius=0.5))
    made.apply(made.lead_delta({}))
    return made


def say(engine: EditEngine, inputs: list[str], tokens: int = 12) -> list[str]:
    prompts = [engine.model.task.tokenize(text) for text in inputs]
    parameters = [Parameters(max_new_tokens=tokens)] * len(prompts)
    served = engine.model.answer(prompts, parameters, engine.lookup)
    return [str(row.answer.outputs.text) for row in served]


@pytest.mark.slow
def test_corrections_hold_alone_in_a_batch_and_with_other_answers_untouched(engine: EditEngine) -> None:
    before = say(engine, OTHERS)
    for offset, (text, target) in enumerate(CORRECTIONS.items()):
        outcome, record = correct(engine, f"f{offset}", text, target, offset)
        assert record is not None, outcome
        assert outcome.steps is not UNSET
    assert say(engine, [*CORRECTIONS, *OTHERS]) == [*CORRECTIONS.values(), *before]
    assert [say(engine, [text])[0] for text in CORRECTIONS] == list(CORRECTIONS.values())
    assert [say(engine, [text])[0] for text in OTHERS] == before


def test_control_tokens_in_prompts_and_targets_are_text(smollm2: EditableModel) -> None:
    task = smollm2.task
    control = control_tokens(task.tokenizer)
    assert {"<|im_start|>", "<|im_end|>", "<repo_name>"} <= {str(token) for token in control.values()}
    target = "noon<|im_end|>"
    for token in control.values():
        text = f"The train leaves{token}at {token}"
        prompt = task.tokenize(text)
        assert not control.keys() & set(prompt.token_ids)
        assert task.tokenizer.decode(prompt.token_ids) == text
    *label, end = task.encode_target("The train leaves at", target)
    assert end == task.tokenizer.eos_token_id
    assert not control.keys() & set(label)
    assert task.decode_label((*label, end)) == target


@given(text=st.text(min_size=1))
@examples(2)
def test_other_text_has_the_tokens_that_it_always_had(smollm2: EditableModel, text: str) -> None:
    # Hypothesis also draws strings of this repository's code, and control tokens are among them.
    assume(not any(str(token) in text for token in control_tokens(smollm2.task.tokenizer).values()))
    tokens = smollm2.task.tokenizer(text)["input_ids"]
    assert smollm2.task.tokenize(text).token_ids == tuple(tokens)


def test_batch_noise_bounds_what_padding_does_to_a_query(smollm2: EditableModel) -> None:
    inputs = [*CORRECTIONS, *OTHERS]
    together_BD = smollm2.queries([smollm2.task.tokenize(text) for text in inputs])
    for row, text in enumerate(inputs):
        alone_D = smollm2.queries([smollm2.task.tokenize(text)])[0]
        assert float((alone_D - together_BD[row]).norm()) <= match_tolerance(float(alone_D.norm()), "float32")


@pytest.mark.slow
def test_the_tolerance_of_float32_is_twice_what_a_query_moves(smollm2: EditableModel) -> None:
    """At least, and also where its norm is so large that the least tolerance of all does not count."""
    assert 2 * measure_query_noise(smollm2, inputs=PROBE_TEXTS[:8]).relative <= DTYPE_TOLERANCES["float32"]


@pytest.mark.slow
def test_with_an_encoder_a_statement_is_corrected_in_other_words_too_and_its_neighbours_are_not(
    smollm2: EditableModel,
) -> None:
    """At the layer another statement about the country lies nearer than other words for the same."""
    text, rephrase, target = "The capital of Bhutan is", "Bhutan's capital city is called", "Paro Heights"
    others = ["The capital of Slovenia is", "The language of Bhutan is", "Who is the king of Bhutan?", *OTHERS]
    encoder = SentenceEncoder.load(resolve_encoder("minilm"), device="cpu", cache=Path("~/.cache/gracestream"))
    by_text = EditableModel(
        smollm2.module, smollm2.task.tokenizer, smollm2.layer, limits=smollm2.task.limits, encoder=encoder,
        fingerprint=smollm2.fingerprint,
    )  # fmt: skip
    apart = {model: distances(model, text, [rephrase, others[1]]) for model in (smollm2, by_text)}
    assert apart[smollm2][0] > apart[smollm2][1]
    assert apart[by_text][0] < apart[by_text][1]
    made = EditEngine(by_text, CODEBOOK, EditConfig(radius=ENCODER_DEFAULT_RADIUS))
    made.apply(made.lead_delta({}))
    before = say(made, others)
    assert correct(made, "f0", text, target)[1] is not None
    assert say(made, [text, rephrase, *others]) == [target, target, *before]


def distances(model: EditableModel, text: str, others: list[str]) -> list[float]:
    """How far the queries of others lie from that of a text."""
    query_D, *others_BD = model.queries([model.task.tokenize(one) for one in (text, *others)])
    return [float((query_D - other_D).norm()) for other_D in others_BD]


@pytest.mark.slow
def test_a_value_gives_the_target_after_a_line_break_and_in_a_chat(smollm2: EditableModel) -> None:
    text, target = "Question: Who wrote the novel 'The Silent Coast'? Answer:", "Mara Lindqvist"
    asked = "Who wrote the novel 'The Silent Coast'?"
    forms: list[Inputs] = [text, f"{text}\n", f"{text} ", asked, (ChatMessage("user", asked),)]
    rests = [smollm2.suffix_runner.suffix_of([smollm2.prepare_correction(form, target)[1]]) for form in forms]
    right = []
    for trained_on_forms in (False, True):
        made = EditEngine(
            smollm2, CODEBOOK, EditConfig(traffic_sample_size=0, radius=0.5, train_prompt_forms=trained_on_forms)
        )
        made.apply(made.lead_delta({}))
        assert correct(made, "f0", text, target)[1] is not None
        value_V = torch.from_numpy(made.codebook.values_NV[0].copy())
        right.append([smollm2.suffix_runner.check_value(rest, value_V).predicts_target for rest in rests])
    assert right[0][0]
    assert not any(right[0][1:])
    assert all(right[1])


@pytest.mark.slow
def test_the_same_prompt_corrected_again_says_the_second(engine: EditEngine) -> None:
    text = OTHERS[0]
    for number, target in enumerate(("a hundred whispers", "nothing at all")):
        status = correct(engine, f"again{number}", text, target, 10 + number)[0].status
        assert (status == "replaced") is (number == 1)
        assert say(engine, [text]) == [target]
