"""Starts vLLM's engine in this process, with the model that gracestream's settings name."""

import os
import shlex
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model import EditableModel
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.vllm.injection import choose_layer, install
from gracestream.pipeline.vllm.support import use_supported_runner


def start_engine(model: EditableModel, checkpoint: str, settings: Settings) -> LLMEngine:
    """An engine of vLLM whose layer takes values.

    Args:
        model: The same model without weights.
        checkpoint: Folder or hub id of the model.
        settings: `vllm_args` are arguments of `vllm serve`.

    Raises:
        UserError: the arguments are wrong, or vLLM cannot serve corrections so.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process, and its step is a call
    use_supported_runner()
    install()
    arguments = _parse(settings.serving.vllm_args)
    arguments.model, arguments.tokenizer = checkpoint, checkpoint
    arguments.disable_log_stats = True
    arguments.async_scheduling = False  # a step that fails is then the only one
    if arguments.dtype == "auto":
        arguments.dtype = settings.model.dtype
    try:
        config = EngineArgs.from_cli_args(arguments).create_engine_config()
        choose_layer(config, settings.model.dtype, model.layer)
        if config.parallel_config.world_size > 1:
            raise UserError(
                f"GRACESTREAM_VLLM_ARGS asks for {config.parallel_config.world_size} processes; this engine has one:"
                " use `vllm serve`"
            )
        return LLMEngine.from_vllm_config(config, disable_log_stats=True)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"vLLM does not start: {error}") from error


def _parse(text: str) -> Any:
    """The engine's arguments.

    Raises:
        UserError: an argument is unknown or wrong.
    """
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))

    def fail(message: str) -> NoReturn:
        raise UserError(f"GRACESTREAM_VLLM_ARGS: {message}")

    parser.error = fail
    return parser.parse_args(shlex.split(text))
