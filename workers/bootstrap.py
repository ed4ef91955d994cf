"""Starts a worker: settings, log output, HTTP endpoints, Kafka, Redis and the model, in this order.

An early step reports its errors before a later, slower step begins. Kafka is required; Redis may come later.
"""

import functools
import math
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from gracestream.pipeline.device import cuda_unavailable_reason, device_name, driver_version
from gracestream.pipeline.editing import EditConfig, ValueTrainingConfig
from gracestream.pipeline.kafka import (
    REQUIRED_PERMISSIONS,
    UnreachableError,
    require_permissions,
    require_topics,
    wait_for_kafka,
)
from gracestream.pipeline.model import (
    ENCODER_DEFAULT_RADIUS,
    ENCODER_MAX_RADIUS,
    EditableModel,
    Limits,
    QueryToken,
    is_causal,
    load_checkpoint,
    resolve_encoder,
    resolve_layer,
    resolve_model,
    suggest_known_models,
)
from gracestream.pipeline.observability import Health, HealthServer, configure_logs, metrics
from gracestream.pipeline.search import set_threads
from gracestream.pipeline.settings import (
    EditingSettings,
    ModelSettings,
    Policy,
    Settings,
    SettingsError,
    unknown_variables,
)
from gracestream.pipeline.stores import wait_for_redis
from gracestream.workers.shutdown import exit_on_signals, exit_when_stalled

log = structlog.get_logger()

WorkerKind = Literal["inference", "editor"]
"""A replica or an editor."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A started worker.

    Attributes:
        name: Of the worker, from the settings or from host and process id.
        health: What the HTTP endpoints report.
        model: On its device.
        stop: Set when the worker must end.
        idle: Set while no work is in progress, so that a signal may end the process at once.
    """

    name: str
    health: Health
    model: EditableModel
    stop: threading.Event
    idle: threading.Event = field(default_factory=threading.Event)


@contextmanager
def start_worker(kind: WorkerKind, settings: Settings) -> Iterator[WorkerContext]:
    """Start a worker, and stop it on exit. SIGTERM and SIGINT set its `stop`, and end the process soon after.

    `idle` is set at the start: until the worker clears it, a signal ends the process at once.

    Raises:
        PortError, SettingsError, UnreachableError, AccessDeniedError, TopicError, ModelError, LayerError: the worker
            cannot start; the text gives the reason and the remedy.
    """
    name = begin_logs(kind, settings)
    idle = threading.Event()
    idle.set()
    stop = exit_on_signals(settings.process.shutdown_timeout, idle)
    health, server = serve_health(kind, settings)
    exit_when_stalled(health.stalled_part, stop)
    try:
        connect(kind, settings)
        yield WorkerContext(name, health, load_worker_model(kind, settings), stop, idle)
    finally:
        stop.set()  # starts the shutdown timeout for threads that still work
        server.close()
        log.info("worker_stopped")


def begin_logs(kind: WorkerKind, settings: Settings) -> str:
    """Set up the log of a worker, and warn of misspelt variables; the worker's name."""
    name = settings.process.worker_name or f"{socket.gethostname()}-{os.getpid()}"
    configure_logs(settings.process.log_format, worker=kind, name=name)
    for variable, intended in unknown_variables(os.environ).items():
        log.warning(
            "setting_ignored",
            variable=variable,
            meant=intended,
            consequence="the variable has no effect",
            remedy="correct the variable's name, or unset it",
        )
    return name


def serve_health(kind: WorkerKind, settings: Settings) -> tuple[Health, HealthServer]:
    """Report the health and metrics of a worker over HTTP from now on.

    Raises:
        PortError: the port cannot be used.
    """
    registry = metrics.REPLICA_REGISTRY if kind == "inference" else metrics.EDITOR_REGISTRY
    health = Health(settings.kafka.stall_timeout, metrics=functools.partial(metrics.render_metrics, registry))
    server = HealthServer(health, settings.http.host, settings.http.port)
    log.info("worker_starting", url=server.url)
    return health, server


def connect(kind: WorkerKind, settings: Settings) -> None:
    """Wait for Kafka, check permissions and topics, and wait some time for Redis.

    Raises:
        UnreachableError, AccessDeniedError, TopicError: Kafka cannot be used.
    """
    wait_for_kafka(settings.kafka, report=_log_waiting, await_name=True)
    require_permissions(settings.kafka, REQUIRED_PERMISSIONS[kind])
    require_topics(settings.kafka)
    try:
        wait_for_redis(settings.redis, report=_log_waiting)
    except UnreachableError as error:
        log.warning(
            "redis_wait_timeout",
            reason=str(error),
            consequence="the worker starts without Redis, and is degraded until Redis answers",
        )


def load_worker_model(kind: WorkerKind, settings: Settings) -> EditableModel:
    """The model of a worker, without its weights if vLLM answers.

    Raises:
        ModelError, LayerError, SettingsError: see `load_model`.
    """
    if settings.model.threads is not None:
        set_threads(settings.model.threads)
    uses_vllm = kind == "inference" and settings.serving.engine == "vllm"
    choice = settings.model.model_copy(update={"device": "cpu"}) if uses_vllm else settings.model
    model = load_model(choice, settings.editing.policy)
    if uses_vllm:
        model.drop_weights()
    log.info(
        "model_loaded",
        model=settings.model.name,
        layer=model.layer,
        fingerprint=model.fingerprint[:12],
        query=model.query_source,
        device=device_name(model.device),
        dtype=model.dtype,
    )
    if model.device.type == "cpu" and choice.device == "auto" and (driver := driver_version()) is not None:
        log.warning(
            "gpu_not_used",
            driver=driver,
            reason=cuda_unavailable_reason(),
            consequence="the model runs on the CPU, slowly",
        )
    return model


