"""The plugins of vLLM: `VLLM_PLUGINS=gracestream vllm serve MODEL` is a replica that answers over HTTP.

1. vLLM calls `register` in each of its processes. The workers then inject values into the layer.
2. vLLM's server makes a `ServerPlugin`. It follows the codebook, looks requests up, and adds headers and a route.

Both do nothing unless `VLLM_PLUGINS` names gracestream, since vLLM loads plugins for routes only by name.
"""

import asyncio
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import structlog
from vllm.engine.arg_utils import EngineArgs

from gracestream.pipeline.client import Client
from gracestream.pipeline.errors import HistoryError, UserError
from gracestream.pipeline.model import ENCODER_REQUIRED, normalize_path, resolve_layer
from gracestream.pipeline.observability import Health
from gracestream.pipeline.replica import LiveCodebook
from gracestream.pipeline.settings import Settings, SettingsError, load_settings
from gracestream.pipeline.vllm.generation import CorrectedGeneration
from gracestream.pipeline.vllm.http import AnswerMemory, CorrectionMiddleware, feedback_router
from gracestream.pipeline.vllm.injection import choose_layer, install, replace_method
from gracestream.pipeline.vllm.lookups import LookupQueue
from gracestream.pipeline.vllm.support import require_supported_version, use_supported_runner
from gracestream.schemas.messages import Feedback
from gracestream.workers.bootstrap import (
    begin_logs,
    checkpoint_from_settings,
    connect,
    load_worker_model,
    serve_health,
    settings_use_encoder,
)

log = structlog.get_logger()

NAME = "gracestream"
"""The name of both plugins in `VLLM_PLUGINS`."""

READINESS_INTERVAL = 0.1
"""Seconds between two updates of readiness."""


def register() -> None:
    """Prepare this process of vLLM for corrections."""
    if NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    with _exit_on_user_error():
        require_supported_version()
        use_supported_runner()
    replace_method(EngineArgs, "create_engine_config", _create_config)
    install()


class ServerPlugin:
    """The plugin of vLLM's server: a `vllm.plugins.endpoint_plugins.EndpointPlugin`."""

    name = NAME
    required_tasks: ClassVar[tuple[str, ...]] = ("generate",)

    def __init__(self) -> None:
        self._memory = AnswerMemory()
        self._client: Client | None = None
        self._takes_feedback = False

    def attach_router(self, app: Any) -> None:
        """Add the middleware and the route of feedback."""
        app.add_middleware(CorrectionMiddleware, memory=self._memory)
        app.include_router(feedback_router(self._memory, self._send, lambda: self._takes_feedback))

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Catch up with the codebook, and look up all requests from now on."""
        del state
        with _exit_on_user_error():
            settings = server_settings(args.model)
            begin_logs("inference", settings)
            health, _ = serve_health("inference", settings)
            await asyncio.to_thread(connect, "inference", settings)
            model = await asyncio.to_thread(load_worker_model, "inference", settings)
            self._client = await asyncio.to_thread(Client, settings)
            self._takes_feedback = settings.http.feedback
            live = LiveCodebook(model.fingerprint, model.layer, model.device, settings, health)
            if not await live.start():
                sys.exit(1)
        engine_client.generate = CorrectedGeneration(
            engine_client.generate,
            model,
            LookupQueue(model, live, health),
            check_answers=settings.serving.check_answers,
        )
        self._follower = asyncio.create_task(_follow(live, health))

    def _send(self, feedback: Feedback) -> None:
        assert self._client is not None
        self._client.send([feedback])


async def _follow(live: LiveCodebook, health: Health) -> None:
    """Follow the log, and report health and readiness, while the server runs. If that fails, stop the server."""
    async with live.following() as follower:
        live.set_ready()
        while not follower.done():
            health.begin("event loop")
            if live.fault is None:
                live.update_readiness()
            await asyncio.sleep(READINESS_INTERVAL)
    live.report_follower(follower)
    health.set_not_ready("the codebook no longer follows the log")
    os.kill(os.getpid(), signal.SIGTERM)


def server_settings(model: str) -> Settings:
    """The settings of a server that runs a model.

    Raises:
        SettingsError: a setting is not valid, or names another model.
    """
    settings = load_settings(engine="vllm", model=None if "GRACESTREAM_MODEL" in os.environ else model)
    checkpoint = checkpoint_from_settings(settings.model)
    if os.path.realpath(checkpoint) != os.path.realpath(model):
        raise SettingsError(
            f"vLLM serves the model {model!r}, and GRACESTREAM_MODEL is {settings.model.name!r}, whose checkpoint is"
            f" {checkpoint!r}: serve that, or unset GRACESTREAM_MODEL"
        )
    return settings


def _create_config(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A configuration that vLLM makes, checked, with the layer."""
    config = create(*args, **kwargs)
    with _exit_on_user_error():
        settings = server_settings(config.model_config.model)
        layer = normalize_path(resolve_layer(settings.model.name, settings.model.layer))
        choose_layer(config, settings.model.dtype, layer)
        if not settings_use_encoder(settings.model, settings.editing.policy):
            raise UserError(ENCODER_REQUIRED)
    return config


@contextmanager
def _exit_on_user_error() -> Iterator[None]:
    """End the process with the text of a `UserError`, without a traceback."""
    try:
        yield
    except (UserError, HistoryError) as error:
        sys.exit(f"gracestream: {error}")
