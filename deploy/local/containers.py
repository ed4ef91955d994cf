"""Kafka and Redis in containers, where a Docker engine of this machine answers. Their data goes when they stop.

Their ports are published on the loopback interface alone: neither asks for a password, and Docker's own default is
every interface, past most firewalls. So is the port of Ryuk, the container by which testcontainers cleans up.
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
KAFKA_PORT = 9092
LOOPBACK = "127.0.0.1"

# Everything that says "this engine cannot run that image": no network, no such image, a start that fails or hangs.
CONTAINER_ERRORS = (
    docker.errors.DockerException,
    requests.RequestException,
    redis.RedisError,
    KafkaError,
    RuntimeError,
    OSError,
)

# The broker must be told the address under which clients reach it, and that is known only once the container runs.
_START_SCRIPT = """
until [ -f /tmp/address ]; do sleep 0.1; done
export KAFKA_ADVERTISED_LISTENERS="CLIENT://$(cat /tmp/address),BROKER://localhost:9094"
exec /etc/kafka/docker/run
"""


def _expose_on_loopback(container: DockerContainer, *ports: int | str) -> DockerContainer:
    """Publish ports of a container at free ports of the loopback interface."""
    container.ports.update({str(port): (LOOPBACK, None) for port in ports})
    return container


# testcontainers has no setting for the interface; Ryuk and RedisContainer call this method themselves.
DockerContainer.with_exposed_ports = _expose_on_loopback


def is_docker_available() -> bool:
    """Whether a Docker engine answers on this machine; from another one, ports on its loopback cannot be reached."""
    try:
        engine = DockerClient(timeout=5)
        with closing(engine.client) as client:
            return engine.host() in ("localhost", LOOPBACK) and bool(client.ping())
    except CONTAINER_ERRORS:
        return False


def kafka_image() -> str:
    """Apache Kafka's own image, of the version that the local broker has."""
    return f"apache/kafka:{kafka_version()}"


@contextmanager
def kafka_container(timeout: float = 60.0) -> Iterator[str]:
    """A Kafka container; the address to bootstrap from.

    testcontainers' KafkaContainer runs the scripts of Confluent's images, which Apache's does not have.

    Raises:
        One of FAILURES: it cannot be run.
    """
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": "1@localhost:9093",
        "listeners": f"CLIENT://:{KAFKA_PORT},BROKER://:9094,CONTROLLER://:9093",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
        # Ending a transaction, the broker calls itself, and the clients' address leads nowhere inside the container.
        "inter.broker.listener.name": "BROKER",
        "controller.listener.names": "CONTROLLER",
        **SINGLE_NODE_CONFIG,
    }
    container = DockerContainer(kafka_image()).with_exposed_ports(KAFKA_PORT).with_command(["sh", "-c", _START_SCRIPT])
    for key, value in settings.items():
        container.with_env("KAFKA_" + key.replace(".", "_").upper(), value)
    with container:
        address = f"{container.get_container_host_ip()}:{container.get_exposed_port(KAFKA_PORT)}"
        # Moved into place, so that the shell above never reads half of it.
        container.exec(["sh", "-c", f"echo {address} > /tmp/address.new && mv /tmp/address.new /tmp/address"])
        describe_cluster(address, timeout)
        yield address


@contextmanager
def redis_container() -> Iterator[str]:
    """A Redis container; its URL.

    Raises:
        One of FAILURES: it cannot be run.
    """
    with RedisContainer(REDIS_IMAGE) as container:
        yield f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(container.port)}/0"
