"""The same stream of corrections twice: every delta must be the same, byte for byte."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest

import numpy as np
from msgspec import UNSET

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.model.editable import EditableModel
from gracestream.schemas.deltas import decode_delta
from gracestream.schemas.messages import Feedback, Outcome
from tests.bench.framework import Row
from tests.bench.random_models import RandomModel
from tests.gpu.corrections import CONFIG, edit_all, facts, new_engine, wrong_corrections
from tests.gpu.rig import Case, CheckError, Rig, smollm2

ALONE, WAITING = 3, 8


def cases(rig: Rig) -> Iterator[Case]:
    """Each model with random weights, and SmolLM2 with the default recipe."""
    for shape in rig.models():
        yield Case(shape.name, partial(_random, rig, shape))
    if rig.real:
        yield Case("smollm2", partial(_trained, rig))


def _random(rig: Rig, shape: RandomModel) -> Iterator[Row]:
    module = shape.module(rig.device)

    def make_corrections(model: EditableModel) -> list[Feedback]:
        return wrong_corrections(shape, model, ALONE + rig.count(WAITING))

    yield from _case(shape.name, partial(shape.editable, module), make_corrections, CONFIG)


def _trained(rig: Rig) -> Iterator[Row]:
    yield from _case("smollm2", partial(smollm2, rig.device), lambda _model: facts(ALONE + WAITING), EditConfig())


def _case(
    name: str,
    load: Callable[[], EditableModel],
    make_corrections: Callable[[EditableModel], list[Feedback]],
    config: EditConfig,
) -> Iterator[Row]:
    (outcomes, first), (second_outcomes, second) = (_stream(load(), make_corrections, config) for _ in range(2))
    values = sum(entry.value is not UNSET for record in first for entry in decode_delta(record).entries)
    same = sum(one == other for one, other in zip(first, second, strict=False))
    yield Row(f"determinism/{name}/values", values, "count")
    yield Row(f"determinism/{name}/equal-deltas", same, "count", len(first))
    if not values:
        raise CheckError(f"{len(outcomes)} corrections gave no value, so nothing was compared")
    if first != second or outcomes != second_outcomes:
        raise CheckError(_difference(first, second, outcomes, second_outcomes))


def _stream(
    model: EditableModel, make_corrections: Callable[[EditableModel], list[Feedback]], config: EditConfig
) -> tuple[list[Outcome], list[bytes]]:
    """Outcomes and deltas of a new editor. Some corrections come alone, the others wait together."""
    try:
        engine, corrections = new_engine(model, config), make_corrections(model)
        alone = edit_all(engine, corrections[:ALONE], batched=False)
        waiting = edit_all(engine, corrections[ALONE:], batched=True)
        return alone[0] + waiting[0], alone[1] + waiting[1]
    finally:
        model.adaptor.remove()


def _difference(
    first: list[bytes], second: list[bytes], outcomes: list[Outcome], second_outcomes: list[Outcome]
) -> str:
    """A description of the first difference between two streams."""
    for one, other in zip_longest(first, second):
        if one == other:
            continue
        if one is None or other is None:
            return f"one stream has {len(first)} deltas, the other {len(second)}"
        first_delta, second_delta = decode_delta(one), decode_delta(other)
        differences = [
            float(np.abs(a.value.array() - b.value.array()).max())
            for a, b in zip(first_delta.entries, second_delta.entries, strict=False)
            if a.value is not UNSET and b.value is not UNSET
        ]
        return f"delta {first_delta.seq} differs; its values differ by at most {max(differences, default=0.0):.3g}"
    feedback_id = next(one.feedback_id for one, other in zip(outcomes, second_outcomes, strict=True) if one != other)
    return f"the outcome of {feedback_id} differs"
