"""Fixtures of the integration tests: checkpoints that load in a moment, and deployments of them."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.settings import Settings
from pipeline.topics import create_topics
from tests.integration.forked import Command, as_given
from tests.integration.running import Checkpoint, Users, save_checkpoint, settings_for


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """A tiny model of each kind."""
    return {kind: save_checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "bert", "t5")}


@pytest.fixture(scope="session")
def deploy(
    kafka: str, redis_url: str, checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Settings]:
    """Settings of a deployment of one kind of model, whose topics exist; nothing runs yet."""
    cache = tmp_path_factory.mktemp("cache")

    def deployed(kind: str, prefix: str, **chosen: object) -> Settings:
        given = {**checkpoints[kind].settings(), "cache": cache, **chosen}
        settings = settings_for(kafka, redis_url, prefix, **given)
        create_topics(settings, partitions=4, replication=1)
        return settings

    return deployed


@pytest.fixture
def deployment(deploy: Callable[..., Settings], prefix: str) -> Settings:
    """A deployment of the language model for one test."""
    return deploy("llama", prefix)


@pytest.fixture
def quick(deploy: Callable[..., Settings], prefix: str) -> Settings:
    """A deployment that follows the log soon after Redis is lost, and does not wait long for a delta."""
    return deploy("llama", prefix, redis_grace=0.6, min_seq_wait=2.0)


@pytest.fixture
def users_of() -> Iterator[Callable[[Settings], Users]]:
    """Users of any deployment, gone at the end of the test."""
    present: list[Users] = []

    def users(settings: Settings) -> Users:
        present.append(Users(settings))
        return present[-1]

    yield users
    for one in present:
        one.close()


@pytest.fixture
def users(deployment: Settings, users_of: Callable[[Settings], Users]) -> Users:
    """Users of the test's deployment."""
    return users_of(deployment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the workers of a test run and log."""
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Callable[..., Command]:
    """Runs a command of `gracestream` to its end, in a folder of its own."""

    def ran(*arguments: str, settings: Settings | None = None, given: str = "", **chosen: Any) -> Command:
        own = folder / secrets.token_hex(4)
        own.mkdir()
        known = {} if settings is None else as_given(settings)
        command = Command(arguments[0], arguments, own, given.encode(), **(known | chosen))
        command.run(90)
        return command

    return ran
