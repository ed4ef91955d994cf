"""What the console accepts: which hosts, and which requests that change something.

The console has no users yet. It listens on a loopback address only, and rejects requests that a web site of somebody
else might send through a browser on this machine:

1. The `Host` header must name a loopback address. This stops a site whose name resolves to one (DNS rebinding).
2. A request that changes something must come from the console's own pages (`Sec-Fetch-Site`, or `Origin`).
3. The content security policy allows no script, style or address of another host, and no inline script.
"""

import ipaddress
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse

from gracestream.pipeline.errors import UserError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self';"
    " base-uri 'none'; frame-ancestors 'none'"
)

RESPONSE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

SAFE_METHODS = {"GET", "HEAD"}


class AccessError(UserError):
    """The console cannot listen on an address safely. The text gives the remedy."""


def require_loopback(host: str) -> None:
    """Check that only this machine can reach an address.

    Raises:
        AccessError: another machine could.
    """
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise AccessError(f"GRACESTREAM_CONSOLE_HOST: no address is known for {host!r} ({error})") from error
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise AccessError(
            f"GRACESTREAM_CONSOLE_HOST is {host!r}, which other machines can reach, and the console has no users or"
            " passwords; set it to 127.0.0.1, and reach it from elsewhere through an SSH tunnel"
        )


class SecurityMiddleware:
    """Rejects foreign requests, and adds the headers to each response."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in RESPONSE_HEADERS.items():
                    headers[name] = value
            await send(message)

        fault = _fault(scope["method"], Headers(scope=scope))
        if fault:
            await PlainTextResponse(f"{fault}\n", 403)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def _fault(method: str, headers: Headers) -> str:
    """Why a request is rejected; empty if it is accepted."""
    host = headers.get("host", "")
    if not _is_loopback_name(urlsplit(f"//{host}").hostname or ""):
        return "open the console by a loopback address, such as http://127.0.0.1"
    if method in SAFE_METHODS:
        return ""
    site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    if site == "same-origin" or (site is None and origin is not None and urlsplit(origin).netloc == host):
        return ""
    return "this request does not come from a page of the console"


def _is_loopback_name(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
