"""Creates Kafka clients from the settings, and waits for Kafka at start.

1. Every consumer reads only committed records and commits no offset by itself.
2. Producers wait for the acknowledgement of all in-sync replicas.
3. The wait ends at once on a final failure, such as a rejected password or an untrusted certificate.

kafka-python can miss a rejected password, and would then retry for ever. A broker sends its error and closes the
connection. If both arrive in one read, kafka-python handles the close and drops the error. The first connection is
therefore made by aiokafka, which reads the error.
"""

import asyncio
import re
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.errors import KafkaError as RawKafkaError
from kafka import KafkaAdminClient, KafkaProducer
from kafka.errors import KafkaConnectionError, KafkaError

from gracestream.pipeline.kafka.client_fixes import PausingNetClient, RejoiningConsumer, RetryingNetClient
from gracestream.pipeline.kafka.lenient_records import BoundedFetcher, install_lenient_parser
from gracestream.pipeline.kafka.security import kafka_security_options, permanent_kafka_failure
from gracestream.pipeline.kafka.transactions import TransactionalProducer
from gracestream.pipeline.kafka.waiting import AccessDeniedError, ProgressCallback, is_dns_failure, wait_until_reachable
from gracestream.pipeline.settings import KafkaSettings, SettingsError
from gracestream.schemas.deltas import MAX_DELTA_BYTES

_HOST_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):([0-9]{1,5})")

MAX_FETCH_BYTES = 4 * 2**20
"""Limit on the bytes of one fetch. It is small so that the next fetch is on its way while the last one is processed.

A broker sends a batch larger than this alone (KIP-74), so large records are not blocked.
"""


def consumer(settings: KafkaSettings, **options: Any) -> RejoiningConsumer:
    """A consumer of committed records that accepts any record and commits no offset by itself.

    `options` are options of KafkaConsumer and override the defaults.
    """
    defaults = {
        "isolation_level": "read_committed",
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "max_partition_fetch_bytes": MAX_FETCH_BYTES,
        "fetch_max_bytes": MAX_FETCH_BYTES,
    }
    client = RejoiningConsumer(**_connection_options(settings), **(defaults | options))
    client._fetcher.__class__ = BoundedFetcher  # noqa: SLF001  (there is no option for its class)
    return client


def aiokafka_consumer(settings: KafkaSettings, **options: Any) -> AIOKafkaConsumer:
    """An aiokafka consumer of committed records, without a group. It raises if its offset does not exist."""
    install_lenient_parser()
    return AIOKafkaConsumer(
        bootstrap_servers=_bootstrap_servers(settings),
        isolation_level="read_committed",
        enable_auto_commit=False,
        auto_offset_reset="none",
        **kafka_security_options(settings),
        **options,
    )


def producer(settings: KafkaSettings, **options: Any) -> KafkaProducer:
    """A producer whose records are acknowledged by all in-sync replicas of a partition.

    With a `transactional_id` it is a TransactionalProducer; the cluster is asked for its `transaction.version`.
    """
    defaults: dict[str, Any] = {
        **_connection_options(settings),
        "acks": "all",
        "max_request_size": MAX_DELTA_BYTES,
        "kafka_client": RetryingNetClient,
    }
    if "transactional_id" in options:
        options = {"end_raises_epoch": _end_txn_raises_epoch(settings), **options}
        return TransactionalProducer(**defaults, **options)
    return KafkaProducer(**defaults, **options)


def admin(settings: KafkaSettings, **options: Any) -> KafkaAdminClient:
    """An admin client, for example to create and describe topics."""
    return KafkaAdminClient(**_connection_options(settings), **options)


def cluster_id(settings: KafkaSettings) -> str:
    """The id of the cluster, which changes if its data is deleted.

    Raises:
        KafkaError: the cluster does not answer.
    """
    with admin(settings) as client:
        return str(client.describe_cluster()["cluster_id"])


