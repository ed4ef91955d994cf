"""Engines and corrections for the parts that edit."""

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
CONFIG = EditConfig(
    recipe=ValueTrainingConfig(max_steps=STEPS, learning_rate=1.0, stop_margin=float("inf")),
    traffic_sample_size=0,
    radius=0.1,
)
"""Every value takes the same number of steps, so times are comparable."""


def new_engine(model: EditableModel, config: EditConfig = CONFIG) -> EditEngine:
    """An engine that leads, with an empty codebook."""
    engine = EditEngine(model, "default", config)
    engine.apply(engine.lead_delta({}))
    return engine


def wrong_corrections(shape: RandomModel, model: EditableModel, count: int, seed: int = 0) -> list[Feedback]:
    """Corrections of random prompts, with targets that the model does not predict."""
    return [make_correction(f"f{seed}-{n}", *shape.wrong_target(model, TOKENS, 1000 * seed + n)) for n in range(count)]


def facts(count: int) -> list[Feedback]:
    """Corrections of the demo's facts, for a model with trained weights."""
    lines = FACTS.read_text(encoding="utf-8").splitlines()[:count]
    facts_read = [json.loads(line) for line in lines]
    return [make_correction(f"f{number}", fact["prompt"], fact["target"]) for number, fact in enumerate(facts_read)]


def edit_all(
    engine: EditEngine, corrections: Sequence[Feedback], *, batched: bool
) -> tuple[list[Outcome], list[bytes]]:
    """Decide on corrections in order. Returns outcomes and deltas. `batched` trains their values together."""
    numbered = [(feedback, offset) for offset, feedback in enumerate(corrections, start=len(engine.memory.offsets))]
    drafts = engine.draft_values(numbered) if batched else {}
    outcomes, records = [], []
    for feedback, offset in numbered:
        result = engine.edit(feedback, offset, draft=drafts.get(offset))
        assert result.outcome is not None
        outcomes.append(result.outcome)
        if result.delta_record is not None:
            engine.apply(result.delta_record)
            records.append(result.delta_record)
    return outcomes, records
