"""Settings of Kafka: the cluster, the names in it, security, and the limits of its clients."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, FiniteFloat, SecretStr

from gracestream.pipeline.settings.group import SettingsGroup, group_config
from gracestream.pipeline.settings.tls import CaFile, CertificateFile, KeyFile, tls_contradictions


class KafkaSettings(SettingsGroup):
    """The cluster, the prefix of names in it, security, timeouts of clients, and the size of records that they read."""

    model_config = group_config("KAFKA_")

    servers: str = Field(
        "localhost:9092",
        validation_alias="GRACESTREAM_KAFKA",
        description="Kafka bootstrap servers, `host:port`, comma separated.",
    )
    topic_prefix: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]*$",
        validation_alias="GRACESTREAM_TOPIC_PREFIX",
        description="Put before every topic, group and Redis key.",
    )
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT",
        description="Protocol of Kafka connections: with TLS (SSL), with user and password (SASL), or both.",
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "SCRAM-SHA-512", description="Mechanism by which the user and password are verified."
    )
    username: str | None = Field(None, min_length=1, description="User of Kafka, for SASL.")
    password: SecretStr | None = Field(None, description="That user's password.")
    ca: CaFile = None
    certificate: CertificateFile = None
    key: KeyFile = None
    key_password: SecretStr | None = Field(None, description="Password of that key, if it has one.")
    check_hostname: bool = Field(True, description="Whether Kafka's certificate must match the host name.")
    startup_timeout: FiniteFloat = Field(
        60.0,
        gt=0,
        validation_alias="GRACESTREAM_STARTUP_TIMEOUT",
        description="Seconds to wait at start for Kafka. A starting replica also ends after so many without progress in"
        " the log.",
    )
    session_timeout: FiniteFloat = Field(
        10.0,
        gt=0,
        validation_alias="GRACESTREAM_SESSION_TIMEOUT",
        description="Seconds without a heartbeat after which Kafka assigns a worker's partitions to another one.",
    )
    stall_timeout: FiniteFloat = Field(
        300.0,
        gt=0,
        le=7 * 24 * 3600,
        validation_alias="GRACESTREAM_STALL_TIMEOUT",
        description="Seconds after which a batch or a decision is stalled: `/live` answers 503, others take it.",
    )
    max_record_bytes: int = Field(
        262_144,
        ge=1024,
        le=2**20,
        validation_alias="GRACESTREAM_MAX_RECORD_BYTES",
        description="A larger request or feedback record is rejected; at most 1 MiB.",
    )

    def topic(self, name: str) -> str:
        """The full name of a topic or group in this deployment: with the prefix."""
        return self.topic_prefix + name

    @property
    def uses_sasl(self) -> bool:
        """Whether clients log in with a user and a password."""
        return self.security_protocol.startswith("SASL")

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.security_protocol.endswith("SSL")

    def contradictions(self) -> Iterator[str]:
        """Credentials that the protocol lacks or does not use, and files that cannot be read."""
        protocol = f"GRACESTREAM_KAFKA_SECURITY_PROTOCOL={self.security_protocol}"
        for field in ("username", "password"):
            if self.uses_sasl and not getattr(self, field):
                yield f"{self.variable(field)} is not set, and {protocol} needs it"
            if not self.uses_sasl and getattr(self, field):
                yield (
                    f"{self.variable(field)} is set, and {protocol} does not use it: choose SASL_SSL, or unset one of"
                    " them"
                )
        without_tls = f"{protocol} is without TLS: choose SSL or SASL_SSL, or unset one of them"
        yield from tls_contradictions(self, None if self.uses_tls else without_tls)
