"""The common part of the local Kafka and the local Valkey: one server process on one data directory."""

import abc
import fcntl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

from gracestream.deploy.local.processes import HOST, ChildProcess, StackError, find_free_port, is_port_free


def ignore_progress(_message: str) -> None:
    """Discard a progress line; the default of `report` parameters."""


class LocalServer(abc.ABC):
    """A server on 127.0.0.1; its data, port and log file stay the same over any number of stops, kills and starts.

    Args:
        data_dir: The data directory; created if missing. A server that starts on it again finds its data.
        port: The port to listen on; a free port if not given.
        report: Called with one line for each step that takes a while.
    """

    name: ClassVar[str]

    def __init__(
        self, data_dir: Path, port: int | None = None, *, report: Callable[[str], None] = ignore_progress
    ) -> None:
        self.data_dir = data_dir.expanduser().resolve()
        self.port = find_free_port() if port is None else port
        self.log_file = self.data_dir / f"{self.name.lower()}.log"
        self._report = report
        self._child: ChildProcess | None = None

    @abc.abstractmethod
    def _prepare_command(self) -> Sequence[str]:
        """Prepare a start; return the command line."""

    @abc.abstractmethod
    def is_responding(self, timeout: float) -> bool:
        """Whether the server answers a request of its own protocol."""

    @property
    def child(self) -> ChildProcess:
        """The server's process; a new object after each start.

        Raises:
            StackError: the server was never started.
        """
        if self._child is None:
            raise StackError(f"{self.name} was never started; call start() first")
        return self._child

    @property
    def address(self) -> str:
        """`host:port` of the server."""
        return f"{HOST}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether the server's process runs."""
        return self._child is not None and self._child.running

    def start(self, timeout: float = 60.0) -> None:
        """Start the server and wait until it responds; if it does not, it is killed.

        Raises:
            StackError: the port or the data are in use, a requirement is missing, the server died, or it did not
                respond within `timeout` seconds.
        """
        if self.running:
            raise StackError(f"{self.name} runs already, on {self.address}; stop it first")
        if not is_port_free(self.port):
            raise StackError(
                f"port {self.port} of {HOST}, wanted for {self.name}, is in use; choose another, or stop its user"
            )
        # The child inherits the lock; closing our copy at the end of the block leaves the child's.
        with self._lock_data() as lock:
            self._child = ChildProcess(self.name, self._prepare_command(), log_file=self.log_file)
            started = time.monotonic()
            self._child.start(inherited_fds=[lock.fileno()])
        try:
            self.child.wait_for(lambda: self.is_responding(timeout), timeout)
        except BaseException:
            self.child.kill()
            raise
        self._report(f"{self.name} answers on {self.address} after {time.monotonic() - started:.1f} s")

    def stop(self, timeout: float = 30.0) -> None:
        """Shut the server down in order; kill it after `timeout` seconds."""
        if self._child is not None:
            self._child.stop(timeout)

    def kill(self) -> None:
        """End the server at once, as in a crash."""
        if self._child is not None:
            self._child.kill()

    def restart(self, timeout: float = 60.0) -> None:
        """Stop the server and start it again on the same data and port."""
        self.stop()
        self.start(timeout)

    def _lock_data(self) -> BinaryIO:
        """A locked file in the data directory; a child that inherits it holds the lock until the child ends.

        The lock survives this process. Kafka has a lock of its own, but a second broker takes over the metadata log
        before it checks that lock.

        Raises:
            StackError: the directory cannot be created or written, or another server holds the lock.
        """
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            lock = (self.data_dir / "lock").open("ab")
        except OSError as error:
            raise StackError(
                f"{self.name} cannot keep its data in {self.data_dir} ({error}); choose another folder"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise StackError(
                f"another {self.name} runs on the data in {self.data_dir}; stop it or choose another folder"
            ) from error
        return lock

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
