"""Every variable in a file is a setting, and every value of it is valid."""

import re
from pathlib import Path

import pytest

from gracestream.pipeline.settings import SECRET_VARIABLES, VARIABLES, load_settings
from tests.support.deployment_files import (
    ACLS,
    COMPOSE,
    COMPOSE_EXTERNAL,
    COMPOSE_GPU,
    DEPLOY,
    KUBERNETES,
    PROMETHEUS,
    containers,
    in_compose,
    in_kubernetes,
)

KNOWN_SETTINGS = set(VARIABLES)


def settings_files() -> list[Path]:
    """The files that people write by hand here and that name settings."""
    folders = [KUBERNETES, PROMETHEUS, DEPLOY / "grafana", DEPLOY / "image"]
    return [
        COMPOSE,
        COMPOSE_EXTERNAL,
        COMPOSE_GPU,
        ACLS,
        *(path for folder in folders for path in folder.rglob("*") if path.is_file()),
    ]


def unknown_settings(text: str) -> set[str]:
    """What looks like a setting, and is none."""
    return set(re.findall(r"\bGRACESTREAM_[A-Z0-9_]+", text)) - KNOWN_SETTINGS


class TestSettings:
    @pytest.mark.parametrize("path", settings_files(), ids=lambda path: path.name)
    def test_every_variable_is_a_setting(self, path: Path) -> None:
        assert unknown_settings(path.read_text()) == set()

    def test_a_typing_error_would_be_found(self) -> None:
        assert unknown_settings("GRACESTREAM_KAFAK: kafka:9092\nGRACESTREAM_REDIS: x") == {"GRACESTREAM_KAFAK"}

    @pytest.mark.parametrize(
        "environment",
        [
            *(pytest.param(in_compose(name), id=f"compose-{name}") for name in ("topics", "editor", "inference")),
            *(pytest.param(in_kubernetes(name), id=f"kubernetes-{name}") for name in containers()),
        ],
    )
    def test_every_value_is_valid_and_others_can_reach_the_worker(
        self, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in KNOWN_SETTINGS:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings = load_settings()
        assert (settings.http.host, settings.http.port) == ("0.0.0.0", 8080)
        # A name such as the default `smollm2` stands for a package that no image has.
        assert "/" in settings.model.name
        assert environment["HF_HOME"].startswith(str(settings.model.cache_dir))

    def test_no_file_holds_a_password(self) -> None:
        secret = SECRET_VARIABLES - {"GRACESTREAM_REDIS"}
        for environment in [*map(in_compose, ("topics", "editor", "inference")), *map(in_kubernetes, containers())]:
            assert not secret & environment.keys()
            assert "@" not in environment["GRACESTREAM_REDIS"]
