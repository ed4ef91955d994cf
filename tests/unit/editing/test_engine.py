"""One outcome per correction: the engine edits or rejects with a reason, and decides the same every time."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import UNSET

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.tasks.base import InputError, Limits
from gracestream.schemas.deltas import decode_delta
from gracestream.schemas.messages import SCHEMA_VERSION, Feedback, Outcome, Parameters
from tests.support.tiny_models import CODEBOOK, WORDS, correct, editable, texts, with_radius

TEXTS = texts(40, seed=11)
NAMES = ["wrong", "right", "neither", "both"]


def engine_of(model: EditableModel, **plan: Any) -> EditEngine:
    made = EditEngine(model, CODEBOOK, EditConfig(**plan))
    made.apply(made.lead_delta({}))
    return made


def said(engine: EditEngine, text: str) -> str:
    model = engine.model
    served = model.answer([model.task.tokenize(text)], [Parameters()], engine.lookup)[0]
    outputs = served.answer.outputs
    return str(outputs.text if outputs.label is UNSET else outputs.label)


def targets(kind: str) -> list[str]:
    return NAMES if kind == "bert" else [WORDS[5], WORDS[40], WORDS[11]]


def wrong_target(engine: EditEngine, text: str, kind: str = "bert") -> str:
    """A target that the model does not give now."""
    return next(name for name in targets(kind) if name != said(engine, text))


def stream(engine: EditEngine, count: int, seed: int = 0) -> list[tuple[Outcome, bytes | None]]:
    """Corrections of a classifier, inputs and targets drawn from a fixed seed, some inputs more than once."""
    generator = np.random.default_rng(seed)
    return [
        correct(engine, f"f{offset}", TEXTS[int(generator.integers(20))], NAMES[int(generator.integers(4))], offset)
        for offset in range(count)
    ]


@pytest.fixture
def bert(_models: Any) -> EditableModel:
    model: EditableModel = _models("bert")
    return model


def test_after_a_correction_the_model_is_right(model: EditableModel, kind: str) -> None:
    engine = engine_of(model)
    done = 0
    for offset, text in enumerate(TEXTS[:4]):
        target = wrong_target(engine, text, kind)
        outcome, record = correct(engine, f"f{offset}", text, target, offset)
        if record is not None:
            done += 1
            assert said(engine, text) == target
            assert outcome.seq == engine.codebook.seq
            assert outcome.entry_id in engine.codebook
            assert engine.memory.serving_entry_id(f"f{offset}") == outcome.entry_id
        else:
            assert outcome.reason
    assert done >= 2


def test_nothing_changes_before_apply(bert: EditableModel) -> None:
    engine = engine_of(bert)
    state, seq = engine.codebook.state_digest(), engine.codebook.seq
    from_model = said(engine, TEXTS[0])
    feedback = Feedback(v=SCHEMA_VERSION, feedback_id="a", inputs=TEXTS[0], target=wrong_target(engine, TEXTS[0]))
    edits = [engine.edit(feedback, 3) for _ in range(2)]
    assert edits[0] == edits[1]
    assert (engine.codebook.state_digest(), engine.codebook.seq, len(engine.memory)) == (state, seq, 0)
    assert said(engine, TEXTS[0]) == from_model


def test_fault_correcting_the_same_prompt_twice_loses_both_edits(model: EditableModel, kind: str) -> None:
    engine = engine_of(model)
    text = TEXTS[2]
    kept = [name for name in targets(kind) if name != said(engine, text)][:2]
    first, _ = correct(engine, "first", text, kept[0], 0)
    second, record = correct(engine, "second", text, kept[1], 1)
    assert (first.status, second.status) == ("added", "replaced")
    assert first.entry_id == second.entry_id == "first"
    assert said(engine, text) == kept[1]
    assert record is not None
    cause = decode_delta(record).cause
    assert cause is not UNSET
    assert cause.supersedes == ("first",)
    assert (len(engine.codebook), engine.memory.feedback_ids) == (1, ["second"])


def test_the_same_feedback_again_is_unchanged_while_it_holds_and_rejected_once_it_does_not(bert: EditableModel) -> None:
    engine = engine_of(bert)
    target = wrong_target(engine, TEXTS[0])
    correct(engine, "a", TEXTS[0], target, 4)
    assert correct(engine, "a", TEXTS[0], target, 5)[0].status == "unchanged"
    correct(engine, "b", TEXTS[0], wrong_target(engine, TEXTS[0]), 6)
    outcome, record = correct(engine, "a", TEXTS[0], target, 7)
    assert (outcome.status, record) == ("rejected", None)
    assert outcome.reason == "its id was used at offset 4; a new correction needs a new id"


def test_where_the_model_is_right_nothing_changes_but_what_the_editor_remembers(
    model: EditableModel, kind: str
) -> None:
    engine = engine_of(model)
    correct(engine, "a", TEXTS[2], wrong_target(engine, TEXTS[2], kind))
    state = engine.codebook.state_digest()
    outcome, record = correct(engine, "b", TEXTS[2], said(engine, TEXTS[2]))
    assert record is not None
    assert (outcome.status, outcome.seq) == ("unchanged", engine.codebook.seq)
    assert decode_delta(record).entries == ()
    assert engine.codebook.state_digest() == state
    assert "b" in engine.memory


@pytest.mark.parametrize(
    ("kind", "inputs", "target", "reason"),
    [
        ("bert", TEXTS[0], "maybe", "the model has no label 'maybe'; it has wrong, right, neither, both"),
        ("bert", TEXTS[0], "4", "no label '4'"),
        (
            "bert",
            " ".join(WORDS[:60]),
            "right",
            "62 tokens; the limit is 48 (GRACESTREAM_MAX_INPUT_TOKENS)",
        ),
        (
            "gpt2",
            TEXTS[0],
            " ".join(WORDS[:7]),
            "7 tokens; the limit is 6 (GRACESTREAM_MAX_TARGET_TOKENS)",
        ),
        ("t5-encoder", TEXTS[0], "Zanzibar", "the tokenizer cannot express the target"),
        ("gpt2", TEXTS[0], "two  spaces", "the tokenizer cannot express the target"),
        ("llama", " ".join(WORDS[:49]), WORDS[0], "the prompt has 49 tokens; the limit is 48"),
        ("llama", (TEXTS[0], TEXTS[1]), WORDS[0], "one text, not a pair"),
    ],
)
def test_what_the_model_cannot_take_is_rejected_as_invalid_with_the_reason(
    kind: str, inputs: Any, target: str, reason: str
) -> None:
    engine = engine_of(editable(kind))
    edited = engine.edit(Feedback(v=SCHEMA_VERSION, feedback_id="a", inputs=inputs, target=target), 0)
    assert edited.dead_letter_reason
    assert edited.delta_record is None
    assert edited.outcome is not None
    assert edited.outcome.status == "rejected"
    assert reason in str(edited.outcome.reason)


def test_a_pair_of_texts_is_corrected_as_one_input(bert: EditableModel) -> None:
    engine = engine_of(bert)
    pair = (TEXTS[0], TEXTS[1])
    prompt = bert.task.tokenize(pair)
    label = bert.answer([prompt], [], engine.lookup)[0].answer.outputs.label
    target = next(name for name in NAMES if name != label)
    assert (
        engine.edit(Feedback(v=SCHEMA_VERSION, feedback_id="a", inputs=pair, target=target), 0).delta_record is not None
    )


def test_a_value_that_does_not_converge_is_rejected_with_its_loss_and_without_a_delta(bert: EditableModel) -> None:
    engine = engine_of(bert, recipe=ValueTrainingConfig(max_steps=1, learning_rate=1e-6))
    for text in TEXTS[:6]:
        outcome, record = correct(engine, "a", text, wrong_target(engine, text))
        if record is None:
            assert (outcome.status, outcome.steps, outcome.loss is not UNSET) == ("rejected", 1, True)
            reason = str(outcome.reason)
            assert reason.startswith("no value was found in 1 steps; the loss is still")
            assert "; raise GRACESTREAM_MAX_STEPS, which is 1, edit another layer (`gracestream layers`)" in reason
            return
    pytest.fail("every value converged")


def test_what_to_try_depends_on_why_no_value_was_found() -> None:
    encoder = engine_of(editable("t5-encoder"), recipe=ValueTrainingConfig(max_steps=0))
    outcome, _ = correct(encoder, "a", TEXTS[0], "train bridge")
    assert "which is 0, set GRACESTREAM_INJECT_TOKENS=all, edit another layer" in str(outcome.reason)
    diverging = engine_of(editable("gpt2"), recipe=ValueTrainingConfig(max_steps=9, learning_rate=1e30))
    outcome, _ = correct(diverging, "a", TEXTS[0], "train bridge")
    assert str(outcome.reason).endswith("; lower GRACESTREAM_LEARNING_RATE, which is 1e+30")


def test_a_prompt_that_only_the_model_has_no_room_for_is_told_so() -> None:
    model = editable("bert", limits=Limits(max_input_tokens=1000))
    with pytest.raises(InputError, match=r"has 70 tokens; the limit is 64 \(the model's own\)"):
        model.task.tokenize(" ".join(WORDS[:68]))


@pytest.mark.parametrize(("block", "warns"), [(1, False), (2, True)])
def test_a_layer_whose_values_do_not_reach_the_whole_target_is_named_in_the_reason(block: int, warns: bool) -> None:
    model = editable("llama", f"model.layers.{block}.mlp.down_proj")
    engine = engine_of(model, recipe=ValueTrainingConfig(max_steps=2))
    outcome, record = correct(engine, "a", TEXTS[0], "train bridge river")
    assert record is None
    found = "at this layer a value reaches 1 of the target's 4 tokens: edit an earlier one" in str(outcome.reason)
    assert found == warns, outcome.reason


def near(engine: EditEngine, text: str) -> np.ndarray:
    query_D: np.ndarray = engine.model.queries([engine.model.task.tokenize(text)])[0].cpu().numpy()
    return query_D


def test_a_near_input_of_the_same_label_expands_and_a_value_that_fails_there_is_not_trusted(
    bert: EditableModel,
) -> None:
    """Verified, not assumed: where the entry's value does not help, the input gets an entry of its own."""
    statuses = []
    for broken in (False, True):
        engine = engine_of(bert, radius=100.0, radius_unit="absolute")
        target = wrong_target(engine, TEXTS[0])
        correct(engine, "a", TEXTS[0], target)
        # The radius shrinks, so that the other input is near but not within it.
        value_V = engine.codebook.entry(0).value_V
        engine.apply(with_radius(engine.codebook, "a", 1e-3, -value_V if broken else None))
        other = next(text for text in TEXTS[1:] if said(engine, text) != target)
        outcome, record = correct(engine, "b", other, target, 1)
        assert record is not None
        assert said(engine, other) == target
        statuses.append((outcome.status, outcome.entry_id, outcome.steps is UNSET))
    assert statuses == [("expanded", "a", True), ("added", "b", False)]


