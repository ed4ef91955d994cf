"""Trial edits on tiny models of every kind: what is measured is what the engine and a replica do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import UNSET

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.editing.calibration import CalibrationError, LabelledRequest
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.sentence_encoder import SentenceEncoder
from gracestream.pipeline.tuning import workbench
from gracestream.pipeline.tuning.evaluation import EvaluationCase, evaluate
from gracestream.pipeline.tuning.trial_texts import UserRequests
from gracestream.pipeline.tuning.trials import ConfigChoice, Share, TrialMaterial, TrialMeasurement, TrialResult
from gracestream.pipeline.tuning.workbench import (
    ENCODER_QUERY,
    AnswerCache,
    LoadedCheckpoint,
    Workbench,
    WorkbenchError,
)
from tests.support.tiny_encoder import encoder
from tests.support.tiny_models import KINDS, LIMITS, WORDS, editable, texts, tokenizer

PROMPTS = texts(24, seed=7, shortest=5, longest=9)
REWORDED = texts(4, seed=8, shortest=5, longest=9)


def samples(kind: str) -> list[LabelledRequest]:
    """Requests, the first with other words, and with a target that every generator can be taught."""
    targets: Sequence[Any] = [UNSET] * 4 if kind == "bert" else WORDS[:4]
    pairs = zip(PROMPTS, REWORDED, targets, strict=False)
    return [*(LabelledRequest(*pair) for pair in pairs), *map(LabelledRequest, PROMPTS[len(REWORDED) :])]


EVERYTHING, NOTHING = 1e6, 1e-3
"""Absolute radii that reach every text, and only the prompt itself."""


def module(kind: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = KINDS[kind].build()
    if (lm_head := model.get_output_embeddings()) is not None:
        lm_head.weight.data[4] *= 4  # so that a value can make it end its answer, as trained models do
    return model


def checkpoint(kind: str, read: SentenceEncoder | None = None) -> LoadedCheckpoint:
    return LoadedCheckpoint(module(kind), tokenizer(KINDS[kind].special_tokens), LIMITS, encoder=read)


def absolute(query: str, radius: float, **plan: Any) -> ConfigChoice:
    usual: dict[str, Any] = {"radius_unit": "absolute", "traffic_sample_size": 0, "check_wording": False}
    return ConfigChoice(query, f"{radius:g}", {}, EditConfig(radius=radius, **(usual | plan)))


@dataclass
class Rig:
    """A workbench with trials."""

    bench: Workbench
    answers: AnswerCache
    material: TrialMaterial

    def measuring(self, **options: Any) -> TrialMeasurement:
        return TrialMeasurement(self.bench, self.material, self.answers, **options)

    def tried(self, *choices: ConfigChoice, **options: Any) -> list[TrialResult]:
        return list(self.measuring(**options).measure(choices))


def rig(
    kind: str,
    given: Sequence[LabelledRequest] | None = None,
    trials: int = 4,
    layers: Sequence[str] = (),
    read: SentenceEncoder | None = None,
) -> Rig:
    bench = Workbench.wrap_layers(checkpoint(kind, read), layers or [KINDS[kind].layer])
    answers = AnswerCache(bench.task, 6)
    return Rig(
        bench,
        answers,
        TrialMaterial.from_requests(
            bench, answers, UserRequests.from_labelled(samples(kind) if given is None else given), trials
        ),
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5-encoder", "bert"])
def test_a_radius_reaches_everything_or_nothing_but_the_prompt(kind: str) -> None:
    made = rig(kind)
    query = made.bench.task.query
    widest, least = made.tried(absolute(query, EVERYTHING), absolute(query, NOTHING))
    assert widest.edited.value >= 0.5
    assert widest.edited.of == len(made.material.trials) == 4
    assert widest.others == Share(10, 10)
    assert least.edited == widest.edited
    assert least.kept.count == least.kept.of == least.edited.count
    assert least.others.count == least.rephrases.count == 0
    assert least.rephrases.of == 4
    assert widest.seconds == least.seconds
    assert widest.broken.of == widest.rephrases.of + widest.forms.of + widest.others.of + widest.about.of
    assert least.broken.of == 0
    assert widest.false_positives == 1
    assert least.false_positives == 0


def test_the_shares_are_those_of_a_codebook_that_replicas_would_serve() -> None:
    """The same corrections by an engine that trains for itself, answered as `evaluate` does."""
    made = rig("llama")
    choice = ConfigChoice("last", "1", {}, EditConfig(radius=1.5, traffic_sample_size=0))
    (tried,) = made.tried(choice)
    model = editable("llama", layer=KINDS["llama"].layer)
    engine = EditEngine(model, "own", choice.config)
    engine.apply(engine.lead_delta({}))
    for number, trial in enumerate(made.material.trials):
        edited = engine.edit(trial.to_feedback(), number)
        if edited.delta_record is not None:
            engine.apply(edited.delta_record)
    captured = answered(model, engine.codebook, [(one, None) for one in made.material.held_out])
    assert Share(sum(one.entry_id is not None for one in captured), len(captured)) == tried.others
    reworded = [(text, trial.target) for trial in made.material.trials for text in trial.rephrases]
    right = answered(model, engine.codebook, reworded)
    assert Share(sum(one.passed and one.entry_id is not None for one in right), len(right)) == tried.rephrases
    own = answered(model, engine.codebook, [(trial.inputs, trial.target) for trial in made.material.trials])
    assert sum(one.passed for one in own) == tried.kept.count


def answered(model: EditableModel, codebook: Codebook, asked: Sequence[tuple[Any, str | None]]) -> list[Any]:
    cases = [
        EvaluationCase(inputs, unchanged=True) if target is None else EvaluationCase(inputs, target)
        for inputs, target in asked
    ]
    named = Codebook(codebook.name, model.fingerprint, model.layer)
    assert (named.model, named.layer) == (codebook.model, codebook.layer)
    return evaluate(model, codebook, cases)


def test_queries_of_one_pass_are_those_of_each_layer_by_itself() -> None:
    layers = ["model.layers.1.mlp.down_proj", "model.layers.2.self_attn.o_proj"]
    bench = Workbench.wrap_layers(checkpoint("llama", encoder()), layers)
    prompts = [bench.task.tokenize(text) for text in PROMPTS]
    found = bench.compute_queries(prompts)
    assert found.keys() == {(layer, kind) for layer in layers for kind in ("last", "mean", ENCODER_QUERY)}
    for (layer, kind), rows in found.items():
        own = bench.models[layer][kind].queries(prompts[:3]).numpy()
        for prompt, query_D in zip(prompts, own, strict=False):
            np.testing.assert_allclose(rows[prompt], query_D, atol=1e-4)


def test_an_encoders_queries_have_candidates_of_their_own() -> None:
    made = rig("llama", read=encoder())
    for_encoder, last = made.tried(absolute(ENCODER_QUERY, EVERYTHING), absolute("last", NOTHING))
    assert (for_encoder.query, last.query) == (ENCODER_QUERY, "last")
    assert for_encoder.seconds == last.seconds, "values are trained once a layer"
    assert for_encoder.edited == last.edited


def test_each_layer_is_trained_once_and_every_step_is_told() -> None:
    reports: list[str] = []
    layers = ["model.layers.1.mlp.down_proj", "model.layers.1.self_attn.o_proj"]
    made = rig("llama", layers=layers)
    choices = [absolute("last", NOTHING), absolute("mean", NOTHING), absolute(ENCODER_QUERY, NOTHING)]
    measuring = made.measuring(on_step=reports.append)
    found = list(measuring.measure(choices))
    assert [(one.layer, one.query) for one in found] == [(layer, kind) for layer in layers for kind in ("last", "mean")]
    assert len(reports) == measuring.count_steps(choices) == 2 * (4 + 2)


def ending_after(asked: int) -> Callable[[], bool]:
    left = [asked]

    def ended() -> bool:
        left[0] -= 1
        return left[0] < 0

    return ended


def test_without_time_the_first_edits_are_measured_and_no_other_layer_is_begun() -> None:
    layers = ["model.layers.1.mlp.down_proj", "model.layers.1.self_attn.o_proj"]
    made = rig("llama", trials=12, layers=layers)
    found = made.tried(absolute("last", NOTHING), absolute("mean", NOTHING), is_time_up=ending_after(0))
    assert [one.layer for one in found] == layers[:1] * 2
    assert {one.edited.of for one in found} == {4}, "those that are trained together"


def test_values_that_do_not_train_have_a_reason() -> None:
    made = rig("llama")
    (tried,) = made.tried(absolute("last", NOTHING, recipe=ValueTrainingConfig(max_steps=1, learning_rate=1e-4)))
    assert tried.edited == Share(0, 4)
    assert tried.reasons[0].startswith("no value was found in 1 steps")
    assert tried.rephrases == Share(0, 4)


def test_what_the_model_cannot_take_is_left_out_with_the_reason_and_the_rest_is_measured() -> None:
    long = " ".join(WORDS[:1] * 60)
    given = [
        LabelledRequest(PROMPTS[0], long),
        LabelledRequest(PROMPTS[1], target="unheard-of"),
        LabelledRequest(long),
        *map(LabelledRequest, PROMPTS[2:]),
    ]
    made = rig("llama", given, trials=3)
    assert any("1 request is left out: the prompt has 60 tokens" in note for note in made.material.notes)
    assert any(note.startswith("no trial edit of") for note in made.material.notes)
    assert len(made.material.trials) == 2  # of three, one of which cannot be taught its target
    assert all(long not in trial.rephrases for trial in made.material.trials)
    (tried,) = made.tried(absolute("last", NOTHING))
    assert tried.edited.of == 2


def test_a_target_that_the_model_gives_already_is_replaced_by_another() -> None:
    (before,) = rig("bert").answers.unedited_answers([rig("bert").bench.task.tokenize(PROMPTS[0])])
    (trial,) = rig(
        "bert", [LabelledRequest(PROMPTS[0], target=before), *map(LabelledRequest, PROMPTS[1:])], trials=1
    ).material.trials
    assert trial.inputs == PROMPTS[0]
    assert trial.target != before


def test_too_few_requests_are_one_sentence() -> None:
    with pytest.raises(CalibrationError, match="there are 1; add lines"):
        rig("llama", samples("llama")[:1])


def test_a_layer_that_cannot_be_edited_is_named_and_the_others_are_tried() -> None:
    bench = Workbench.wrap_layers(checkpoint("llama"), ["lm_head", "model.layers[1].mlp.down_proj"])
    assert list(bench.models) == ["model.layers.1.mlp.down_proj"]
    assert list(bench.layer_errors) == ["lm_head"]
    with pytest.raises(WorkbenchError, match=r"no layer can be tried \(lm_head: .*--layer"):
        Workbench.wrap_layers(checkpoint("llama"), ["lm_head"])


def test_a_layer_before_the_first_attention_has_an_encoders_queries_alone() -> None:
    layer = "model.layers.0.self_attn.v_proj"
    bench = Workbench.wrap_layers(checkpoint("llama", encoder()), [layer])
    assert list(bench.models[layer]) == [ENCODER_QUERY, "mean"]


def test_no_answer_is_generated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rig("llama")
    generated: list[int] = []
    run = workbench.AnswerCache._run

    def counting(self: AnswerCache, model: EditableModel, prompts: Any, values_BV: np.ndarray) -> Any:
        generated.append(len(prompts))
        return run(self, model, prompts, values_BV)

    monkeypatch.setattr(workbench.AnswerCache, "_run", counting)
    made.tried(absolute("last", EVERYTHING))
    first = sum(generated)
    made.tried(absolute("last", EVERYTHING))
    assert sum(generated) == first > 0


def test_a_candidate_is_one_json_object() -> None:
    (tried,) = rig("bert").tried(absolute("first", NOTHING))
    assert msgspec.json.decode(msgspec.json.encode(tried), type=TrialResult) == tried
