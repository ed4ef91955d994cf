"""Child processes of the local stack.

1. On Linux no child outlives its parent, even if the parent is killed.
2. No child gets the terminal's Ctrl-C: each has a session of its own, and the parent stops it in order.
"""

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
"""The address of all local servers."""

# Runs in the child, before the program itself:
# 1. Ask Linux to kill this process when its parent dies (1 is PR_SET_PDEATHSIG).
# 2. Exit if the parent died before step 1.
# 3. Become the program.
# A preexec_fn would do the same, but may deadlock in a parent with threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]): os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class StackError(UserError):
    """The local stack cannot do its task; the message is one sentence, and the end of a log file if there is one."""


@functools.cache
def _spawn_executor() -> ThreadPoolExecutor:
    """The executor with the only thread that starts children.

    Linux sends the death signal when the *thread* that forked ends, not the process. This thread lives as long as the
    process, so a child survives the thread that asked for it.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="children")


class ChildProcess:
    """One child process in a session of its own, with its output in a log file.

    1. `stop` and `kill` signal the whole process group, and return when the process has ended.
    2. On Linux the process is killed when this process dies, for any reason.

    Not promised: an end with the parent on other systems; there only `stop` and `kill` end the process.

    Args:
        name: The name in errors.
        argv: The program, looked up on PATH, and its arguments.
        log_file: The file to which standard output and error are appended.
        env: Variables on top of this process's environment.
        cwd: The working directory; this process's own if not given.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_file: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.log_file = log_file
        self.env = dict(env or {})
        self.cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def running(self) -> bool:
        """Whether the process runs; False after it has ended for any reason."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group.

        Raises:
            StackError: the process was never started.
        """
        if self._process is None:
            raise StackError(f"{self.name} was never started; call start() first")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status of the last run, negative for a signal; None during a run and before the first start."""
        return None if self._process is None else self._process.poll()

    def start(self, inherited_fds: Sequence[int] = ()) -> None:
        """Start the process; it may be started again after it has ended.

        The process inherits the file descriptors `inherited_fds` and no others.

        Raises:
            StackError: the process runs already, or the program does not exist.
        """
        if self.running:
            raise StackError(f"{self.name} runs already, as process {self.pid}; stop it first")
        program = shutil.which(self.argv[0])
        if program is None:
            raise StackError(f"{self.name} needs the program {self.argv[0]!r}, which is not on PATH; install it")
        argv = [program, *self.argv[1:]]
        if sys.platform == "linux":
            argv = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv]
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            self._process = _spawn_executor().submit(self._spawn, argv, log, inherited_fds).result()

    def wait_for(self, predicate: Callable[[], bool], timeout: float, poll_seconds: float = 0.05) -> None:
        """Wait until `predicate` returns true; call it every `poll_seconds` seconds.

        Raises:
            StackError: the process ended first, or `timeout` seconds passed; the message has the end of its log file.
        """
        deadline = time.monotonic() + timeout
        while not predicate():
            if not self.running:
                raise StackError(self.describe_exit("while starting"))
            if time.monotonic() > deadline:
                raise StackError(f"{self.name} was not ready after {timeout:g} s; {self._describe_log_tail()}")
            time.sleep(poll_seconds)

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process group if the process runs; SIGSTOP pauses it, SIGCONT resumes it."""
        if self.running:
            os.killpg(self.pid, signum)

    def stop(self, timeout: float = 15.0) -> None:
        """Ask the process to end (SIGTERM), and kill it after `timeout` seconds; does nothing if it has ended."""
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)  # a paused process handles SIGTERM only after it is resumed
        try:
            self._wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process at once (SIGKILL), without any cleanup, as in a crash."""
        self.send_signal(signal.SIGKILL)
        self._wait(None)

    def restart(self, timeout: float = 15.0) -> None:
        """Stop the process if it runs, and start it again with the same arguments."""
        self.stop(timeout)
        self.start()

    def describe_exit(self, phase: str = "") -> str:
        """The exit status of a process that ended by itself, and the last lines of its log file."""
        return f"{self.name} ended with status {self.returncode}{phase and f' {phase}'}; {self._describe_log_tail()}"

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log file since the last start; empty if there is no log file."""
        try:
            with self.log_file.open("rb") as log:
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
        tail = self.log_tail()
        return f"its log file {self.log_file} ends:\n{tail}" if tail else f"its log file {self.log_file} is empty"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def make_worker_process(
    name: str, module: str, *arguments: str, log_file: Path, settings: Mapping[str, object]
) -> ChildProcess:
    """A worker process: `python -m module arguments` with `settings` as `GRACESTREAM_*` variables.

    Set its `http_port` (from `find_free_port`), so that `is_http_ok(port, "/ready")` shows when it is ready.
    """
    return ChildProcess(
        name, [sys.executable, "-m", module, *arguments], log_file=log_file, env=to_environment_variables(settings)
    )


def is_http_ok(port: int, path: str, timeout: float = 2.0) -> bool:
    """Whether `GET path` on a local port answers 200; False if there is no answer within `timeout` seconds."""
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
        # Servers set this option, too: a port whose old connections are in TIME_WAIT is free for them.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def is_port_open(port: int) -> bool:
    """Whether a server listens on this port of 127.0.0.1."""
    try:
        socket.create_connection((HOST, port), timeout=1.0).close()
    except OSError:
        return False
    return True


_RESERVED_PORTS: set[int] = set()
"""Ports that `find_free_port` does not return: it returned them before, or they are reserved."""


def reserve_ports(ports: Iterable[int]) -> None:
    """Keep `find_free_port` from returning these ports."""
    _RESERVED_PORTS.update(ports)


def find_free_port() -> int:
    """A free port of 127.0.0.1 that this process has not been given before.

    The port is below Linux's range for outgoing connections (from 32768). A port in that range may be taken by such a
    connection before the server binds it. And a client that waits for the server may connect to itself (TCP
    simultaneous open).

    Raises:
        StackError: no free port was found.
    """
    for _ in range(200):
        port = 20_000 + secrets.randbelow(12_000)
        if port not in _RESERVED_PORTS and is_port_free(port):
            _RESERVED_PORTS.add(port)
            return port
    raise StackError("no free port was found on 127.0.0.1 between 20000 and 31999; stop some servers")
