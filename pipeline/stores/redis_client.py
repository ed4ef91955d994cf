"""Creates Redis clients from the settings, with TLS, and waits for Redis at start.

1. No message made here contains a password.
2. The wait ends at once on a final failure (`permanent_redis_failure`): a wrong password, an untrusted certificate.
3. A call takes a limited time and returns an answer of limited size (`pipeline.stores.redis_bounds`).
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
from gracestream.pipeline.settings import RedisSettings, SettingsError, secret_text
from gracestream.pipeline.stores.redis_bounds import BoundedParser, ask_redis


def redis_client(settings: RedisSettings, timeout: float = 1.0) -> Redis:
    """A Redis client. An answer, and a connection, must arrive within `timeout` seconds.

    The limit keeps a lost Redis from delaying requests for long.
    """
    return Redis.from_url(
        settings.url,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        parser_class=BoundedParser,
        **redis_security_options(settings),
    )


def ping_redis(settings: RedisSettings, timeout_seconds: float) -> None:
    """Check once that Redis answers within `timeout_seconds`.

    Raises:
        AccessDeniedError: Redis rejects the user or certificate, or its certificate is not trusted.
        SettingsError: the URL in the settings is invalid.
        RedisError, OSError: Redis does not answer, or its answer is malformed.
    """
    try:
        client = redis_client(settings, timeout_seconds)
    except ValueError as error:  # its text is not shown: it may contain a part of the password
        raise SettingsError(
            "GRACESTREAM_REDIS is not a URL of a Redis such as redis://localhost:6379/0 or rediss://user:password@host:6379"
            " (with @ : / ? # in a password as %40 %3A %2F %3F %23)"
        ) from error
    try:
        with client:
            ask_redis(client, client.ping)
    except (RedisError, OSError) as error:
        if failure := permanent_redis_failure(error, settings):
            raise AccessDeniedError(failure) from error
        raise


def wait_for_redis(settings: RedisSettings, report: ProgressCallback) -> None:
    """Wait until Redis answers, for at most `redis_outage_grace` seconds. Workers start without it after that.

    Raises:
        UnreachableError: no answer within `redis_outage_grace`.
        SettingsError: the URL in the settings is invalid; raised at once.
        AccessDeniedError: Redis rejects the user or certificate, or is not trusted; raised at once.
    """
    wait_until_reachable(
        f"Redis at {redact_url(settings.url)}",
        "",
        "GRACESTREAM_REDIS",
        lambda: ping_redis(settings, 1.0),
        (RedisError,),
        is_set="url" in settings.model_fields_set,
        timeout_seconds=settings.outage_grace,
        await_name=True,
        report=report,
    )


def redis_security_options(settings: RedisSettings) -> dict[str, Any]:
    """Security options for redis-py's `from_url`. A password in the URL takes precedence.

    Raises:
        SettingsError: a file of certificates or keys cannot be used.
    """
    options: dict[str, Any] = {}
    if password := secret_text(settings.password):
        options["password"] = password
    if settings.ca:
        create_tls_context(settings.ca, "GRACESTREAM_REDIS_CA")  # only checks the file
        options["ssl_ca_certs"] = settings.ca
    if settings.certificate:
        load_client_cert(ssl.create_default_context(), settings.certificate, settings.key, "GRACESTREAM_REDIS", None)
        options["ssl_certfile"] = settings.certificate
        options["ssl_keyfile"] = settings.key or settings.certificate
    return options


def permanent_redis_failure(error: BaseException, settings: RedisSettings) -> str | None:
    """The reason and the remedy if a retry cannot help; None if the failure may be temporary."""
    where = f"Redis at {redact_url(settings.url)}"
    if isinstance(error, AuthenticationError | NoPermissionError):
        return (
            f"{where} rejects this user ({error_message(error)}); check the user and the password in"
            " GRACESTREAM_REDIS and GRACESTREAM_REDIS_PASSWORD"
        )
    return permanent_tls_failure(error, where, "GRACESTREAM_REDIS", "the scheme of GRACESTREAM_REDIS")


def redact_url(url: str) -> str:
    """The URL of a Redis without user, password and options, for messages.

    Everything up to the last @ is removed, because a password without percent-encoding may contain any character.
    """
    return re.sub(r"//.*@", "//", url, flags=re.DOTALL).partition("?")[0]
