"""How an editor edits: its policy, radii, guard and recipe, as one value."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.pipeline.errors import HistoryError


@dataclass(frozen=True, slots=True)
class EditConfig:
    """How an editor edits: the fields that `Settings` explains under the same names."""

    policy: Literal["nearest", "paper"] = "nearest"
    radius: float = 1.0
    radius_unit: Literal["median", "absolute"] = "median"
    max_radius: float = math.inf
    scope_radius: bool = False
    scope_alpha: float = 0.05
    expand: Literal["cover", "paper"] = "cover"
    guard: bool = True
    wording: bool = True
    traffic: int = 512
    seed: int = 0
    init: Literal["layer", "label", "random"] = "layer"
    forms: bool = True
    recipe: ValueTrainingConfig = field(default_factory=ValueTrainingConfig)


def edit_config_from_lead(environment: Mapping[str, str]) -> EditConfig:
    """The plan under which a term edited, as its `lead` delta says; what it does not say is the default.

    A delta that says nothing of forms or wordings is of an editor that trained at one prompt, and compared no words.
    """
    known = {"forms": "False", "wording": "False"} | {
        name: environment[name] for name in EditConfig.__dataclass_fields__ if name in environment
    }
    recipe = {name: environment[name] for name in ValueTrainingConfig.__dataclass_fields__ if name in environment}
    try:
        made: EditConfig = msgspec.convert({**known, "recipe": recipe}, EditConfig, strict=False)
    except msgspec.ValidationError as error:
        raise HistoryError(f"the plan in a lead delta cannot be read: {error}") from error
    return made
