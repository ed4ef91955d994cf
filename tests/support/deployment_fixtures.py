"""Fixtures: small checkpoints, and deployments of them. A `conftest.py` imports the fixtures of its tests."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from structlog.typing import EventDict

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.kafka.topics import TOPICS, create_topics
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.pipeline.stores.redis_head import RedisHeadStore
from tests.support.doubles.kafka import MemoryKafka
from tests.support.editor_clusters import Cluster
from tests.support.forked_commands import Command, explicit_settings
from tests.support.running import Checkpoint, Users, resume, save_checkpoint, settings_for
from tests.support.secured_servers import SecuredKafka
from tests.support.tiny_models import LAYER, MODEL

__all__ = [
    "checkpoints",
    "cluster",
    "codebook_replica_of",
    "deploy",
    "deployment",
    "folder",
    "logged",
    "own_kafka",
    "quick",
    "run",
    "secured_kafka",
    "users",
    "users_of",
]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """A tiny model of each kind."""
    return {kind: save_checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "chat", "bert", "t5")}


@pytest.fixture(scope="session")
def deploy(
    kafka: str, redis_url: str, checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Settings]:
    """Returns the settings of a deployment of one kind of model. Its topics exist; no worker runs yet."""
    cache = tmp_path_factory.mktemp("cache")

    def deployed(kind: str, prefix: str, **chosen: object) -> Settings:
        given = {**checkpoints[kind].settings(), "cache_dir": cache, **chosen}
        settings = settings_for(kafka, redis_url, prefix, **given)
        create_topics(settings.kafka, partitions=4, replication=1)
        return settings

    return deployed


@pytest.fixture(scope="session")
def secured_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """A Kafka with authentication and authorisation: it knows users and certificates, and rules allow operations."""
    secured = SecuredKafka(tmp_path_factory.mktemp("secured"))
    secured.start()
    yield secured
    secured.server.stop()


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[LocalKafka]:
    """A Kafka for one test, which may pause it."""
    with LocalKafka(tmp_path / "kafka") as local:
        yield local
        resume(local)


@pytest.fixture(params=["double", pytest.param("kafka", marks=pytest.mark.kafka)])
def cluster(request: pytest.FixtureRequest, prefix: str) -> Iterator[Cluster]:
    """The topics of one deployment, on the test double and on the real Kafka."""
    if request.param == "double":
        settings = load_settings(topic_prefix=prefix)
        made = Cluster(settings, MemoryKafka([settings.kafka.topic(topic.name) for topic in TOPICS]))
    else:
        settings = settings_for(request.getfixturevalue("kafka"), "redis://unused", prefix, session_timeout=10.0)
        create_topics(settings.kafka, partitions=1, replication=1)
        made = Cluster(settings, None)
    yield made
    made.close()


@pytest.fixture
def deployment(deploy: Callable[..., Settings], prefix: str) -> Settings:
    """A deployment of the language model for one test."""
    return deploy("llama", prefix)


@pytest.fixture
def quick(deploy: Callable[..., Settings], prefix: str) -> Settings:
    """A deployment with a short grace period without Redis and a short wait for a delta."""
    return deploy("llama", prefix, redis_outage_grace=0.6, min_seq_wait=2.0)


@pytest.fixture
def users_of() -> Iterator[Callable[[Settings], Users]]:
    """Returns the users of a deployment; closes them at the end of the test."""
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
def codebook_replica_of() -> Iterator[Callable[..., CodebookReplica]]:
    """Returns a started `CodebookReplica` of a deployment; closes its follower at the end of the test."""
    followers: list[DeltaFollower] = []

    def start(settings: Settings, model: str = MODEL, layer: str = LAYER) -> CodebookReplica:
        codebook = Codebook(settings.model.codebook, model, layer)
        followers.append(DeltaFollower(settings.kafka))
        store = RedisHeadStore(redis_client(settings.redis), settings.kafka.topic_prefix, settings.model.codebook)
        made = CodebookReplica(codebook, KeyIndex(codebook, torch.device("cpu")), store, followers[-1], settings)
        made.start()
        return made

    yield start
    for follower in followers:
        follower.close()


@pytest.fixture
def logged() -> Iterator[list[EventDict]]:
    """The log events of this process."""
    with structlog.testing.capture_logs() as events:
        yield events


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working folder of a test's workers, with their output."""
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Callable[..., Command]:
    """Runs a command of `gracestream` to its end in a new folder."""

    def ran(
        *arguments: str, settings: Settings | None = None, given: str = "", within: float = 90, **chosen: Any
    ) -> Command:
        own = folder / secrets.token_hex(4)
        own.mkdir()
        known = {"http_port": 0} | ({} if settings is None else explicit_settings(settings))
        command = Command(arguments[0], arguments, own, given.encode(), **(known | chosen))
        command.run(within)
        return command

    return ran
