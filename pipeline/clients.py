"""Clients of Kafka and Redis, made from settings, and the wait for both at start."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.errors import KafkaError
from redis import Redis
from redis.exceptions import RedisError

from pipeline.errors import UserError
from pipeline.settings import Settings

T = TypeVar("T")
Report = Callable[[str], None]

MAX_DELTA_BYTES = 64 * 2**20
"""A delta with its guard entries may be large; the topic, the producer and every reader allow this much."""


class UnreachableError(UserError):
    """Kafka or Redis did not answer in time; the text says where it was looked for."""


def consumer(settings: Settings, **options: Any) -> KafkaConsumer:
    """A consumer that reads committed records only and commits nothing by itself."""
    return KafkaConsumer(
        bootstrap_servers=settings.kafka.split(","),
        isolation_level="read_committed",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=MAX_DELTA_BYTES,
        fetch_max_bytes=MAX_DELTA_BYTES,
        **options,
    )


def producer(settings: Settings, **options: Any) -> KafkaProducer:
    """A producer whose records are acknowledged by all replicas of a partition."""
    return KafkaProducer(
        bootstrap_servers=settings.kafka.split(","), acks="all", max_request_size=MAX_DELTA_BYTES, **options
    )


def admin(settings: Settings, **options: Any) -> KafkaAdminClient:
    """A client for creating and describing topics."""
    return KafkaAdminClient(bootstrap_servers=settings.kafka.split(","), **options)


def redis_client(settings: Settings) -> Redis:
    """A client whose calls take a second at most, so that a lost Redis never holds up a batch for long."""
    return Redis.from_url(settings.redis, socket_timeout=1.0, socket_connect_timeout=1.0)


def await_kafka(settings: Settings, report: Report) -> None:
    """Wait until the cluster answers.

    Raises:
        UnreachableError: not within `startup_timeout`.
    """
    patience_ms = int(1000 * min(settings.startup_timeout, 5.0))  # of one attempt, which the client makes 30 s long

    def ask() -> None:
        client = admin(settings, bootstrap_timeout_ms=patience_ms, request_timeout_ms=patience_ms)
        try:
            client.describe_cluster()
        finally:
            client.close()

    _await(
        f"Kafka at {settings.kafka}",
        "GRACESTREAM_KAFKA",
        ask,
        expected=(KafkaError, OSError, ValueError),
        settings=settings,
        report=report,
    )


def await_redis(settings: Settings, report: Report) -> None:
    """Wait until Redis answers.

    Raises:
        UnreachableError: not within `startup_timeout`, or the URL is none.
    """
    try:
        client = redis_client(settings)
    except ValueError as error:
        raise UnreachableError(f"GRACESTREAM_REDIS is no URL of a Redis: {error}") from error
    with client:
        _await(
            f"Redis at {settings.redis}",
            "GRACESTREAM_REDIS",
            client.ping,
            expected=(RedisError, OSError),
            settings=settings,
            report=report,
        )


def _await(
    what: str,
    variable: str,
    ask: Callable[[], object],
    *,
    expected: tuple[type[Exception], ...],
    settings: Settings,
    report: Report,
) -> None:
    deadline = time.monotonic() + settings.startup_timeout
    while True:
        try:
            ask()
        except expected as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise UnreachableError(
                    f"{what} does not answer ({error or type(error).__name__}); is it running, and is {variable} right?"
                ) from error
            report(f"waiting for {what}, {left:.0f} s more")
            time.sleep(min(1.0, left))
        else:
            return
