"""`gracestream` commands as real processes that start fast.

A process takes about ten seconds of a core to import torch and transformers. Here one server imports them once, and
each command is forked from it: a process with its own id, signals, memory and output.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from gracestream.deploy.local.processes import find_free_port, is_http_ok
from gracestream.pipeline.settings import Settings, to_environment_variables
from tests.support.running import TIMEOUT, status, wait_until

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.preloading"])


def _command(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    given: bytes,
    output: Path,
    errors: Path,
    sabotage: Callable[[], None] | None,
) -> None:
    """The child process: runs `gracestream` with its input from a file and its output in files."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # the child dies with the server
    for path, number in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    for name in [name for name in os.environ if name.startswith("GRACESTREAM_")]:
        del os.environ[name]
    os.environ.update({**environment, "COLUMNS": "200"})
    os.chdir(output.parent)
    output.with_suffix(".in").write_bytes(given)
    sys.stdin = output.with_suffix(".in").open(encoding="utf-8")
    from gracestream.workers.cli import main  # noqa: PLC0415 - after the output is in place

    if sabotage is not None:
        sabotage()
    main(list(arguments))


def explicit_settings(settings: Settings) -> dict[str, Any]:
    """The settings that differ from their defaults."""
    return settings.explicit_values()


class Command:
    """A command to run. `folder` is its working directory and gets its output; `given` is its input.

    `sabotage` runs in its process before the command begins, for example a function of `tests.chaos.dying`.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        given: bytes = b"",
        sabotage: Callable[[], None] | None = None,
        **settings: Any,
    ) -> None:
        self.name, self.folder, self._given, self._sabotage = name, folder, given, sabotage
        self.output, self.errors = folder / f"{name}.out", folder / f"{name}.err"
        self._arguments = list(arguments)
        self._environment = to_environment_variables(settings)
        self._process: ForkServerProcess | None = None

    @property
    def process(self) -> ForkServerProcess:
        """The process of the last start."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    @property
    def running(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        """Start the process, and return at once."""
        arguments = (self._arguments, self._environment, self._given, self.output, self.errors, self._sabotage)
        self._process = _CONTEXT.Process(target=_command, args=arguments, daemon=True)
        self._process.start()

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Wait for the end of the process; returns its exit status."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            pytest.fail(f"{self.name} still runs after {timeout:g} s; {self.stderr()}")
        return self.process.exitcode

    def run(self, timeout: float = TIMEOUT) -> int:
        """Start the process and wait for its end; returns the exit status."""
        self.start()
        return self.wait(timeout)

    def kill(self) -> None:
        """Kill the process, as a crash would."""
        self.process.kill()
        self.process.join()

    def stop(self) -> int:
        """Send SIGTERM and wait; returns the exit status."""
        self.process.terminate()
        return self.wait()

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def pause(self) -> None:
        """Pause the process."""
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the paused process run again."""
        self.send_signal(signal.SIGCONT)

    def stdout(self) -> str:
        """The text of its standard output so far."""
        return self.output.read_text(encoding="utf-8") if self.output.exists() else ""

    def stderr(self) -> str:
        """The text of its standard error so far."""
        return self.errors.read_text(encoding="utf-8") if self.errors.exists() else ""

    def events(self) -> list[dict[str, Any]]:
        """The worker's log events; lines of libraries are left out."""
        events = [json.loads(line) for line in self.stderr().splitlines()]
        return [event for event in events if "logger" not in event]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.running:
            self.process.terminate()
            self.resume()
            self.process.join(10)
        if self.running:
            self.kill()


class Forked(Command):
    """A worker, `infer` or `edit`, of a deployment."""

    def __init__(self, name: str, command: str, settings: Settings, folder: Path, **chosen: Any) -> None:
        self.port = find_free_port()
        own = {"http_port": self.port, "worker_name": name, "threads": 1, **chosen}
        super().__init__(name, [command], folder, **(explicit_settings(settings) | own))

    def wait_ready(self, timeout: float = TIMEOUT) -> None:
        """Wait until `/ready` answers 200; the test fails if the worker ends first."""

        def ready() -> bool:
            if not self.running:
                pytest.fail(f"{self.name} ended with {self.process.exitcode}: {self.stderr()}")
            return is_http_ok(self.port, "/ready")

        wait_until(ready, timeout, f"{self.name}, which says {self.stderr()[-2000:]},")

    def state(self) -> dict[str, Any]:
        """The answer of `/state`."""
        found: dict[str, Any] = json.loads(status(self.port, "/state")[1])
        return found

    def ready(self) -> tuple[int, str]:
        """The answer of `/ready`: status and reason."""
        return status(self.port, "/ready")

    def live(self) -> tuple[int, str]:
        """The answer of `/live`: status and reason."""
        return status(self.port, "/live")


def status_of(command: Command) -> int | None:
    """The exit status of a command that has run."""
    return command.process.exitcode


def sentence(command: Command) -> str:
    """The one line on standard error of a failed command, apart from log events."""
    assert status_of(command) == 1, command.stderr()
    errors = [line for line in command.stderr().splitlines() if not line.startswith(("{", "waiting for "))]
    assert len(errors) == 1, command.stderr()
    assert errors[0].startswith("gracestream: ")
    return errors[0].removeprefix("gracestream: ")
