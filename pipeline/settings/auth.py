"""Settings of the acceptance of feedback: authors, signatures and rates."""

from typing import Annotated

from pydantic import Field

from gracestream.pipeline.settings.group import NONE_WORD, SettingsGroup


class AuthSettings(SettingsGroup):
    """Whose feedback the editor accepts, and how much of it."""

    authors_file: str | None = Field(
        None,
        min_length=1,
        description="TOML file with the authors, their keys and roles; by default no list of authors.",
    )
    require_signature: bool = Field(False, description="Reject feedback that is not signed by an author on the list.")
    feedback_rate_limit: Annotated[int | None, NONE_WORD] = Field(
        None,
        ge=1,
        description="Limit on the feedback records accepted from one author per minute; by default no limit.",
    )
