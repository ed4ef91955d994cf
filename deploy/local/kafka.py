"""A local Apache Kafka: one KRaft node, whose jars Maven fetches once."""

import base64
import contextlib
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from gracestream.deploy.local.processes import HOST, StackError, find_free_port, is_port_open
from gracestream.deploy.local.server import LocalServer, ignore_progress
from gracestream.pipeline.settings import load_settings

BROKER_FOLDER = Path(__file__).parent / "broker"
"""The folder with the Maven project of the broker's jars and with the broker's log configuration."""

# Without the optimising compiler (tier 4) the broker starts in half the time and leaves the models the cores.
JAVA_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Options with which every program of Kafka starts fast."""

MIN_JAVA_VERSION = 17
"""The oldest Java that runs a broker, since Kafka 4.0."""

EXIT_AFTER_SIGTERM = 128 + signal.SIGTERM
"""The exit status of a Java program that SIGTERM ended in order."""

EXISTING_KAFKA_HINT = "or set GRACESTREAM_KAFKA to the address of an existing cluster"
"""The alternative remedy in every error."""

SINGLE_NODE_CONFIG = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
}
"""Broker settings of a cluster with one node, local or in a container.

The internal topics have one partition each: Kafka creates them at their first use, and the first client waits for all
of their partitions.
"""


@functools.cache
def kafka_version() -> str:
    """The version of Kafka that the pom names."""
    found = re.search(r"<kafka\.version>(.+?)<", (BROKER_FOLDER / "pom.xml").read_text(encoding="utf-8"))
    assert found, "the pom names kafka.version"
    return found[1]


class LocalKafka(LocalServer):
    """One Kafka node (broker and controller in one process) on 127.0.0.1, with 512 MB of heap.

    Records survive `kill`: they are in the operating system's page cache, which does not depend on the process. A power
    failure may lose the newest records. Only Kafka's internal topics are created automatically.

    Args:
        data_dir: The data directory, as for `LocalServer`.
        port: The port for clients; a free port if not given.
        cache: The folder for Kafka's jars; the settings' cache folder if not given.
        report: Called with progress lines, as for `LocalServer`.
        protocols: Security protocols besides PLAINTEXT, each on a port of its own (`addresses`).
        properties: Server properties that override the default ones: certificates, mechanisms, an authorizer.
    """

    name = "Kafka"

    def __init__(
        self,
        data_dir: Path,
        port: int | None = None,
        *,
        cache: Path | None = None,
        report: Callable[[str], None] = ignore_progress,
        protocols: Sequence[str] = (),
        properties: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(data_dir, port, report=report)
        ports = [self.port]
        for _ in ("CONTROLLER", *protocols):
            ports.append(_find_other_port(ports))
        self._controller_port = ports[1]
        self.addresses = {protocol: f"{HOST}:{port}" for protocol, port in zip(protocols, ports[2:], strict=True)}
        """`host:port` of each of `protocols`."""
        self._extra_properties = properties or {}
        self._cache = (cache or load_settings().model.cache_dir).expanduser().resolve()
        self._new_archive: Path | None = None

    @property
    def bootstrap(self) -> str:
        """The value of `bootstrap_servers` for Kafka clients."""
        return self.address

    def _prepare_command(self) -> Sequence[str]:
        java = find_java()
        jars = fetch_jars(self._cache, self._report)
        self._report(f"starting a local Apache Kafka {kafka_version()}")
        config = self.data_dir / "server.properties"
        config.write_text(self._render_properties(), encoding="utf-8")
        logging = f"-Dlog4j2.configurationFile={BROKER_FOLDER / 'log4j2.properties'}"
        options = [*JAVA_OPTIONS, *self._archive_options(java, jars), "-XX:+ExitOnOutOfMemoryError", "-Xmx512m"]
        command = [java, *options, logging, "-cp", f"{jars}/*"]
        if not (self.data_dir / "log" / "meta.properties").exists():
            _format_storage(command, config)
        return [*command, "kafka.Kafka", str(config)]

    def is_responding(self, timeout: float) -> bool:
        """Whether the cluster reports a broker within `timeout` seconds, at most 5."""
        # If the broker has died, the client would retry until its timeout and leave a thread behind each time.
        if not is_port_open(self.port):
            return False
        try:
            return bool(describe_cluster(self.bootstrap, min(timeout, 5.0))["brokers"])
        except (KafkaError, OSError):
            return False

    def _archive_options(self, java: str, jars: Path) -> list[str]:
        """The Java option that reads the class archive, which another broker writes first if there is none."""
        if self._new_archive is not None:
            return [f"-XX:ArchiveClassesAtExit={self._new_archive}"]
        archive = class_archive(java, jars)
        if not archive.exists():
            self._report("archiving Kafka's classes, once, so that it starts faster")
            with contextlib.suppress(StackError, OSError):  # the broker needs none
                self._write_archive(archive)
        # Without the file, Java would not even use the archive of its own classes.
        return [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []

    def _write_archive(self, archive: Path) -> None:
        """Write the class archive. Several processes may do so at the same time: the last rename wins.

        Raises:
            StackError, OSError: it could not be written.
        """
        with tempfile.TemporaryDirectory(prefix="archiving-", dir=self._cache) as folder:
            broker = LocalKafka(Path(folder) / "data", cache=self._cache)
            broker._new_archive = Path(folder) / archive.name
            with broker:
                pass
            if broker.child.returncode == EXIT_AFTER_SIGTERM:  # otherwise the archive may be incomplete
                broker._new_archive.rename(archive)

    def _render_properties(self) -> str:
        """The content of the broker's `server.properties`."""
        listeners = {"CLIENT": self.address, "CONTROLLER": f"{HOST}:{self._controller_port}", **self.addresses}
        protocols = {"CLIENT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **{name: name for name in self.addresses}}
        values = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{HOST}:{self._controller_port}",
            "listeners": ",".join(f"{name}://{address}" for name, address in listeners.items()),
            "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
            "inter.broker.listener.name": "CLIENT",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": self.data_dir / "log",
            # After a kill the controller rejects the restarted broker until the broker's old session has expired. The
            # default of 9 s would delay each restart.
            "broker.session.timeout.ms": 3000,
            "broker.heartbeat.interval.ms": 500,
            # The default of 128 MiB would take a quarter of this heap; the compacted topics here are small.
            "log.cleaner.dedupe.buffer.size": 16 * 2**20,
            **SINGLE_NODE_CONFIG,
            **self._extra_properties,
        }
        return "".join(f"{key}={value}\n" for key, value in values.items())


