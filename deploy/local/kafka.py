"""An Apache Kafka of one's own: one node, KRaft, its jars fetched once by Maven."""

import base64
import functools
import os
import re
import shutil
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
MIN_JAVA_VERSION = 17  # of a broker, since Kafka 4.0
EXISTING_KAFKA_HINT = "or set GRACESTREAM_KAFKA to the address of an existing cluster"


# Settings of a cluster of one node, wherever it runs. Few partitions: each is made at the first use, which waits.
SINGLE_NODE_CONFIG = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
}


@functools.cache
def kafka_version() -> str:
    """The version that the pom names."""
    found = re.search(r"<kafka\.version>(.+?)<", (BROKER_FOLDER / "pom.xml").read_text(encoding="utf-8"))
    assert found, "the pom names kafka.version"
    return found[1]


class LocalKafka(LocalServer):
    """One Kafka node, broker and controller in one, in 512 MB of heap on 127.0.0.1.

    Records survive `kill`: they are in the operating system's cache, which a process's death leaves alone. Topics are
    made only by whoever asks for them; those of groups and transactions have one partition and one replica.

    Args:
        data_dir: as for `LocalServer`.
        port: where clients connect; a free port if not given.
        cache: folder for Kafka's jars; that of the settings if not given.
        report: as for `LocalServer`.
        protocols: security protocols that it speaks beside PLAINTEXT, each on a port of its own (`addresses`).
        properties: of the server, over its own: certificates, mechanisms, an authorizer.
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
        """Where each of `protocols` is spoken."""
        self._extra_properties = properties or {}
        self._cache = (cache or load_settings().cache).expanduser().resolve()

    @property
    def bootstrap(self) -> str:
        """What Kafka clients take as `bootstrap_servers`."""
        return self.address

    def _prepare_command(self) -> Sequence[str]:
        java = find_java()
        jars = fetch_jars(self._cache, self._report)
        self._report(f"starting a local Apache Kafka {kafka_version()}")
        config = self.data_dir / "server.properties"
        config.write_text(self._render_properties(), encoding="utf-8")
        # Without the optimising compiler the broker starts in half the time, and leaves the cores to the models.
        java_options = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError", "-Xmx512m"]
        logging = f"-Dlog4j2.configurationFile={BROKER_FOLDER / 'log4j2.properties'}"
        command = [java, *java_options, logging, "-cp", f"{jars}/*"]
        if not (self.data_dir / "log" / "meta.properties").exists():
            _format_storage(command, config)
        return [*command, "kafka.Kafka", str(config)]

    def is_responding(self, timeout: float) -> bool:
        """Whether it says that a broker is there; False where nobody listens, and where that takes 5 s."""
        # The client's own attempts would go on where the broker has died, and leave a thread behind each time.
        if not is_port_open(self.port):
            return False
        try:
            return bool(describe_cluster(self.bootstrap, min(timeout, 5.0))["brokers"])
        except (KafkaError, OSError):
            return False

    def _render_properties(self) -> str:
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
            # After a kill the controller, which sits in the same process, refuses the broker until its old session
            # has run out: 9 s by default.
            "broker.session.timeout.ms": 3000,
            "broker.heartbeat.interval.ms": 500,
            # The default buffer takes a quarter of this heap; the compacted topics here are small.
            "log.cleaner.dedupe.buffer.size": 16 * 2**20,
            **SINGLE_NODE_CONFIG,
            **self._extra_properties,
        }
        return "".join(f"{key}={value}\n" for key, value in values.items())


def describe_cluster(bootstrap: str, timeout: float) -> dict[str, list[object]]:
    """What the cluster says of itself; `brokers` is a list.

    Raises:
        KafkaError: it did not answer within `timeout` seconds.
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
    """The Java of JAVA_HOME, or the one on PATH.

    Raises:
        StackError: there is none, it does not run, or it is too old for a broker.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")
    if java is None:
        where = f"JAVA_HOME={home!r} has no bin/java" if home else "there is no java on PATH"
        raise StackError(
            f"{where}, and a local Kafka needs Java {MIN_JAVA_VERSION} or newer; install it, {EXISTING_KAFKA_HINT}"
        )
    ran = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    # `version "17.0.15"`, but `version "1.8.0_402"` for Java 8.
    found = re.search(r'version "(?:1\.)?(\d+)', ran.stderr + ran.stdout)
    if ran.returncode or not found:
        raise StackError(
            f"{java} does not run, and a local Kafka needs Java {MIN_JAVA_VERSION} or newer; install it,"
            f" {EXISTING_KAFKA_HINT}"
        )
    if int(found[1]) < MIN_JAVA_VERSION:
        raise StackError(
            f"{java} is Java {found[1]}, and a local Kafka needs {MIN_JAVA_VERSION} or newer; install it,"
            f" {EXISTING_KAFKA_HINT}"
        )
    return java


def fetch_jars(cache: Path, report: Callable[[str], None] = ignore_progress) -> Path:
    """The folder with Kafka's jars; Maven fetches them (43 MB) where the cache does not have them yet.

    Raises:
        StackError: there is no Maven, or it could not fetch them.
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
        ran = subprocess.run(
            [maven, "--batch-mode", "--quiet", "--file", str(BROKER_FOLDER / "pom.xml"), *goal],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode or not target.is_dir():
            reason = next((line for line in ran.stdout.splitlines() if "ERROR" in line), "it said nothing")
            raise StackError(
                f"Maven could not fetch Apache Kafka {kafka_version()}: {reason}; see that it reaches its"
                f" repository, {EXISTING_KAFKA_HINT}"
            )
        try:
            target.rename(jars)
        except OSError:
            if not jars.is_dir():  # unless another process was faster
                raise
    return jars


def _format_storage(command: Sequence[str], config: Path) -> None:
    # A cluster id is a UUID in URL-safe base64 that does not begin like an option.
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "_")
    tool = ["kafka.tools.StorageTool", "format", "--cluster-id", cluster, "--config", str(config)]
    ran = subprocess.run([*command, *tool], capture_output=True, text=True, check=False)
    if ran.returncode:
        lines = (ran.stderr + ran.stdout).strip().splitlines()
        raise StackError(
            f"Kafka could not format {config.parent}; choose another folder or empty it:\n" + "\n".join(lines[-20:])
        )


def _find_other_port(taken: Sequence[int]) -> int:
    while (other := find_free_port()) in taken:
        pass
    return other
