"""Corrections of random inputs, and engines that take them: what the parts that edit share."""

import json
from collections.abc import Sequence
from pathlib import Path

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.pipeline.model.editable import EditableModel
from gracestream.schemas.messages import Feedback, Outcome
from tests.bench.random_models import RandomModel

FACTS = Path(__file__).parents[2] / "deploy" / "demo" / "facts.jsonl"
TOKENS = 20
STEPS = 20
PLAN = EditConfig(
    recipe=ValueTrainingConfig(max_steps=STEPS, learning_rate=1.0, stop_margin=float("inf")),
    traffic_sample_size=0,
    radius=0.1,
)
"""Every value takes the same number of steps, so that times can be compared."""


def engine_of(model: EditableModel, plan: EditConfig = PLAN) -> EditEngine:
    """An engine that leads an empty codebook."""
    engine = EditEngine(model, "default", plan)
    engine.apply(engine.lead_delta({}))
    return engine


def wrong_ones(shape: RandomModel, model: EditableModel, count: int, seed: int = 0) -> list[Feedback]:
    """Corrections of answers that the model gives wrong."""
    return [make_correction(f"f{seed}-{n}", *shape.wrong(model, TOKENS, 1000 * seed + n)) for n in range(count)]


def facts(count: int) -> list[Feedback]:
    """Corrections of the demo's facts, for a model with trained weights."""
    lines = FACTS.read_text(encoding="utf-8").splitlines()[:count]
    read = [json.loads(line) for line in lines]
    return [make_correction(f"f{number}", fact["prompt"], fact["target"]) for number, fact in enumerate(read)]


def edit_all(engine: EditEngine, given: Sequence[Feedback], *, together: bool) -> tuple[list[Outcome], list[bytes]]:
    """Decide on corrections one after the other, their values trained together or not: outcomes and deltas."""
    numbered = [(feedback, offset) for offset, feedback in enumerate(given, start=len(engine.memory.offsets))]
    ahead = engine.draft_values(numbered) if together else {}
    outcomes, records = [], []
    for feedback, offset in numbered:
        edited = engine.edit(feedback, offset, draft=ahead.get(offset))
        assert edited.outcome is not None
        outcomes.append(edited.outcome)
        if edited.delta_record is not None:
            engine.apply(edited.delta_record)
            records.append(edited.delta_record)
    return outcomes, records
