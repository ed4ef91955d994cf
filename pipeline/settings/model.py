"""Settings of the model: its weights and edited layer, the codebook of its edits, its queries and its limits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from gracestream.pipeline.settings.group import NONE_WORD, SettingsGroup


class ModelSettings(SettingsGroup):
    """The model, its edited layer, the codebook of its edits, the source of queries, and limits on tokens."""

    name: str = Field(
        "smollm2",
        min_length=1,
        validation_alias="GRACESTREAM_MODEL",
        description="A local folder, a hub id, `id@revision`, or a name that `gracestream up` knows.",
    )
    layer: str | None = Field(
        None,
        min_length=1,
        description="The module to wrap, as `gracestream layers` lists; by default that of a model known by name.",
    )
    codebook: str = Field("default", min_length=1, description="Name of the codebook, written into every delta.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="The model's weights.")
    threads: Annotated[int | None, NONE_WORD] = Field(
        None, ge=1, description="Torch threads of a worker; by default torch's own choice."
    )
    cache_dir: Path = Field(Path("~/.cache/gracestream"), description="Folder for converted models and fingerprints.")

    query_source: Literal["auto", "last", "first", "mean", "encoder"] = Field(
        "auto",
        description="Source of the query: a token of the prompt, or encoder: a sentence encoder. auto: encoder for a"
        " causal language model unless `policy` is paper; otherwise the last token, or [CLS] of a classifier.",
    )
    encoder: str = Field(
        "minilm",
        min_length=1,
        description="The sentence encoder that makes queries: a local folder, a hub id, `id@revision`, or `minilm`.",
    )
    inject_tokens: Literal["auto", "last", "all"] = Field(
        "auto", description="Which prompt tokens take the value; auto: last for generators, all for classifiers."
    )

    default_max_new_tokens: int = Field(
        64, ge=1, description="Tokens to generate if the request does not set `max_new_tokens`."
    )
    max_new_tokens: int = Field(512, ge=1, description="A request for more tokens is rejected.")
    max_input_tokens: int = Field(512, ge=1, description="A prompt of more tokens is rejected.")
    max_target_tokens: int = Field(64, ge=1, description="A correction whose target has more tokens is rejected.")

    def contradictions(self) -> Iterator[str]:
        """A default that exceeds the limit."""
        if self.max_new_tokens < self.default_max_new_tokens:
            yield (
                f"GRACESTREAM_MAX_NEW_TOKENS: {self.max_new_tokens} should be at least"
                f" GRACESTREAM_DEFAULT_MAX_NEW_TOKENS, which is {self.default_max_new_tokens}"
            )
