"""Clients of Kafka and Redis, made from settings, and the wait for both at start.

The wait ends at once where it is hopeless: a refused password, a certificate that is not trusted. kafka-python would go
on trying, and never learn of the first: a broker that refuses says so and hangs up, and where both come in one read,
kafka-python sees that it hung up and drops what it said. So the first connection is aiokafka's, which hears it out.
"""

import asyncio
import re
import socket
import time
from collections.abc import Callable
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.errors import KafkaError as RawKafkaError
from kafka import KafkaAdminClient, KafkaProducer
from kafka.errors import KafkaConnectionError, KafkaError
from redis import Redis
from redis.exceptions import RedisError

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.patient import PatientConsumer, PatientNetClient
from gracestream.pipeline.records import BoundedFetcher, install_in_aiokafka
from gracestream.pipeline.redis_bounds import BoundedParser, asked
from gracestream.pipeline.security import kafka_refusal, kafka_security, redis_refusal, redis_security, without_password
from gracestream.pipeline.settings import Settings, SettingsError
from gracestream.pipeline.transactions import TransactionalProducer
from gracestream.schemas.deltas import MAX_DELTA_BYTES

_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):([0-9]{1,5})")

Report = Callable[[str], None]

TOLD_EVERY = 5.0
"""Seconds between two lines that say the same of a wait."""

FETCH_BYTES = 4 * 2**20
"""Bytes that a broker sends at once: few, so that one fetch is on its way while the last is worked at. A batch that is
larger comes all the same, alone (KIP-74)."""


class UnreachableError(UserError):
    """Kafka or Redis did not answer in time; the text says where it was looked for."""


class RefusedError(UserError):
    """Kafka or Redis does not take us, or we do not trust it; the text says which setting to look at."""


def consumer(settings: Settings, **options: Any) -> PatientConsumer:
    """A consumer of committed records, whatever their headers are called, which commits nothing by itself."""
    ours = {
        "isolation_level": "read_committed",
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "max_partition_fetch_bytes": FETCH_BYTES,
        "fetch_max_bytes": FETCH_BYTES,
    }
    made = PatientConsumer(**_cluster(settings), **(ours | options))
    made._fetcher.__class__ = BoundedFetcher  # noqa: SLF001  (it has no public name)
    return made


def bulk_consumer(settings: Settings, **options: Any) -> AIOKafkaConsumer:
    """A consumer of committed records, in no group, that raises where its offset is not there."""
    install_in_aiokafka()
    return AIOKafkaConsumer(
        bootstrap_servers=_bootstrap_servers(settings),
        isolation_level="read_committed",
        enable_auto_commit=False,
        auto_offset_reset="none",
        **kafka_security(settings),
        **options,
    )


def producer(settings: Settings, **options: Any) -> KafkaProducer:
    """A producer whose records are acknowledged by all replicas of a partition.

    With a `transactional_id` it is a TransactionalProducer, which asks the cluster for its `transaction.version`.
    """
    ours: dict[str, Any] = {"acks": "all", "max_request_size": MAX_DELTA_BYTES, "kafka_client": PatientNetClient}
    if "transactional_id" in options:
        options = {"end_raises_epoch": _end_raises_epoch(settings), **options}
        return TransactionalProducer(**_cluster(settings), **ours, **options)
    return KafkaProducer(**_cluster(settings), **ours, **options)


def admin(settings: Settings, **options: Any) -> KafkaAdminClient:
    """A client for creating and describing topics."""
    return KafkaAdminClient(**_cluster(settings), **options)


def redis_client(settings: Settings, timeout: float = 1.0) -> Redis:
    """A client whose calls take `timeout` seconds at most, so that a lost Redis never holds up a batch for long."""
    return Redis.from_url(
        settings.redis,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        parser_class=BoundedParser,
        **redis_security(settings),
    )


def ask_kafka(settings: Settings, patience: float) -> None:
    """See that the cluster answers, within `patience` seconds or so.

    Raises:
        RefusedError: it does not take us, or is not trusted.
        SettingsError: an address is none.
        KafkaError, OSError, ValueError: it does not answer, or its name is none.
    """
    milliseconds = int(1000 * patience)
    try:
        asyncio.run(_connect(settings, milliseconds))
        with admin(settings, bootstrap_timeout_ms=milliseconds, request_timeout_ms=milliseconds) as client:
            client.describe_cluster()
    except (RawKafkaError, KafkaError, OSError) as error:
        if refused := kafka_refusal(error, settings):
            raise RefusedError(refused) from error
        if isinstance(error, RawKafkaError):
            raise KafkaConnectionError(*error.args) from error
        raise


def ask_redis(settings: Settings, patience: float) -> None:
    """See that Redis answers, within `patience` seconds.

    Raises:
        RefusedError: it does not take us, or is not trusted.
        SettingsError: the URL is none.
        RedisError, OSError: it does not answer, or its answer is malformed.
    """
    try:
        client = redis_client(settings, patience)
    except ValueError as error:  # its text may show a part of the password
        raise SettingsError(
            "GRACESTREAM_REDIS is no URL of a Redis such as redis://localhost:6379/0 or rediss://user:password@host:6379"
            " (with @ : / ? # in a password as %40 %3A %2F %3F %23)"
        ) from error
    try:
        with client:
            asked(client, client.ping)
    except (RedisError, OSError) as error:
        if refused := redis_refusal(error, settings):
            raise RefusedError(refused) from error
        raise


