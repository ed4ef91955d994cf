"""Settings of replicas: the engine, waits, and the check of answers."""

from typing import Literal

from pydantic import Field, FiniteFloat

from gracestream.pipeline.settings.group import SettingsGroup


class ServingSettings(SettingsGroup):
    """How replicas answer requests."""

    check_answers: bool = Field(
        True,
        description="If the value of an entry does not produce its target on a prompt, answer unedited (near miss).",
    )
    engine: Literal["auto", "batch", "continuous", "vllm"] = Field(
        "auto",
        description="What runs the model: `batch` (whole answers together), `continuous` (requests join and leave"
        " between tokens) or `vllm`. `auto` is continuous for causal language models that support it.",
    )
    vllm_args: str = Field(
        "", description="Arguments for the engine `vllm`, as for `vllm serve`, such as `--max-model-len 4096`."
    )
    request_batch_size: int = Field(16, ge=1, description="Limit on the requests in the model at one time.")
    batch_max_wait: FiniteFloat = Field(
        0.02, ge=0, description="Seconds that requests from Kafka wait for more, to be taken together."
    )
    min_seq_wait: FiniteFloat = Field(5.0, ge=0, description="Seconds that a request waits for its `min_seq`.")
