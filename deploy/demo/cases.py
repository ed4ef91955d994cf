"""What the demo asks and corrects: prompts written for it, of which the model answers some wrong."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import UNSET

from pipeline.errors import UserError
from schemas.messages import Parameters, Prediction

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Case:
    """An input, what should come out, and other words for the same."""

    inputs: str
    target: str
    rephrase: str


@dataclass(frozen=True, slots=True)
class Script:
    """The inputs of one story. `controls` must answer after all edits as they did before."""

    title: str
    cases: tuple[Case, ...]
    controls: tuple[str, ...]
    parameters: Parameters


def script_of(model: str) -> Script:
    """The script for a model of `deploy.models`.

    Raises:
        UserError: the demo has none for it.
    """
    if model == "smollm2":
        facts = tuple(Case(row["prompt"], row["target"], row["rephrase"]) for row in _rows("facts.jsonl"))
        controls = tuple(row["prompt"] for row in _rows("controls.jsonl"))
        return Script("SmolLM2-135M gets facts wrong", facts, controls, Parameters(max_new_tokens=12))
    if model == "intent":
        moved = tuple(Case(row["text"], row["target"], row["rephrase"]) for row in _rows("policy.jsonl"))
        controls = tuple(row["text"] for row in _rows("intents.jsonl") if row["split"] == "traffic")
        return Script("a help desk changes where it routes some intents", moved, controls, Parameters())
    raise UserError(f"the demo has no story for the model {model!r}; it has smollm2 and intent")


def answer_of(prediction: Prediction) -> str:
    """What the model said: its text, or its label."""
    if prediction.outputs is UNSET:
        return f"error: {prediction.error}"
    outputs = prediction.outputs
    return outputs.label if outputs.label is not UNSET else outputs.text if outputs.text is not UNSET else ""


def is_wrong(answer: str, target: str) -> bool:
    """A generator may go on after the target, for nothing told it to stop; a label has to be the label."""
    return not answer.casefold().startswith(target.casefold())


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines() if line.strip()]
