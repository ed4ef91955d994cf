"""Settings of the console."""

from pathlib import Path

from pydantic import Field

from gracestream.pipeline.settings.group import SettingsGroup, group_config


class ConsoleSettings(SettingsGroup):
    """The console: its address, and the file that holds what it shows."""

    model_config = group_config("CONSOLE_")

    host: str = Field("127.0.0.1", min_length=1, description="Address of the console: a loopback address.")
    port: int = Field(8090, ge=0, le=65535, description="Port of the console; 0: a free port, which it prints.")
    author: str = Field(
        "console", min_length=1, max_length=256, description="Author of the feedback that the console sends."
    )
    key: Path | None = Field(
        None, description="File of the private key with which the console signs; none: it does not sign."
    )
    file: Path = Field(
        Path("~/.cache/gracestream/console.db"),
        description="File of the console's tables. It can be deleted: the console builds it from the topics.",
    )
    max_predictions: int = Field(1_000_000, ge=100, description="Predictions that the console keeps, the newest.")
