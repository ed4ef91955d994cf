"""The workers' HTTP end: `/live`, `/ready`, `/metrics` and `/state`.

`/live` says that the process works, `/ready` that it may be given work (503 with the reason, until then), `/state` as
JSON which codebook it holds. It answers from a thread of its own, so a long forward pass does not hold it up.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from pipeline.errors import UserError
from pipeline.metrics import READY


class PortError(UserError):
    """The port cannot be listened on."""


@dataclass
class Health:
    """What the worker says of itself. `reason` is why it is not ready, or not alive."""

    live: bool = True
    ready: bool = False
    reason: str = "starting"
    state: Callable[[], dict[str, object]] = dict

    def become_ready(self) -> None:
        """`/ready` answers 200 from now on."""
        self.ready, self.reason = True, ""
        READY.set(1)

    def not_ready(self, reason: str) -> None:
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
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise PortError(f"cannot listen on {host}:{port}: {error.strerror}; choose GRACESTREAM_PORT") from error
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    health: Health

    def do_GET(self) -> None:
        """Answer one of the four paths."""
        match self.path.split("?")[0]:
            case "/live":
                self._say(200 if self.health.live else 503, self.health.live, self.health.reason)
            case "/ready":
                self._say(200 if self.health.ready else 503, self.health.ready, self.health.reason)
            case "/state":
                self._send(200, "application/json", msgspec.json.encode(self.health.state()))
            case "/metrics":
                self._send(200, CONTENT_TYPE_LATEST, generate_latest())
            case _:
                self._send(404, "text/plain", b"try /live, /ready, /metrics or /state\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class names it so)
        """Nothing: probes come every few seconds."""

    def _say(self, status: int, good: bool, reason: str) -> None:
        self._send(status, "text/plain; charset=utf-8", b"ok\n" if good else f"{reason}\n".encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
