"""Settings of replicas: micro-batches, waits, and the check of answers."""

from pydantic import Field, FiniteFloat

from gracestream.pipeline.settings.group import SettingsGroup


class ServingSettings(SettingsGroup):
    """How replicas answer requests."""

    check_answers: bool = Field(
        True,
        description="If the value of an entry does not produce its target on a prompt, answer unedited (near miss).",
    )
    request_batch_size: int = Field(16, ge=1, description="Limit on the requests in one micro-batch.")
    batch_max_wait: FiniteFloat = Field(0.02, ge=0, description="Seconds that a micro-batch waits for more requests.")
    min_seq_wait: FiniteFloat = Field(5.0, ge=0, description="Seconds that a request waits for its `min_seq`.")
