"""Redis: a client made from settings, its TLS, and the wait for it at start.

1. No text made here holds a password.
2. What `permanent_redis_failure` recognises is final: waiting ends at once for a wrong password or an untrusted
   certificate.
"""

import re
import ssl
from typing import Any

from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from gracestream.pipeline.kafka import (
    AccessDeniedError,
    ProgressCallback,
    create_tls_context,
    error_message,
    load_client_cert,
    permanent_tls_failure,
    wait_until_reachable,
)
from gracestream.pipeline.settings import Settings, SettingsError
from gracestream.pipeline.stores.redis_bounds import BoundedParser, ask_redis


def redis_client(settings: Settings, timeout: float = 1.0) -> Redis:
    """A client whose calls take `timeout` seconds at most, so that a lost Redis never holds up a batch for long."""
    return Redis.from_url(
        settings.redis,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        parser_class=BoundedParser,
        **redis_security_options(settings),
    )


def ping_redis(settings: Settings, timeout_seconds: float) -> None:
    """See that Redis answers, within `timeout_seconds` seconds.

    Raises:
        AccessDeniedError: it does not take us, or is not trusted.
        SettingsError: the URL is none.
        RedisError, OSError: it does not answer, or its answer is malformed.
    """
    try:
        client = redis_client(settings, timeout_seconds)
    except ValueError as error:  # its text may show a part of the password
        raise SettingsError(
            "GRACESTREAM_REDIS is no URL of a Redis such as redis://localhost:6379/0 or rediss://user:password@host:6379"
            " (with @ : / ? # in a password as %40 %3A %2F %3F %23)"
        ) from error
    try:
        with client:
            ask_redis(client, client.ping)
    except (RedisError, OSError) as error:
        if refused := permanent_redis_failure(error, settings):
            raise AccessDeniedError(refused) from error
        raise


def wait_for_redis(settings: Settings, report: ProgressCallback) -> None:
    """Wait until Redis answers, for as long as a replica does without it before it follows the log.

    Raises:
        UnreachableError: not within `redis_grace`.
        SettingsError: the URL is none.
        AccessDeniedError: it does not take us, or is not trusted; at once.
    """
    wait_until_reachable(
        f"Redis at {redact_url(settings.redis)}",
        "",
        "GRACESTREAM_REDIS",
        lambda: ping_redis(settings, 1.0),
        (RedisError,),
        is_set="redis" in settings.model_fields_set,
        timeout_seconds=settings.redis_grace,
        await_name=True,
        report=report,
    )


def redis_security_options(settings: Settings) -> dict[str, Any]:
    """Options of redis-py's `from_url`, beside the URL, whose own password wins.

    Raises:
        SettingsError: a file of certificates or keys is not what it must be.
    """
    options: dict[str, Any] = {}
    if password := settings.redis_password.get_secret_value():
        options["password"] = password
    if settings.redis_ca:
        create_tls_context(settings.redis_ca, "GRACESTREAM_REDIS_CA")
        options["ssl_ca_certs"] = settings.redis_ca
    if settings.redis_certificate:
        load_client_cert(
            ssl.create_default_context(), settings.redis_certificate, settings.redis_key, "GRACESTREAM_REDIS", ""
        )
        options["ssl_certfile"] = settings.redis_certificate
        options["ssl_keyfile"] = settings.redis_key or settings.redis_certificate
    return options


def permanent_redis_failure(error: BaseException, settings: Settings) -> str | None:
    """Likewise, for what a client of Redis raised."""
    where = f"Redis at {redact_url(settings.redis)}"
    if isinstance(error, AuthenticationError | NoPermissionError):
        return (
            f"{where} refuses this user ({error_message(error)}); check the user and the password in"
            " GRACESTREAM_REDIS and"
            " GRACESTREAM_REDIS_PASSWORD"
        )
    return permanent_tls_failure(error, where, "GRACESTREAM_REDIS", "the scheme of GRACESTREAM_REDIS")


def redact_url(url: str) -> str:
    """The URL of a Redis as it may be shown: without user, password and options.

    Everything up to the last @ goes: a password that was not percent-encoded may hold any character.
    """
    return re.sub(r"//.*@", "//", url, flags=re.DOTALL).partition("?")[0]
