"""The wait for a service at start. It ends at once where waiting is hopeless."""

import socket
import time
from collections.abc import Callable

from gracestream.pipeline.errors import UserError

ProgressCallback = Callable[[str], None]

REPORT_INTERVAL_SECONDS = 5.0
"""Seconds between two lines that say the same of a wait."""


class UnreachableError(UserError):
    """Kafka or Redis did not answer in time; the text says where it was looked for."""


class AccessDeniedError(UserError):
    """Kafka or Redis does not take us, or we do not trust it; the text says which setting to look at."""


def is_dns_failure(error: BaseException | None) -> bool:
    """Whether an error is that of a host name without an address; redis-py wraps it."""
    while error is not None:
        if isinstance(error, socket.gaierror | UnicodeError):  # the latter for what no host can be called
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
    """Ask until a service answers.

    Args:
        service: The service and its address.
        protocol: Over which protocol; may be empty.
        variable: The setting that holds the address.
        ping: Asks once, and raises where there is no answer.
        retriable_errors: What `ping` raises where asking again may help, beside OSError and ValueError.
        is_set: Whether the setting was set.
        timeout_seconds: Seconds until waiting ends.
        await_name: Wait for a host name that is unknown yet, too.
        report: Is told what is waited for.

    Raises:
        UnreachableError: `timeout_seconds` has passed, or the host name is unknown.
    """
    caught: tuple[type[Exception], ...] = (*retriable_errors, OSError, ValueError)
    deadline = time.monotonic() + timeout_seconds
    remedy = f"is it running, and is {variable} right?"
    if not is_set:
        remedy = f"{variable} is not set: set it to an address, such as the one that `gracestream up` prints"
    told, told_at = "", 0.0
    while True:
        try:
            ping()
        except caught as error:
            now, reason = time.monotonic(), str(error) or type(error).__name__
            if is_dns_failure(error):
                reason = f"its host name is unknown: {reason}"
                if not await_name:
                    raise UnreachableError(f"{service} cannot be reached, {reason}; is {variable} right?") from error
            left = deadline - now
            if left <= 0:
                answer = f"does not answer {protocol}".rstrip()
                raise UnreachableError(f"{service} {answer} ({reason}); {remedy}") from error
            if reason != told or now >= told_at + REPORT_INTERVAL_SECONDS:
                report(f"waiting for {service}, {left:.0f} s more ({reason})")
                told, told_at = reason, now
            time.sleep(min(1.0, left))
        else:
            return
