"""Settings of a process: its name, log output, secrets and shutdown."""

from typing import Literal

from pydantic import Field, FiniteFloat

from gracestream.pipeline.settings.group import SettingsGroup


class ProcessSettings(SettingsGroup):
    """The name of a process, its log output, its folder of secrets, and its shutdown."""

    worker_name: str | None = Field(
        None,
        min_length=1,
        description="Name of this worker in logs and predictions; by default host name and process id.",
    )
    log_format: Literal["json", "text"] = Field("json", description="Format of the log output on standard error.")
    secrets_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder of files that have the names of these variables and contain their values.",
    )
    shutdown_timeout: FiniteFloat = Field(
        9.0,
        gt=0,
        description="Seconds after SIGTERM within which a worker stops. Another worker takes unfinished work.",
    )
