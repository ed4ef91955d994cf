"""SASL and TLS: what the settings mean to each client library, and which failures no patience mends.

1. Every client of Kafka gets the same options from `kafka_security`, and trusts by the same `ssl.SSLContext`.
2. What `kafka_refusal` and `redis_refusal` recognise is final: a wrong password or a certificate that is not trusted
   stays so however often it is tried, where the libraries themselves would try for ever.
3. No text made here holds a password.
"""

import re
import ssl
from typing import Any
from urllib.parse import unquote

from aiokafka.errors import (
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from redis.exceptions import AuthenticationError, NoPermissionError

from gracestream.pipeline.settings import Settings, SettingsError

WHO_MAY = "deploy/acls.sh says who may do what"


def kafka_security(settings: Settings) -> dict[str, Any]:
    """Options of kafka-python's clients, and of aiokafka's.

    Raises:
        SettingsError: a file of certificates or keys is not what it must be.
    """
    options: dict[str, Any] = {"security_protocol": settings.kafka_security_protocol}
    if settings.kafka_security_protocol.startswith("SASL"):
        options |= {
            "sasl_mechanism": settings.kafka_sasl_mechanism,
            "sasl_plain_username": settings.kafka_username,
            "sasl_plain_password": settings.kafka_password.get_secret_value(),
        }
    if settings.kafka_security_protocol.endswith("SSL"):
        options["ssl_context"] = kafka_tls(settings)
    return options


def kafka_tls(settings: Settings) -> ssl.SSLContext:
    """Whom clients trust to be Kafka, and the certificate that they show it.

    Raises:
        SettingsError: a file of certificates or keys is not what it must be.
    """
    context = _trusting(settings.kafka_ca, "GRACESTREAM_KAFKA_CA")
    context.check_hostname = settings.kafka_check_hostname
    if settings.kafka_certificate:
        password = settings.kafka_key_password.get_secret_value()
        _show(context, settings.kafka_certificate, settings.kafka_key, "GRACESTREAM_KAFKA", password)
    return context


def redis_security(settings: Settings) -> dict[str, Any]:
    """Options of redis-py's `from_url`, beside the URL, whose own password wins.

    Raises:
        SettingsError: a file of certificates or keys is not what it must be.
    """
    options: dict[str, Any] = {}
    if password := settings.redis_password.get_secret_value():
        options["password"] = password
    if settings.redis_ca:
        _trusting(settings.redis_ca, "GRACESTREAM_REDIS_CA")
        options["ssl_ca_certs"] = settings.redis_ca
    if settings.redis_certificate:
        _show(ssl.create_default_context(), settings.redis_certificate, settings.redis_key, "GRACESTREAM_REDIS", "")
        options["ssl_certfile"] = settings.redis_certificate
        options["ssl_keyfile"] = settings.redis_key or settings.redis_certificate
    return options


def without_password(url: str) -> str:
    """The URL of a Redis as it may be shown: without user, password and options.

    Everything up to the last @ goes: a password that was not percent-encoded may hold any character.
    """
    return re.sub(r"//.*@", "//", url, flags=re.DOTALL).partition("?")[0]


_URL_USER = re.compile(r"(?<=://)(?:([^/@]*):(.*)|([^/@]*))@", re.DOTALL)
"""User and password, which may hold any character, since secret keys of S3 have slashes."""


def url_secrets(url: str) -> tuple[str, list[str]]:
    """A URL of snapshots as it may be shown, without user, password and options; and what was left out of it."""
    if "://" not in url or url.startswith("file://"):
        return url, []
    shown, _, options = _URL_USER.sub("", url).partition("?")
    found = [part for match in _URL_USER.finditer(url) for part in (match[0], *match.groups()) if part]
    return shown, [*found, *(unquote(part) for part in found), *([options] if options else [])]


def kafka_refusal(error: BaseException, settings: Settings) -> str | None:
    """What is wrong, where trying again cannot help; None for all that may pass."""
    if isinstance(error, SaslAuthenticationFailed | UnsupportedSaslMechanismError):
        return (
            f"Kafka at {settings.kafka} does not accept the user {settings.kafka_username!r} by"
            f" {settings.kafka_sasl_mechanism} ({_words(error)}); check GRACESTREAM_KAFKA_USERNAME,"
            " GRACESTREAM_KAFKA_PASSWORD and GRACESTREAM_KAFKA_SASL_MECHANISM"
        )
    check = "GRACESTREAM_KAFKA_SECURITY_PROTOCOL"
    return _tls_refusal(error, f"Kafka at {settings.kafka}", "GRACESTREAM_KAFKA", check)


def redis_refusal(error: BaseException, settings: Settings) -> str | None:
    """Likewise, for what a client of Redis raised."""
    where = f"Redis at {without_password(settings.redis)}"
    if isinstance(error, AuthenticationError | NoPermissionError):
        return (
            f"{where} refuses this user ({_words(error)}); check the user and the password in GRACESTREAM_REDIS and"
            " GRACESTREAM_REDIS_PASSWORD"
        )
    return _tls_refusal(error, where, "GRACESTREAM_REDIS", "the scheme of GRACESTREAM_REDIS")


def plainly(error: Exception) -> str:
    """An error of either library as one line; what an authorizer refused, without the whole request that it refused."""
    text = str(error) or type(error).__name__
    refused = re.search(r"(Topic|Group|Cluster|TransactionalId)AuthorizationFailed", text)
    if refused is None:
        return text
    return f"Kafka does not allow this user to do this ({refused[0]}); {WHO_MAY}"


def kafka_user(settings: Settings) -> str:
    """Who we are to Kafka, in words."""
    if settings.kafka_username:
        return f"the user {settings.kafka_username!r}"
    if settings.kafka_certificate:
        return f"the user of the certificate {settings.kafka_certificate!r}"
    return "users without a name"


def _tls_refusal(error: BaseException, where: str, variable: str, protocol: str) -> str | None:
    tls = _tls_error(error)
    if isinstance(tls, ssl.SSLCertVerificationError):
        return f"{where} is not trusted: {tls.verify_message}; check {variable}_CA, and the host's name in {variable}"
    reason = "" if tls is None else str(tls.reason)
    if reason == "WRONG_VERSION_NUMBER":
        return f"{where} does not speak TLS on that port; check {protocol}"
    if re.search(r"ALERT.*(CERTIFICATE|UNKNOWN_CA|HANDSHAKE_FAILURE|ACCESS_DENIED)", reason):
        return f"{where} refuses the client's certificate ({reason}); check {variable}_CERTIFICATE and {variable}_KEY"
    return None


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS failure behind an error: both libraries wrap it, as its cause, its context or its argument."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return error
        wrapped = next((argument for argument in error.args if isinstance(argument, BaseException)), None)
        error = error.__cause__ or error.__context__ or wrapped
    return None


def _trusting(authorities: str, variable: str) -> ssl.SSLContext:
    """Trusts the authorities in a file, or those of the system where none is named."""
    try:
        return ssl.create_default_context(cafile=authorities or None)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise SettingsError(f"{variable}: {authorities!r} has no certificate in PEM: {error}") from error


def _show(context: ssl.SSLContext, certificate: str, key: str, variable: str, password: str) -> None:
    """Load the client certificate; a key that wants a password gets the one given, never one from the terminal."""

    def given() -> str:
        if not password:
            raise SettingsError(f"{variable}_KEY: the key in {key or certificate!r} has a password, and none is given")
        return password

    try:
        context.load_cert_chain(certificate, key or None, given)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{variable}_CERTIFICATE: {certificate!r} and its key in {key or certificate!r} are no pair in PEM that"
            f" can be read: {error}"
        ) from error


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
