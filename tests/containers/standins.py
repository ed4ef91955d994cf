"""The base images and neighbours of the project's containers, from a registry or built as stand-ins.

Where no registry can be reached, each is built here from Debian's packages, Kafka's own jars or Prometheus' source. It
has the label `gracestream.stand-in`, and the name of the image that it stands for only while the tests run. Stand-ins
show that our files fit together and what our own image does. They do not show that the official images behave alike.
"""

import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import docker  # type: ignore[import-untyped]

from gracestream.deploy.local.containers import kafka_image
from gracestream.deploy.local.kafka import fetch_jars
from gracestream.pipeline.settings import load_settings
from tests.containers.engine import EngineError, cache, compile_go, install
from tests.support.deployment_files import compose

LABEL = "gracestream.stand-in"
RECIPE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
"""The label's value. A stand-in built by another version of this file is built again."""

SUITE = "bookworm"
"""A Debian with the Python version of the image."""

PYTHON_PACKAGES = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates"
CERTIFICATES = Path("/usr/local/share/ca-certificates")
"""The folder of certificates that this machine trusts in addition to Debian's, such as a proxy's."""

SERVERS = f"""
FROM python:3.11-slim
RUN update-ca-certificates && apt-get -qq update && apt-get -qq install --yes --no-install-recommends \\
    gcc libc6-dev openjdk-17-jre-headless redis-server
LABEL {LABEL}={RECIPE}
"""

KAFKA = f"""
FROM python:3.11
COPY jars /opt/kafka/libs
COPY run /etc/kafka/docker/run
COPY kafka-broker-api-versions.sh /opt/kafka/bin/
RUN useradd --uid 1000 appuser \\
    && install -d -o appuser /opt/kafka/config /etc/kafka/secrets /mnt/shared/config /var/lib/kafka/data \\
    && touch /etc/kafka/docker/server.properties \\
    && echo 'Configuration: {{Loggers: {{Root: {{level: INFO}}}}}}' > /etc/kafka/docker/log4j2.yaml \\
    && cp /etc/kafka/docker/log4j2.yaml /etc/kafka/docker/tools-log4j2.yaml \\
    && chmod +x /etc/kafka/docker/run /opt/kafka/bin/*
VOLUME ["/etc/kafka/secrets", "/mnt/shared/config", "/var/lib/kafka/data"]
USER appuser
LABEL {LABEL}={RECIPE}
CMD ["/etc/kafka/docker/run"]
"""
"""The entry point, as in Apache's image: its class turns variables into properties, and formats the folder."""

KAFKA_RUN = """#!/bin/bash
output=$(java -cp '/opt/kafka/libs/*' kafka.docker.KafkaDockerWrapper setup --default-configs-dir /etc/kafka/docker \\
    --mounted-configs-dir /mnt/shared/config --final-configs-dir /opt/kafka/config 2>&1) \\
    || grep "already formatted" <<< "$output" || { echo "$output"; exit 1; }
exec java $KAFKA_HEAP_OPTS -XX:+UseSerialGC -cp '/opt/kafka/libs/*' kafka.Kafka /opt/kafka/config/server.properties
"""

KAFKA_PROBE = """#!/bin/bash
: < "/dev/tcp/${2/://}"
"""
"""The health check. Kafka's own tool is in a further jar; here an open port suffices."""

VALKEY = f"""
FROM python:3.11
RUN ln -s /usr/bin/redis-server /usr/local/bin/valkey-server && ln -s /usr/bin/redis-cli /usr/local/bin/valkey-cli \\
    && printf '#!/bin/sh\\nexec "$@" --protected-mode no\\n' > /usr/local/bin/entrypoint \\
    && chmod +x /usr/local/bin/entrypoint
VOLUME /data
WORKDIR /data
LABEL {LABEL}={RECIPE}
ENTRYPOINT ["entrypoint"]
CMD ["valkey-server"]
"""

PROMETHEUS = f"""
FROM python:3.11-slim
COPY prometheus promtool /bin/
RUN install -d -o nobody -g nogroup /prometheus
VOLUME /prometheus
WORKDIR /prometheus
USER nobody
LABEL {LABEL}={RECIPE}
ENTRYPOINT ["prometheus", "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
"""


KEPT = "gracestream-stand-in"
"""The name of stored stand-ins. They have the names of the images that they replace only while tests run."""

UNREACHABLE = ("dial tcp", "no such host", "connection refused", "i/o timeout", "proxyconnect", "request canceled")
"""An engine's messages about a registry that does not answer."""

_named: set[str] = set()
"""The images whose names stand-ins have at present."""


def require_images(*services: str) -> None:
    """Let this engine have what our image is built from, and the images of these services of the Compose file.

    Raises:
        EngineError: one can neither be fetched nor built.
    """
    client = docker.from_env()
    try:
        for name in ("python:3.11-slim", "python:3.11", *(compose()["services"][one]["image"] for one in services)):
            _require(client, name)
    finally:
        client.close()


def remove_stand_ins() -> None:
    """Remove the names of other images from this process's stand-ins."""
    if not _named:
        return
    client = docker.from_env()
    try:
        while _named:
            client.images.remove(_named.pop())
    finally:
        client.close()


