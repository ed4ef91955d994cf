"""Clients of Kafka, made from settings, and the wait for it at start.

The wait ends at once where it is hopeless: a refused password, a certificate that is not trusted. kafka-python would go
on trying, and never learn of the first: a broker that refuses says so and hangs up, and where both come in one read,
kafka-python sees that it hung up and drops what it said. So the first connection is aiokafka's, which hears it out.
"""

import asyncio
import re
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.errors import KafkaError as RawKafkaError
from kafka import KafkaAdminClient, KafkaProducer
from kafka.errors import KafkaConnectionError, KafkaError

from gracestream.pipeline.kafka.client_fixes import RejoiningConsumer, RetryingNetClient
from gracestream.pipeline.kafka.lenient_records import BoundedFetcher, install_lenient_parser
from gracestream.pipeline.kafka.security import kafka_security_options, permanent_kafka_failure
from gracestream.pipeline.kafka.transactions import TransactionalProducer
from gracestream.pipeline.kafka.waiting import AccessDeniedError, ProgressCallback, is_dns_failure, wait_until_reachable
from gracestream.pipeline.settings import Settings, SettingsError
from gracestream.schemas.deltas import MAX_DELTA_BYTES

_HOST_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):([0-9]{1,5})")

MAX_FETCH_BYTES = 4 * 2**20
"""Bytes that a broker sends at once: few, so that one fetch is on its way while the last is worked at. A batch that is
larger comes all the same, alone (KIP-74)."""


def consumer(settings: Settings, **options: Any) -> RejoiningConsumer:
    """A consumer of committed records, whatever their headers are called, which commits nothing by itself."""
    ours = {
        "isolation_level": "read_committed",
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "max_partition_fetch_bytes": MAX_FETCH_BYTES,
        "fetch_max_bytes": MAX_FETCH_BYTES,
    }
    made = RejoiningConsumer(**_connection_options(settings), **(ours | options))
    made._fetcher.__class__ = BoundedFetcher  # noqa: SLF001  (it has no public name)
    return made


def aiokafka_consumer(settings: Settings, **options: Any) -> AIOKafkaConsumer:
    """A consumer of committed records, in no group, that raises where its offset is not there."""
    install_lenient_parser()
    return AIOKafkaConsumer(
        bootstrap_servers=_bootstrap_servers(settings),
        isolation_level="read_committed",
        enable_auto_commit=False,
        auto_offset_reset="none",
        **kafka_security_options(settings),
        **options,
    )


def producer(settings: Settings, **options: Any) -> KafkaProducer:
    """A producer whose records are acknowledged by all replicas of a partition.

    With a `transactional_id` it is a TransactionalProducer, which asks the cluster for its `transaction.version`.
    """
    ours: dict[str, Any] = {"acks": "all", "max_request_size": MAX_DELTA_BYTES, "kafka_client": RetryingNetClient}
    if "transactional_id" in options:
        options = {"end_raises_epoch": _end_txn_raises_epoch(settings), **options}
        return TransactionalProducer(**_connection_options(settings), **ours, **options)
    return KafkaProducer(**_connection_options(settings), **ours, **options)


def admin(settings: Settings, **options: Any) -> KafkaAdminClient:
    """A client for creating and describing topics."""
    return KafkaAdminClient(**_connection_options(settings), **options)


def ping_kafka(settings: Settings, timeout_seconds: float) -> None:
    """See that the cluster answers, within `timeout_seconds` seconds or so.

    Raises:
        AccessDeniedError: it does not take us, or is not trusted.
        SettingsError: an address is none.
        KafkaError, OSError, ValueError: it does not answer, or its name is none.
    """
    milliseconds = int(1000 * timeout_seconds)
    try:
        asyncio.run(_connect(settings, milliseconds))
        with admin(settings, bootstrap_timeout_ms=milliseconds, request_timeout_ms=milliseconds) as client:
            client.describe_cluster()
    except (RawKafkaError, KafkaError, OSError) as error:
        if refused := permanent_kafka_failure(error, settings):
            raise AccessDeniedError(refused) from error
        if isinstance(error, RawKafkaError):
            raise KafkaConnectionError(*error.args) from error
        raise


def wait_for_kafka(settings: Settings, report: ProgressCallback, *, await_name: bool = False) -> None:
    """Wait until the cluster answers.

    With `await_name` also for a host name that is unknown yet: the services of a deployment start together, and a
    service's name may appear after its users have started. A command fails at once instead.

    Raises:
        UnreachableError: not within `startup_timeout`, or, without `await_name`, no host name is known.
        SettingsError: an address is none; at once.
        AccessDeniedError: it does not take us, or is not trusted; at once.
    """
    wait_until_reachable(
        f"Kafka at {settings.kafka}",
        f"over {settings.kafka_security_protocol}",
        "GRACESTREAM_KAFKA",
        lambda: ping_kafka(settings, min(settings.startup_timeout, 5.0)),
        (KafkaError,),
        is_set="kafka" in settings.model_fields_set,
        timeout_seconds=settings.startup_timeout,
        await_name=await_name,
        report=report,
    )


def _end_txn_raises_epoch(settings: Settings) -> bool:
    """Whether EndTxn raises the producer's epoch: the finalised `transaction.version` is 2 or more (KIP-890)."""
    with admin(settings) as client:
        features = client.describe_features()
    _, level = features.get("transaction.version", {}).get("finalized", (0, 0))
    return bool(level >= 2)


def _connection_options(settings: Settings) -> dict[str, Any]:
    """Where and how to connect; a cluster that was away is found again within a second, not half a minute."""
    return {
        "bootstrap_servers": _bootstrap_servers(settings),
        "reconnect_backoff_max_ms": 1000,
        **kafka_security_options(settings),
    }


def _bootstrap_servers(settings: Settings) -> list[str]:
    """Raises SettingsError where one is not host:port."""
    servers = [server.strip() for server in settings.kafka.split(",")]
    for server in servers:
        address = _HOST_PORT.fullmatch(server)
        if address is None or not 0 < int(address[1]) < 2**16:
            raise SettingsError(
                f"GRACESTREAM_KAFKA: {server!r} is no host:port; set it to the addresses of one or more brokers, such"
                " as broker-1:9092,broker-2:9092"
            )
    return servers


async def _connect(settings: Settings, timeout_ms: int) -> None:
    """Connect to one of the bootstrap servers and authenticate.

    Where none takes us, the error is that of the last one whose name is known, if there is one.
    """
    failure: Exception | None = None
    for host, port, _ in collect_hosts(_bootstrap_servers(settings), randomize=False):
        try:
            connection = await create_conn(
                host, port, request_timeout_ms=timeout_ms, **kafka_security_options(settings)
            )
        except (RawKafkaError, OSError, UnicodeError) as error:  # a time-out is an OSError
            if failure is None or not is_dns_failure(error):
                failure = error
        else:
            connection.close()
            return
    assert failure is not None, "there is at least one server"
    raise failure
