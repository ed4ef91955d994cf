"""The inference worker: builds a replica from settings and runs it."""

import asyncio
from importlib.util import find_spec

import structlog

from gracestream.pipeline.codebook import CodebookLookup
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model import AnswerEngine, EditableModel, make_engine
from gracestream.pipeline.replica import EngineFactory, PreparedRequest, Replica
from gracestream.pipeline.settings import Settings
from gracestream.workers.bootstrap import WorkerContext, checkpoint_from_settings, start_worker

log = structlog.get_logger()


def run(settings: Settings) -> int:
    """Run one replica until it is stopped; the exit status.

    Raises:
        UserError: the engine is vLLM, which is not installed.
    """
    if settings.serving.engine == "vllm" and find_spec("vllm") is None:
        raise UserError(
            "GRACESTREAM_ENGINE is vllm, but vLLM is not installed: install it as docs/how-to/vllm.md says, or set"
            " GRACESTREAM_ENGINE=auto"
        )
    with start_worker("inference", settings) as started:
        return asyncio.run(build_replica(started, settings).run())


def build_replica(worker: WorkerContext, settings: Settings) -> Replica:
    """The replica of a started worker, on the Kafka and Redis that the settings name.

    Raises:
        UserError: the model does not support the engine.
    """
    return Replica(
        worker.model,
        settings,
        engine_factory(worker.model, settings),
        name=worker.name,
        health=worker.health,
        stop=worker.stop,
        idle=worker.idle,
    )


def engine_factory(model: EditableModel, settings: Settings) -> EngineFactory:
    """Makes the engine that the settings name, with a lookup.

    Raises:
        UserError: vLLM is not supported, or does not start.
    """
    serving = settings.serving
    name = serving.engine
    if name == "vllm":
        return _vllm_factory(model, settings)

    def make(lookup: CodebookLookup) -> AnswerEngine[PreparedRequest]:
        return make_engine(
            name,
            model,
            lookup,
            max_rows=serving.request_batch_size,
            check_answers=serving.check_answers,
            on_fallback=_warn_of_batch_engine,
        )

    return make


def _vllm_factory(model: EditableModel, settings: Settings) -> EngineFactory:
    # vLLM is optional, and slow to import.
    from gracestream.pipeline.vllm.support import explain_import_errors, require_supported_version  # noqa: PLC0415

    require_supported_version()
    with explain_import_errors():
        from gracestream.pipeline.vllm.engine import VllmEngine  # noqa: PLC0415
        from gracestream.pipeline.vllm.startup import start_engine  # noqa: PLC0415

    serving = settings.serving
    llm = start_engine(model, checkpoint_from_settings(settings.model), settings)
    return lambda lookup: VllmEngine(
        llm, model, lookup, max_rows=serving.request_batch_size, check_answers=serving.check_answers
    )


def _warn_of_batch_engine(reason: str) -> None:
    """Log that the continuous engine cannot run the model."""
    log.warning(
        "continuous_engine_unsupported",
        reason=reason,
        consequence="the batch engine answers: a short answer waits for the longest of its batch",
    )
