"""What both workers do first: settings, log, HTTP end, Kafka and Redis, the model."""

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

from gracestream.pipeline.codebook import DTYPE_TOLERANCES
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
from gracestream.pipeline.settings import Settings, SettingsError, unknown_variables
from gracestream.pipeline.stores import wait_for_redis
from gracestream.workers.shutdown import exit_on_signals, exit_when_stalled

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A started worker: its name, what it says of itself, its model, and the event that ends it.

    `idle` is set while it has nothing in hand, so that a signal may end it at once.
    """

    name: str
    health: Health
    model: EditableModel
    stop: threading.Event
    idle: threading.Event = field(default_factory=threading.Event)


@contextmanager
def start_worker(kind: Literal["inference", "editor"], settings: Settings) -> Iterator[WorkerContext]:
    """Start one; SIGTERM and SIGINT set its `stop`, and the process ends soon after. Redis may come later.

    It begins `idle`: until it clears that, a signal ends it at once.

    Raises:
        PortError, SettingsError, UnreachableError, RefusedError, TopicError, ModelError, LayerError: one sentence each.
    """
    name = settings.replica or f"{socket.gethostname()}-{os.getpid()}"
    configure_logs(settings.log_format, worker=kind, name=name)
    for variable, meant in unknown_variables(os.environ).items():
        log.warning("unknown_setting", variable=variable, meant=meant)
    idle = threading.Event()
    idle.set()
    stop = exit_on_signals(settings.shutdown_timeout, idle)
    own = metrics.REPLICA_REGISTRY if kind == "inference" else metrics.EDITOR_REGISTRY
    health = Health(settings.stuck_after, metrics=functools.partial(metrics.render_metrics, own))
    exit_when_stalled(health.stalled_part, stop)
    server = HealthServer(health, settings.host, settings.port)
    try:
        log.info("starting", url=server.url)
        wait_for_kafka(settings, report=lambda line: log.info("waiting", what=line), await_name=True)
        require_permissions(settings, REQUIRED_PERMISSIONS[kind])
        require_topics(settings)
        try:
            wait_for_redis(settings, report=lambda line: log.info("waiting", what=line))
        except UnreachableError as error:
            log.warning("starting_without_redis", reason=str(error))
        if settings.threads:
            set_threads(settings.threads)
        model = load_model(settings)
        log.info(
            "model_loaded",
            model=settings.model,
            layer=model.layer,
            fingerprint=model.fingerprint[:12],
            query=model.query_source,
            device=device_name(model.device),
            dtype=model.dtype,
        )
        if model.device.type not in DTYPE_TOLERANCES[model.query_dtype].measured_on:
            log.warning(
                "tolerance_not_measured",
                dtype=model.query_dtype,
                device=model.device.type,
                consequence="the same input may count as another one in another batch, or on another device",
            )
        if model.device.type == "cpu" and settings.device == "auto" and (driver := driver_version()) is not None:
            log.warning(
                "gpu_not_used",
                driver=driver,
                reason=cuda_unavailable_reason(),
                consequence="the model runs on the CPU, slowly",
            )
        yield WorkerContext(name, health, model, stop, idle)
    finally:
        stop.set()  # from now on what still waits in some thread has as long as after a signal
        server.close()
        log.info("stopped")


def edit_config_from_settings(settings: Settings, *, uses_encoder: bool) -> EditConfig:
    """How to edit, as the settings say; with an encoder's queries radii that are not set are others.

    The paper trains at one prompt and compares no words, and so does its policy unless `forms` and `wording` are set.

    Args:
        settings: Of the editor.
        uses_encoder: Whether an encoder makes the queries, as the loaded model says (`EditableModel.reads_text`).
    """
    own = {"radius": ENCODER_DEFAULT_RADIUS, "max_radius": ENCODER_MAX_RADIUS} if uses_encoder else {}
    radii = {"radius": settings.radius, "max_radius": settings.max_radius or math.inf}
    radii |= {name: radius for name, radius in own.items() if name not in settings.model_fields_set}
    return EditConfig(
        policy=settings.policy,
        radius_unit=settings.radius_unit,
        scope_radius=uses_encoder and _has_scope_radius(settings),
        scope_alpha=settings.scope_alpha,
        expand=settings.expand,
        guard=settings.guard,
        wording=_enabled_unless_paper(settings, "wording"),
        traffic=settings.traffic,
        seed=settings.seed,
        init=settings.init,
        forms=_enabled_unless_paper(settings, "forms"),
        recipe=ValueTrainingConfig(settings.max_steps, settings.learning_rate, settings.margin),
        **radii,
    )


def _enabled_unless_paper(settings: Settings, name: str) -> bool:
    """A switch as it is set; else on, but for the paper's policy."""
    chosen: bool = getattr(settings, name)
    return chosen if name in settings.model_fields_set else settings.policy != "paper"


