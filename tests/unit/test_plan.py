"""Each setting of how to edit reaches the editor's plan."""

import math
from dataclasses import fields
from typing import Any

import pytest

from pipeline.encoder import FARTHEST, UNIT
from pipeline.plan import Plan
from pipeline.settings import Settings, SettingsError, as_environment, load_settings, misspelt
from pipeline.training import Recipe
from workers.boot import plan_of

CHOSEN = Plan(
    policy="paper",
    radius=0.5,
    radius_unit="absolute",
    max_radius=0.25,
    scope_radius=True,
    scope_alpha=0.125,
    expand="paper",
    guard=False,
    wording=False,
    traffic=7,
    seed=3,
    init="random",
    forms=False,
    recipe=Recipe(max_steps=11, learning_rate=0.125, margin=1.5),
)


def test_no_setting_is_dropped_on_its_way_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {field.name: getattr(CHOSEN, field.name) for field in fields(Plan) if field.name != "recipe"}
    recipe = {field.name: getattr(CHOSEN.recipe, field.name) for field in fields(Recipe)}
    for variable, value in as_environment(plan | recipe | {"query": "encoder"}).items():
        monkeypatch.setenv(variable, value)
    assert plan_of(load_settings()) == CHOSEN


@pytest.mark.parametrize(("ours", "default"), [(CHOSEN, Plan()), (CHOSEN.recipe, Recipe())])
def test_the_plan_above_is_nowhere_the_default(ours: Plan | Recipe, default: Plan | Recipe) -> None:
    assert all(getattr(ours, field.name) != getattr(default, field.name) for field in fields(default))


def test_the_settings_of_who_chooses_nothing_are_those_of_a_plan_without_a_choice() -> None:
    assert plan_of(load_settings()) == Plan()


def test_a_largest_radius_of_0_is_none() -> None:
    assert plan_of(load_settings(max_radius=0)).max_radius == math.inf


def test_an_encoder_without_a_word_of_its_queries_is_a_mistake() -> None:
    with pytest.raises(SettingsError, match="only GRACESTREAM_QUERY=encoder makes use of it"):
        load_settings(encoder="minilm")
    for query in ("last", "encoder"):
        assert load_settings(query=query, encoder="mine").encoder == "mine"


def test_balls_of_an_encoder_are_smaller_unless_their_radius_is_set() -> None:
    assert plan_of(load_settings(query="encoder")).radius == UNIT < plan_of(load_settings()).radius
    assert plan_of(load_settings(query="encoder")).max_radius == FARTHEST
    chosen = plan_of(load_settings(query="encoder", radius=1.5, max_radius=0))
    assert (chosen.radius, chosen.max_radius) == (1.5, math.inf)


@pytest.mark.parametrize("switch", ["forms", "wording"])
def test_the_papers_policy_trains_at_one_prompt_and_compares_no_words_unless_it_is_set(switch: str) -> None:
    def switched(**settings: Any) -> bool:
        on: bool = getattr(plan_of(load_settings(**settings)), switch)
        return on

    assert switched()
    assert not switched(policy="paper")
    assert switched(policy="paper", **{switch: True})
    assert not switched(**{switch: False})


def test_radii_of_each_corrections_own_are_an_encoders_unless_a_radius_is_set() -> None:
    assert not plan_of(load_settings()).scope_radius
    assert not plan_of(load_settings(scope_radius=True)).scope_radius
    assert plan_of(load_settings(query="encoder")).scope_radius
    assert not plan_of(load_settings(query="encoder", scope_radius=False)).scope_radius
    assert not plan_of(load_settings(query="encoder", radius=0.8)).scope_radius
    assert plan_of(load_settings(query="encoder", radius=0.8, scope_radius=True)).scope_radius


@pytest.mark.parametrize("alpha", [0, 0.001, 0.5])
def test_a_share_that_nothing_was_measured_for_is_refused(alpha: float) -> None:
    with pytest.raises(SettingsError, match="GRACESTREAM_SCOPE_ALPHA"):
        load_settings(scope_alpha=alpha)


def test_a_variable_that_looks_like_a_setting_and_is_none_is_told() -> None:
    known = [f"GRACESTREAM_{name.upper()}" for name in Settings.model_fields]
    others = ["PATH", "GRACESTREAM_DATA", "GRACESTREAM_EDITOR_SERVICE_HOST", "GRACESTREAM_REDIS_PORT"]
    assert misspelt([*known, *others]) == {}
    assert misspelt(["GRACESTREAM_KAFAK", "GRACESTREAM_RADIUS_UNITS"]) == {
        "GRACESTREAM_KAFAK": "GRACESTREAM_KAFKA",
        "GRACESTREAM_RADIUS_UNITS": "GRACESTREAM_RADIUS_UNIT",
    }
