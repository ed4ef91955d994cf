"""How a worker ends: in order and soon after SIGTERM or SIGINT, and at once after a second one.

What `end_on_signals` guarantees:

1. The first signal sets `stop`, which the worker looks at between two pieces of work.
2. Whoever sets `stop`: a process that is still there `seconds` later is ended then, with status 1. What it had not
   committed is left to another.
3. A second signal ends it at once.

Python runs a signal's handler in the main thread and between two of its own instructions, which a call into a hung
driver never reaches. So a thread reads the signals from the descriptor to which Python's C code writes their numbers.
"""

import os
import signal
import socket
import threading
import time

import structlog

log = structlog.get_logger()


def end_on_signals(seconds: float) -> threading.Event:
    """Take SIGTERM and SIGINT from now on, and end the process in time; `stop`. For the main thread, once."""
    stop = threading.Event()
    signals, written = socket.socketpair()
    written.setblocking(False)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    signal.set_wakeup_fd(written.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_take, args=[signals, stop, seconds], name="signals", daemon=True).start()
    threading.Thread(target=_end_in_time, args=[stop, seconds], name="ending", daemon=True).start()
    return stop


def _take(signals: socket.socket, stop: threading.Event, seconds: float) -> None:
    (first,) = signals.recv(1)
    log.info("stopping", signal=signal.Signals(first).name, seconds=seconds)
    stop.set()
    (second,) = signals.recv(1)
    log.warning("stopped_at_once", signal=signal.Signals(second).name)
    os._exit(128 + second)


def _end_in_time(stop: threading.Event, seconds: float) -> None:
    stop.wait()
    time.sleep(seconds)
    log.error("not_stopped_in_time", seconds=seconds)
    os._exit(1)
