"""Quality and cost of edits on zsRE and on the demo: success, rephrases and locality.

The engine is that of the editor worker, without Kafka. `docs/explanation/method.md` defines the method. zsRE: 200
corrections in the form `Question: … Answer:`, one after the other. The traffic sample holds 512 questions of Natural
Questions (NQ); locality is measured on others. All prompts are checked again at the END of the stream. The defaults
were chosen on rows after these 200. `demo`: the demo's facts and controls.

- `exact`: the share of corrections for which the edited model gives the target, its end token, and nothing else.
  `after`: the same right after each edit.
- `rephrase`: the same for another wording of the question. `reached`: the share of rephrases within the radius of their
  own edit. `works`: of these, the share for which the value gives the target.
- `locality`: the share of unrelated questions (held out from NQ, and zsRE's own) within no radius. `same`: of a sample
  of them, the share of answers that equal the unedited model's to the letter.
- `generated`: of a sample of the edits, the share of generated answers that equal the target to the letter.
- `steps`, `seconds`: means over the edits with a trained value. `entries`, `rejected`: counts.
- `wrong`, `right` (demo): facts that the unedited model answers wrong or right; the wrong ones are corrected.
- `controls same`, `right same` (demo): the share of unchanged answers to controls, and to facts that were right before.

Queries are the layer's (`GRACESTREAM_QUERY_SOURCE=last`). Rows named `encoder` use MiniLM's
(`GRACESTREAM_QUERY_SOURCE=encoder`), with radii for those queries.

The baseline of a number is the same number in the row `paper`: Algorithm 1 to the letter, without retention guard and
traffic. A value depends only on its input, label and recipe. So settings with the same recipe train it once, and its
time counts wherever it is used. The edited model's result for a text depends only on the entry that serves it, so each
pair of text and value is checked once.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean

import numpy as np

from gracestream.deploy.demo import DEMO_FOLDER
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.experiments.tasks import zsre
from gracestream.pipeline.model.registry import default_layer
from gracestream.pipeline.search.key_search import NO_SLOT
from gracestream.pipeline.settings import load_settings
from gracestream.pipeline.tuning.evaluation import begins_with_target
from gracestream.workers.bootstrap import edit_config_from_settings
from tests.bench.edits import (
    CachedModel,
    CorrectionCosts,
    Fact,
    TrainedValues,
    apply_corrections,
    fraction,
    open_cached_model,
    serving_slots,
    start_engine,
)
from tests.bench.framework import Options, Row

EDITS, QUICK, HELD_OUT, SAMPLE = 200, 50, 300, 48

LAYERS = ("model.layers.25.mlp.gate_proj", "model.layers.23.self_attn.o_proj")
"""The layers to compare."""

ENCODER_RADII = (1.0, 4 / 3)
"""Radii for queries of the sentence encoder, relative to their default."""


@dataclass(frozen=True, slots=True)
class Zsre:
    """The stream of corrections, the unflagged traffic, and questions that no edit should change."""

    facts: list[Fact]
    traffic: list[str]
    unrelated: list[str]


def run(options: Options) -> Iterator[Row]:
    """The rows of `quality`."""
    settings = load_settings(device=options.device, query_source="last", layer=default_layer("smollm2"))
    assert settings.model.layer is not None
    data = zsre_data(QUICK if options.quick else EDITS)
    few_data = replace(data, facts=data.facts[:QUICK])
    plan = edit_config_from_settings(settings.editing, uses_encoder=False)
    margins = [margin for margin in (1.0, 2.0) if margin != plan.recipe.stop_margin]
    baselines: dict[str, float] = {}
    trained_values: TrainedValues = {}
    with open_cached_model(settings, trained_values) as model:
        for name, chosen in variants(plan).items():
            options.report(f"zsRE: {name}")
            for row in zsre_rows(f"zsre/{name}", model, chosen, data, generate=chosen == plan or not baselines):
                baselines.setdefault(row.metric, row.value)
                yield replace(row, baseline=baselines[row.metric])
        options.report("demo")
        yield from demo_rows("demo/facts", model, plan)
        yield from zsre_rows(f"zsre-{QUICK}/{short(settings.model.layer)}", model, plan, few_data)
        for margin in margins:
            options.report(f"zsRE: margin {margin:g}")
            other = replace(plan, recipe=replace(plan.recipe, stop_margin=margin))
            yield from zsre_rows(f"zsre-{QUICK}/margin {margin:g}", model, other, few_data)
    encoder_settings = settings.replace(query_source="encoder", use_scope_radius=False)
    with open_cached_model(encoder_settings, trained_values) as model:
        for part in ENCODER_RADII:
            chosen = edit_config_from_settings(encoder_settings.editing, uses_encoder=True)
            chosen = replace(chosen, radius=part * chosen.radius)
            options.report(f"zsRE: encoder, radius {chosen.radius:g}")
            for row in zsre_rows(f"zsre/encoder, radius {chosen.radius:g}", model, chosen, data):
                yield replace(row, baseline=baselines[row.metric])
    for layer in LAYERS:
        if layer != settings.model.layer:
            options.report(f"zsRE: {layer}")
            with open_cached_model(settings.replace(layer=layer), trained_values) as model:
                yield from zsre_rows(f"zsre-{QUICK}/{short(layer)}", model, plan, few_data)


def variants(plan: EditConfig) -> dict[str, EditConfig]:
    """The settings to compare on the whole stream. `paper` is first, because it is the baseline."""
    return {
        "paper": replace(plan, policy="paper", expand="paper", retention_guard=False, traffic_sample_size=0),
        "paper, guard, traffic": replace(plan, policy="paper", expand="paper"),
        "nearest, no traffic": replace(plan, traffic_sample_size=0),
        "nearest (default)": plan,
        **{f"radius {part * plan.radius:g}": replace(plan, radius=part * plan.radius) for part in (0.75, 1.5)},
    }


def zsre_data(edits: int) -> Zsre:
    """`edits` corrections, the traffic, and unrelated questions: held-out ones of NQ and zsRE's own."""
    task = zsre()
    facts = [Fact(edit.example.inputs, edit.rephrases[0], edit.example.target) for edit in task.edits[:edits]]
    held_out = [example.inputs for example in task.retention[:HELD_OUT]]
    return Zsre(facts, task.traffic, held_out + task.unrelated[:edits])


