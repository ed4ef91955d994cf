"""The configuration of edits: policy, radii, retention guard and training, as one immutable value.

An editor writes its configuration into the `lead` delta of its term. So replays decide under the same configuration
(docs/explanation/determinism.md).
"""

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


def edit_config_from_lead(environment: Mapping[str, str]) -> EditConfig:
    """The configuration that the environment of a `lead` delta records; missing fields have their defaults.

    Raises:
        HistoryError: a recorded field has a value that cannot be read.
    """
    # An environment without these two fields comes from an editor that had neither feature, whatever the default is.
    known = {"train_prompt_forms": "False", "check_wording": "False"} | {
        name: environment[name] for name in EditConfig.__dataclass_fields__ if name in environment
    }
    recipe = {name: environment[name] for name in ValueTrainingConfig.__dataclass_fields__ if name in environment}
    try:
        config: EditConfig = msgspec.convert({**known, "recipe": recipe}, EditConfig, strict=False)
    except msgspec.ValidationError as error:
        raise HistoryError(f"the configuration in a lead delta cannot be read: {error}") from error
    return config
