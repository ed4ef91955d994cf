"""Corrections per second, compared with a textbook GRACE."""

import statistics
from collections.abc import Iterator
from functools import partial

from msgspec import UNSET

from gracestream.pipeline.editing.config import EditConfig
from tests.bench.device import timed
from tests.bench.framework import Row
from tests.bench.random_models import RandomModel
from tests.bench.textbook import train
from tests.gpu.corrections import CONFIG, STEPS, edit_all, facts, new_engine, wrong_corrections
from tests.gpu.rig import Case, CheckError, Rig, smollm2

REPEATS = 3
WAITING = 16


def cases(rig: Rig) -> Iterator[Case]:
    """Each model with random weights, and SmolLM2."""
    for shape in rig.models():
        yield Case(shape.name, partial(_case, rig, shape))
    if rig.real:
        yield Case("smollm2", partial(_trained, rig))


def _case(rig: Rig, shape: RandomModel) -> Iterator[Row]:
    model, count = shape.load(rig.device), rig.count(WAITING)
    alone: list[float] = []
    textbook: list[float] = []
    waiting: list[float] = []
    for turn in range(1 + rig.repeats(REPEATS)):
        (correction,) = wrong_corrections(shape, model, 1, seed=turn)
        seconds, (outcomes, _) = timed(rig.device, partial(edit_all, new_engine(model), [correction], batched=False))
        alone.append(seconds)
        assert correction.inputs is not UNSET
        assert correction.target is not UNSET
        _, supervised = model.prepare_correction(correction.inputs, correction.target)
        textbook.append(timed(rig.device, partial(train, model, supervised, STEPS, CONFIG.recipe.learning_rate))[0])
        corrections = wrong_corrections(shape, model, count, seed=100 + turn)
        seconds, (waiting_outcomes, _) = timed(
            rig.device, partial(edit_all, new_engine(model), corrections, batched=True)
        )
        waiting.append(seconds / count)
        steps = {outcome.steps for outcome in (*outcomes, *waiting_outcomes)}
        if steps != {STEPS}:
            raise CheckError(f"corrections took {steps} steps instead of {STEPS} each")
    median_alone, median_textbook, median_waiting = (
        statistics.median(seconds_of_kind[1:]) for seconds_of_kind in (alone, textbook, waiting)
    )
    name = f"edit/{shape.name}"
    yield Row(f"{name}/alone/edits-per-second", 1 / median_alone, "1/s", 1 / median_textbook)
    yield Row(f"{name}/alone/textbook-of-ours", median_textbook / median_alone, "x")
    yield Row(f"{name}/alone/steps", STEPS, "count")
    yield Row(f"{name}/{count}-waiting/edits-per-second", 1 / median_waiting, "1/s", 1 / median_textbook)
    yield Row(f"{name}/{count}-waiting/textbook-of-ours", median_textbook / median_waiting, "x")
    yield Row(f"{name}/{count}-waiting/steps", STEPS, "count")


def _trained(rig: Rig) -> Iterator[Row]:
    """The rows of SmolLM2 with the default recipe."""
    model = smollm2(rig.device)
    corrections = facts(2 * WAITING)
    edit_all(new_engine(model, EditConfig()), corrections[:2], batched=True)  # warms up
    halves = {"alone": corrections[:WAITING], f"{WAITING}-waiting": corrections[WAITING:]}
    for way, half in halves.items():
        engine = new_engine(model, EditConfig())
        seconds, (outcomes, records) = timed(rig.device, partial(edit_all, engine, half, batched=way != "alone"))
        steps = [outcome.steps for outcome in outcomes if outcome.steps is not UNSET]
        yield Row(f"edit/smollm2/{way}/edits-per-second", len(half) / seconds, "1/s")
        yield Row(f"edit/smollm2/{way}/steps", statistics.mean(steps) if steps else 0, "mean")
        yield Row(f"edit/smollm2/{way}/in-force", len(records), "count", len(half))
