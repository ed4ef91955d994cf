"""SASL and TLS of the Kafka clients, and recognition of final failures.

1. Every Kafka client gets its options from `kafka_security_options`, so all of them trust the same authorities.
2. `permanent_kafka_failure` recognises failures that a retry cannot mend: a wrong password, an untrusted certificate.
   The libraries would retry for ever.
3. No message made here contains a password.
"""

import re
import ssl
from typing import Any

from aiokafka.errors import (
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)

from gracestream.pipeline.kafka.tls import create_tls_context, error_message, load_client_cert, permanent_tls_failure
from gracestream.pipeline.settings import KafkaSettings, secret_text

ACL_HINT = "deploy/acls.sh says who may do what"


def kafka_security_options(settings: KafkaSettings) -> dict[str, Any]:
    """Security options for clients of kafka-python and of aiokafka.

    Raises:
        SettingsError: a file of certificates or keys is not what it must be.
    """
    options: dict[str, Any] = {"security_protocol": settings.security_protocol}
    if settings.uses_sasl:
        options |= {
            "sasl_mechanism": settings.sasl_mechanism,
            "sasl_plain_username": settings.username,
            "sasl_plain_password": secret_text(settings.password),
        }
    if settings.uses_tls:
        options["ssl_context"] = kafka_tls_context(settings)
    return options


def kafka_tls_context(settings: KafkaSettings) -> ssl.SSLContext:
    """The TLS context of Kafka clients: the trusted authorities, and the client certificate.

    Raises:
        SettingsError: a file of certificates or keys is not what it must be.
    """
    context = create_tls_context(settings.ca, "GRACESTREAM_KAFKA_CA")
    context.check_hostname = settings.check_hostname
    if settings.certificate:
        password = secret_text(settings.key_password)
        load_client_cert(context, settings.certificate, settings.key, "GRACESTREAM_KAFKA", password)
    return context


def permanent_kafka_failure(error: BaseException, settings: KafkaSettings) -> str | None:
    """The reason and the remedy if a retry cannot help; None if the failure may be temporary."""
    if isinstance(error, SaslAuthenticationFailed | UnsupportedSaslMechanismError):
        return (
            f"Kafka at {settings.servers} does not accept the user {settings.username!r} by"
            f" {settings.sasl_mechanism} ({error_message(error)}); check GRACESTREAM_KAFKA_USERNAME,"
            " GRACESTREAM_KAFKA_PASSWORD and GRACESTREAM_KAFKA_SASL_MECHANISM"
        )
    check = "GRACESTREAM_KAFKA_SECURITY_PROTOCOL"
    return permanent_tls_failure(error, f"Kafka at {settings.servers}", "GRACESTREAM_KAFKA", check)


def describe_error(error: Exception) -> str:
    """The text of an error of either library, for users.

    Authorization errors are shortened: their text holds the whole rejected request.
    """
    text = str(error) or type(error).__name__
    denied = re.search(r"(Topic|Group|Cluster|TransactionalId)AuthorizationFailed", text)
    if denied is None:
        return text
    return f"Kafka does not allow this user to do this ({denied[0]}); {ACL_HINT}"


def describe_kafka_user(settings: KafkaSettings) -> str:
    """The identity of this client at Kafka, for messages: its user, its certificate, or none."""
    if settings.username:
        return f"the user {settings.username!r}"
    if settings.certificate:
        return f"the user of the certificate {settings.certificate!r}"
    return "users without a name"
