"""How a worker ends: in order and soon after SIGTERM or SIGINT, at once after a second one, by itself where it hangs.

What `end_on_signals` guarantees:

1. The first signal sets `stop`, which the worker looks at between two pieces of work. While `idle` is set the worker
   has nothing in hand, as at its start: then the signal ends it at once, with status 0, whatever it waits for.
2. Whoever sets `stop`: a process that is still there `seconds` later is ended then, with status 1. What it had not
   committed is left to another.
3. A second signal ends it at once.

`end_when_stuck` ends one that has been stuck for `STUCK_SECONDS`, with status 1, so that it is started again where
nobody acts on what `/live` says, as in Compose.

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

STUCK_SECONDS = 60.0
"""For which a worker may be stuck: as long as the probes of `deploy/kubernetes` allow for."""

LOOK_SECONDS = 1.0
"""Between two looks at whether it is."""


LOG_SECONDS = 0.5
"""For the last line of the log."""


def end_on_signals(seconds: float, idle: threading.Event) -> threading.Event:
    """Take SIGTERM and SIGINT from now on, and end the process in time; `stop`. For the main thread, once."""
    stop = threading.Event()
    signals, written = socket.socketpair()
    written.setblocking(False)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    signal.set_wakeup_fd(written.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_take, args=[signals, stop, seconds, idle], name="signals", daemon=True).start()
    threading.Thread(target=_end_in_time, args=[stop, seconds], name="ending", daemon=True).start()
    return stop


def end_when_stuck(stuck: Callable[[], str | None], stop: threading.Event) -> None:
    """From now on, until `stop`: end the process where `stuck` has told of something for too long."""
    threading.Thread(target=_end_when_stuck, args=[stuck, stop], name="stuck", daemon=True).start()


def _end_when_stuck(stuck: Callable[[], str | None], stop: threading.Event) -> None:
    since: float | None = None
    while not stop.wait(LOOK_SECONDS):
        reason, now = stuck(), time.monotonic()
        since = None if reason is None else since or now
        if since is not None and now - since > STUCK_SECONDS:
            remedy = "set GRACESTREAM_STUCK_AFTER higher where work takes that long"
            _end(1, log.error, "ended_as_stuck", reason=reason, remedy=remedy)


def _take(signals: socket.socket, stop: threading.Event, seconds: float, idle: threading.Event) -> None:
    (first,) = signals.recv(1)
    stop.set()
    if idle.is_set():
        _end(0, log.info, "stopped", signal=signal.Signals(first).name, reason="it had nothing in hand")
    _say(log.info, "stopping", signal=signal.Signals(first).name, seconds=seconds)
    (second,) = signals.recv(1)
    _end(128 + second, log.warning, "stopped_at_once", signal=signal.Signals(second).name)


def _end_in_time(stop: threading.Event, seconds: float) -> None:
    stop.wait()
    time.sleep(seconds)
    _end(1, log.error, "not_stopped_in_time", seconds=seconds)


def _end(status: int, level: Callable[..., object], event: str, **fields: object) -> None:
    _say(level, event, **fields)
    os._exit(status)


def _say(level: Callable[..., object], event: str, **fields: object) -> None:
    """Write to the log, unless that takes too long."""
    saying = threading.Thread(target=level, args=[event], kwargs=fields, daemon=True)
    saying.start()
    saying.join(LOG_SECONDS)
