"""Answers of the engines to a backlog of short corrected requests and long ones, compared with simpler engines."""

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.engines.batch import BatchEngine
from gracestream.pipeline.model.engines.continuous import ContinuousEngine
from gracestream.schemas.messages import Feedback
from tests.bench.codebooks import extended, queries, radii_of, stored
from tests.bench.contenders import Answered, BenchRequest, Generate, WithoutCodebook, make_request, run_engine
from tests.bench.framework import Row
from tests.bench.random_models import RandomModel, texts
from tests.gpu.corrections import CONFIG, edit_all, facts, new_engine, wrong_corrections
from tests.gpu.rig import Case, CheckError, Rig, smollm2

CORRECTED, OTHERS, ROWS = 16, 48, 32
ENTRIES = 100_000
MEDIAN_TOKENS, MAX_TOKENS, REHEARSAL_TOKENS = 16, 64, 4
ROUNDS = 3
PROMPT_TOKENS = 20
REAL_KEYS, RADIUS_QUERIES = 512, 128


def cases(rig: Rig) -> Iterator[Case]:
    """A causal model with random weights, and SmolLM2 with the default recipe."""
    for shape in rig.models():
        if shape.name.startswith("gpt2"):
            yield Case(shape.name, partial(_random, rig, shape))
    if rig.real:
        yield Case("smollm2", partial(_trained, rig))


def _random(rig: Rig, shape: RandomModel) -> Iterator[Row]:
    model = shape.load(rig.device)
    yield from _case(rig, shape.name, model, CONFIG, wrong_corrections(shape, model, rig.count(CORRECTED)))


def _trained(rig: Rig) -> Iterator[Row]:
    yield from _case(rig, "smollm2", smollm2(rig.device, MAX_TOKENS), EditConfig(), facts(CORRECTED))


def _case(
    rig: Rig, name: str, model: EditableModel, config: EditConfig, corrections: Sequence[Feedback]
) -> Iterator[Row]:
    engine = new_engine(model, config)
    outcomes, _ = edit_all(engine, corrections, batched=True)
    in_force = {outcome.feedback_id for outcome in outcomes if outcome.status in ("added", "expanded", "split")}
    lookup = _lookup(rig, engine)
    requests = [
        make_request(model, correction.inputs, str(correction.target), max_new_tokens=MAX_TOKENS)
        for correction in corrections
        if correction.feedback_id in in_force
    ]
    yield Row(f"engines/{name}/corrected", len(requests), "count", len(corrections))
    requests += _others(rig, model)
    random.Random(1).shuffle(requests)
    limits: dict[str, Any] = {"max_rows": ROWS, "check_answers": True}
    bare: Any = WithoutCodebook(model)
    contenders: dict[str, Callable[[], Any]] = {
        "continuous": lambda: ContinuousEngine(model, lookup, **limits),
        "batch": lambda: BatchEngine(model, lookup, **limits),
        "bare": lambda: ContinuousEngine(bare, lookup, **limits),
        "generate": lambda: Generate(model, ROWS),
    }
    rounds: dict[str, list[Answered]] = {contender: [] for contender in contenders}
    for turn in range(-1, rig.repeats(ROUNDS)):
        for contender, make_engine in contenders.items():
            answered = run_engine(make_engine(), requests, rig.device)
            if turn >= 0:  # the first round warms up
                rounds[contender].append(answered)
    yield from _rows(f"engines/{name}", requests, rounds)


def _lookup(rig: Rig, engine: EditEngine) -> CodebookLookup:
    """The corrections among many other entries, whose keys lie where queries lie."""
    model = engine.model
    prompts = [model.task.tokenize(text) for text in texts(model, REAL_KEYS + RADIUS_QUERIES, PROMPT_TOKENS, seed=9)]
    found_ND = queries(model, prompts)
    keys_ND = stored(found_ND[RADIUS_QUERIES:], ENTRIES if rig.real else REAL_KEYS)
    codebook = extended(engine.codebook, keys_ND, radii_of(keys_ND, found_ND[:RADIUS_QUERIES]))
    return CodebookLookup(codebook, KeyIndex(codebook, rig.device))


def _others(rig: Rig, model: EditableModel) -> list[BenchRequest]:
    """Requests for answers of log-normal lengths."""
    generator = np.random.default_rng(2)
    longest = MAX_TOKENS if rig.real else REHEARSAL_TOKENS
    lengths = generator.lognormal(np.log(MEDIAN_TOKENS), 0.8, rig.count(OTHERS)).clip(1, longest).astype(int).tolist()
    return [
        make_request(model, text, max_new_tokens=length, min_new_tokens=length)
        for text, length in zip(texts(model, len(lengths), PROMPT_TOKENS, seed=8), lengths, strict=True)
    ]


def _rows(path: str, requests: Sequence[BenchRequest], rounds: dict[str, list[Answered]]) -> Iterator[Row]:
    generate = statistics.median(one.seconds for one in rounds["generate"])
    for contender, answers in rounds.items():
        seconds = statistics.median(one.seconds for one in answers)
        yield Row(f"{path}/{contender}/answers-per-second", len(requests) / seconds, "1/s", len(requests) / generate)
    for other in ("bare", "batch"):
        pairs = zip(rounds["continuous"], rounds[other], strict=True)
        yield Row(f"{path}/continuous/time-of-{other}", statistics.median(a.seconds / b.seconds for a, b in pairs), "x")
    wrong = []
    for contender in ("continuous", "batch"):
        texts_of_contender = rounds[contender][-1].texts
        targets = [(one.target, texts_of_contender[id(one)]) for one in requests if one.target]
        correct = sum(text.startswith(target) for target, text in targets)
        yield Row(f"{path}/{contender}/correct", correct / max(1, len(targets)), "share", 1)
        wrong += [
            f"{contender}: {target!r} instead of {text!r}" for target, text in targets if not text.startswith(target)
        ]
    ours, batch = rounds["continuous"][-1].texts, rounds["batch"][-1].texts
    equal = sum(ours[id(one)] == batch[id(one)] for one in requests)
    yield Row(f"{path}/continuous/equal-to-batch", equal / len(requests), "share")
    if wrong:
        raise CheckError(f"{len(wrong)} answers are not the corrections' targets: {'; '.join(wrong[:3])}")
