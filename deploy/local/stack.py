"""The whole system on this machine: Kafka, Redis, one editor and its replicas, each a process of its own."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local.backends import kafka_backend, redis_backend
from deploy.local.processes import Child, StackError, answers_ok, free_port
from deploy.local.processes import worker as worker_process
from deploy.local.server import silent
from deploy.models import layer_of, resolve
from pipeline.security import without_password
from pipeline.settings import Settings, load_settings
from pipeline.topics import create_topics

WORKER_TIMEOUT = 180.0
"""Seconds that a worker has to load its model and catch up."""

WATCH = 0.5
"""Seconds between looks at whether all workers are still there."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process and where its HTTP end is."""

    child: Child
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
        self.child.wait_for(lambda: answers_ok(self.port, "/ready"), WORKER_TIMEOUT, poll=0.2)


@dataclass(frozen=True, slots=True)
class Stack:
    """A running system."""

    settings: Settings
    kafka_origin: str
    redis_origin: str
    editor: Worker
    replicas: tuple[Worker, ...]

    def endpoints(self) -> dict[str, Any]:
        """What `gracestream up --json` prints."""
        return {
            "kafka": self.settings.kafka,
            "redis": without_password(self.settings.redis),
            "editor": self.editor.url,
            "replicas": [replica.url for replica in self.replicas],
        }

    def watch(self, report: Callable[[str], None]) -> None:
        """Stay, and report each worker that ends by itself; the others go on.

        Raises:
            StackError: none is left.
        """
        at_work = [self.editor, *self.replicas]
        while at_work:
            time.sleep(WATCH)
            ended = [worker for worker in at_work if not worker.child.running]
            at_work = [worker for worker in at_work if worker not in ended]
            for worker in ended:
                report(worker.child.ending())
        raise StackError("no worker is left")


@contextmanager
def running_stack(
    data: Path,
    *,
    replicas: int = 2,
    partitions: int = 8,
    report: Callable[[str], None] = silent,
    **chosen: Any,
) -> Iterator[Stack]:
    """Start everything, wait until it is ready, and stop what was started at the end.

    Args:
        data: Folder for logs and for the data of a local Kafka and Redis.
        replicas: How many.
        partitions: Of `requests`; no more replicas than these get work.
        report: Called with one line a step.
        chosen: Settings that win over the environment, such as `model` and `layer`.

    Raises:
        StackError: something did not start; the text says what, why, and where its log is.
    """
    try:
        data.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise StackError(f"{data} is no folder") from error
    except OSError as error:
        raise StackError(f"the folder {data} cannot be made: {error.strerror}") from error
    with ExitStack() as stack:
        first = load_settings(**chosen)
        chosen["layer"] = layer_of(first)
        model = resolve(first.model, first.cache, report)
        kafka = stack.enter_context(kafka_backend(data / "kafka", cache=first.cache.expanduser(), report=report))
        redis = stack.enter_context(redis_backend(data / "redis", report=report))
        settings = load_settings(**{**chosen, "kafka": kafka.address, "redis": redis.address, "model": model})
        create_topics(settings, partitions=partitions, replication=1)
        threads = settings.threads or 1
        workers = []
        for name, command in [("editor", "edit"), *((f"replica-{n + 1}", "infer") for n in range(replicas))]:
            port = free_port()
            own = {"port": port, "replica": name, "threads": threads}
            given = {field: getattr(settings, field) for field in settings.model_fields_set} | own
            worker = Worker(
                worker_process(name, "workers.cli", command, log=data / "logs" / f"{name}.log", settings=given), port
            )
            stack.callback(worker.child.stop)
            worker.start()
            workers.append(worker)
        for worker in workers:
            report(f"starting the {worker.child.name}")
            worker.wait_ready()
        yield Stack(settings, kafka.origin, redis.origin, workers[0], tuple(workers[1:]))


__all__ = ["Stack", "StackError", "Worker", "running_stack"]
