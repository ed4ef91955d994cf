"""Values that are trained together are those that each would be alone, rounding apart; decisions stay one by one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from transformers import ConvBertConfig, ConvBertForSequenceClassification

from gracestream.pipeline.codebook.lookup import CodebookLookup, FoundEntry
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.editing.value_training import TrainedValue, ValueTrainingConfig, train_value, train_values
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.suffix_pass import SuffixPass, TargetCheck
from gracestream.pipeline.model.tasks.base import TargetPass
from gracestream.schemas.deltas import Cause, Delta, decode_delta
from gracestream.schemas.messages import Feedback, encode
from tests.support.chosen_queries import PointModel, at, engine
from tests.support.recorded_history import PLAN, Recorded
from tests.support.tiny_models import CODEBOOK, LIMITS, SIZE, WORDS, editable, index_of, new_codebook, texts, tokenizer

TEXTS = texts(5, seed=4)
SHORT = ValueTrainingConfig(max_steps=10, stop_margin=1e9)


def wanted(kind: str) -> list[str]:
    """Of each text a target; those of generators have one word to three."""
    if kind == "bert":
        return ["both", "1", "both", "1", "both"]
    return [" ".join(WORDS[3 * number : 3 * number + 1 + number % 3]) for number in range(len(TEXTS))]


def passes(model: EditableModel, kind: str) -> list[TargetPass]:
    return [model.prepare_correction(text, target)[1] for text, target in zip(TEXTS, wanted(kind), strict=True)]


def start(model: EditableModel, supervised: TargetPass) -> torch.Tensor:
    nothing = new_codebook(model.fingerprint, model.layer)
    return model.suffix_runner.inspect(supervised, CodebookLookup(nothing, index_of(nothing)))[1].outputs_BV[0]


def alone(model: EditableModel, one: TargetPass, recipe: ValueTrainingConfig) -> TrainedValue:
    return train_value(model.suffix_runner, model.suffix_runner.suffix_of([one]), start(model, one), recipe)


def assert_alike(ours: np.ndarray, theirs: np.ndarray, share: float = 0.01) -> None:
    """Values are the same but for rounding, which Adam magnifies."""
    assert float(np.linalg.norm(ours - theirs)) <= share * float(np.linalg.norm(theirs))


def test_a_long_target_has_more_steps_alone_and_beside_short_ones() -> None:
    wide = editable("llama", limits=replace(LIMITS, max_target_tokens=40, max_input_tokens=80))
    long, short = (wide.prepare_correction(TEXTS[0], " ".join(["train"] * words))[1] for words in (31, 2))
    assert [len(row.labels[0]) for row in (long, short)] == [32, 3]
    starts = [start(wide, row) for row in (long, short)]
    slow = replace(SHORT, learning_rate=1e-6)
    found = train_values(wide.suffix_runner, wide.suffix_runner.suffix_of([long, short]), starts, slow)
    assert [trained.steps for trained in found] == [2 * slow.max_steps, slow.max_steps]
    assert alone(wide, long, slow).steps == 2 * slow.max_steps


def test_the_further_steps_of_a_long_target_end_when_it_is_given() -> None:
    recipe = ValueTrainingConfig(max_steps=10, stop_margin=3.0)
    assert recipe.is_done(TargetCheck(3.0, 0.1), 0)
    assert not recipe.is_done(TargetCheck(1.0, 0.1), 9), "right, but without the margin"
    assert recipe.is_done(TargetCheck(1.0, 0.1), 10)
    assert not recipe.is_done(TargetCheck(-1.0, 2.0), 10)
    assert [recipe.step_limit(tokens) for tokens in (1, 16, 17, 32)] == [10, 10, 11, 20]


def test_values_that_are_trained_together_are_those_of_each_alone(model: EditableModel, kind: str) -> None:
    rows = passes(model, kind)
    assert len({row.num_tokens for row in rows}) > 1
    starts = [start(model, row) for row in rows]
    found = train_values(model.suffix_runner, model.suffix_runner.suffix_of(rows), starts, SHORT)
    for row, trained in zip(rows, found, strict=True):
        by_itself = alone(model, row, SHORT)
        assert trained.steps == by_itself.steps == SHORT.max_steps
        assert trained.target_check.loss == pytest.approx(by_itself.target_check.loss, rel=1e-3, abs=1e-4)
        assert_alike(trained.value_V, by_itself.value_V, 1e-3)


@pytest.mark.slow
def test_each_stops_by_itself(model: EditableModel, kind: str) -> None:
    rows = passes(model, kind)
    recipe = ValueTrainingConfig(max_steps=60, stop_margin=1.0, learning_rate=0.05 if kind == "bert" else 2.0)
    found = train_values(
        model.suffix_runner, model.suffix_runner.suffix_of(rows), [start(model, row) for row in rows], recipe
    )
    assert len({trained.steps for trained in found}) > 1
    for row, trained in zip(rows, found, strict=True):
        by_itself = alone(model, row, recipe)
        assert abs(trained.steps - by_itself.steps) <= 1
        assert trained.converged == by_itself.converged
        value_V = torch.from_numpy(trained.value_V)
        margin = model.suffix_runner.check_value(model.suffix_runner.suffix_of([row]), value_V).margin
        assert margin == pytest.approx(trained.target_check.margin, abs=0.05)


def test_rows_that_are_left_are_as_before(model: EditableModel, kind: str) -> None:
    """Also once the one with the longest label has gone."""
    rows = passes(model, kind)
    starts_BV = torch.stack([start(model, row) for row in rows])
    rest = model.suffix_runner.suffix_of(rows)
    whole = [float(loss) for _, loss in model.suffix_runner.evaluate(rest, starts_BV)]
    longest = max(range(len(rows)), key=lambda row: len(rows[row].labels[0]))
    for kept in ([row for row in range(len(rows)) if row != longest], [0], [len(rows) - 1]):
        found = [float(loss) for _, loss in model.suffix_runner.evaluate(rest.select_rows(kept), starts_BV[kept])]
        assert found == pytest.approx([whole[row] for row in kept], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "layer", ["encoder.block[0].layer[0].SelfAttention.o", "decoder.block[0].layer[0].SelfAttention.o"]
)
def test_what_a_module_puts_out_for_all_rows_is_no_row(layer: str) -> None:
    """The first block of a T5 makes a table of positions, (T, T, heads), before the layer."""
    model = editable("t5-encoder", layer=layer)
    rows = passes(model, "t5-encoder")
    rows = [next(row for row in rows if row.num_tokens == tokens) for tokens in {row.num_tokens for row in rows}]
    starts = [start(model, row) for row in rows]
    found = train_values(model.suffix_runner, model.suffix_runner.suffix_of(rows), starts, SHORT)
    for row, trained in zip(rows, found, strict=True):
        assert_alike(trained.value_V, alone(model, row, SHORT).value_V, 1e-3)
    assert model.suffix_runner.supports_padding()


def test_padding_counts_in_none_of_the_usual_models(model: EditableModel) -> None:
    assert model.suffix_runner.supports_padding()


def test_a_model_in_which_padding_counts_is_not_trained_so() -> None:
    """Its convolutions reach over what is masked."""
    config = ConvBertConfig(
        vocab_size=SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        embedding_size=32, head_ratio=2, conv_kernel_size=5, num_labels=3, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = ConvBertForSequenceClassification(config)
    made = EditableModel(module, tokenizer("bert"), "convbert.encoder.layer[1].output.dense", limits=LIMITS)
    assert not made.suffix_runner.supports_padding()
    given = [(make_correction(f"f{number}", text, "1"), number) for number, text in enumerate(TEXTS)]
    assert EditEngine(made, CODEBOOK, EditConfig(traffic_sample_size=0)).draft_values(given) == {}


@pytest.mark.slow
def test_the_same_rows_give_the_same_bits(model: EditableModel, kind: str) -> None:
    rows = passes(model, kind)
    starts = [start(model, row) for row in rows]
    one, two = (
        train_values(model.suffix_runner, model.suffix_runner.suffix_of(rows), starts, ValueTrainingConfig())
        for _ in range(2)
    )
    assert [trained.value_V.tobytes() for trained in one] == [trained.value_V.tobytes() for trained in two]


def test_they_are_so_where_every_pass_is_a_whole_one() -> None:
    model = editable("gpt2")
    model.suffix_runner._optimisations = "none"
    rows = passes(model, "gpt2")
    found = train_values(
        model.suffix_runner, model.suffix_runner.suffix_of(rows), [start(model, row) for row in rows], SHORT
    )
    for row, trained in zip(rows, found, strict=True):
        assert_alike(trained.value_V, alone(model, row, SHORT).value_V, 1e-3)


def feedback(kind: str) -> list[Feedback]:
    return [
        make_correction(f"f{n}", text, target) for n, (text, target) in enumerate(zip(TEXTS, wanted(kind), strict=True))
    ]


def decided(made: EditEngine, given: Sequence[Feedback], together: bool) -> list[Delta]:
    """The deltas of an engine's decisions on feedback that waits, after its lead."""
    made.apply(made.lead_delta({}))
    corrections = [(one, offset) for offset, one in enumerate(given)]
    ahead = made.draft_values(corrections) if together else {}
    deltas = []
    for one, offset in corrections:
        edited = made.edit(one, offset, draft=ahead.get(offset))
        if edited.delta_record is not None:
            made.apply(edited.delta_record)
            deltas.append(decode_delta(edited.delta_record))
    return deltas