def test_the_same_stream_of_feedback_twice_gives_the_same_bits() -> None:
    runs = []
    for _ in range(2):
        engine = engine_of(editable("bert"), radius=1.0)
        runs.append([(msgspec.json.encode(outcome), record) for outcome, record in stream(engine, 25)])
    assert runs[0] == runs[1]
    assert sum(record is not None for _, record in runs[0]) > 10


@pytest.mark.parametrize("init", ["layer", "label", "random"])
@pytest.mark.parametrize("policy", ["nearest", "paper"])
def test_fault_saving_loses_keys_radii_and_labels(bert: EditableModel, init: str, policy: str) -> None:
    """Folding the records anew gives the same codebook, the same memory and the same next decision."""
    plan: dict[str, Any] = {"value_init": init, "policy": policy, "seed": 3}
    live, again = engine_of(bert, **plan), engine_of(bert, **plan)
    for _, record in stream(live, 20):
        if record is not None:
            again.apply(record)
    assert again.codebook.state_digest() == live.codebook.state_digest()
    assert again.codebook.digest == live.codebook.digest
    for name in ("feedback_ids", "entry_ids", "offsets"):
        assert getattr(again.memory, name) == getattr(live.memory, name)
    assert again.memory.queries_ED.tobytes() == live.memory.queries_ED.tobytes()
    following = Feedback(v=SCHEMA_VERSION, feedback_id="next", inputs=TEXTS[30], target=wrong_target(live, TEXTS[30]))
    assert again.edit(following, 99) == live.edit(following, 99)


