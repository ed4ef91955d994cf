"""What the local Kafka and the local Valkey share: one server process over one data directory."""

import abc
import fcntl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

from gracestream.deploy.local.processes import HOST, ChildProcess, StackError, find_free_port, is_port_free


def ignore_progress(_message: str) -> None:
    """Report progress to nobody."""


class LocalServer(abc.ABC):
    """A server on 127.0.0.1 that keeps its data, its port and its log over any number of stops, kills and starts.

    Args:
        data_dir: made if missing; a server started on it again finds its data.
        port: where it listens; a free port if not given.
        report: called with one line for each step that takes a while.
    """

    name: ClassVar[str]

    def __init__(
        self, data_dir: Path, port: int | None = None, *, report: Callable[[str], None] = ignore_progress
    ) -> None:
        self.data_dir = data_dir.expanduser().resolve()
        self.port = find_free_port() if port is None else port
        self.log = self.data_dir / f"{self.name.lower()}.log"
        self._report = report
        self._child: ChildProcess | None = None

    @abc.abstractmethod
    def _prepare_command(self) -> Sequence[str]:
        """Make everything ready for a start; the command line."""

    @abc.abstractmethod
    def is_responding(self, timeout: float) -> bool:
        """Whether the server answers a request of its own protocol."""

    @property
    def child(self) -> ChildProcess:
        """The server's process; another object after each start.

        Raises:
            StackError: it was never started.
        """
        if self._child is None:
            raise StackError(f"{self.name} was never started; call start() first")
        return self._child

    @property
    def address(self) -> str:
        """`host:port` that it listens on."""
        return f"{HOST}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self._child is not None and self._child.running

    def start(self, timeout: float = 60.0) -> None:
        """Start it and wait until it answers.

        Raises:
            StackError: its port or its data are in use, something it needs is missing, it died, or it did not answer
                in time.
        """
        if self.running:
            raise StackError(f"{self.name} runs already, on {self.address}; stop it first")
        if not is_port_free(self.port):
            raise StackError(
                f"port {self.port} of {HOST}, wanted for {self.name}, is in use; choose another, or stop its user"
            )
        with self._lock_data() as lock:
            self._child = ChildProcess(self.name, self._prepare_command(), log=self.log)
            started = time.monotonic()
            self._child.start(inherited_fds=[lock.fileno()])
        try:
            self.child.wait_for(lambda: self.is_responding(timeout), timeout)
        except BaseException:
            self.child.kill()
            raise
        self._report(f"{self.name} answers on {self.address} after {time.monotonic() - started:.1f} s")

    def stop(self, timeout: float = 30.0) -> None:
        """Let it shut down in order; after `timeout` seconds, kill it."""
        if self._child is not None:
            self._child.stop(timeout)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._child is not None:
            self._child.kill()

    def restart(self, timeout: float = 60.0) -> None:
        """Stop it and start it on the same data and port."""
        self.stop()
        self.start(timeout)

    def _lock_data(self) -> BinaryIO:
        """A lock on the data that a child which inherits the file holds until it ends, whatever becomes of us.

        Kafka has a lock of its own, but a second broker takes over the metadata log before it looks at that lock.
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
