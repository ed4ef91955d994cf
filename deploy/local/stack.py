"""The whole system on this machine: Kafka, Redis, one editor and its replicas, each a process of its own."""

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
"""Seconds that a worker has to load its model and catch up."""

WATCH_INTERVAL_SECONDS = 0.5
"""Seconds between looks at whether all workers are still there."""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """One worker process and where its HTTP end is."""

    child: ChildProcess
    port: int

    @property
    def url(self) -> str:
        """Its HTTP end."""
        return f"http://127.0.0.1:{self.port}"

    def state(self) -> dict[str, Any]:
        """What `/state` says."""
        with urllib.request.urlopen(f"{self.url}/state", timeout=10) as answer:  # noqa: S310  (a port of our own)
            found: dict[str, Any] = json.load(answer)
            return found

    def start(self) -> None:
        """Start the process, and return at once."""
        self.child.start()

    def wait_ready(self) -> None:
        """Wait until `/ready` answers 200.

        Raises:
            StackError: it ended, or was not ready in time; with the last lines of its log.
        """
        self.child.wait_for(lambda: is_http_ok(self.port, "/ready"), WORKER_READY_SECONDS, poll_seconds=0.2)


@dataclass(frozen=True, slots=True)
class Stack:
    """A running system."""

    settings: Settings
    kafka_origin: str
    redis_origin: str
    editor: WorkerProcess
    replicas: tuple[WorkerProcess, ...]
    servers: tuple[ChildProcess, ...]
    """The local Kafka and Redis; those in Docker or of the environment are not among them."""

    def endpoints(self) -> dict[str, Any]:
        """What `gracestream up --json` prints."""
        return {
            "kafka": self.settings.kafka,
            "redis": redact_url(self.settings.redis),
            "editor": self.editor.url,
            "replicas": [replica.url for replica in self.replicas],
        }

    def watch(self, report: Callable[[str], None]) -> None:
        """Stay, and report each worker and each local server that ends by itself; the others go on.

        Raises:
            StackError: no worker is left.
        """
        at_work, servers = [self.editor, *self.replicas], list(self.servers)
        while at_work:
            time.sleep(WATCH_INTERVAL_SECONDS)
            for server in [one for one in servers if not one.running]:
                servers.remove(server)
                report(
                    f"{server.name} ended with status {server.returncode}, and the workers wait for it; see its log"
                    f" {server.log}, stop this with Ctrl-C, and start `gracestream up` again"
                )
            ended = [worker for worker in at_work if not worker.child.running]
            at_work = [worker for worker in at_work if worker not in ended]
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
    """Start everything, wait until it is ready, and stop what was started at the end.

    Nothing is started where the folder is in use, a port is taken, the list of authors cannot be used, an existing
    Kafka or Redis does not answer, or `check` raises.

    Args:
        data: Folder for logs and for the data of a local Kafka and Redis.
        replicas: How many.
        partitions: Of `requests`; no more replicas than these get work.
        port: Of Kafka; Redis, the editor and the replicas have those after it. Without it those of the last run in
            this folder, where they are free. Containers and existing servers have ports of their own.
        check: Raises where the model of these settings, whose folder is known, cannot be served.
        report: Called with one line a step.
        overrides: Settings that win over the environment, such as `model` and `layer`.

    Raises:
        StackError: something did not start; the text says what, why, and where its log is.
        SettingsError, AuthorsError: the editor could not judge feedback by the list of authors.
    """
    try:
        data.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise StackError(f"{data} is no folder") from error
    except OSError as error:
        raise StackError(f"the folder {data} cannot be made: {error.strerror}") from error
    with ExitStack() as stack:
        stack.enter_context(_lock_folder(data))
        first = load_settings(**overrides)
        admission_from_settings(first)
        find_existing_kafka()
        find_existing_redis()
        commands = {"editor": "edit", **{f"replica-{n + 1}": "infer" for n in range(replicas)}}
        ports = assign_ports(data, ["kafka", "redis", *commands], port, report)
        overrides["layer"] = first.layer or default_layer(first.model)
        overrides["model"] = resolve_model(first.model, first.cache, report)
        check(load_settings(**overrides))
        cache = first.cache.expanduser()
        kafka = stack.enter_context(kafka_backend(data / "kafka", port=ports["kafka"], cache=cache, report=report))
        redis = stack.enter_context(redis_backend(data / "redis", port=ports["redis"], report=report))
        if port is not None and "docker" in (kafka.origin, redis.origin):
            report("Docker chooses the ports of containers; --port holds for the workers")
        settings = load_settings(**{**overrides, "kafka": kafka.address, "redis": redis.address})
        create_topics(settings, partitions=partitions, replication=1)
        threads = settings.threads or 1
        workers = []
        for name, command in commands.items():
            own = {"port": ports[name], "replica": name, "threads": threads}
            given = {field: getattr(settings, field) for field in settings.model_fields_set} | own
            worker = WorkerProcess(
                worker_process(
                    name, "gracestream.workers.cli", command, log=data / "logs" / f"{name}.log", settings=given
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
    """Keep other stacks from a folder; the system frees it when this process ends, however it ends.

    Raises:
        StackError: another one has it; the text names its process.
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
