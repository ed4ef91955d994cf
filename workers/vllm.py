"""The plugins of vLLM: `VLLM_PLUGINS=gracestream vllm serve MODEL` is a replica that answers over HTTP.

1. vLLM calls `register` in each of its processes. The workers then inject values into the layer.
2. vLLM's server makes a `ServerPlugin`. It follows the codebook, looks requests up, and adds headers and a route.
3. vLLM logs an error of a plugin's import and serves on, without corrections. So this module imports nothing that may
   fail. Its functions import the rest, and end the process if that fails.

Both do nothing unless `VLLM_PLUGINS` names gracestream, since vLLM loads plugins for routes only by name.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.vllm.support import explain_import_errors, require_supported_version, use_supported_runner

NAME = "gracestream"
"""The name of both plugins in `VLLM_PLUGINS`."""


def register() -> None:
    """Prepare this process of vLLM for corrections."""
    if NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    with _exit_on_user_error():
        require_supported_version()
        use_supported_runner()
        with explain_import_errors():
            from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - see above

            from gracestream.pipeline.vllm.injection import install, replace_method  # noqa: PLC0415 - likewise
    replace_method(EngineArgs, "create_engine_config", _create_config)
    install()


class ServerPlugin:
    """The plugin of vLLM's server: a `vllm.plugins.endpoint_plugins.EndpointPlugin`."""

    name = NAME
    required_tasks: ClassVar[tuple[str, ...]] = ("generate",)

    def __init__(self) -> None:
        with _exit_on_user_error():
            require_supported_version()
            with explain_import_errors():
                from gracestream.workers.vllm_server import CorrectionServer  # noqa: PLC0415 - see above
        self._server = CorrectionServer()

    def attach_router(self, app: Any) -> None:
        """Add the middleware and the route of feedback."""
        self._server.attach_router(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Catch up with the codebook, and look up all requests from now on."""
        del state
        with _exit_on_user_error():
            await self._server.start(engine_client, args.model)


def _create_config(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A configuration that vLLM makes, checked, with the layer."""
    config = create(*args, **kwargs)
    with _exit_on_user_error():
        with explain_import_errors():
            from gracestream.workers.vllm_server import choose_served_layer  # noqa: PLC0415 - see above
        choose_served_layer(config)
    return config


@contextmanager
def _exit_on_user_error() -> Iterator[None]:
    """End the process with the text of a `UserError`, without a traceback."""
    try:
        yield
    except UserError as error:
        sys.exit(f"gracestream: {error}")
