"""The base of all groups of settings.

A field of a group is one variable. Its name is the group's prefix and the field's name, unless the field names another
variable by `validation_alias`. Names of variables are unique among all groups.
"""

from collections.abc import Iterator

from pydantic import BeforeValidator, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from gracestream.pipeline.errors import UserError

PREFIX = "GRACESTREAM_"
"""The first part of the name of every variable."""


class SettingsError(UserError):
    """A setting is not valid. The text names the environment variable."""


def group_config(prefix: str = "") -> SettingsConfigDict:
    """The configuration of a group whose variables begin with `GRACESTREAM_` and `prefix`.

    Compose passes variables that are not set as empty ones, so an empty variable counts as not set.
    """
    return SettingsConfigDict(
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        alias_generator=lambda field: f"{PREFIX}{prefix}{field.upper()}",
    )


NONE_WORD = BeforeValidator(lambda value: None if value == "none" else value)
"""For a field whose default is not None, or which a user may set explicitly to no limit: `none` stands for None."""


def secret_text(secret: SecretStr | None) -> str | None:
    """A secret in plain text; None if it is not set."""
    return None if secret is None else secret.get_secret_value()


class SettingsGroup(BaseSettings):
    """Settings that are used together. They are read once, at the start of a process, and never change."""

    model_config = group_config()

    @classmethod
    def variable(cls, field: str) -> str:
        """The name of the environment variable of a field."""
        return str(cls.model_fields[field].validation_alias)

    def contradictions(self) -> Iterator[str]:
        """Faults of these settings that no field has by itself, a line each."""
        yield from ()
