"""The whole system on this machine: Kafka, Redis, one editor and its replicas, each in a process of its own.

1. Settings, ports, the list of authors and the model are checked before anything starts.
2. Everything that was started is stopped at the end, in reverse order: the workers before their servers.
3. Two stacks never share a folder.
"""

import fcntl
import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gracestream.deploy.local.backends import find_existing_kafka, find_existing_redis, kafka_backend, redis_backend
from gracestream.deploy.local.ports import assign_ports
from gracestream.deploy.local.processes import ChildProcess, StackError, is_http_ok
from gracestream.deploy.local.processes import make_worker_process as worker_process
from gracestream.deploy.local.server import ignore_progress
from gracestream.pipeline.editor import admission_from_settings
from gracestream.pipeline.kafka import create_topics
from gracestream.pipeline.model import default_layer, resolve_model
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.pipeline.stores import redact_url

WORKER_READY_SECONDS = 180.0
"""Seconds for a worker to load its model and catch up."""

WATCH_INTERVAL_SECONDS = 0.5
"""Seconds between two checks that all workers run."""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """One worker process and its HTTP port."""

    child: ChildProcess
    port: int

    @property
    def url(self) -> str:
        """The base URL of the worker's HTTP server."""
        return f"http://127.0.0.1:{self.port}"

    def state(self) -> dict[str, Any]:
        """The answer of `/state`."""
        with urllib.request.urlopen(f"{self.url}/state", timeout=10) as answer:  # noqa: S310  (a port of our own)
            state: dict[str, Any] = json.load(answer)
            return state

    def start(self) -> None:
        """Start the process without waiting for it."""
        self.child.start()

    def wait_ready(self) -> None:
        """Wait until `/ready` answers 200.

        Raises:
            StackError: the worker ended, or was not ready in time; the message has the end of its log file.
        """
        self.child.wait_for(lambda: is_http_ok(self.port, "/ready"), WORKER_READY_SECONDS, poll_seconds=0.2)


@dataclass(frozen=True, slots=True)
class Stack:
    """A running system.

    Attributes:
        settings: The settings of all workers.
        kafka_origin: The origin of Kafka: `environment`, `docker` or `local`.
        redis_origin: The origin of Redis, likewise.
        editor: The editor.
        replicas: The replicas.
        servers: The local Kafka and Redis; servers in Docker or from the environment are not included.
    """

    settings: Settings
    kafka_origin: str
    redis_origin: str
    editor: WorkerProcess
    replicas: tuple[WorkerProcess, ...]
    servers: tuple[ChildProcess, ...]

    def endpoints(self) -> dict[str, Any]:
        """The addresses that `gracestream up --json` prints, without passwords."""
        return {
            "kafka": self.settings.kafka.servers,
            "redis": redact_url(self.settings.redis.url),
            "editor": self.editor.url,
            "replicas": [replica.url for replica in self.replicas],
        }

    def watch(self, report: Callable[[str], None]) -> None:
        """Watch until no worker is left, and report each worker and each local server that ends by itself.

        Raises:
            StackError: no worker is left.
        """
        workers, servers = [self.editor, *self.replicas], list(self.servers)
        while workers:
            time.sleep(WATCH_INTERVAL_SECONDS)
            for server in [candidate for candidate in servers if not candidate.running]:
                servers.remove(server)
                report(
                    f"{server.name} ended with status {server.returncode}, and the workers wait for it; see its log"
                    f" file {server.log_file}, stop this with Ctrl-C, and start `gracestream up` again"
                )
            ended = [worker for worker in workers if not worker.child.running]
            workers = [worker for worker in workers if worker not in ended]
            for worker in ended:
                report(worker.child.describe_exit())
        raise StackError("no worker is left")


