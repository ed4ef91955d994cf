"""The HTTP endpoints of the workers: `/live`, `/ready`, `/metrics` and `/state`.

1. `/live` answers 200. It answers 503 with the reason if a part of the worker is stalled: one piece of work has taken
   more than `stall_timeout` seconds.
2. `/ready` answers 503 with the reason until the worker can take work; then 200.
3. `/metrics` answers the Prometheus metrics, and `/state` the state of the codebook in JSON.
4. A separate thread answers, so a long forward pass does not delay the answer.

Not promised: access control. The endpoints have neither authentication nor TLS.
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
from gracestream.pipeline.observability.metrics import READY, STALLED, render_metrics


class PortError(UserError):
    """The HTTP server cannot listen on its address and port."""


@dataclass
class Health:
    """The health of a worker. The worker updates it, and `HealthServer` reports it.

    Attributes:
        stall_timeout: Limit on the seconds of one piece of work.
        ready: Whether the worker can take work.
        reason: Why the worker is not ready.
        state: Returns the answer of `/state`.
        metrics: Returns the answer of `/metrics`.
    """

    stall_timeout: float = math.inf
    ready: bool = False
    reason: str = "starting"
    state: Callable[[], dict[str, object]] = dict
    metrics: Callable[[], bytes] = render_metrics
    _started_at: dict[str, float] = field(default_factory=dict)

    def begin(self, part: str) -> None:
        """Record that a part of the worker begins a piece of work; its previous one is done."""
        self._started_at[part] = time.monotonic()

    def end(self, part: str) -> None:
        """Record that a part of the worker is idle."""
        self._started_at.pop(part, None)

    @contextmanager
    def busy(self, part: str) -> Iterator[None]:
        """A context for one piece of work of a part, which is idle after it."""
        self.begin(part)
        try:
            yield
        finally:
            self.end(part)

    def stalled_part(self) -> str | None:
        """A report of the first part that has exceeded `stall_timeout`; None if there is none."""
        now = time.monotonic()
        for part, since in list(self._started_at.items()):  # a copy, because other threads change the dict
            if now - since > self.stall_timeout:
                return f"the {part} is stalled: it has been at one piece of work for {now - since:.0f} s"
        return None

    def set_ready(self) -> None:
        """Report the worker as ready."""
        self.ready, self.reason = True, ""
        READY.set(1)

    def set_not_ready(self, reason: str) -> None:
        """Report the worker as not ready, for this reason."""
        self.ready, self.reason = False, reason
        READY.set(0)


class HealthServer:
    """The HTTP server of a `Health`. It runs in a thread of its own until `close`.

    `url` is its address. A port of 0 takes a free port.

    Raises:
        PortError: the port is in use, or the address does not belong to this machine.
    """

    def __init__(self, health: Health, host: str, port: int) -> None:
        handler = type("Handler", (_Handler,), {"health": health})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = type("Server", (ThreadingHTTPServer,), {"address_family": family})((host, port), handler)
        except OSError as error:
            raise PortError(
                f"cannot listen on {host}:{port}: {error.strerror};"
                " choose another GRACESTREAM_HTTP_PORT, or 0 for a free one"
            ) from error
        self._server.daemon_threads = True
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def close(self) -> None:
        """Stop the server and close its port."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    health: Health
    timeout = 10.0
    """Seconds to wait for a request. A silent client does not occupy a thread for longer."""

    def do_GET(self) -> None:
        """Answer the request for a path."""
        match self.path.split("?")[0]:
            case "/live":
                self._send_status(self.health.stalled_part())
            case "/ready":
                self._send_status(None if self.health.ready else self.health.reason)
            case "/state":
                self._send(200, "application/json", msgspec.json.encode(self.health.state()))
            case "/metrics":
                STALLED.set(self.health.stalled_part() is not None)
                self._send(200, CONTENT_TYPE_LATEST, self.health.metrics())
            case _:
                self._send(404, "text/plain", b"try /live, /ready, /metrics or /state\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class names it so)
        """Log nothing: probes arrive every few seconds."""

    def _send_status(self, failure: str | None) -> None:
        status, text = (200, "ok") if failure is None else (503, failure)
        self._send(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