def describe_cluster(bootstrap: str, timeout: float) -> dict[str, list[object]]:
    """The cluster's description of itself; `brokers` is the list of its brokers.

    Raises:
        KafkaError: the cluster did not answer within `timeout` seconds.
    """
    milliseconds = int(timeout * 1000)
    admin = KafkaAdminClient(
        bootstrap_servers=bootstrap.split(","),
        bootstrap_timeout_ms=milliseconds,
        request_timeout_ms=milliseconds,
        reconnect_backoff_max_ms=200,
    )
    try:
        answer: dict[str, list[object]] = admin.describe_cluster()
        return answer
    finally:
        admin.close()


def find_java() -> str:
    """The path of `java`: from JAVA_HOME if it is set, or else from PATH.

    Raises:
        StackError: there is no Java, it does not run, or it is too old for a broker.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")
    if java is None:
        problem = f"JAVA_HOME={home!r} has no bin/java" if home else "there is no java on PATH"
        raise StackError(
            f"{problem}, and a local Kafka needs Java {MIN_JAVA_VERSION} or newer; install it, {EXISTING_KAFKA_HINT}"
        )
    # Java 17 prints `version "17.0.15"`, but Java 8 `version "1.8.0_402"`.
    version = re.search(r'version "(?:1\.)?(\d+)', java_version(java))
    if not version:
        raise StackError(
            f"{java} does not run, and a local Kafka needs Java {MIN_JAVA_VERSION} or newer; install it,"
            f" {EXISTING_KAFKA_HINT}"
        )
    if int(version[1]) < MIN_JAVA_VERSION:
        raise StackError(
            f"{java} is Java {version[1]}, and a local Kafka needs {MIN_JAVA_VERSION} or newer; install it,"
            f" {EXISTING_KAFKA_HINT}"
        )
    return java


@functools.cache
def java_version(java: str) -> str:
    """The output of `java -version`; empty if it fails."""
    completed = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    return "" if completed.returncode else completed.stderr + completed.stdout


def class_archive(java: str, jars: Path) -> Path:
    """The file with Kafka's classes in the form in which this Java maps them into memory (class data sharing).

    With it a broker starts with 2.2 instead of 3.6 CPU seconds. It holds for one build of Java and for jars in place:
    so it has a name for each build, and lies with the jars.
    """
    return jars / f"classes-{hashlib.sha256(java_version(java).encode()).hexdigest()[:16]}.jsa"


def fetch_jars(cache: Path, report: Callable[[str], None] = ignore_progress) -> Path:
    """The folder with Kafka's jars; Maven fetches them (43 MB) if the cache does not have them.

    Several processes may call this at the same time: each fetches into a folder of its own, and the first rename wins.

    Raises:
        StackError: there is no Maven, or it could not fetch the jars.
    """
    jars = cache / f"kafka-{kafka_version()}"
    if jars.is_dir():
        return jars
    maven = shutil.which("mvn")
    if maven is None:
        raise StackError(
            f"there is no mvn on PATH to fetch Apache Kafka {kafka_version()} into {cache}; install Maven,"
            f" {EXISTING_KAFKA_HINT}"
        )
    report(f"fetching Apache Kafka {kafka_version()} with Maven")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetching-", dir=cache) as folder:
        target = Path(folder) / "jars"
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={target}"]
        completed = subprocess.run(
            [maven, "--batch-mode", "--quiet", "--file", str(BROKER_FOLDER / "pom.xml"), *goal],
            capture_output=True,
            text=True,
            check=False,
        )
        if completed.returncode or not target.is_dir():
            reason = next((line for line in completed.stdout.splitlines() if "ERROR" in line), "it gave no reason")
            raise StackError(
                f"Maven could not fetch Apache Kafka {kafka_version()}: {reason}; check that it reaches its"
                f" repository, {EXISTING_KAFKA_HINT}"
            )
        try:
            target.rename(jars)
        except OSError:
            if not jars.is_dir():  # if it exists, another process was faster
                raise
    return jars


def _format_storage(command: Sequence[str], config: Path) -> None:
    """Format the empty log directory, which KRaft requires before the first start.

    Raises:
        StackError: Kafka's tool failed; the message has the end of its output.
    """
    # A cluster id is a UUID in URL-safe base64. Without "-" it cannot look like an option of the tool.
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "_")
    tool = ["kafka.tools.StorageTool", "format", "--cluster-id", cluster, "--config", str(config)]
    completed = subprocess.run([*command, *tool], capture_output=True, text=True, check=False)
    if completed.returncode:
        lines = (completed.stderr + completed.stdout).strip().splitlines()
        raise StackError(
            f"Kafka could not format {config.parent}; choose another folder or empty it:\n" + "\n".join(lines[-20:])
        )


def _find_other_port(taken: Sequence[int]) -> int:
    """A free port that is not in `taken`: the caller's own port need not come from `find_free_port`."""
    while (other := find_free_port()) in taken:
        pass
    return other
