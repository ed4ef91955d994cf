"""What both workers do first: settings, log, HTTP end, Kafka and Redis, the model."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import faiss
import structlog
import torch

from deploy.models import resolve
from pipeline.clients import await_kafka, await_redis
from pipeline.editing import Plan
from pipeline.health import Health, HealthServer
from pipeline.logs import configure_logs
from pipeline.model import EditableModel, load_checkpoint
from pipeline.settings import Settings
from pipeline.tasks import Limits
from pipeline.topics import require_topics
from pipeline.training import Recipe

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Worker:
    """A started worker: its name, what it says of itself, its model, and the event that ends it."""

    name: str
    health: Health
    model: EditableModel
    stop: threading.Event


@contextmanager
def worker(kind: str, settings: Settings) -> Iterator[Worker]:
    """Start one; SIGTERM and SIGINT set its `stop`.

    Raises:
        PortError, UnreachableError, TopicError, ModelError, LayerError: one sentence each.
    """
    name = settings.replica or f"{socket.gethostname()}-{os.getpid()}"
    configure_logs(settings.log_format, worker=kind, name=name)
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    health = Health()
    server = HealthServer(health, settings.host, settings.port)
    try:
        log.info("starting", url=server.url)
        await_kafka(settings, report=lambda line: log.info("waiting", what=line))
        require_topics(settings)
        await_redis(settings, report=lambda line: log.info("waiting", what=line))
        if settings.threads:
            torch.set_num_threads(settings.threads)
            faiss.omp_set_num_threads(settings.threads)
        model = load_model(settings)
        log.info("model_loaded", model=settings.model, layer=model.layer, fingerprint=model.fingerprint[:12])
        yield Worker(name, health, model, stop)
    finally:
        server.close()
        log.info("stopped")


def plan_of(settings: Settings) -> Plan:
    """How to edit, as the settings say."""
    return Plan(
        policy=settings.policy,
        radius=settings.radius,
        radius_unit=settings.radius_unit,
        expand=settings.expand,
        guard=settings.guard,
        traffic=settings.traffic,
        seed=settings.seed,
        init=settings.init,
        recipe=Recipe(settings.max_steps, settings.learning_rate, settings.margin),
    )


def load_bare_model(settings: Settings) -> Any:
    """The model that the settings name, with nothing wrapped, on the CPU."""
    return load_checkpoint(_resolved(settings), device="cpu")[0]


def load_model(settings: Settings) -> EditableModel:
    """The model that the settings name.

    Raises:
        ModelError, LayerError: it cannot be loaded, or has no such layer.
    """
    cache = settings.cache.expanduser()
    return EditableModel.load(
        _resolved(settings),
        settings.layer,
        device=settings.device,
        dtype=settings.dtype,
        cache=cache,
        limits=Limits(settings.max_input_tokens, settings.max_target_tokens, settings.max_new_tokens),
        query=None if settings.query == "auto" else settings.query,
        replace=None if settings.replace == "auto" else settings.replace,
    )


def _resolved(settings: Settings) -> str:
    return resolve(settings.model, settings.cache.expanduser(), lambda line: log.info("preparing", what=line))