def _has_scope_radius(settings: Settings) -> bool:
    """A radius that is set is meant; then only who sets both gets radii of each entry's own."""
    chosen = "scope_radius" in settings.model_fields_set or "radius" not in settings.model_fields_set
    return settings.scope_radius and chosen


def load_base_model(settings: Settings) -> Any:
    """The model that the settings name, with nothing wrapped, on the CPU."""
    with suggest_known_models(settings.model):
        return load_checkpoint(checkpoint_from_settings(settings), device="cpu")[0]


def choose_query_source(settings: Settings, checkpoint: str) -> QueryToken | Literal["encoder"] | None:
    """What makes the queries of a checkpoint's prompts: a token, or the encoder; None: the token of the model's task.

    By default that is the encoder for a causal language model. The paper's policy keeps the paper's queries.

    Raises:
        ModelError: there is no such checkpoint.
        SettingsError: an encoder is named that has no use for this model.
    """
    if settings.query != "auto":
        return settings.query
    if settings.policy != "paper" and is_causal(checkpoint):
        return "encoder"
    if "encoder" in settings.model_fields_set:
        raise SettingsError(
            f"GRACESTREAM_ENCODER is set, and {settings.model!r} is no causal language model, so that its layer makes"
            " the queries: set GRACESTREAM_QUERY=encoder, or unset GRACESTREAM_ENCODER"
        )
    return None


def settings_use_encoder(settings: Settings) -> bool:
    """Whether an encoder makes the queries; the model's weights are not loaded for this."""
    with suggest_known_models(settings.model):
        return choose_query_source(settings, checkpoint_from_settings(settings)) == "encoder"


def load_model(settings: Settings) -> EditableModel:
    """The model that the settings name.

    Raises:
        ModelError, LayerError: it or its encoder cannot be loaded, or it has no such layer.
        SettingsError: an encoder is named that has no use for it.
    """
    cache = settings.cache.expanduser()
    with suggest_known_models(settings.model):
        checkpoint = checkpoint_from_settings(settings)
        query = choose_query_source(settings, checkpoint)
        return EditableModel.load(
            checkpoint,
            resolve_layer(settings.model, settings.layer),
            device=settings.device,
            dtype=settings.dtype,
            cache=cache,
            limits=limits_from_settings(settings),
            query=None if query == "encoder" else query,
            replace=None if settings.replace == "auto" else settings.replace,
            encoder=resolve_encoder(settings.encoder) if query == "encoder" else None,
        )


def limits_from_settings(settings: Settings) -> Limits:
    """Of prompts, targets and answers, as the settings say."""
    return Limits(
        settings.max_input_tokens, settings.max_target_tokens, settings.max_new_tokens, settings.new_tokens_limit
    )


def checkpoint_from_settings(settings: Settings) -> str:
    """The folder or hub id of the model, built if it is known by name."""
    return resolve_model(settings.model, settings.cache.expanduser(), lambda line: log.info("preparing", what=line))
