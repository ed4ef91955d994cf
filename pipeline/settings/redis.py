"""Settings of Redis or Valkey: the address, security, and the tolerance of outages."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from pydantic import Field, FiniteFloat, SecretStr

from gracestream.pipeline.settings.group import SettingsGroup, group_config
from gracestream.pipeline.settings.tls import CaFile, CertificateFile, KeyFile, tls_contradictions


class RedisSettings(SettingsGroup):
    """The address of Redis or Valkey, security, and the tolerance of outages."""

    model_config = group_config("REDIS_")

    url: str = Field(
        "redis://localhost:6379/0",
        repr=False,
        validation_alias="GRACESTREAM_REDIS",
        description="URL of Redis or Valkey; `rediss://` for TLS.",
    )
    password: SecretStr | None = Field(None, description="Password of Redis, if its URL has none.")
    ca: CaFile = None
    certificate: CertificateFile = None
    key: KeyFile = None
    outage_grace: FiniteFloat = Field(
        5.0,
        ge=0,
        description="Seconds to wait for Redis: at start, and when it fails. Then a worker starts without it, and a"
        " replica follows the log instead.",
    )

    def contradictions(self) -> Iterator[str]:
        """Two passwords, TLS files without TLS, and files that cannot be read."""
        without_tls = None
        try:
            url = urlsplit(self.url)
        except ValueError:
            pass  # not a URL; `ping_redis` reports it
        else:
            if self.password and url.password:
                yield "GRACESTREAM_REDIS_PASSWORD is set, and GRACESTREAM_REDIS has a password too: keep one of them"
            if url.scheme != "rediss":
                without_tls = "GRACESTREAM_REDIS does not begin with rediss://"
        yield from tls_contradictions(self, without_tls)