@pytest.mark.slow
def test_decisions_are_those_of_one_at_a_time(model: EditableModel, kind: str) -> None:
    plan = EditConfig(traffic_sample_size=0)
    given = [*feedback(kind), make_correction("again", TEXTS[0], wanted(kind)[0]), make_correction("f1", TEXTS[1], "x")]
    one_by_one, at_once = (decided(EditEngine(model, CODEBOOK, plan), given, way) for way in (False, True))
    for was, now in zip(one_by_one, at_once, strict=True):
        assert (was.op, cause(was).entry_id, cause(was).supersedes) == (
            now.op,
            cause(now).entry_id,
            cause(now).supersedes,
        )
        for before, after in zip(was.entries, now.entries, strict=True):
            assert (before.entry_id, before.key, before.label) == (after.entry_id, after.key, after.label)
            assert (before.radius, before.removed) == (after.radius, after.removed)
            if before.value is UNSET or after.value is UNSET:
                assert before.value is after.value
            else:
                assert_alike(after.value.array(), before.value.array())
    trained = {cause(delta).together for delta in at_once if delta.entries}
    assert all(cause(delta).offset in cause(delta).together for delta in at_once if cause(delta).together)
    assert max(map(len, trained)) > 1


def cause(delta: Delta) -> Cause:
    assert delta.cause is not UNSET
    return delta.cause


