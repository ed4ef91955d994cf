"""How a worker ends: in order and soon after SIGTERM or SIGINT, at once after a second one, by itself where it hangs.

What `exit_on_signals` guarantees:

1. The first signal sets `stop`, which the worker looks at between two pieces of work. While `idle` is set the worker
   has nothing in hand, as at its start: then the signal ends it at once, with status 0, whatever it waits for.
2. Whoever sets `stop`: a process that is still there `seconds` later is ended then, with status 1. What it had not
   committed is left to another.
3. A second signal ends it at once.

`exit_when_stalled` ends one that has been stuck for `MAX_STALL_SECONDS`, with status 1, so that it is started again
where nobody acts on what `/live` says, as in Compose.

Python runs a signal's handler in the main thread and between two of its own instructions, which a call into a hung
driver never reaches. So a thread reads the signals from the descriptor to which Python's C code writes their numbers.

No end waits for the log: whoever reads standard error may hang as well.
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
"""For which a worker may be stuck: as long as the probes of `deploy/kubernetes` allow for."""

STALL_CHECK_SECONDS = 1.0
"""Between two looks at whether it is."""


LOG_TIMEOUT_SECONDS = 0.5
"""For the last line of the log."""


def exit_on_signals(timeout: float, idle: threading.Event) -> threading.Event:
    """Take SIGTERM and SIGINT from now on, and end the process in time; `stop`. For the main thread, once."""
    stop = threading.Event()
    signals, written = socket.socketpair()
    written.setblocking(False)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    signal.set_wakeup_fd(written.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_handle_signals, args=[signals, stop, timeout, idle], name="signals", daemon=True).start()
    threading.Thread(target=_enforce_timeout, args=[stop, timeout], name="ending", daemon=True).start()
    return stop


def exit_when_stalled(stalled_part: Callable[[], str | None], stop: threading.Event) -> None:
    """From now on, until `stop`: end the process where `stalled_part` has told of something for too long."""
    threading.Thread(target=_exit_when_stalled, args=[stalled_part, stop], name="stuck", daemon=True).start()


def _exit_when_stalled(stalled_part: Callable[[], str | None], stop: threading.Event) -> None:
    since: float | None = None
    while not stop.wait(STALL_CHECK_SECONDS):
        reason, now = stalled_part(), time.monotonic()
        since = None if reason is None else since or now
        if since is not None and now - since > MAX_STALL_SECONDS:
            remedy = "set GRACESTREAM_STUCK_AFTER higher where work takes that long"
            _exit(1, log.error, "ended_as_stuck", reason=reason, remedy=remedy)


def _handle_signals(signals: socket.socket, stop: threading.Event, timeout: float, idle: threading.Event) -> None:
    (first,) = signals.recv(1)
    stop.set()
    if idle.is_set():
        _exit(0, log.info, "stopped", signal=signal.Signals(first).name, reason="it had nothing in hand")
    _log_with_timeout(log.info, "stopping", signal=signal.Signals(first).name, seconds=timeout)
    (second,) = signals.recv(1)
    _exit(128 + second, log.warning, "stopped_at_once", signal=signal.Signals(second).name)


def _enforce_timeout(stop: threading.Event, timeout: float) -> None:
    stop.wait()
    time.sleep(timeout)
    _exit(1, log.error, "not_stopped_in_time", seconds=timeout)


def _exit(status: int, log_method: Callable[..., object], event: str, **fields: object) -> None:
    _log_with_timeout(log_method, event, **fields)
    os._exit(status)


def _log_with_timeout(log_method: Callable[..., object], event: str, **fields: object) -> None:
    """Write to the log, unless that takes too long."""
    saying = threading.Thread(target=log_method, args=[event], kwargs=fields, daemon=True)
    saying.start()
    saying.join(LOG_TIMEOUT_SECONDS)
