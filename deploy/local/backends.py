"""Choosing a Kafka and a Redis: an existing one, or else one in Docker, or else a local one.

1. If GRACESTREAM_KAFKA or GRACESTREAM_REDIS is set, exactly that server is used. It is an error if it does not answer.
2. A server from the environment is never stopped; every other one is stopped at the end of its context.

The order is described in docs/explanation/architecture.md.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kafka.errors import KafkaError
from redis.exceptions import RedisError

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.deploy.local.processes import ChildProcess, StackError
from gracestream.deploy.local.redis import LocalRedis
from gracestream.deploy.local.server import ignore_progress
from gracestream.pipeline.kafka import ping_kafka
from gracestream.pipeline.settings import SettingsError, load_settings
from gracestream.pipeline.stores import ping_redis, redact_url

CONNECT_TIMEOUT_SECONDS = 10.0
"""Seconds for an existing server to answer."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A Kafka or a Redis that answers.

    Attributes:
        address: The address for clients: bootstrap servers, or a URL.
        origin: The origin of the server.
        child: The process of a local server; None for any other server.
    """

    address: str
    origin: Literal["environment", "docker", "local"]
    child: ChildProcess | None = None


@contextmanager
def kafka_backend(
    data_dir: Path,
    *,
    port: int | None = None,
    cache: Path | None = None,
    report: Callable[[str], None] = ignore_progress,
) -> Iterator[Backend]:
    """A context with a Kafka that answers; clients bootstrap from its `address`.

    Args:
        data_dir: The data directory of a local Kafka, kept for the next run. A container's data is lost with it.
        port: The port of a local Kafka; a free port if not given.
        cache: The folder for the jars of a local Kafka; the settings' cache folder if not given.
        report: Called with one line about the choice, and with one line per step.

    Raises:
        StackError: GRACESTREAM_KAFKA is set and does not answer, or no local Kafka can be started.
        AccessDeniedError: the existing Kafka rejects this client, or its certificate is not trusted.
    """
    existing = find_existing_kafka()
    if existing is not None:
        report(f"using the existing Kafka at {existing}")
        yield Backend(existing, "environment")
        return
    with _run_in_docker("kafka", report) as address:
        if address is not None:
            yield Backend(address, "docker")
            return
    with LocalKafka(data_dir, port, cache=cache, report=report) as local:
        yield Backend(local.bootstrap, "local", local.child)


@contextmanager
def redis_backend(
    data_dir: Path, *, port: int | None = None, report: Callable[[str], None] = ignore_progress
) -> Iterator[Backend]:
    """A context with a Redis or Valkey that answers; `address` is its URL.

    Arguments and errors are those of `kafka_backend`.
    """
    existing = find_existing_redis()
    if existing is not None:
        report(f"using the existing Redis at {redact_url(existing)}")
        yield Backend(existing, "environment")
        return
    with _run_in_docker("redis", report) as address:
        if address is not None:
            yield Backend(address, "docker")
            return
    with LocalRedis(data_dir, port, report=report) as local:
        yield Backend(local.url, "local", local.child)


def find_existing_kafka() -> str | None:
    """The address of an existing Kafka that answers; None if the settings name none.

    Raises:
        StackError: the Kafka does not answer, or a security setting is set without an address.
        AccessDeniedError: the Kafka rejects this client, or its certificate is not trusted.
    """
    settings = load_settings()
    if "servers" in settings.kafka.model_fields_set:
        check_kafka(settings.kafka.servers)
        return settings.kafka.servers
    if settings.kafka.security_protocol != "PLAINTEXT":
        raise StackError(
            f"GRACESTREAM_KAFKA_SECURITY_PROTOCOL={settings.kafka.security_protocol} is for an existing Kafka; set"
            " GRACESTREAM_KAFKA to its address, or unset the protocol to get a Kafka of your own"
        )
    return None


def find_existing_redis() -> str | None:
    """The URL of an existing Redis that answers; None if the settings name none.

    Raises:
        StackError: the Redis does not answer, or a password is set without a URL.
        AccessDeniedError: the Redis rejects this client, or its certificate is not trusted.
    """
    settings = load_settings()
    if "url" in settings.redis.model_fields_set:
        check_redis(settings.redis.url)
        return settings.redis.url
    if settings.redis.password:
        raise StackError(
            "GRACESTREAM_REDIS_PASSWORD is for an existing Redis; set GRACESTREAM_REDIS to its URL, or unset the"
            " password to get a Valkey of your own"
        )
    return None


def check_kafka(bootstrap: str, timeout: float = CONNECT_TIMEOUT_SECONDS) -> None:
    """Check that an existing Kafka answers with the security settings.

    Raises:
        StackError: it does not answer within `timeout` seconds.
        AccessDeniedError: it rejects this client, or its certificate is not trusted.
    """
    try:
        ping_kafka(load_settings(kafka=bootstrap).kafka, timeout)
    except (KafkaError, OSError, ValueError) as error:
        raise StackError(
            f"GRACESTREAM_KAFKA is {bootstrap!r}, and no Kafka answers there ({error}); start it, correct the variable,"
            " or unset it to get a Kafka of your own"
        ) from error


def check_redis(url: str, timeout: float = CONNECT_TIMEOUT_SECONDS) -> None:
    """Check that an existing Redis answers with the security settings.

    Raises:
        StackError: it does not answer within `timeout` seconds, or the URL is invalid.
        AccessDeniedError: it rejects this client, or its certificate is not trusted.
    """
    try:
        ping_redis(load_settings(redis=url).redis, timeout)
    except (RedisError, OSError, SettingsError) as error:
        raise StackError(
            f"GRACESTREAM_REDIS is {redact_url(url)!r}, and no Redis answers there ({error}); start it, correct"
            " the variable, or unset it to get a Valkey of your own"
        ) from error


@contextmanager
def _run_in_docker(service: Literal["kafka", "redis"], report: Callable[[str], None]) -> Iterator[str | None]:
    """A context with the address of a new container; None if no engine answers, or it cannot run the image."""
    try:
        from gracestream.deploy.local import containers  # noqa: PLC0415 - testcontainers is optional, and slow to import
    except ImportError:
        yield None
        return
    if not containers.is_docker_available():
        yield None
        return
    container: AbstractContextManager[str] = (
        containers.kafka_container() if service == "kafka" else containers.redis_container()
    )
    image = containers.kafka_image() if service == "kafka" else containers.REDIS_IMAGE
    report(f"starting {image} in Docker; its data is lost when it stops")
    with ExitStack() as running:
        address = None
        try:
            address = running.enter_context(container)
        except containers.CONTAINER_ERRORS as error:
            # Not an error: the local server is as good as the container.
            report(f"Docker cannot run {image} ({error}); starting a local one instead")
        yield address
