"""Ends a worker: in order after SIGTERM or SIGINT, at once after a second signal, and by itself after a stall.

`exit_on_signals` guarantees:

1. The first signal sets `stop`, which the worker checks between two pieces of work. While `idle` is set, no work is in
   progress, as at the start. Then the signal ends the process at once, with status 0, whatever the process waits for.
2. The process ends with status 1 if it still runs `timeout` seconds after `stop` was set, by a signal or otherwise.
   Another worker does the work that it has not committed.
3. A second signal ends the process at once, with status 128 plus the signal's number.

`exit_when_stalled` guarantees: the process ends with status 1 after it has stalled for `MAX_STALL_SECONDS`. So it is
restarted even where nothing probes `/live`, as under Compose.

Why threads: Python runs a signal handler in the main thread, between two of its own instructions. A call into a hung
driver never reaches that point. CPython's C code writes each signal's number to a file descriptor
(`signal.set_wakeup_fd`), and a thread reads it there.

Not promised: that the last log line is written. No exit waits longer than `LOG_TIMEOUT_SECONDS` for the log, since the
reader of standard error may hang as well.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger()

MAX_STALL_SECONDS = 60.0
"""Seconds for which a worker may be stalled: as long as the probes of `deploy/kubernetes` allow."""

STALL_CHECK_SECONDS = 1.0
"""Seconds between two checks for a stall."""


LOG_TIMEOUT_SECONDS = 0.5
"""Seconds that an exit waits for its log line."""


def exit_on_signals(timeout: float, idle: threading.Event) -> threading.Event:
    """Handle SIGTERM and SIGINT from now on; returns `stop`. Call it once, in the main thread."""
    stop = threading.Event()
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_handle_signals, args=[receiver, stop, timeout, idle], name="signals", daemon=True).start()
    threading.Thread(target=_enforce_timeout, args=[stop, timeout], name="ending", daemon=True).start()
    return stop


def exit_when_stalled(stalled_part: Callable[[], str | None], stop: threading.Event) -> None:
    """Until `stop`, end the process once `stalled_part` has reported a stall for `MAX_STALL_SECONDS`."""
    threading.Thread(target=_exit_when_stalled, args=[stalled_part, stop], name="stalls", daemon=True).start()


def _exit_when_stalled(stalled_part: Callable[[], str | None], stop: threading.Event) -> None:
    stalled_since: float | None = None
    while not stop.wait(STALL_CHECK_SECONDS):
        reason, now = stalled_part(), time.monotonic()
        stalled_since = None if reason is None else stalled_since or now
        if stalled_since is not None and now - stalled_since > MAX_STALL_SECONDS:
            _exit(
                1,
                log.error,
                "killed_after_stall",
                reason=reason,
                consequence="the process exits with status 1; its uncommitted work is done again",
                remedy="set GRACESTREAM_STALL_TIMEOUT higher where work takes that long",
            )


def _handle_signals(signals: socket.socket, stop: threading.Event, timeout: float, idle: threading.Event) -> None:
    (first,) = signals.recv(1)
    stop.set()
    if idle.is_set():
        _exit(0, log.info, "worker_stopped", signal=signal.Signals(first).name, reason="no work was in progress")
    _log_with_timeout(log.info, "worker_stopping", signal=signal.Signals(first).name, seconds=timeout)
    (second,) = signals.recv(1)
    _exit(
        128 + second,
        log.warning,
        "forced_exit",
        signal=signal.Signals(second).name,
        consequence="the process ends at once; another worker does its uncommitted work",
    )


def _enforce_timeout(stop: threading.Event, timeout: float) -> None:
    stop.wait()
    time.sleep(timeout)
    _exit(
        1,
        log.error,
        "shutdown_timeout",
        seconds=timeout,
        consequence="the process exits with status 1; another worker does its uncommitted work",
    )


def _exit(status: int, log_method: Callable[..., object], event: str, **fields: object) -> None:
    _log_with_timeout(log_method, event, **fields)
    os._exit(status)


def _log_with_timeout(log_method: Callable[..., object], event: str, **fields: object) -> None:
    """Log an event, but wait for at most `LOG_TIMEOUT_SECONDS`."""
    thread = threading.Thread(target=log_method, args=[event], kwargs=fields, daemon=True)
    thread.start()
    thread.join(LOG_TIMEOUT_SECONDS)