def test_what_needs_no_value_is_not_trained() -> None:
    made = engine(PLAN)
    given = [
        *(make_correction("right", at(0, 0), "0"), make_correction("no class", at(1, 1), "7")),
        *(make_correction("a", at(2, 2), "1"), make_correction("b", at(4, 4), "2")),
    ]
    ahead = made.draft_values([(one, offset) for offset, one in enumerate(given)])
    assert {offset: found.trained_with for offset, found in ahead.items()} == {2: (2, 3), 3: (2, 3)}


def test_values_that_start_from_an_entry_wait_for_it() -> None:
    made = engine(replace(PLAN, value_init="label"))
    given = [make_correction("a", at(2, 2), "1"), make_correction("b", at(4, 4), "1")]
    assert made.draft_values([(one, offset) for offset, one in enumerate(given)]) == {}


def test_inputs_of_other_lengths_are_trained_apart() -> None:
    made = EditEngine(editable("gpt2"), CODEBOOK, EditConfig(traffic_sample_size=0))
    lengths = (4, 40, 5, 41)
    given = [make_correction(f"f{n}", " ".join(WORDS[:length]), WORDS[50 + n]) for n, length in enumerate(lengths)]
    ahead = made.draft_values([(one, offset) for offset, one in enumerate(given)])
    assert {found.trained_with for found in ahead.values()} == {(0, 2), (1, 3)}


def proof(made: EditEngine, one: Feedback, delta: Delta) -> tuple[SuffixPass, torch.Tensor]:
    """The pass of a correction, and the value of its delta."""
    assert one.inputs is not UNSET
    assert one.target is not UNSET
    value = delta.entries[0].value
    assert value is not UNSET
    return made.model.suffix_runner.suffix_of(
        [made.model.prepare_correction(one.inputs, one.target)[1]]
    ), torch.from_numpy(value.array().copy())


