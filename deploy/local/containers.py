"""Kafka and Redis in containers, on a Docker engine of this machine.

1. Ports are published on the loopback interface only. Neither server asks for a password, and Docker's default would
   open the ports on every interface, bypassing most firewalls.
2. This holds for Ryuk, too, the container with which testcontainers cleans up.

Not promised: durable data. The data is lost when a container stops.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import docker.errors  # type: ignore[import-untyped]
import redis
import requests
from kafka.errors import KafkaError
from testcontainers.community.redis import RedisContainer
from testcontainers.core.container import DockerContainer
from testcontainers.core.docker_client import DockerClient

from gracestream.deploy.local.kafka import SINGLE_NODE_CONFIG, describe_cluster, kafka_version

REDIS_IMAGE = "redis:8-alpine"
"""The image of Redis."""

KAFKA_PORT = 9092
"""The port of Kafka's listener for clients inside its container."""

LOOPBACK = "127.0.0.1"
"""The address on which ports are published."""

CONTAINER_ERRORS = (
    docker.errors.DockerException,
    requests.RequestException,
    redis.RedisError,
    KafkaError,
    RuntimeError,
    OSError,
)
"""Errors of an engine that cannot run an image: no network, no such image, a start that fails or times out."""

# The broker needs the address under which clients reach it, and Docker chooses the port when the container starts. So
# the container starts with a shell, which waits for the address and then starts the broker.
_START_SCRIPT = """
until [ -f /tmp/address ]; do sleep 0.1; done
export KAFKA_ADVERTISED_LISTENERS="CLIENT://$(cat /tmp/address),BROKER://localhost:9094"
exec /etc/kafka/docker/run
"""


def _expose_on_loopback(container: DockerContainer, *ports: int | str) -> DockerContainer:
    """Publish a container's ports on free ports of the loopback interface."""
    container.ports.update({str(port): (LOOPBACK, None) for port in ports})
    return container


# testcontainers has no setting for the interface. Ryuk and RedisContainer call this method, so it is replaced for all.
DockerContainer.with_exposed_ports = _expose_on_loopback


def is_docker_available() -> bool:
    """Whether a Docker engine answers on this machine; the loopback ports of a remote engine could not be reached."""
    try:
        engine = DockerClient(timeout=5)
        with closing(engine.client) as client:
            return engine.host() in ("localhost", LOOPBACK) and bool(client.ping())
    except CONTAINER_ERRORS:
        return False


def kafka_image() -> str:
    """The official image of Apache Kafka, in the version of the local broker."""
    return f"apache/kafka:{kafka_version()}"


@contextmanager
def kafka_container(timeout: float = 60.0) -> Iterator[str]:
    """A context with a Kafka container; yields the address to bootstrap from.

    testcontainers' KafkaContainer needs the scripts of Confluent's images, which Apache's image does not have.

    Raises:
        One of CONTAINER_ERRORS: the container cannot be run.
    """
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": "1@localhost:9093",
        "listeners": f"CLIENT://:{KAFKA_PORT},BROKER://:9094,CONTROLLER://:9093",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
        # The broker calls itself when it ends a transaction. Inside the container the clients' address leads nowhere.
        "inter.broker.listener.name": "BROKER",
        "controller.listener.names": "CONTROLLER",
        **SINGLE_NODE_CONFIG,
    }
    container = DockerContainer(kafka_image()).with_exposed_ports(KAFKA_PORT).with_command(["sh", "-c", _START_SCRIPT])
    for key, value in settings.items():
        container.with_env("KAFKA_" + key.replace(".", "_").upper(), value)
    with container:
        address = f"{container.get_container_host_ip()}:{container.get_exposed_port(KAFKA_PORT)}"
        # Moved into place, so that the start script never reads an incomplete address.
        container.exec(["sh", "-c", f"echo {address} > /tmp/address.new && mv /tmp/address.new /tmp/address"])
        describe_cluster(address, timeout)
        yield address


@contextmanager
def redis_container() -> Iterator[str]:
    """A context with a Redis container; yields its URL.

    Raises:
        One of CONTAINER_ERRORS: the container cannot be run.
    """
    with RedisContainer(REDIS_IMAGE) as container:
        yield f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(container.port)}/0"
