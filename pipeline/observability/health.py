"""The workers' HTTP end: `/live`, `/ready`, `/metrics` and `/state`.

`/live` says that the process works: no part of it has been at one thing for longer than `stuck_after` seconds. `/ready`
says that it may be given work (503 with the reason, until then), `/state` as JSON which codebook it holds. It answers
from a thread of its own, so a long forward pass does not hold it up.
"""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.observability.metrics import READY, STUCK, render_metrics


class PortError(UserError):
    """The port cannot be listened on."""


@dataclass
class Health:
    """What the worker says of itself. `reason` is why it is not ready.

    Attributes:
        stuck_after: Seconds that one piece of work may take at most.
        metrics: What `/metrics` answers.
    """

    stuck_after: float = math.inf
    ready: bool = False
    reason: str = "starting"
    state: Callable[[], dict[str, object]] = dict
    metrics: Callable[[], bytes] = render_metrics
    _started_at: dict[str, float] = field(default_factory=dict)

    def begin(self, part: str) -> None:
        """A part of the worker begins a piece of work; the one before it is done."""
        self._started_at[part] = time.monotonic()

    def end(self, part: str) -> None:
        """A part of the worker has nothing to do until it begins a piece of work."""
        self._started_at.pop(part, None)

    @contextmanager
    def busy(self, part: str) -> Iterator[None]:
        """For one piece of work, after which the part rests."""
        self.begin(part)
        try:
            yield
        finally:
            self.end(part)

    def stalled_part(self) -> str | None:
        """Which part has been at one thing for too long, if any."""
        now = time.monotonic()
        for part, since in list(self._started_at.items()):
            if now - since > self.stuck_after:
                return f"the {part} is stuck: it has been at one thing for {now - since:.0f} s"
        return None

    def set_ready(self) -> None:
        """`/ready` answers 200 from now on."""
        self.ready, self.reason = True, ""
        READY.set(1)

    def set_not_ready(self, reason: str) -> None:
        """`/ready` answers 503 with this reason from now on."""
        self.ready, self.reason = False, reason
        READY.set(0)


class HealthServer:
    """Serves a `Health` until closed.

    Raises:
        PortError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, health: Health, host: str, port: int) -> None:
        handler = type("Handler", (_Handler,), {"health": health})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = type("Server", (ThreadingHTTPServer,), {"address_family": family})((host, port), handler)
        except OSError as error:
            raise PortError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another GRACESTREAM_PORT"
            ) from error
        self._server.daemon_threads = True
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    health: Health
    timeout = 10.0
    """Seconds for a request to come; who connects and says nothing keeps no thread for longer."""

    def do_GET(self) -> None:
        """Answer one of the four paths."""
        match self.path.split("?")[0]:
            case "/live":
                self._send_status(self.health.stalled_part())
            case "/ready":
                self._send_status(None if self.health.ready else self.health.reason)
            case "/state":
                self._send(200, "application/json", msgspec.json.encode(self.health.state()))
            case "/metrics":
                STUCK.set(self.health.stalled_part() is not None)
                self._send(200, CONTENT_TYPE_LATEST, self.health.metrics())
            case _:
                self._send(404, "text/plain", b"try /live, /ready, /metrics or /state\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class names it so)
        """Nothing: probes come every few seconds."""

    def _send_status(self, failure: str | None) -> None:
        status, text = (200, "ok") if failure is None else (503, failure)
        self._send(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