def test_what_is_not_right_by_itself_is_looked_for_alone() -> None:
    made = engine(PLAN)
    given = [make_correction("a", at(2, 2), "1"), make_correction("b", at(4, 4), "2")]
    ahead = made.draft_values([(one, offset) for offset, one in enumerate(given)])
    vain = replace(ahead[0], trained=replace(ahead[0].trained, converged=False))
    wrong = replace(ahead[0], trained=replace(ahead[0].trained, value_V=np.zeros_like(ahead[0].trained.value_V)))
    for found in (vain, wrong):
        edited = made.edit(given[0], 0, draft=found)
        assert edited.delta_record is not None
        delta = decode_delta(edited.delta_record)
        assert cause(delta).together == ()
        assert made.model.suffix_runner.check_value(*proof(made, given[0], delta)).predicts_target


def history() -> Recorded:
    """Corrections that waited together, of which some came to need no value of their own, and one that none suits."""
    made = Recorded()
    places = [((0.0, 0.0), 1), ((0.0, 0.2), 1), ((3.0, 3.0), 2), ((9.0, 1.0), 3), ((6.0, 6.0), 7)]
    made.send(*(encode(make_correction(f"f{n}", at(*place), str(label))) for n, (place, label) in enumerate(places)))
    made.undo("u", "f0")
    made.send(*(encode(make_correction(f"g{n}", at(n, 7), "2")) for n in range(3)))
    return made


def test_a_history_of_batches_is_reproduced_to_the_bit() -> None:
    made = history()
    compositions = [cause(decode_delta(record)).together for record in made.deltas[1:]]
    assert (0, 1, 2, 3) in compositions
    again = made.reproduced()
    assert again.report.first_difference is None
    assert again.records == made.deltas
    assert again.report.decisions == again.report.same_decisions


def test_a_record_on_which_the_model_fails_is_decided_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Recorded()
    supervised = PointModel.prepare_correction

    def failing(self: PointModel, inputs: str, target: str) -> object:
        if target == "3":
            raise RuntimeError("it broke")
        return supervised(self, inputs, target)

    monkeypatch.setattr(PointModel, "prepare_correction", failing)
    given = [
        make_correction("a", at(0, 0), "1"),
        make_correction("b", at(5, 5), "3"),
        make_correction("c", at(9, 9), "2"),
    ]
    outcomes = made.send(*map(encode, given))
    assert [outcome and outcome.status for outcome in outcomes] == ["added", "rejected", "added"]
    assert all(cause(decode_delta(record)).together == () for record in made.deltas[1:])


def test_a_pass_is_not_run_again_for_a_decision_unless_what_it_told_has_changed(
    model: EditableModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = EditEngine(model, CODEBOOK, replace(PLAN, traffic_sample_size=0))
    made.apply(made.lead_delta({}))
    targets = wanted(kind)
    given = [make_correction(f"f{number}", text, targets[number]) for number, text in enumerate(TEXTS)]
    ahead = made.draft_values([(one, offset) for offset, one in enumerate(given)])
    offset = next(iter(ahead))
    examined: list[TargetPass] = []
    examine = model.suffix_runner.inspect

    def counted(one: TargetPass, *rest: Any) -> Any:
        examined.append(one)
        return examine(one, *rest)

    monkeypatch.setattr(model.suffix_runner, "inspect", counted)
    first = made.edit(given[offset], offset, draft=ahead[offset])
    assert not examined
    assert first.delta_record is not None
    served = replace(ahead[offset].inspection, served_by=FoundEntry(0, "another", 0.0, 1.0))
    again = made.edit(given[offset], offset, draft=replace(ahead[offset], inspection=served))
    assert len(examined) == 1
    assert again.delta_record == first.delta_record
    made.apply(first.delta_record)
    late = make_correction("late", TEXTS[offset], targets[offset])
    assert made.edit(late, 99, draft=ahead[offset]).outcome is not None
    assert len(examined) == 2, "an entry serves it by now"
