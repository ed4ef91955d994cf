"""Waits for a service at start, and ends at once if waiting cannot help."""

import socket
import time
from collections.abc import Callable

from gracestream.pipeline.errors import UserError

ProgressCallback = Callable[[str], None]
"""Receives a line of text that reports the progress."""

REPORT_INTERVAL_SECONDS = 5.0
"""Seconds after which an unchanged reason for waiting is reported again."""


class UnreachableError(UserError):
    """Kafka or Redis did not answer in time. The text names the address and the setting to check."""


class AccessDeniedError(UserError):
    """Kafka or Redis rejects the user or certificate, or is not trusted. The text names the setting to check."""


def is_dns_failure(error: BaseException | None) -> bool:
    """Whether an error, or an error that it wraps, is a host name without an address. redis-py wraps such errors."""
    while error is not None:
        if isinstance(error, socket.gaierror | UnicodeError):  # Python raises UnicodeError for an invalid host name
            return True
        error = error.__cause__ or error.__context__
    return False


def wait_until_reachable(
    service: str,
    protocol: str,
    variable: str,
    ping: Callable[[], object],
    retriable_errors: tuple[type[Exception], ...],
    *,
    is_set: bool,
    timeout_seconds: float,
    await_name: bool,
    report: ProgressCallback,
) -> None:
    """Ping a service, about once a second, until it answers.

    Args:
        service: Name and address of the service, for messages.
        protocol: Protocol, for messages, such as "over SSL"; may be empty.
        variable: Name of the setting that holds the address.
        ping: Pings once, and raises if there is no answer.
        retriable_errors: Errors of `ping` after which it is called again, besides OSError and ValueError.
        is_set: Whether the setting was set; if not, the remedy is to set it.
        timeout_seconds: Limit on the waiting time.
        await_name: Retry an unknown host name, too.
        report: Receives a line of progress when the reason changes, and every `REPORT_INTERVAL_SECONDS`.

    Raises:
        UnreachableError: no answer within `timeout_seconds`; or, without `await_name`, an unknown host name.
        Exception: any other error of `ping`, at once.
    """
    caught: tuple[type[Exception], ...] = (*retriable_errors, OSError, ValueError)
    deadline = time.monotonic() + timeout_seconds
    remedy = f"is it running, and is {variable} right?"
    if not is_set:
        remedy = f"{variable} is not set: set it to an address, such as the one that `gracestream up` prints"
    reported_reason, reported_at = "", 0.0
    while True:
        try:
            ping()
        except caught as error:
            now, reason = time.monotonic(), str(error) or type(error).__name__
            if is_dns_failure(error):
                reason = f"its host name is unknown: {reason}"
                if not await_name:
                    raise UnreachableError(f"{service} cannot be reached, {reason}; is {variable} right?") from error
            remaining = deadline - now
            if remaining <= 0:
                answer = f"does not answer {protocol}".rstrip()
                raise UnreachableError(f"{service} {answer} ({reason}); {remedy}") from error
            if reason != reported_reason or now >= reported_at + REPORT_INTERVAL_SECONDS:
                report(f"waiting for {service}, {remaining:.0f} s more ({reason})")
                reported_reason, reported_at = reason, now
            time.sleep(min(1.0, remaining))
        else:
            return