def await_kafka(settings: Settings, report: Report, *, await_name: bool = False) -> None:
    """Wait until the cluster answers.

    With `await_name` also for a host name that is unknown yet: the services of a deployment start together, and a
    service's name may appear after its users have started. A command fails at once instead.

    Raises:
        UnreachableError: not within `startup_timeout`, or, without `await_name`, no host name is known.
        SettingsError: an address is none; at once.
        RefusedError: it does not take us, or is not trusted; at once.
    """
    _await(
        f"Kafka at {settings.kafka}",
        f"over {settings.kafka_security_protocol}",
        "GRACESTREAM_KAFKA",
        lambda: ask_kafka(settings, min(settings.startup_timeout, 5.0)),
        is_set="kafka" in settings.model_fields_set,
        patience=settings.startup_timeout,
        await_name=await_name,
        report=report,
    )


def await_redis(settings: Settings, report: Report) -> None:
    """Wait until Redis answers, for as long as a replica does without it before it follows the log.

    Raises:
        UnreachableError: not within `redis_grace`.
        SettingsError: the URL is none.
        RefusedError: it does not take us, or is not trusted; at once.
    """
    _await(
        f"Redis at {without_password(settings.redis)}",
        "",
        "GRACESTREAM_REDIS",
        lambda: ask_redis(settings, 1.0),
        is_set="redis" in settings.model_fields_set,
        patience=settings.redis_grace,
        await_name=True,
        report=report,
    )


def _end_raises_epoch(settings: Settings) -> bool:
    """Whether EndTxn raises the producer's epoch: the finalised `transaction.version` is 2 or more (KIP-890)."""
    with admin(settings) as client:
        features = client.describe_features()
    _, level = features.get("transaction.version", {}).get("finalized", (0, 0))
    return bool(level >= 2)


def _cluster(settings: Settings) -> dict[str, Any]:
    """Where and how to connect; a cluster that was away is found again within a second, not half a minute."""
    return {
        "bootstrap_servers": _bootstrap_servers(settings),
        "reconnect_backoff_max_ms": 1000,
        **kafka_security(settings),
    }


def _bootstrap_servers(settings: Settings) -> list[str]:
    """Raises SettingsError where one is not host:port."""
    servers = [server.strip() for server in settings.kafka.split(",")]
    for server in servers:
        address = _ADDRESS.fullmatch(server)
        if address is None or not 0 < int(address[1]) < 2**16:
            raise SettingsError(
                f"GRACESTREAM_KAFKA: {server!r} is no host:port; set it to the addresses of one or more brokers, such"
                " as broker-1:9092,broker-2:9092"
            )
    return servers


async def _connect(settings: Settings, milliseconds: int) -> None:
    """Connect to one of the bootstrap servers and authenticate.

    Where none takes us, the error is that of the last one whose name is known, if there is one.
    """
    failure: Exception | None = None
    for host, port, _ in collect_hosts(_bootstrap_servers(settings), randomize=False):
        try:
            connection = await create_conn(host, port, request_timeout_ms=milliseconds, **kafka_security(settings))
        except (RawKafkaError, OSError, UnicodeError) as error:  # a time-out is an OSError
            if failure is None or not _is_unresolved(error):
                failure = error
        else:
            connection.close()
            return
    assert failure is not None, "there is at least one server"
    raise failure


def _is_unresolved(error: BaseException | None) -> bool:
    """Whether an error is that of a host name without an address; redis-py wraps it."""
    while error is not None:
        if isinstance(error, socket.gaierror | UnicodeError):  # the latter for what no host can be called
            return True
        error = error.__cause__ or error.__context__
    return False


def _await(
    what: str,
    how: str,
    variable: str,
    ask: Callable[[], object],
    *,
    is_set: bool,
    patience: float,
    await_name: bool,
    report: Report,
) -> None:
    deadline = time.monotonic() + patience
    remedy = f"is it running, and is {variable} right?"
    if not is_set:
        remedy = f"{variable} is not set: set it to an address, such as the one that `gracestream up` prints"
    told, told_at = "", 0.0
    while True:
        try:
            ask()
        except (KafkaError, RedisError, OSError, ValueError) as error:
            now, reason = time.monotonic(), str(error) or type(error).__name__
            if _is_unresolved(error):
                reason = f"its host name is unknown: {reason}"
                if not await_name:
                    raise UnreachableError(f"{what} cannot be reached, {reason}; is {variable} right?") from error
            left = deadline - now
            if left <= 0:
                answer = f"does not answer {how}".rstrip()
                raise UnreachableError(f"{what} {answer} ({reason}); {remedy}") from error
            if reason != told or now >= told_at + TOLD_EVERY:
                report(f"waiting for {what}, {left:.0f} s more ({reason})")
                told, told_at = reason, now
            time.sleep(min(1.0, left))
        else:
            return
