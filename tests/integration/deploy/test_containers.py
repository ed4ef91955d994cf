"""Containers of the local stack on a real Docker engine. Their image is built here, without a registry."""

import io
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import docker  # type: ignore[import-untyped]
import pytest
import redis
from testcontainers.core.config import ConnectionMode, testcontainers_config
from testcontainers.core.container import DockerContainer

from gracestream.deploy.local import containers
from gracestream.deploy.local.containers import redis_container
from gracestream.deploy.local.redis import _find_binary
from tests.support.running import wait_until

pytestmark = pytest.mark.docker


@pytest.fixture
def valkey(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An image of this machine's Valkey, in place of the registry's image."""
    binary = Path(_find_binary())
    linked = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    files = {"/valkey-server": binary} | {path: Path(path) for path in re.findall(r"/\S+", linked)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, path in files.items():
            archive.add(path.resolve(), name.lstrip("/"))
    client = docker.from_env()
    image = "gracestream-test-valkey:latest"
    changes = ['CMD ["/valkey-server", "--protected-mode", "no"]']
    name, _, tag = image.partition(":")
    client.api.import_image_from_data(packed.getvalue(), repository=name, tag=tag, changes=changes)
    monkeypatch.setattr(containers, "REDIS_IMAGE", image)
    monkeypatch.setattr(testcontainers_config, "_ryuk_disabled", True)  # its image would come from a registry
    # Where the tests are in a container, testcontainers takes the engine for that container's host.
    monkeypatch.setattr(testcontainers_config, "connection_mode_override", ConnectionMode.docker_host)
    yield image
    client.images.remove(image, force=True)
    client.close()


def hosts(container_of: str) -> set[str]:
    """The addresses on which the running container of an image publishes its ports."""
    client = docker.from_env()
    try:
        (container,) = client.containers.list(filters={"ancestor": container_of})
        published = container.attrs["NetworkSettings"]["Ports"].values()
        return {binding["HostIp"] for bindings in published for binding in bindings}
    finally:
        client.close()


def test_redis_is_published_on_loopback_alone(valkey: str) -> None:
    with redis_container() as url, redis.Redis.from_url(url) as client:
        assert client.ping()
        assert hosts(valkey) == {"127.0.0.1"}


def test_every_container_of_testcontainers_publishes_on_loopback_alone(valkey: str) -> None:
    with DockerContainer(valkey).with_exposed_ports(6379, "8080/tcp"):
        wait_until(lambda: hosts(valkey))
        assert hosts(valkey) == {"127.0.0.1"}
