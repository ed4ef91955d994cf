"""The local stack: it starts, keeps its data, names what is missing, and leaves nothing behind."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import docker  # type: ignore[import-untyped]
import pytest
import redis
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic

from gracestream.deploy.local import backends
from gracestream.deploy.local import kafka as local_kafka
from gracestream.deploy.local.backends import kafka_backend, redis_backend
from gracestream.deploy.local.containers import REDIS_IMAGE, kafka_image
from gracestream.deploy.local.kafka import LocalKafka, describe_cluster
from gracestream.deploy.local.ports import assign_ports
from gracestream.deploy.local.processes import (
    ChildProcess,
    StackError,
    find_free_port,
    is_http_ok,
    is_port_free,
    make_worker_process,
)
from gracestream.deploy.local.redis import LocalRedis
from gracestream.deploy.local.server import ignore_progress
from gracestream.pipeline.settings import load_settings

SLEEP = [sys.executable, "-c", "import time; print('awake', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('awake', flush=True); time.sleep(600)",
]


def make_topic(bootstrap: str, topic: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1)])
    admin.close()


def read_values(bootstrap: str, topic: str, count: int, timeout: float = 20.0) -> list[bytes]:
    """The first `count` committed values, or as many as there are after `timeout` seconds."""
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False, group_id=None
    )
    consumer.assign([TopicPartition(topic, 0)])
    consumer.seek_to_beginning()
    values: list[bytes] = []
    deadline = time.monotonic() + timeout
    while len(values) < count and time.monotonic() < deadline:
        for records in consumer.poll(timeout_ms=200).values():
            values.extend(record.value for record in records)
    consumer.close()
    return values


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[LocalKafka]:
    with LocalKafka(tmp_path / "kafka") as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[LocalRedis]:
    with LocalRedis(tmp_path / "redis") as server:
        yield server


class TestPorts:
    NAMES = ("kafka", "redis", "editor", "replica-1")

    def test_they_are_those_of_the_last_run(self, tmp_path: Path) -> None:
        reports: list[str] = []
        first = assign_ports(tmp_path, self.NAMES[:3], None, reports.append)
        assert len(set(first.values())) == 3
        again = assign_ports(tmp_path, self.NAMES, None, reports.append)
        assert {**again, **first} == again
        assert assign_ports(tmp_path, self.NAMES[:2], None, reports.append) == dict(list(first.items())[:2])
        assert assign_ports(tmp_path, self.NAMES, None, reports.append) == again, (
            "also of a replica that did not run once"
        )
        assert reports == []

    def test_a_port_in_use_is_replaced_and_reported(self, tmp_path: Path) -> None:
        reports: list[str] = []
        first = assign_ports(tmp_path, self.NAMES, None, reports.append)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", first["redis"]))
            taken.listen()
            again = assign_ports(tmp_path, self.NAMES, None, reports.append)
        assert again == {**first, "redis": again["redis"]}
        assert again["redis"] != first["redis"]
        assert reports == [
            f"port {first['redis']}, where redis was before, is in use; it is on {again['redis']} now",
        ]
        assert assign_ports(tmp_path, self.NAMES, None, reports.append) == again

    def test_ports_from_a_given_port_on_are_consecutive(self, tmp_path: Path) -> None:
        port = next(port for port in range(15_000, 20_000, 7) if all(map(is_port_free, range(port, port + 4))))
        ports = assign_ports(tmp_path, self.NAMES, port, ignore_progress)
        assert ports == dict(zip(self.NAMES, range(port, port + 4), strict=True))
        assert assign_ports(tmp_path, self.NAMES, None, ignore_progress) == ports
        assert find_free_port() not in ports.values()

    def test_an_unreadable_file_of_ports_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "ports.json").write_text("{")
        ports = assign_ports(tmp_path, self.NAMES, None, ignore_progress)
        assert assign_ports(tmp_path, self.NAMES, None, ignore_progress) == ports


class TestKafka:
    def test_it_answers(self, kafka: str) -> None:
        assert describe_cluster(kafka, timeout=10)["brokers"]

    def test_only_committed_transactions_are_read(self, kafka: str, prefix: str) -> None:
        topic = prefix + "values"
        make_topic(kafka, topic)
        producer = KafkaProducer(bootstrap_servers=kafka, transactional_id=prefix + "writer", retry_backoff_ms=5)
        producer.init_transactions()
        for value, commit in [(b"one", True), (b"lost", False), (b"two", True)]:
            producer.begin_transaction()
            producer.send(topic, value)
            producer.flush()
            if commit:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
        producer.close()
        assert read_values(kafka, topic, 2) == [b"one", b"two"]

    @pytest.mark.slow
    @pytest.mark.kafka
    def test_records_survive_a_kill_and_a_move_to_another_port(self, own_kafka: LocalKafka, prefix: str) -> None:
        topic = prefix + "values"
        make_topic(own_kafka.bootstrap, topic)
        producer = KafkaProducer(bootstrap_servers=own_kafka.bootstrap, acks="all")
        producer.send(topic, b"kept").get(timeout=10)
        producer.close()
        with pytest.raises(StackError, match="another Kafka runs on the data in"):
            LocalKafka(own_kafka.data_dir).start()
        own_kafka.kill()
        assert not own_kafka.running
        own_kafka.start()
        assert read_values(own_kafka.bootstrap, topic, 1) == [b"kept"]
        own_kafka.stop()
        with LocalKafka(own_kafka.data_dir) as successor:
            assert successor.bootstrap != own_kafka.bootstrap
            assert read_values(successor.bootstrap, topic, 1) == [b"kept"]

    @pytest.mark.kafka
    def test_the_error_for_a_broker_that_dies_at_start_has_the_end_of_its_log_file(self, tmp_path: Path) -> None:
        (tmp_path / "log").mkdir()
        (tmp_path / "log" / "meta.properties").write_text("version=1\ncluster.id=other\nnode.id=7\n")
        server = LocalKafka(tmp_path)
        with pytest.raises(
            StackError, match=r"Kafka ended with status \d+ while starting; its log file .*kafka\.log ends:"
        ):
            server.start()
        assert "node" in server.child.log_tail()
        assert not server.running

    def test_a_taken_port_is_named(self, tmp_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(StackError, match=f"port {port} of 127.0.0.1, wanted for Kafka, is in use"):
                LocalKafka(tmp_path, port).start()

    def test_an_impossible_data_folder_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StackError, match=r"Kafka cannot keep its data in .*file.*; choose another folder"):
            LocalKafka(tmp_path / "file").start()

    def test_the_error_without_java_names_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("JAVA_HOME", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(StackError, match="no java on PATH, and a local Kafka needs Java 17 or newer; install it"):
            LocalKafka(tmp_path).start()

    @pytest.mark.parametrize(
        ("script", "message"),
        [
            ("echo 'openjdk version \"11.0.2\"' >&2", "is Java 11, and a local Kafka needs 17 or newer"),
            ("echo 'java version \"1.8.0_402\"' >&2", "is Java 8, and a local Kafka needs 17 or newer"),
            ("exit 1", "does not run"),
        ],
    )
    def test_an_unfit_java_is_named(
        self, script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_script(tmp_path / "bin" / "java", script)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        with pytest.raises(StackError, match=message):
            local_kafka.find_java()

    def test_the_error_without_maven_names_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(StackError, match=r"no mvn on PATH to fetch Apache Kafka 4.* install Maven, or set"):
            local_kafka.fetch_jars(tmp_path / "cache")

    def test_a_failed_fetch_shows_mavens_reason_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_script(tmp_path / "mvn", "echo '[ERROR] the repository is out of reach'; exit 1")
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
        with pytest.raises(StackError, match=r"Maven could not fetch .* the repository is out of reach"):
            local_kafka.fetch_jars(tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []


class TestClassArchive:
    @pytest.fixture
    def cache(self, tmp_path: Path) -> Path:
        """A cache with Kafka's jars and without a class archive."""
        jars = local_kafka.fetch_jars(load_settings().model.cache_dir.expanduser())
        shutil.copytree(jars, tmp_path / jars.name, ignore=shutil.ignore_patterns("*.jsa"))
        return tmp_path

    @pytest.mark.slow
    def test_the_first_start_writes_an_archive_that_java_accepts(self, cache: Path) -> None:
        java, jars = local_kafka.find_java(), local_kafka.fetch_jars(cache)
        reported: list[str] = []
        server = LocalKafka(cache / "data", cache=cache, report=reported.append)
        archive = local_kafka.class_archive(java, jars)
        for _ in range(2):
            assert server._archive_options(java, jars) == [f"-XX:SharedArchiveFile={archive}"]
        assert reported == ["archiving Kafka's classes, once, so that it starts faster"]
        assert list(jars.glob("*.jsa")) == [archive]
        assert [folder.name for folder in cache.iterdir()] == [jars.name]
        options = [*local_kafka.JAVA_OPTIONS, f"-XX:SharedArchiveFile={archive}", "-Xshare:on", "-Xlog:class+load"]
        command = [java, *options, "-cp", f"{jars}/*", "kafka.Kafka", "--version"]
        loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert re.search(r"kafka\.Kafka source: shared objects file \(top\)", loaded)

    @pytest.mark.parametrize("error", [StackError("no broker"), PermissionError("no place")])
    def test_a_broker_starts_without_an_archive_that_cannot_be_written(
        self, cache: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_server: LocalKafka, _archive: Path) -> None:
            raise error

        monkeypatch.setattr(LocalKafka, "_write_archive", fail)
        server = LocalKafka(cache / "data", cache=cache)
        assert server._archive_options(local_kafka.find_java(), local_kafka.fetch_jars(cache)) == []

    def test_another_java_has_an_archive_of_its_own(self, tmp_path: Path) -> None:
        javas = [tmp_path / "old" / "java", tmp_path / "new" / "java"]
        for java in javas:
            write_script(java, f"echo 'openjdk version \"17.0.1\" {java.parent.name}' >&2")
        assert len({local_kafka.class_archive(str(java), tmp_path) for java in javas}) == 2

    def test_an_archive_of_a_broker_that_was_killed_is_not_used(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Killed:
            returncode = -signal.SIGKILL

        def start(server: LocalKafka, timeout: float = 60.0) -> None:
            assert server._new_archive is not None
            server._new_archive.write_bytes(b"incomplete")

        monkeypatch.setattr(LocalKafka, "start", start)
        monkeypatch.setattr(LocalKafka, "child", Killed)
        server = LocalKafka(cache / "data", cache=cache)
        assert server._archive_options(local_kafka.find_java(), local_kafka.fetch_jars(cache)) == []


class TestRedis:
    def test_it_answers(self, redis_url: str, prefix: str) -> None:
        with redis.Redis.from_url(redis_url) as client:
            client.set(prefix + "head", b"1:2:abc")
            assert client.get(prefix + "head") == b"1:2:abc"

    @pytest.mark.kafka
    def test_written_data_survive_a_kill(self, own_redis: LocalRedis) -> None:
        with redis.Redis.from_url(own_redis.url) as client:
            client.set("head", b"1:2:abc")
        own_redis.kill()
        own_redis.start()
        with redis.Redis.from_url(own_redis.url) as client:
            assert client.get("head") == b"1:2:abc"

    def test_a_taken_port_is_named(self, own_redis: LocalRedis, tmp_path: Path) -> None:
        with pytest.raises(StackError, match=f"port {own_redis.port} of 127.0.0.1, wanted for Valkey, is in use"):
            LocalRedis(tmp_path / "other", own_redis.port).start()

    def test_another_server_on_the_same_data_is_rejected(self, own_redis: LocalRedis) -> None:
        with pytest.raises(StackError, match=f"another Valkey runs on the data in {own_redis.data_dir}; stop it"):
            LocalRedis(own_redis.data_dir).start()
        own_redis.kill()
        with LocalRedis(own_redis.data_dir) as successor:
            assert successor.running


class TestBackends:
    @pytest.fixture
    def images(self) -> None:
        """The images of Kafka and Redis, if a registry or this machine has them."""
        with closing(docker.from_env()) as client:
            for image in (kafka_image(), REDIS_IMAGE):
                try:
                    client.images.get(image)
                except docker.errors.ImageNotFound:
                    try:
                        client.images.pull(image)
                    except docker.errors.APIError as error:
                        pytest.skip(f"the engine has no image {image}, and cannot fetch it: {error.explanation}")

    def test_an_existing_kafka_is_used_and_left_alone(
        self, kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GRACESTREAM_KAFKA", kafka)
        with kafka_backend(tmp_path / "unused") as backend:
            assert (backend.address, backend.origin) == (kafka, "environment")
        assert not (tmp_path / "unused").exists()
        backends.check_kafka(kafka)

    def test_an_existing_redis_is_used_and_left_alone(
        self, own_redis: LocalRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GRACESTREAM_REDIS", own_redis.url)
        with redis_backend(tmp_path / "unused") as backend:
            assert (backend.address, backend.origin) == (own_redis.url, "environment")
        assert own_redis.running

    def test_an_existing_kafka_that_does_not_answer_is_named(self) -> None:
        with pytest.raises(StackError, match=r"GRACESTREAM_KAFKA is '127.0.0.1:9', and no Kafka answers there"):
            backends.check_kafka("127.0.0.1:9", timeout=0.5)

    @pytest.mark.parametrize("url", ["redis://me:secret@127.0.0.1:9/0", "http://127.0.0.1:9"])
    def test_an_existing_redis_that_does_not_answer_is_named_without_its_password(self, url: str) -> None:
        with pytest.raises(StackError, match=r"GRACESTREAM_REDIS is .*127.0.0.1:9.* no Redis answers there") as caught:
            backends.check_redis(url, timeout=0.5)
        assert "secret" not in str(caught.value)

    @pytest.mark.docker
    @pytest.mark.usefixtures("images")
    def test_docker_comes_before_a_local_server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GRACESTREAM_KAFKA", raising=False)
        monkeypatch.delenv("GRACESTREAM_REDIS", raising=False)
        with kafka_backend(tmp_path) as kafka, redis_backend(tmp_path) as redis_server:
            assert (kafka.origin, redis_server.origin) == ("docker", "docker")
            make_topic(kafka.address, "values")
            producer = KafkaProducer(bootstrap_servers=kafka.address, transactional_id="writer", retry_backoff_ms=5)
            producer.init_transactions()
            producer.begin_transaction()
            producer.send("values", b"one")
            producer.commit_transaction()
            producer.close()
            assert read_values(kafka.address, "values", 1) == [b"one"]


class TestChild:
    def test_its_output_is_in_its_log_file_and_stop_ends_it(self, tmp_path: Path) -> None:
        with ChildProcess("sleeper", SLEEP, log_file=tmp_path / "log") as child:
            child.wait_for(lambda: child.log_tail() == "awake", timeout=10)
            assert child.running
        assert child.returncode == -signal.SIGTERM

    def test_a_process_that_does_not_stop_is_killed(self, tmp_path: Path) -> None:
        with ChildProcess("stubborn", STUBBORN, log_file=tmp_path / "log") as child:
            child.wait_for(lambda: child.log_tail() == "awake", timeout=10)
            child.stop(timeout=0.1)
        assert child.returncode == -signal.SIGKILL

    def test_a_restart_is_another_process_and_its_tail_begins_anew(self, tmp_path: Path) -> None:
        with ChildProcess("sleeper", SLEEP, log_file=tmp_path / "log") as child:
            child.wait_for(lambda: child.log_tail() == "awake", timeout=10)
            first = child.pid
            child.restart()
            child.wait_for(lambda: child.log_tail() == "awake", timeout=10)
            assert child.pid != first
        assert (tmp_path / "log").read_text() == "awake\nawake\n"

    def test_the_error_for_a_process_that_ends_early_has_status_and_log(self, tmp_path: Path) -> None:
        argv = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
        with (
            ChildProcess("worker", argv, log_file=tmp_path / "log") as child,
            pytest.raises(
                StackError, match=r"worker ended with status 1 while starting; its log file .* ends:\nno such model"
            ),
        ):
            child.wait_for(lambda: False, timeout=10)

    def test_not_being_ready_in_time_is_an_error(self, tmp_path: Path) -> None:
        with (
            ChildProcess("sleeper", SLEEP, log_file=tmp_path / "log") as child,
            pytest.raises(StackError, match=r"sleeper was not ready after 0\.1 s"),
        ):
            child.wait_for(lambda: False, timeout=0.1)

    def test_a_missing_program_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StackError, match="needs the program 'no-such-program', which is not on PATH"):
            ChildProcess("x", ["no-such-program"], log_file=tmp_path / "log").start()

    def test_a_paused_process_can_be_stopped(self, tmp_path: Path) -> None:
        with ChildProcess("sleeper", SLEEP, log_file=tmp_path / "log") as child:
            child.wait_for(lambda: child.log_tail() == "awake", timeout=10)
            child.send_signal(signal.SIGSTOP)
            child.stop()
        assert child.returncode == -signal.SIGTERM

    def test_the_terminals_interrupt_does_not_reach_it(self, tmp_path: Path) -> None:
        with ChildProcess("sleeper", SLEEP, log_file=tmp_path / "log") as child:
            assert os.getpgid(child.pid) != os.getpgid(0)
            assert os.getsid(child.pid) != os.getsid(0)

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
    def test_it_dies_with_a_parent_that_is_killed(self, tmp_path: Path) -> None:
        code = f"""
import pathlib, time
from gracestream.deploy.local.processes import ChildProcess
child = ChildProcess("sleeper", {SLEEP!r}, log_file=pathlib.Path({str(tmp_path / "log")!r}))
child.start()
child.wait_for(lambda: child.log_tail() == "awake", timeout=10)
print(child.pid, flush=True)
time.sleep(600)
"""
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert is_alive(pid)
            parent.kill()
        deadline = time.monotonic() + 10
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_alive(pid)

    def test_it_outlives_the_thread_that_started_it(self, tmp_path: Path) -> None:
        child = ChildProcess("sleeper", SLEEP, log_file=tmp_path / "log")
        thread = threading.Thread(target=child.start)
        thread.start()
        thread.join()
        try:
            child.wait_for(lambda: child.log_tail() == "awake", timeout=10)
            time.sleep(0.2)
            assert child.running
        finally:
            child.kill()

    def test_a_worker_gets_its_settings_and_reports_when_it_is_ready(self, tmp_path: Path) -> None:
        (tmp_path / "answering.py").write_text(
            "import http.server, os\n"
            "address = ('127.0.0.1', int(os.environ['GRACESTREAM_HTTP_PORT']))\n"
            "http.server.HTTPServer(address, http.server.SimpleHTTPRequestHandler).serve_forever()\n"
        )
        port = find_free_port()
        child = make_worker_process("answering", "answering", log_file=tmp_path / "log", settings={"http_port": port})
        child.cwd = tmp_path
        assert not is_http_ok(port, "/")
        with child:
            child.wait_for(lambda: is_http_ok(port, "/"), timeout=10)
            assert not is_http_ok(port, "/absent")


def write_script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def is_alive(pid: int) -> bool:
    """True if a process runs; a zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
