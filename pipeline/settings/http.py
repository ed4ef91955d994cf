"""Settings of a worker's HTTP endpoints."""

from pydantic import Field

from gracestream.pipeline.settings.group import SettingsGroup, group_config


class HttpSettings(SettingsGroup):
    """The address of a worker's HTTP endpoints."""

    model_config = group_config("HTTP_")

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address of the HTTP endpoints `/live`, `/ready`, `/metrics` and `/state`.",
    )
    port: int = Field(
        8080,
        ge=0,
        le=65535,
        description="Port of the HTTP endpoints; 0: a free port, which the worker logs at its start.",
    )
    feedback: bool = Field(
        False,
        description="Whether a vLLM server takes corrections over HTTP, from everybody who may ask it for answers.",
    )
