"""All settings: environment variables with the prefix `GRACESTREAM_`, or files of these names, in groups.

1. `load_settings` checks, at the start of a process, everything that can be checked without a connection. It reports
   all faults at once.
2. Secrets do not appear in logs or errors. Passwords are `SecretStr`. The URLs of Redis and of snapshots, which may
   contain a password, are excluded from `repr`, and no error shows their values.
3. Names of variables are flat: `GRACESTREAM_KAFKA_CA` sets `settings.kafka.ca`. A function takes the groups that it
   uses.

Not promised: that a path or an address stays valid after the start.
"""

from gracestream.pipeline.settings.auth import AuthSettings
from gracestream.pipeline.settings.console import ConsoleSettings
from gracestream.pipeline.settings.editing import EditingSettings, Policy
from gracestream.pipeline.settings.group import SettingsError, SettingsGroup, secret_text
from gracestream.pipeline.settings.http import HttpSettings
from gracestream.pipeline.settings.kafka import KafkaSettings
from gracestream.pipeline.settings.loading import (
    SECRET_VARIABLES,
    VARIABLES,
    Settings,
    Variable,
    load_settings,
    to_environment_variables,
    to_text,
    unknown_variables,
)
from gracestream.pipeline.settings.model import ModelSettings
from gracestream.pipeline.settings.process import ProcessSettings
from gracestream.pipeline.settings.redis import RedisSettings
from gracestream.pipeline.settings.serving import ServingSettings
from gracestream.pipeline.settings.snapshots import SnapshotSettings

__all__ = [
    "SECRET_VARIABLES",
    "VARIABLES",
    "AuthSettings",
    "ConsoleSettings",
    "EditingSettings",
    "HttpSettings",
    "KafkaSettings",
    "ModelSettings",
    "Policy",
    "ProcessSettings",
    "RedisSettings",
    "ServingSettings",
    "Settings",
    "SettingsError",
    "SettingsGroup",
    "SnapshotSettings",
    "Variable",
    "load_settings",
    "secret_text",
    "to_environment_variables",
    "to_text",
    "unknown_variables",
]
