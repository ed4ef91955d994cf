"""Child processes of the local stack: none outlives its parent, none sees the terminal's Ctrl-C."""

import functools
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Self

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.settings import to_environment_variables

HOST = "127.0.0.1"

# Runs before the program, in the child: asks Linux to kill it when its parent dies (1 is PR_SET_PDEATHSIG), and ends
# where the parent is gone already. A preexec_fn would do the same, but may deadlock in a parent with threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]): os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class StackError(UserError):
    """The local stack cannot do what was asked; the text is one plain sentence, with a log's end where there is one."""


@functools.cache
def _spawn_executor() -> ThreadPoolExecutor:
    """The one thread that starts children.

    Linux sends the death signal when the *thread* that forked ends. This one lives as long as the process, so a child
    that was started from a short-lived thread stays.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="children")


class ChildProcess:
    """One child process in a session of its own, with its output in a log file.

    Guarantees: `stop` and `kill` reach the whole process group, and return once the process is gone. On Linux the
    process is killed when this one dies, however it dies; elsewhere only `stop` and `kill` end it.

    Args:
        name: what it is called in errors.
        argv: the program, looked up on PATH, and its arguments.
        log: its standard output and error are appended here.
        env: on top of this process's environment.
        cwd: its working directory; this process's own if not given.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.log = log
        self.env = dict(env or {})
        self.cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def running(self) -> bool:
        """Whether the process is there; one that ended by itself is not."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id, which is the id of its process group too.

        Raises:
            StackError: it was never started.
        """
        if self._process is None:
            raise StackError(f"{self.name} was never started; call start() first")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the last run, negative for a signal; None while it runs or before the first start."""
        return None if self._process is None else self._process.poll()

    def start(self, inherited_fds: Sequence[int] = ()) -> None:
        """Start it; it may be started again once it has ended. It inherits the files `inherited_fds`, and no others.

        Raises:
            StackError: it runs already, or there is no such program.
        """
        if self.running:
            raise StackError(f"{self.name} runs already, as process {self.pid}; stop it first")
        program = shutil.which(self.argv[0])
        if program is None:
            raise StackError(f"{self.name} needs the program {self.argv[0]!r}, which is not on PATH; install it")
        argv = [program, *self.argv[1:]]
        if sys.platform == "linux":
            argv = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = _spawn_executor().submit(self._spawn, argv, log, inherited_fds).result()

    def wait_for(self, predicate: Callable[[], bool], timeout: float, poll_seconds: float = 0.05) -> None:
        """Wait until `predicate` holds, asking every `poll_seconds` seconds.

        Raises:
            StackError: the process ended first, or `timeout` seconds passed; with the last lines of its log.
        """
        deadline = time.monotonic() + timeout
        while not predicate():
            if not self.running:
                raise StackError(self.describe_exit("while starting"))
            if time.monotonic() > deadline:
                raise StackError(f"{self.name} was not ready after {timeout:g} s; {self._describe_log_tail()}")
            time.sleep(poll_seconds)

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process group, if it still runs (SIGSTOP and SIGCONT make it pause)."""
        if self.running:
            os.killpg(self.pid, signum)

    def stop(self, timeout: float = 15.0) -> None:
        """Ask it to end (SIGTERM); after `timeout` seconds, kill it. Nothing happens where it has ended."""
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)  # one that is paused obeys too
        try:
            self._wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once (SIGKILL), with no chance to tidy up: what a crash does."""
        self.send_signal(signal.SIGKILL)
        self._wait(None)

    def restart(self, timeout: float = 15.0) -> None:
        """Stop it if it runs, and start it with the same arguments."""
        self.stop(timeout)
        self.start()

    def describe_exit(self, phase: str = "") -> str:
        """Of one that ended by itself: with which status, and the last lines of its log."""
        return f"{self.name} ended with status {self.returncode}{phase and f' {phase}'}; {self._describe_log_tail()}"

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that this run has logged."""
        try:
            with self.log.open("rb") as log:
                log.seek(self._log_start)
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _spawn(self, argv: Sequence[str], log: BinaryIO, inherited_fds: Sequence[int]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | self.env,
            cwd=self.cwd,
            start_new_session=True,
            pass_fds=inherited_fds,
        )

    def _wait(self, timeout: float | None) -> None:
        if self._process is not None:
            self._process.wait(timeout)

    def _describe_log_tail(self) -> str:
        words = self.log_tail()
        return f"its log {self.log} ends:\n{words}" if words else f"its log {self.log} says nothing"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def make_worker_process(
    name: str, module: str, *arguments: str, log: Path, settings: Mapping[str, object]
) -> ChildProcess:
    """A worker process: `python -m module arguments` with `settings` as `GRACESTREAM_*` variables.

    Give it a `port` (from `find_free_port`), so that `answers_ok(port, "/ready")` can tell when it is ready.
    """
    return ChildProcess(
        name, [sys.executable, "-m", module, *arguments], log=log, env=to_environment_variables(settings)
    )


def is_http_ok(port: int, path: str, timeout: float = 2.0) -> bool:
    """Whether `GET path` on a local port answers 200; False where nothing answers."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def is_port_free(port: int) -> bool:
    """Whether a server could listen on this port of 127.0.0.1."""
    with socket.socket() as probe:
        # As servers do: a port whose last connections are only fading away (TIME_WAIT) is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def is_port_open(port: int) -> bool:
    """Whether something listens on this port of 127.0.0.1."""
    try:
        socket.create_connection((HOST, port), timeout=1.0).close()
    except OSError:
        return False
    return True


_RESERVED_PORTS: set[int] = set()


def reserve_ports(ports: Iterable[int]) -> None:
    """Keep `find_free_port` from giving these to anyone."""
    _RESERVED_PORTS.update(ports)


def find_free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, and that this process was not given before.

    Below Linux's range for outgoing connections: a port of that range may be taken by one before the server binds, and
    a client that waits for the server there can end up connected to itself.

    Raises:
        StackError: none was found.
    """
    for _ in range(200):
        port = 20_000 + secrets.randbelow(12_000)
        if port not in _RESERVED_PORTS and is_port_free(port):
            _RESERVED_PORTS.add(port)
            return port
    raise StackError("no free port was found on 127.0.0.1 between 20000 and 31999; stop some servers")
