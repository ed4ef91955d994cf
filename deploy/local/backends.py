"""Which Kafka and which Redis to use: an existing one, else one in Docker, else a local one (design, section 7)."""

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

CONNECT_TIMEOUT_SECONDS = 10.0  # seconds that an existing cluster has to answer


@dataclass(frozen=True, slots=True)
class Backend:
    """A Kafka or a Redis that answers, and where it came from; one from the environment is never stopped.

    `child` is the process of a local one.
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
    """A Kafka that answers; `address` is what clients bootstrap from.

    Args:
        data_dir: data of the local one, kept for the next time. A container's data goes with the container.
        port: of the local one; a free port if not given.
        cache: folder for the local one's jars; that of the settings if not given.
        report: called with one line that says which was taken, and with the steps on the way.

    Raises:
        StackError: GRACESTREAM_KAFKA is set and does not answer, or no local one can be started.
        RefusedError: the existing one does not take us, or is not trusted.
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
    """A Redis or Valkey that answers; `address` is its URL. Arguments and errors as for `kafka_backend`."""
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
    """The address of an existing Kafka, which answers; None where the settings name none.

    Raises:
        StackError: it does not answer, or other settings are for an existing one.
        RefusedError: it does not take us, or is not trusted.
    """
    settings = load_settings()
    if "kafka" in settings.model_fields_set and settings.kafka:
        check_kafka(settings.kafka)
        return settings.kafka
    if settings.kafka_security_protocol != "PLAINTEXT":
        raise StackError(
            f"GRACESTREAM_KAFKA_SECURITY_PROTOCOL={settings.kafka_security_protocol} is for an existing Kafka; set"
            " GRACESTREAM_KAFKA to its address, or unset the protocol to get a Kafka of your own"
        )
    return None


def find_existing_redis() -> str | None:
    """The URL of an existing Redis that answers; None if the settings name none. Errors: `find_existing_kafka`."""
    settings = load_settings()
    if "redis" in settings.model_fields_set and settings.redis:
        check_redis(settings.redis)
        return settings.redis
    if settings.redis_password:
        raise StackError(
            "GRACESTREAM_REDIS_PASSWORD is for an existing Redis; set GRACESTREAM_REDIS to its URL, or unset the"
            " password to get a Valkey of your own"
        )
    return None


def check_kafka(bootstrap: str, timeout: float = CONNECT_TIMEOUT_SECONDS) -> None:
    """See that an existing cluster answers, as the settings have it secured.

    Raises:
        StackError: it does not, within `timeout` seconds.
        RefusedError: it does not take us, or is not trusted.
    """
    try:
        ping_kafka(load_settings(kafka=bootstrap), timeout)
    except (KafkaError, OSError, ValueError) as error:
        raise StackError(
            f"GRACESTREAM_KAFKA is {bootstrap!r}, and no Kafka answers there ({error}); start it, correct the variable,"
            " or unset it to get a Kafka of your own"
        ) from error


def check_redis(url: str, timeout: float = CONNECT_TIMEOUT_SECONDS) -> None:
    """See that an existing Redis answers, as the settings have it secured.

    Raises:
        StackError: it does not, within `timeout` seconds, or the URL is none.
        RefusedError: it does not take us, or is not trusted.
    """
    try:
        ping_redis(load_settings(redis=url), timeout)
    except (RedisError, OSError, SettingsError) as error:
        raise StackError(
            f"GRACESTREAM_REDIS is {redact_url(url)!r}, and no Redis answers there ({error}); start it, correct"
            " the variable, or unset it to get a Valkey of your own"
        ) from error


@contextmanager
def _run_in_docker(service: Literal["kafka", "redis"], report: Callable[[str], None]) -> Iterator[str | None]:
    """The address of a new container; None where no engine answers, or the engine cannot run the image."""
    try:
        from gracestream.deploy.local import containers  # noqa: PLC0415 - testcontainers is an option, and slow to import
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
    report(f"starting {image} in Docker; what it holds goes when it stops")
    with ExitStack() as running:
        address = None
        try:
            address = running.enter_context(container)
        except containers.CONTAINER_ERRORS as error:
            # An engine that cannot reach the image is no reason to stop: the local one is as real.
            report(f"Docker cannot run {image} ({error}); starting a local one instead")
        yield address