def test_a_record_that_does_not_follow_is_a_fault_and_changes_nothing(bert: EditableModel) -> None:
    engine, other = engine_of(bert), engine_of(bert)
    records = [record for _, record in stream(other, 8) if record is not None]
    with pytest.raises(HistoryError):
        engine.apply(records[1])
    assert (engine.codebook.seq, len(engine.memory)) == (1, 0)


def test_editing_draws_no_random_number_and_keeps_the_weights(bert: EditableModel) -> None:
    weights = {name: tensor.clone() for name, tensor in bert.module.state_dict().items()}
    state = torch.get_rng_state()
    stream(engine_of(bert, value_init="random"), 8)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in bert.module.state_dict().items())


def observed(engine: EditEngine, text: str, offset: int) -> None:
    score = engine.traffic_sample.offer(0, offset, 0.0)
    assert score is not None
    engine.add_traffic(score, near(engine, text))


def test_radii_keep_clear_of_traffic_which_the_edit_does_not_capture(bert: EditableModel) -> None:
    engine = engine_of(bert, radius=1000.0, radius_unit="absolute")
    for offset, text in enumerate(TEXTS[1:12]):
        observed(engine, text, offset)
    before = [said(engine, text) for text in TEXTS[1:12]]
    query_D = near(engine, TEXTS[0])
    clearance = min(float(np.linalg.norm(query_D - near(engine, text))) for text in TEXTS[1:12])
    outcome, record = correct(engine, "a", TEXTS[0], wrong_target(engine, TEXTS[0]))
    assert outcome.status == "added"
    assert engine.codebook.radii_N[0] == pytest.approx(0.8 * clearance, rel=1e-4)
    assert [said(engine, text) for text in TEXTS[1:12]] == before
    assert record is not None
    assert decode_delta(record).cause.traffic == {"0": 11}  # type: ignore[union-attr]


