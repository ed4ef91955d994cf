"""Settings of Redis or Valkey: the address, security, and the tolerance of outages."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from pydantic import Field, FiniteFloat, SecretStr

from gracestream.pipeline.settings.group import SettingsGroup, group_config


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
    ca: str | None = Field(
        None,
        min_length=1,
        description="File (PEM) of the authorities that may sign Redis's certificate; by default the system's.",
    )
    certificate: str | None = Field(
        None, min_length=1, description="File (PEM) of the client certificate shown to Redis."
    )
    key: str | None = Field(
        None, min_length=1, description="File (PEM) of its key; by default in the file of the certificate."
    )
    outage_grace: FiniteFloat = Field(
        5.0,
        ge=0,
        description="Seconds to wait for Redis: at start, and when it fails. Then a worker starts without it, and a"
        " replica follows the log instead.",
    )

    def contradictions(self) -> Iterator[str]:
        """Two passwords, TLS files without TLS, and files that cannot be read."""
        yield from self._url_contradictions()
        if self.key and not self.certificate:
            yield "GRACESTREAM_REDIS_KEY is set without GRACESTREAM_REDIS_CERTIFICATE"
        yield from self.unreadable_files("ca", "certificate", "key")

    def _url_contradictions(self) -> Iterator[str]:
        try:
            url = urlsplit(self.url)
        except ValueError:
            return  # not a URL; `ping_redis` reports it
        if self.password and url.password:
            yield "GRACESTREAM_REDIS_PASSWORD is set, and GRACESTREAM_REDIS has a password too: keep one of them"
        for field in ("ca", "certificate", "key"):
            if getattr(self, field) and url.scheme != "rediss":
                yield f"{self.variable(field)} is set, and GRACESTREAM_REDIS does not begin with rediss://"
