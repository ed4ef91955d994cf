"""Answers per second with an empty and a filled codebook, compared with the unedited model."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import truediv

import torch

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel
from gracestream.schemas.messages import Parameters
from tests.bench.codebooks import codebook_of, queries, stored
from tests.bench.device import timed
from tests.bench.framework import Row
from tests.bench.random_models import RandomModel, prompts
from tests.gpu.rig import Case, Rig, smollm2

TOKENS, NEW_TOKENS = 20, 16
BATCHES = (1, 32)
REPEATS = 15
REAL = {"10k": 10_000, "100k": 100_000}
SMALL = {"1k": 1000}
REAL_KEYS, OTHER_QUERIES = 512, 128


def cases(rig: Rig) -> Iterator[Case]:
    """Each model with random weights, to its first token; and SmolLM2, for 16 tokens."""
    for shape in rig.models():
        yield Case(shape.name, partial(_random, rig, shape))
    if rig.real:
        yield Case("smollm2", partial(_trained, rig))


def _random(rig: Rig, shape: RandomModel) -> Iterator[Row]:
    yield from _case(rig, shape.name, shape.load(rig.device))


def _trained(rig: Rig) -> Iterator[Row]:
    yield from _case(rig, "smollm2", smollm2(rig.device, max_new_tokens=NEW_TOKENS))


def _case(rig: Rig, name: str, model: EditableModel) -> Iterator[Row]:
    generated = prompts(model, REAL_KEYS + OTHER_QUERIES + max(BATCHES), TOKENS)
    real_ND, others_RD = (
        queries(model, generated[:REAL_KEYS]),
        queries(model, generated[REAL_KEYS : REAL_KEYS + OTHER_QUERIES]),
    )
    empty = Codebook("default", model.fingerprint, model.layer)
    codebooks_by_size = {
        size: codebook_of(model, stored(real_ND, count), others_RD)
        for size, count in (REAL if rig.real else SMALL).items()
    }
    codebooks = {
        size: (book, KeyIndex(book, model.device)) for size, book in {"empty": empty, **codebooks_by_size}.items()
    }
    for batch in BATCHES:
        inputs = generated[-batch:]
        variants: dict[str, Callable[[], object]] = {"unedited": partial(_unedited, model, inputs)}
        variants |= {size: partial(_edited, model, inputs, *pair) for size, pair in codebooks.items()}
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        for turn in range(-2, rig.repeats(REPEATS)):
            for variant, call in variants.items():
                spent, _ = timed(rig.device, call)
                if turn >= 0:  # earlier rounds warm up
                    seconds[variant].append(spent)
        unedited = batch / statistics.median(seconds["unedited"])
        for variant, samples in seconds.items():
            path = f"serve/{name}/batch{batch}/{variant}"
            yield Row(f"{path}/answers-per-second", batch / statistics.median(samples), "1/s", unedited)
            if variant != "unedited":
                ratios = map(truediv, samples, seconds["unedited"])
                yield Row(f"{path}/time-of-unedited", statistics.median(ratios), "x")


def _unedited(model: EditableModel, inputs: Sequence[Prompt]) -> None:
    with torch.inference_mode():
        model.task.run(model.task.batch(inputs), [Parameters()] * len(inputs))


def _edited(model: EditableModel, inputs: Sequence[Prompt], codebook: Codebook, index: KeyIndex) -> None:
    model.answer(inputs, [Parameters()] * len(inputs), CodebookLookup(codebook, index))
