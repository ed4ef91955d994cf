"""Each setting of how to edit reaches the editor's plan."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.pipeline.model.sentence_encoder import ENCODER_DEFAULT_RADIUS, ENCODER_MAX_RADIUS
from gracestream.pipeline.settings import (
    VARIABLES,
    SettingsError,
    load_settings,
    to_environment_variables,
    unknown_variables,
)
from gracestream.workers.bootstrap import edit_config_from_settings

CHOSEN = EditConfig(
    policy="paper",
    radius=0.5,
    radius_unit="absolute",
    max_radius=0.25,
    use_scope_radius=True,
    scope_error_rate=0.125,
    expand="paper",
    retention_guard=False,
    check_wording=False,
    traffic_sample_size=7,
    seed=3,
    value_init="random",
    train_prompt_forms=False,
    recipe=ValueTrainingConfig(max_steps=11, learning_rate=0.125, stop_margin=1.5),
)


def test_no_setting_is_dropped_on_its_way_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {field.name: getattr(CHOSEN, field.name) for field in fields(EditConfig) if field.name != "recipe"}
    recipe = {field.name: getattr(CHOSEN.recipe, field.name) for field in fields(ValueTrainingConfig)}
    del plan["expand"]  # an option of experiments
    for variable, value in to_environment_variables(plan | recipe).items():
        monkeypatch.setenv(variable, value)
    assert replace(edit_config_from_settings(load_settings().editing, uses_encoder=True), expand="paper") == CHOSEN


@pytest.mark.parametrize(("ours", "default"), [(CHOSEN, EditConfig()), (CHOSEN.recipe, ValueTrainingConfig())])
def test_the_plan_above_is_nowhere_the_default(
    ours: EditConfig | ValueTrainingConfig, default: EditConfig | ValueTrainingConfig
) -> None:
    assert all(getattr(ours, field.name) != getattr(default, field.name) for field in fields(default))


def test_the_settings_of_who_chooses_nothing_are_those_of_a_plan_without_a_choice() -> None:
    assert edit_config_from_settings(load_settings().editing, uses_encoder=False) == EditConfig()


def test_a_largest_radius_of_none_is_no_limit() -> None:
    settings = load_settings(max_radius="none").editing
    assert edit_config_from_settings(settings, uses_encoder=False).max_radius == math.inf


def test_an_encoder_that_the_papers_policy_does_not_use_is_a_mistake() -> None:
    with pytest.raises(SettingsError, match="ENCODER is set, and with GRACESTREAM_POLICY=paper the layer makes"):
        load_settings(encoder="mine", policy="paper")
    assert load_settings(encoder="mine").model.encoder == "mine"
    for query in ("last", "encoder"):
        assert load_settings(query_source=query, encoder="mine", policy="paper").model.encoder == "mine"


def test_radii_of_an_encoder_are_smaller_unless_they_are_set() -> None:
    plan = edit_config_from_settings(load_settings().editing, uses_encoder=True)
    assert (
        plan.radius
        == ENCODER_DEFAULT_RADIUS
        < edit_config_from_settings(load_settings().editing, uses_encoder=False).radius
    )
    assert plan.max_radius == ENCODER_MAX_RADIUS
    chosen = edit_config_from_settings(load_settings(radius=1.5, max_radius="none").editing, uses_encoder=True)
    assert (chosen.radius, chosen.max_radius) == (1.5, math.inf)


@pytest.mark.parametrize("switch", ["train_prompt_forms", "check_wording"])
def test_the_papers_policy_trains_at_one_prompt_and_compares_no_words_unless_it_is_set(switch: str) -> None:
    def switched(**settings: Any) -> bool:
        on: bool = getattr(edit_config_from_settings(load_settings(**settings).editing, uses_encoder=False), switch)
        return on

    assert switched()
    assert not switched(policy="paper")
    assert switched(policy="paper", **{switch: True})
    assert not switched(**{switch: False})


def test_radii_of_each_corrections_own_are_an_encoders_unless_a_radius_is_set() -> None:
    def has_own(*, reads_text: bool = True, **settings: Any) -> bool:
        return edit_config_from_settings(load_settings(**settings).editing, uses_encoder=reads_text).use_scope_radius

    assert has_own()
    assert not has_own(reads_text=False)
    assert not has_own(reads_text=False, use_scope_radius=True)
    assert not has_own(use_scope_radius=False)
    assert not has_own(radius=0.8)
    assert has_own(radius=0.8, use_scope_radius=True)


@pytest.mark.parametrize("alpha", [0, 0.001, 0.5])
def test_a_share_that_nothing_was_measured_for_is_rejected(alpha: float) -> None:
    with pytest.raises(SettingsError, match="GRACESTREAM_SCOPE_ERROR_RATE"):
        load_settings(scope_error_rate=alpha)


def test_a_variable_that_looks_like_a_setting_and_is_none_is_told() -> None:
    others = ["PATH", "GRACESTREAM_DATA", "GRACESTREAM_EDITOR_SERVICE_HOST", "GRACESTREAM_REDIS_PORT"]
    assert unknown_variables([*VARIABLES, *others]) == {}
    assert unknown_variables(["GRACESTREAM_KAFAK", "GRACESTREAM_RADIUS_UNITS"]) == {
        "GRACESTREAM_KAFAK": "GRACESTREAM_KAFKA",
        "GRACESTREAM_RADIUS_UNITS": "GRACESTREAM_RADIUS_UNIT",
    }