def _require(client: docker.DockerClient, name: str) -> None:
    present = client.images.list(name)
    if present and LABEL not in present[0].labels:
        return
    try:
        client.images.pull(name)
    except docker.errors.APIError as error:
        if not any(sign in str(error) for sign in UNREACHABLE):
            raise EngineError(f"the image {name} cannot be fetched: {error}") from error
    else:
        return
    kept = client.images.list(f"{KEPT}/{name}")
    if not kept or kept[0].labels[LABEL] != RECIPE:
        _build_stand_in(client, name)
    client.images.get(f"{KEPT}/{name}").tag(name)
    _named.add(name)


def _build_stand_in(client: docker.DockerClient, name: str) -> None:
    print(f"no registry answers for {name}: a stand-in is built", file=sys.stderr)
    builders: dict[str, Callable[[docker.DockerClient, str], None]] = {
        "python:3.11-slim": _build_python,
        "python:3.11": partial(_build, dockerfile=SERVERS),
        kafka_image(): _build_kafka,
        "valkey/valkey": partial(_build, dockerfile=VALKEY),
        "prom/prometheus": _build_prometheus,
    }
    build = builders.get(name) or builders.get(name.partition(":")[0])
    if build is None:
        raise EngineError(f"the image {name} cannot be fetched, and nothing stands in for it")
    try:
        build(client, name)
    except (docker.errors.DockerException, subprocess.CalledProcessError, OSError) as error:
        raise EngineError(f"the image {name} can neither be fetched nor built: {error}") from error


def _build_python(client: docker.DockerClient, name: str) -> None:
    """Debian with its own Python, since the official image comes from a registry only."""
    if shutil.which("debootstrap") is None:
        install("debootstrap")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        options = ["--variant=minbase", f"--include={PYTHON_PACKAGES}"]
        subprocess.run(["debootstrap", *options, SUITE, root, _mirror()], check=True, stdout=subprocess.DEVNULL)
        for sources in Path("/etc/apt").glob("sources.list.d/debian.sources"):
            (root / "etc/apt/sources.list").unlink(missing_ok=True)
            shutil.copy(sources, root / "etc/apt/sources.list.d")
        for settings in Path("/etc/apt/apt.conf.d").glob("99*"):
            shutil.copy(settings, root / "etc/apt/apt.conf.d")
        for certificate in CERTIFICATES.glob("*.crt"):
            shutil.copy(certificate, root / CERTIFICATES.relative_to("/"))
        for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()  # so that pip installs as in the official image
        for package in root.glob("var/cache/apt/archives/*.deb"):
            package.unlink()
        archive = Path(folder) / "root.tar"
        subprocess.run(["tar", "--create", "--directory", root, "--file", archive, "."], check=True)
        repository, _, tag = f"{KEPT}/{name}".partition(":")
        changes = [f"LABEL {LABEL}={RECIPE}", 'CMD ["python3"]']
        client.api.import_image_from_file(str(archive), repository=repository, tag=tag, changes=changes)


def _mirror() -> str:
    """The mirror of this machine's packages."""
    for path in (*Path("/etc/apt/sources.list.d").glob("*.sources"), Path("/etc/apt/sources.list")):
        text = path.read_text() if path.exists() else ""
        if found := re.search(r"^(?:URIs:\s*|deb\s+(?:\[.*?\]\s*)?)(\S+)", text, re.MULTILINE):
            return found[1]
    raise EngineError("this machine names no mirror of Debian in /etc/apt")


def _build_kafka(client: docker.DockerClient, name: str) -> None:
    jars = fetch_jars(load_settings().model.cache_dir.expanduser())
    files = {f"jars/{jar.name}": jar.read_bytes() for jar in sorted(jars.glob("*.jar"))}
    scripts = {"run": KAFKA_RUN, "kafka-broker-api-versions.sh": KAFKA_PROBE}
    _build(client, name, KAFKA, {**files, **{name: script.encode() for name, script in scripts.items()}})


def _build_prometheus(client: docker.DockerClient, name: str) -> None:
    """Compile the version that the Compose file names."""
    major, minor, patch = map(int, name.partition(":v")[2].split("."))
    version = f"v0.{major}{minor:02d}.{patch}"  # as its releases are numbered for Go
    folder = cache() / f"prometheus-{version}"
    programs = ("prometheus", "promtool")
    if not all((folder / program).exists() for program in programs):
        module = "github.com/prometheus/prometheus"
        compile_go(folder, version, *(f"{module}/cmd/{program}" for program in programs))
    _build(client, name, PROMETHEUS, {program: (folder / program).read_bytes() for program in programs})


def _build(client: docker.DockerClient, name: str, dockerfile: str, files: Mapping[str, bytes] | None = None) -> None:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for path, content in {"Dockerfile": dockerfile.encode(), **(files or {})}.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            member.mode = 0o755
            archive.addfile(member, io.BytesIO(content))
    context.seek(0)
    client.images.build(fileobj=context, custom_context=True, tag=f"{KEPT}/{name}", network_mode="host", rm=True)