@contextmanager
def running_stack(
    data: Path,
    *,
    replicas: int = 2,
    partitions: int = 8,
    port: int | None = None,
    check: Callable[[Settings], object] = lambda _: None,
    report: Callable[[str], None] = ignore_progress,
    **overrides: Any,
) -> Iterator[Stack]:
    """A context with a running system: start everything, wait until it is ready, and stop it at the end.

    Nothing is started if the folder is in use, a port is taken, or the list of authors is unusable. Nor is it if an
    existing Kafka or Redis does not answer, or `check` raises.

    Args:
        data: The folder for log files, and for the data of a local Kafka and Redis.
        replicas: The number of replicas.
        partitions: The number of partitions of `requests`, and so the largest number of replicas that get work.
        port: The port of Kafka; Redis, the editor and the replicas get the next ports. Without it each gets its port of
            the last run in this folder, if it is free. Containers and existing servers have ports of their own.
        check: Raises if the model of these settings, with the model's folder resolved, cannot be served.
        report: Called with one line per step.
        overrides: Settings that override the environment, such as `model` and `layer`.

    Raises:
        StackError: something did not start; the message says what, why, and where its log file is.
        SettingsError, AuthorsError: the editor could not use the list of authors.
    """
    try:
        data.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise StackError(f"{data} is not a folder") from error
    except OSError as error:
        raise StackError(f"the folder {data} cannot be made: {error.strerror}") from error
    with ExitStack() as stack:
        # 1. Check everything that can be checked without starting a process.
        stack.enter_context(_lock_folder(data))
        initial = load_settings(**overrides)
        admission_from_settings(initial.auth, initial.kafka, initial.model.codebook)  # only for its errors
        find_existing_kafka()
        find_existing_redis()
        commands = {"editor": "edit", **{f"replica-{n + 1}": "infer" for n in range(replicas)}}
        ports = assign_ports(data, ["kafka", "redis", *commands], port, report)
        overrides["layer"] = initial.model.layer or default_layer(initial.model.name)
        overrides["model"] = resolve_model(initial.model.name, initial.model.cache_dir, report)
        check(load_settings(**overrides))
        # 2. Start the servers, and create the topics.
        cache = initial.model.cache_dir.expanduser()
        kafka = stack.enter_context(kafka_backend(data / "kafka", port=ports["kafka"], cache=cache, report=report))
        redis = stack.enter_context(redis_backend(data / "redis", port=ports["redis"], report=report))
        if port is not None and "docker" in (kafka.origin, redis.origin):
            report("Docker chooses the ports of containers; --port holds for the workers")
        settings = load_settings(**{**overrides, "kafka": kafka.address, "redis": redis.address})
        create_topics(settings.kafka, partitions=partitions, replication=1)
        # 3. Start all workers, so that they load their models at the same time; then wait for each.
        threads = settings.model.threads or 1
        workers = []
        for name, command in commands.items():
            worker_settings = {"http_port": ports[name], "worker_name": name, "threads": threads}
            all_settings = settings.explicit_values() | worker_settings
            worker = WorkerProcess(
                worker_process(
                    name,
                    "gracestream.workers.cli",
                    command,
                    log_file=data / "logs" / f"{name}.log",
                    settings=all_settings,
                ),
                ports[name],
            )
            stack.callback(worker.child.stop)
            worker.start()
            workers.append(worker)
        for worker in workers:
            report(f"starting the {worker.child.name}")
            worker.wait_ready()
        servers = tuple(backend.child for backend in (kafka, redis) if backend.child is not None)
        yield Stack(settings, kafka.origin, redis.origin, workers[0], tuple(workers[1:]), servers)


@contextmanager
def _lock_folder(data: Path) -> Iterator[None]:
    """A context that keeps other stacks out of a folder.

    The operating system releases the lock when this process ends, for any reason.

    Raises:
        StackError: another stack holds the folder; the message names its process.
    """
    with (data / "up.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read()
            raise StackError(
                f"another `gracestream up`, process {holder}, holds the folder {data}; stop it with Ctrl-C in its"
                f" terminal or `kill {holder}`, or choose another folder with --data"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


__all__ = ["Stack", "StackError", "WorkerProcess", "running_stack"]
