"""The configuration of edits: policy, radii, retention guard and training, as one immutable value.

An editor writes its configuration into the `lead` delta of its term. So a reproduction decides under the same
configuration (docs/explanation/determinism.md).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.pipeline.errors import HistoryError


@dataclass(frozen=True, slots=True)
class EditConfig:
    """The configuration of edits; docs/reference/settings.md explains the fields. It is constant within a term."""

    policy: Literal["nearest", "paper"] = "nearest"
    radius: float = 1.0
    radius_unit: Literal["median", "absolute"] = "median"
    max_radius: float = math.inf
    use_scope_radius: bool = False
    scope_error_rate: float = 0.05
    expand: Literal["cover", "paper"] = "cover"
    retention_guard: bool = True
    check_wording: bool = True
    traffic_sample_size: int = 512
    seed: int = 0
    value_init: Literal["layer", "label", "random"] = "layer"
    train_prompt_forms: bool = True
    recipe: ValueTrainingConfig = field(default_factory=ValueTrainingConfig)


RECORDED_NAMES = {
    "use_scope_radius": "scope_radius",
    "scope_error_rate": "scope_alpha",
    "retention_guard": "guard",
    "check_wording": "wording",
    "traffic_sample_size": "traffic",
    "value_init": "init",
    "train_prompt_forms": "forms",
    "stop_margin": "margin",
}
"""Fields with another name in `lead` deltas. A field may be renamed, its name on the wire may not.

Otherwise an undo would repeat the decisions of an older history with the defaults of the renamed fields.
"""


def edit_config_to_environment(config: EditConfig) -> dict[str, str]:
    """The configuration as the environment of a `lead` delta records it; `edit_config_from_lead` reads it."""
    fields = {**dataclasses.asdict(config), **dataclasses.asdict(config.recipe)}
    fields.pop("recipe")
    return {RECORDED_NAMES.get(name, name): str(value) for name, value in fields.items()}


def edit_config_from_lead(environment: Mapping[str, str]) -> EditConfig:
    """The configuration that the environment of a `lead` delta records; missing fields have their defaults.

    Raises:
        HistoryError: a recorded field has a value that cannot be read.
    """
    # An environment without these two fields comes from an editor that had neither feature, whatever the default is.
    known = {"train_prompt_forms": "False", "check_wording": "False"} | _recorded_fields(EditConfig, environment)
    recipe = _recorded_fields(ValueTrainingConfig, environment)
    try:
        config: EditConfig = msgspec.convert({**known, "recipe": recipe}, EditConfig, strict=False)
    except msgspec.ValidationError as error:
        raise HistoryError(f"the configuration in a lead delta cannot be read: {error}") from error
    return config


def _recorded_fields(config_class: type, environment: Mapping[str, str]) -> dict[str, str]:
    """The fields of this class that the environment records, by their names in the class."""
    recorded = {field.name: RECORDED_NAMES.get(field.name, field.name) for field in dataclasses.fields(config_class)}
    return {name: environment[key] for name, key in recorded.items() if key in environment}