def zsre_rows(
    setting: str, model: CachedModel, plan: EditConfig, data: Zsre, *, generate: bool = False
) -> Iterator[Row]:
    """The rows of one setting: apply the whole stream, then check every question. `generate` adds generated answers."""
    engine = start_engine(model, plan, data.traffic)
    cost = apply_corrections(engine, model, data.facts)
    is_correct = partial(model.is_correct, engine)
    queries_RD = np.stack([model.unedited_pass(fact.rephrase, fact.target).query_D for fact in data.facts])
    reached = [
        slot != NO_SLOT and engine.memory.serving_entry_id(str(number)) == engine.codebook.entry_ids[slot]
        for number, slot in enumerate(serving_slots(engine, queries_RD))
        if str(number) in engine.memory
    ]
    rephrased = [is_correct(fact.rephrase, fact.target) for fact in data.facts]
    in_force = [rephrased[number] for number in range(len(rephrased)) if str(number) in engine.memory]
    works = [success for success, own in zip(in_force, reached, strict=True) if own]
    captured = [slot != NO_SLOT for slot in serving_slots(engine, model.queries(data.unrelated))]
    yield Row(f"{setting}/exact", fraction(is_correct(fact.text, fact.target) for fact in data.facts), "share")
    yield Row(f"{setting}/after", fraction(cost.correct_after), "share")
    yield Row(f"{setting}/rephrase", fraction(rephrased), "share")
    yield Row(f"{setting}/reached", sum(reached) / len(data.facts), "share")
    yield Row(f"{setting}/works", fraction(works), "share")
    yield Row(f"{setting}/locality", 1 - fraction(captured), "share")
    if generate:
        sample, corrected = data.unrelated[:SAMPLE], data.facts[:SAMPLE]
        same = zip(model.generate_answers(sample, engine), model.generate_answers(sample), strict=True)
        generated = zip(model.generate_answers([fact.text for fact in corrected], engine), corrected, strict=True)
        yield Row(f"{setting}/same", fraction(now == before for now, before in same), "share")
        yield Row(f"{setting}/generated", fraction(answer == fact.target for answer, fact in generated), "share")
    yield from cost_rows(setting, engine, cost)


def demo_rows(setting: str, model: CachedModel, plan: EditConfig) -> Iterator[Row]:
    """The rows of the demo: wrong facts are corrected; controls and right facts must keep their answers.

    A fact is right if the unedited model's answer begins with the target.
    """
    facts = [Fact(row["prompt"], row["rephrase"], row["target"]) for row in demo_data("facts.jsonl")]
    before = model.generate_answers([fact.text for fact in facts])
    known = [fact for fact, answer in zip(facts, before, strict=True) if begins_with_target(answer, fact.target)]
    wrong = [fact for fact in facts if fact not in known]
    unchanged_texts = [row["prompt"] for row in demo_data("controls.jsonl")] + [fact.text for fact in known]
    engine = start_engine(model, plan, unchanged_texts)
    cost = apply_corrections(engine, model, wrong)
    fixed = zip(model.generate_answers([fact.text for fact in wrong], engine), wrong, strict=True)
    rephrased = zip(model.generate_answers([fact.rephrase for fact in wrong], engine), wrong, strict=True)
    unchanged = [
        now == was
        for now, was in zip(
            model.generate_answers(unchanged_texts, engine), model.generate_answers(unchanged_texts), strict=True
        )
    ]
    controls = len(unchanged_texts) - len(known)
    yield Row(f"{setting}/wrong", len(wrong), "count")
    yield Row(f"{setting}/right", len(known), "count")
    yield Row(f"{setting}/generated", fraction(answer == fact.target for answer, fact in fixed), "share")
    yield Row(f"{setting}/rephrase", fraction(answer == fact.target for answer, fact in rephrased), "share")
    yield Row(f"{setting}/controls same", fraction(unchanged[:controls]), "share")
    yield Row(f"{setting}/right same", fraction(unchanged[controls:]), "share")
    yield from cost_rows(setting, engine, cost)


def demo_data(name: str) -> list[dict[str, str]]:
    """The rows of a data file of the demo."""
    return [json.loads(line) for line in (DEMO_FOLDER / name).read_text(encoding="utf-8").splitlines()]


def cost_rows(setting: str, engine: EditEngine, cost: CorrectionCosts) -> Iterator[Row]:
    """Rows of the cost of edits, and of their results."""
    yield Row(f"{setting}/steps", mean(cost.steps), "steps")
    yield Row(f"{setting}/seconds", mean(cost.seconds), "s")
    yield Row(f"{setting}/entries", len(engine.codebook), "count")
    yield Row(f"{setting}/rejected", cost.statuses.count("rejected"), "count")


def short(layer: str) -> str:
    """The path of a layer without the prefix of all blocks."""
    return layer.removeprefix("model.layers.")
