"""The demo's prompts and corrections, written for it. The model answers some of the prompts wrong."""

import json
import re
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from gracestream.deploy.demo import DEMO_FOLDER
from gracestream.pipeline.errors import UserError
from gracestream.schemas.messages import ChatMessage, Inputs, Parameters, Prediction


@dataclass(frozen=True, slots=True)
class DemoCase:
    """A prompt, its target, and variants of the prompt, in the order of the script's `variant_names`."""

    inputs: Inputs
    target: str
    variants: tuple[Inputs, ...]


@dataclass(frozen=True, slots=True)
class DemoScript:
    """The prompts of one story.

    Attributes:
        title: The title of the story.
        case_name: What the answers of the cases are about, in the plural.
        cases: Prompts to correct if their answers are wrong.
        controls: Prompts whose answers must be the same before and after all edits.
        parameters: Parameters of all requests.
        variant_names: Descriptions of the variants of each case.
    """

    title: str
    case_name: str
    cases: tuple[DemoCase, ...]
    controls: tuple[str, ...]
    parameters: Parameters
    variant_names: tuple[str, ...]


MAX_CASES, MAX_CONTROLS, MAX_LABELLED_CONTROLS = 12, 8, 48
"""Most prompts of the short story. A classifier answers fast, so its story has more controls."""


def load_script(model: str, *, complete: bool = False) -> DemoScript:
    """The script for a model that is known by name.

    Args:
        model: Name of the model.
        complete: Takes all prompts. The short story spreads its prompts evenly over them.

    Raises:
        UserError: the demo has no script for the model.
    """

    def select(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
        return rows if complete else rows[:: -(-len(rows) // most)]

    if model == "smollm2":
        facts = tuple(
            DemoCase((ChatMessage("user", row["question"]),), row["target"], (row["prompt"], row["rephrase"]))
            for row in select(_read_rows("facts.jsonl"), MAX_CASES)
        )
        controls = tuple(row["prompt"] for row in select(_read_rows("controls.jsonl"), MAX_CONTROLS))
        variant_names = ("as a text to complete", "in other words")
        return DemoScript(
            "SmolLM2-135M gets facts wrong", "facts", facts, controls, Parameters(max_new_tokens=24), variant_names
        )
    if model == "intent":
        policy = select(_read_rows("policy.jsonl"), MAX_CASES)
        cases = tuple(DemoCase(row["text"], row["target"], (row["rephrase"],)) for row in policy)
        traffic = [row for row in _read_rows("intents.jsonl") if row["split"] == "traffic"]
        controls = tuple(row["text"] for row in select(traffic, MAX_LABELLED_CONTROLS))
        title = "a help desk changes where it routes some intents"
        return DemoScript(title, "routes", cases, controls, Parameters(), ("in other words",))
    raise UserError(f"the demo has no story for the model {model!r}; it has smollm2 and intent")


def prediction_text(prediction: Prediction) -> str:
    """The answer of a prediction: its text, its label, or its error."""
    if prediction.outputs is UNSET:
        return f"error: {prediction.error}"
    outputs = prediction.outputs
    return outputs.label if outputs.label is not UNSET else outputs.text if outputs.text is not UNSET else ""


def is_wrong(answer: str, target: str) -> bool:
    """Whether the target does not occur as a word in the answer: an assistant puts it into a sentence."""
    return re.search(rf"(?<!\w){re.escape(target)}(?!\w)", answer, re.IGNORECASE) is None


def _read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DEMO_FOLDER / name).read_text(encoding="utf-8").splitlines() if line.strip()]
