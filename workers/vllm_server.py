"""The part of gracestream in a vLLM server: follows the codebook, looks requests up, and adds headers and a route."""

import asyncio
import os
import signal
import sys
from typing import Any

from gracestream.pipeline.client import Client
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model import ENCODER_REQUIRED, normalize_path, resolve_layer
from gracestream.pipeline.observability import Health
from gracestream.pipeline.replica import LiveCodebook
from gracestream.pipeline.settings import Settings, SettingsError, load_settings
from gracestream.pipeline.vllm.generation import CorrectedGeneration
from gracestream.pipeline.vllm.http import AnswerMemory, CorrectionMiddleware, feedback_router
from gracestream.pipeline.vllm.injection import choose_layer
from gracestream.pipeline.vllm.lookups import LookupQueue
from gracestream.schemas.messages import Feedback
from gracestream.workers.bootstrap import (
    begin_logs,
    checkpoint_from_settings,
    connect,
    load_worker_model,
    serve_health,
    settings_use_encoder,
)

READINESS_INTERVAL = 0.1
"""Seconds between two updates of readiness."""


class CorrectionServer:
    """What a server of vLLM does for corrections."""

    def __init__(self) -> None:
        self._memory = AnswerMemory()
        self._client: Client | None = None
        self._takes_feedback = False

    def attach_router(self, app: Any) -> None:
        """Add the middleware and the route of feedback."""
        app.add_middleware(CorrectionMiddleware, memory=self._memory)
        app.include_router(feedback_router(self._memory, self._send, lambda: self._takes_feedback))

    async def start(self, engine_client: Any, model_name: str) -> None:
        """Catch up with the codebook, and look up all requests from now on.

        Args:
            engine_client: An `EngineClient` of vLLM.
            model_name: The model that vLLM serves.

        Raises:
            UserError: the settings, Kafka, the model or the history do not allow it.
        """
        settings = server_settings(model_name)
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


def choose_served_layer(config: Any) -> None:
    """Check a `VllmConfig` and write the layer of the settings into it.

    Raises:
        UserError: vLLM cannot serve corrections under this configuration.
    """
    settings = server_settings(config.model_config.model)
    layer = normalize_path(resolve_layer(settings.model.name, settings.model.layer))
    choose_layer(config, settings.model.dtype, layer)
    if not settings_use_encoder(settings.model, settings.editing.policy):
        raise UserError(ENCODER_REQUIRED)
