"""Settings of snapshots: where, how often and how many."""

from typing import Annotated

from pydantic import Field

from gracestream.pipeline.settings.group import NONE_WORD, SettingsGroup, group_config


class SnapshotSettings(SettingsGroup):
    """Where snapshots are, how often the editor writes one, and how many are kept."""

    model_config = group_config("SNAPSHOT_")

    url: str | None = Field(
        None,
        min_length=1,
        repr=False,
        description="Folder or fsspec URL for snapshots, the same for all workers; by default no snapshots.",
    )
    interval: Annotated[int | None, NONE_WORD] = Field(
        1000, ge=1, description="Deltas between two snapshots by the editor; none: the editor writes none."
    )
    keep: int = Field(3, ge=1, description="Number of snapshots to keep; older ones are deleted.")