def ping_kafka(settings: KafkaSettings, timeout_seconds: float) -> None:
    """Check once that the cluster answers, within about `timeout_seconds`.

    Raises:
        AccessDeniedError: the cluster rejects the user or certificate, or its certificate is not trusted.
        SettingsError: an address in the settings is invalid.
        KafkaError, OSError, ValueError: the cluster does not answer, or its host name is invalid.
    """
    milliseconds = int(1000 * timeout_seconds)
    try:
        asyncio.run(_connect(settings, milliseconds))
        with admin(settings, bootstrap_timeout_ms=milliseconds, request_timeout_ms=milliseconds) as client:
            client.describe_cluster()
    except (RawKafkaError, KafkaError, OSError) as error:
        if failure := permanent_kafka_failure(error, settings):
            raise AccessDeniedError(failure) from error
        if isinstance(error, RawKafkaError):
            raise KafkaConnectionError(*error.args) from error
        raise


def wait_for_kafka(settings: KafkaSettings, report: ProgressCallback, *, await_name: bool = False) -> None:
    """Wait until the cluster answers.

    With `await_name`, an unknown host name is retried too. Services of a deployment start together, so the name of one
    may appear after another has started. Commands do not set it, and fail at once.

    Raises:
        UnreachableError: no answer within `startup_timeout`; or, without `await_name`, no host name is known.
        SettingsError: an address in the settings is invalid; raised at once.
        AccessDeniedError: the cluster rejects the user or certificate, or is not trusted; raised at once.
    """
    wait_until_reachable(
        f"Kafka at {settings.servers}",
        f"over {settings.security_protocol}",
        "GRACESTREAM_KAFKA",
        lambda: ping_kafka(settings, min(settings.startup_timeout, 5.0)),
        (KafkaError,),
        is_set="servers" in settings.model_fields_set,
        timeout_seconds=settings.startup_timeout,
        await_name=await_name,
        report=report,
    )


def _end_txn_raises_epoch(settings: KafkaSettings) -> bool:
    """Whether EndTxn raises the epoch of the producer: `transaction.version` is finalised at 2 or more (KIP-890)."""
    with admin(settings) as client:
        features = client.describe_features()
    _, level = features.get("transaction.version", {}).get("finalized", (0, 0))
    return bool(level >= 2)


def _connection_options(settings: KafkaSettings) -> dict[str, Any]:
    """Address and security options of kafka-python clients.

    The reconnect backoff is limited to 1 s instead of 30 s, so that a client finds a restarted cluster soon.
    """
    return {
        "bootstrap_servers": _bootstrap_servers(settings),
        "reconnect_backoff_max_ms": 1000,
        "kafka_client": PausingNetClient,
        **kafka_security_options(settings),
    }


def _bootstrap_servers(settings: KafkaSettings) -> list[str]:
    """The addresses in the settings.

    Raises:
        SettingsError: an address is not host:port.
    """
    servers = [server.strip() for server in settings.servers.split(",")]
    for server in servers:
        address = _HOST_PORT.fullmatch(server)
        if address is None or not 0 < int(address[1]) < 2**16:
            raise SettingsError(
                f"GRACESTREAM_KAFKA: {server!r} is not host:port; set it to the addresses of one or more brokers, such"
                " as broker-1:9092,broker-2:9092"
            )
    return servers


async def _connect(settings: KafkaSettings, timeout_ms: int) -> None:
    """Connect to one of the bootstrap servers and authenticate.

    Raises:
        KafkaError, OSError, UnicodeError: no server accepted the connection. The error is that of the last server with
            a known host name; if there is none, that of the first server.
    """
    failure: Exception | None = None
    for host, port, _ in collect_hosts(_bootstrap_servers(settings), randomize=False):
        try:
            connection = await create_conn(
                host, port, request_timeout_ms=timeout_ms, **kafka_security_options(settings)
            )
        except (RawKafkaError, OSError, UnicodeError) as error:  # a timeout is an OSError
            if failure is None or not is_dns_failure(error):
                failure = error
        else:
            connection.close()
            return
    assert failure is not None, "there is at least one server"
    raise failure