def test_what_an_entry_answers_is_no_traffic_and_what_was_flagged_is_forgotten(bert: EditableModel) -> None:
    engine = engine_of(bert, radius=1e-3, radius_unit="absolute")
    observed(engine, TEXTS[0], 0)
    observed(engine, TEXTS[1], 1)
    assert len(engine.traffic_sample) == 2
    correct(engine, "a", TEXTS[0], wrong_target(engine, TEXTS[0]))
    assert len(engine.traffic_sample) == 1
    observed(engine, TEXTS[0], 2)
    assert len(engine.traffic_sample) == 1


def test_without_traffic_the_unit_of_radii_is_that_of_everyday_sentences(bert: EditableModel) -> None:
    unit = engine_of(bert, radius=1.0).initial_radius()
    assert unit > 0
    assert engine_of(bert, radius=2.5).initial_radius() == pytest.approx(2.5 * unit)
    assert engine_of(bert, radius=2.5, radius_unit="absolute").initial_radius() == 2.5


def test_key_and_value_have_the_widths_of_the_layers_input_and_output(model: EditableModel, kind: str) -> None:
    engine = engine_of(model)
    correct(engine, "a", TEXTS[2], wrong_target(engine, TEXTS[2], kind))
    widths = (engine.codebook.keys_ND.shape[1], engine.codebook.values_NV.shape[1])
    assert sorted(widths) == sorted(model.module.get_parameter(f"{model.layer}.weight").shape)


def test_another_correction_under_a_used_id_is_rejected_though_the_model_is_right_on_it(bert: EditableModel) -> None:
    engine = engine_of(bert, traffic_sample_size=0)
    assert correct(engine, "a", TEXTS[0], wrong_target(engine, TEXTS[0]), 0)[0].status == "added"
    outcome, record = correct(engine, "a", TEXTS[1], said(engine, TEXTS[1]), 1)
    assert (outcome.status, record) == ("rejected", None)
    assert str(outcome.reason).startswith("its id was used at offset 0")


def test_radii_are_measured_on_sentences_that_the_model_takes() -> None:
    engine = engine_of(editable("bert", limits=Limits(max_input_tokens=8)), traffic_sample_size=0)
    assert correct(engine, "a", WORDS[5], wrong_target(engine, WORDS[5]), 0)[0].status == "added"
    engine = engine_of(editable("bert", limits=Limits(max_input_tokens=3)), traffic_sample_size=0)
    with pytest.raises(InputError, match="choose GRACESTREAM_RADIUS_UNIT=absolute"):
        correct(engine, "a", WORDS[5], wrong_target(engine, WORDS[5]), 0)


def test_a_target_of_many_digits_is_no_label(bert: EditableModel) -> None:
    outcome, _ = correct(engine_of(bert), "a", TEXTS[0], "9" * 5000, 0)
    assert str(outcome.reason).startswith("the model has no label '999")