def _log_waiting(progress: str) -> None:
    log.info("waiting_for_dependency", progress=progress)


def edit_config_from_settings(settings: EditingSettings, *, uses_encoder: bool) -> EditConfig:
    """The editing configuration that the settings ask for.

    With an encoder's queries, radii that are not set have other defaults. The paper trains at one prompt and compares
    no words. So does its policy, unless `train_prompt_forms` and `check_wording` are set.

    Args:
        settings: Of edits.
        uses_encoder: Whether an encoder makes the queries, as the loaded model says (`EditableModel.reads_text`).
    """
    radius, max_radius = settings.radius, math.inf if settings.max_radius is None else settings.max_radius
    if uses_encoder and "radius" not in settings.model_fields_set:
        radius = ENCODER_DEFAULT_RADIUS
    if uses_encoder and "max_radius" not in settings.model_fields_set:
        max_radius = ENCODER_MAX_RADIUS
    return EditConfig(
        policy=settings.policy,
        radius=radius,
        max_radius=max_radius,
        radius_unit=settings.radius_unit,
        use_scope_radius=uses_encoder and _has_scope_radius(settings),
        scope_error_rate=settings.scope_error_rate,
        retention_guard=settings.retention_guard,
        check_wording=_enabled_unless_paper(settings, "check_wording"),
        traffic_sample_size=settings.traffic_sample_size,
        seed=settings.seed,
        value_init=settings.value_init,
        train_prompt_forms=_enabled_unless_paper(settings, "train_prompt_forms"),
        recipe=ValueTrainingConfig(settings.max_steps, settings.learning_rate, settings.stop_margin),
    )


def _enabled_unless_paper(settings: EditingSettings, name: str) -> bool:
    """The value of a boolean setting; by default True, except under the paper's policy."""
    value: bool = getattr(settings, name)
    return value if name in settings.model_fields_set else settings.policy != "paper"


def _has_scope_radius(settings: EditingSettings) -> bool:
    """True if each entry has its own radius.

    An explicit `radius` is meant literally, so it disables this default. An explicit `use_scope_radius` enables it.
    """
    applies = "use_scope_radius" in settings.model_fields_set or "radius" not in settings.model_fields_set
    return settings.use_scope_radius and applies


def load_base_model(settings: ModelSettings) -> Any:
    """The model that the settings name, unwrapped, on the CPU."""
    with suggest_known_models(settings.name):
        return load_checkpoint(checkpoint_from_settings(settings), device="cpu")[0]


def choose_query_source(
    settings: ModelSettings, policy: Policy, checkpoint: str
) -> QueryToken | Literal["encoder"] | None:
    """What makes the queries of a checkpoint's prompts: a token or the encoder; None: the default token of the task.

    The default is the encoder for a causal language model. The paper's policy keeps the paper's queries.

    Raises:
        ModelError: there is no such checkpoint.
        SettingsError: an encoder is set that this model does not use.
    """
    if settings.query_source != "auto":
        return settings.query_source
    if policy != "paper" and is_causal(checkpoint):
        return "encoder"
    if "encoder" in settings.model_fields_set:
        raise SettingsError(
            f"GRACESTREAM_ENCODER is set, but {settings.name!r} is not a causal language model, so its layer makes the"
            " queries: set GRACESTREAM_QUERY_SOURCE=encoder, or unset GRACESTREAM_ENCODER"
        )
    return None


def settings_use_encoder(settings: ModelSettings, policy: Policy) -> bool:
    """True if an encoder makes the queries. Does not load the model's weights."""
    with suggest_known_models(settings.name):
        return choose_query_source(settings, policy, checkpoint_from_settings(settings)) == "encoder"


def load_model(settings: ModelSettings, policy: Policy) -> EditableModel:
    """The model that the settings name. With query source `auto` the policy determines the queries, too.

    Raises:
        ModelError, LayerError: the model or its encoder cannot be loaded, or has no such layer.
        SettingsError: an encoder is set that this model does not use.
    """
    cache = settings.cache_dir.expanduser()
    with suggest_known_models(settings.name):
        checkpoint = checkpoint_from_settings(settings)
        query = choose_query_source(settings, policy, checkpoint)
        return EditableModel.load(
            checkpoint,
            resolve_layer(settings.name, settings.layer),
            device=settings.device,
            dtype=settings.dtype,
            cache=cache,
            limits=limits_from_settings(settings),
            query=None if query == "encoder" else query,
            replace=None if settings.inject_tokens == "auto" else settings.inject_tokens,
            encoder=resolve_encoder(settings.encoder) if query == "encoder" else None,
        )


def limits_from_settings(settings: ModelSettings) -> Limits:
    """The limits of prompts, targets and answers."""
    return Limits(
        settings.max_input_tokens, settings.max_target_tokens, settings.default_max_new_tokens, settings.max_new_tokens
    )


def checkpoint_from_settings(settings: ModelSettings) -> str:
    """The folder or hub id of the model. A model that is known by name is built first."""
    return resolve_model(
        settings.name,
        settings.cache_dir.expanduser(),
        lambda progress: log.info("model_build_progress", progress=progress),
    )
