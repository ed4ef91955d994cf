"""Corrections a second, against a textbook GRACE."""

import statistics
from collections.abc import Iterator
from functools import partial

from msgspec import UNSET

from gracestream.pipeline.editing.config import EditConfig
from tests.bench.device import timed
from tests.bench.framework import Row
from tests.bench.random_models import RandomModel
from tests.bench.textbook import train
from tests.gpu.corrections import PLAN, STEPS, edit_all, engine_of, facts, wrong_ones
from tests.gpu.rig import Case, CheckError, Rig, smollm2

TURNS = 3
WAITING = 16


def cases(rig: Rig) -> Iterator[Case]:
    """Each model of random weights, and SmolLM2."""
    for shape in rig.models():
        yield Case(shape.name, partial(_case, rig, shape))
    if rig.real:
        yield Case("smollm2", partial(_trained, rig))


def _case(rig: Rig, shape: RandomModel) -> Iterator[Row]:
    model, count = shape.load(rig.device), rig.some(WAITING)
    alone: list[float] = []
    textbook: list[float] = []
    waiting: list[float] = []
    for turn in range(1 + rig.turns(TURNS)):
        (given,) = wrong_ones(shape, model, 1, seed=turn)
        seconds, (outcomes, _) = timed(rig.device, partial(edit_all, engine_of(model), [given], together=False))
        alone.append(seconds)
        assert given.inputs is not UNSET
        assert given.target is not UNSET
        _, supervised = model.prepare_correction(given.inputs, given.target)
        textbook.append(timed(rig.device, partial(train, model, supervised, STEPS, PLAN.recipe.learning_rate))[0])
        many = wrong_ones(shape, model, count, seed=100 + turn)
        seconds, (found, _) = timed(rig.device, partial(edit_all, engine_of(model), many, together=True))
        waiting.append(seconds / count)
        steps = {outcome.steps for outcome in (*outcomes, *found)}
        if steps != {STEPS}:
            raise CheckError(f"corrections took {steps} steps, and have to take {STEPS}")
    of_alone, of_textbook, of_waiting = (statistics.median(some[1:]) for some in (alone, textbook, waiting))
    name = f"edit/{shape.name}"
    yield Row(f"{name}/alone/edits-per-second", 1 / of_alone, "1/s", 1 / of_textbook)
    yield Row(f"{name}/alone/textbook-of-ours", of_textbook / of_alone, "x")
    yield Row(f"{name}/alone/steps", STEPS, "count")
    yield Row(f"{name}/{count}-waiting/edits-per-second", 1 / of_waiting, "1/s", 1 / of_textbook)
    yield Row(f"{name}/{count}-waiting/textbook-of-ours", of_textbook / of_waiting, "x")
    yield Row(f"{name}/{count}-waiting/steps", STEPS, "count")


def _trained(rig: Rig) -> Iterator[Row]:
    """SmolLM2 with the default recipe."""
    model = smollm2(rig.device)
    given = facts(2 * WAITING)
    edit_all(engine_of(model, EditConfig()), given[:2], together=True)  # warms up
    halves = {"alone": given[:WAITING], f"{WAITING}-waiting": given[WAITING:]}
    for way, some in halves.items():
        engine = engine_of(model, EditConfig())
        seconds, (outcomes, records) = timed(rig.device, partial(edit_all, engine, some, together=way != "alone"))
        steps = [outcome.steps for outcome in outcomes if outcome.steps is not UNSET]
        yield Row(f"edit/smollm2/{way}/edits-per-second", len(some) / seconds, "1/s")
        yield Row(f"edit/smollm2/{way}/steps", statistics.mean(steps) if steps else 0, "mean")
        yield Row(f"edit/smollm2/{way}/in-force", len(records), "count", len(some))
