"""Settings from the environment: all faults at once, what is empty, what is `none`, and what was set."""

import pytest

from gracestream.pipeline.settings import (
    SECRET_VARIABLES,
    VARIABLES,
    Settings,
    SettingsError,
    load_settings,
    to_environment_variables,
)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def given(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Settings:
    for name, value in variables.items():
        monkeypatch.setenv(f"GRACESTREAM_{name}", value)
    return load_settings()


def test_every_variable_has_one_name_one_description_and_a_default_that_is_valid() -> None:
    assert len({(variable.group, variable.field) for variable in VARIABLES.values()}) == len(VARIABLES)
    assert all(variable.info.description for variable in VARIABLES.values())
    assert load_settings().explicit_values() == {}


def test_faults_of_all_groups_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError) as caught:
        given(monkeypatch, KAFKA_USERNAME="ann", HTTP_PORT="many", SNAPSHOT_INTERVAL="0", MAX_NEW_TOKENS="3")
    assert [line.split()[0].rstrip(":") for line in str(caught.value).splitlines()] == [
        "GRACESTREAM_KAFKA_USERNAME",
        "GRACESTREAM_MAX_NEW_TOKENS",
        "GRACESTREAM_SNAPSHOT_INTERVAL",
        "GRACESTREAM_HTTP_PORT",
    ]


@pytest.mark.parametrize("name", VARIABLES)
def test_an_empty_variable_counts_as_not_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    assert load_settings() == load_settings().without([])
    assert load_settings().explicit_values() == {}


@pytest.mark.parametrize("name", ["threads", "max_radius", "snapshot_interval", "feedback_rate_limit"])
def test_none_is_a_value_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = given(monkeypatch, **{name.upper(): "none"})
    assert settings.explicit_values() == {name: None}
    assert to_environment_variables(settings.explicit_values()) == {f"GRACESTREAM_{name.upper()}": "none"}


def test_an_empty_override_takes_back_what_the_environment_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given(monkeypatch, SNAPSHOT_URL="/snapshots", TOPIC_PREFIX="mine-").snapshots.url == "/snapshots"
    settings = load_settings(snapshot_url="", topic_prefix="")
    assert (settings.snapshots.url, settings.kafka.topic_prefix) == (None, "")
    assert load_settings(snapshot_url=None).snapshots.url == "/snapshots"


def test_a_name_that_is_no_setting_is_an_error_of_the_caller() -> None:
    with pytest.raises(TypeError, match="'prefix' is not a setting"):
        load_settings(prefix="mine-")
    with pytest.raises(TypeError, match="'prefix' is not a setting"):
        load_settings().replace(prefix="mine-")


def test_a_copy_has_other_values_which_count_as_set() -> None:
    settings = load_settings(kafka="broker:9092")
    copy = settings.replace(topic_prefix="mine-", http_port=0)
    assert (copy.kafka.servers, copy.kafka.topic("deltas"), copy.http.port) == ("broker:9092", "mine-deltas", 0)
    assert copy.explicit_values() == {"kafka": "broker:9092", "topic_prefix": "mine-", "http_port": 0}
    assert settings.explicit_values() == {"kafka": "broker:9092"}
    assert copy.without(["kafka", "http_port"]).explicit_values() == {"topic_prefix": "mine-"}
    assert copy.without(["kafka", "http_port"]).http.port == load_settings().http.port


def test_no_error_shows_the_value_of_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {
        "GRACESTREAM_REDIS",
        "GRACESTREAM_REDIS_PASSWORD",
        "GRACESTREAM_KAFKA_PASSWORD",
        "GRACESTREAM_KAFKA_KEY_PASSWORD",
        "GRACESTREAM_SNAPSHOT_URL",
    } == SECRET_VARIABLES
    with pytest.raises(SettingsError) as caught:
        given(monkeypatch, REDIS="redis://:hush@cache", REDIS_PASSWORD="hush, too", KAFKA_PASSWORD="hush")
    assert "hush" not in str(caught.value)


def test_the_endpoints_have_a_port_that_prometheus_can_know() -> None:
    assert load_settings().http.port == 8080
