"""Every setting, in one place: environment variables with the prefix `GRACESTREAM_`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, FiniteFloat, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from pipeline.errors import UserError


class Settings(BaseSettings):
    """Read from the environment once, at the start of a process, and never changed after."""

    model_config = SettingsConfigDict(env_prefix="GRACESTREAM_", frozen=True, extra="ignore")

    kafka: str = Field("localhost:9092", description="Kafka bootstrap servers, `host:port`, comma separated.")
    redis: str = Field("redis://localhost:6379/0", description="URL of Redis or Valkey.")
    prefix: str = Field("", pattern=r"^[A-Za-z0-9._-]*$", description="Put before every topic, group and Redis key.")
    codebook: str = Field("default", min_length=1, description="Name of the codebook, written into every delta.")
    startup_timeout: FiniteFloat = Field(60.0, gt=0, description="Seconds to wait for Kafka and Redis at start.")

    model: str = Field("smollm2", description="A local folder, a hub id, or a name that `gracestream up` knows.")
    layer: str = Field(
        "model.layers.23.self_attn.o_proj", description="The module to wrap, as `gracestream layers` lists."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="The model's weights.")
    threads: int = Field(0, ge=0, description="Torch threads of a worker; 0 leaves torch's own choice.")
    query: Literal["auto", "last", "first", "mean"] = Field(
        "auto", description="Which prompt token is the query; auto: the last, or a classifier's [CLS]."
    )
    replace: Literal["auto", "last", "all"] = Field(
        "auto", description="Which prompt tokens take the value; auto: last for generators, all for classifiers."
    )

    policy: Literal["nearest", "paper"] = Field("nearest", description="Codebook maintenance; paper: Algorithm 1.")
    radius: FiniteFloat = Field(1.0, gt=0, description="Radius of a new entry, in units of `radius_unit`.")
    radius_unit: Literal["median", "absolute"] = Field(
        "median", description="median: the median nearest-neighbour distance of recent traffic; absolute: as it is."
    )
    expand: Literal["cover", "paper"] = Field(
        "cover", description="How the paper policy expands: just to cover the query, or by the initial radius."
    )
    guard: bool = Field(True, description="Give an earlier edit an entry of its own when a new one takes its query.")
    traffic: int = Field(512, ge=0, description="Unflagged recent queries that new radii keep clear of; 0: none.")
    seed: int = Field(0, description="Seed of everything random in the editor.")

    max_steps: int = Field(100, ge=1, description="Optimisation steps after which an edit is given up.")
    learning_rate: FiniteFloat = Field(2.0, gt=0, description="Adam's learning rate for values.")
    margin: FiniteFloat = Field(3.0, ge=0, description="Logit margin at which a value counts as trained.")
    init: Literal["layer", "label", "random"] = Field(
        "layer", description="A value starts as the layer's own output, as that of an entry of its label, or at random."
    )

    max_new_tokens: int = Field(64, ge=1, description="Tokens to generate where a request does not say.")
    max_input_tokens: int = Field(512, ge=1, description="A longer prompt is refused.")
    max_target_tokens: int = Field(64, ge=1, description="A longer correction is refused.")
    max_record_bytes: int = Field(262_144, ge=1024, description="A larger request or feedback record is refused.")

    batch: int = Field(16, ge=1, description="Requests of one micro-batch at most.")
    batch_wait: FiniteFloat = Field(0.02, ge=0, description="Seconds that a micro-batch waits for more requests.")
    min_seq_wait: FiniteFloat = Field(5.0, ge=0, description="Seconds that a batch waits for a request's `min_seq`.")
    redis_grace: FiniteFloat = Field(
        5.0, ge=0, description="Seconds without Redis after which a replica follows the log."
    )
    session_timeout: FiniteFloat = Field(
        10.0, gt=0, description="Seconds after which Kafka takes a silent replica's work."
    )

    replica: str = Field("", description="Name of this replica in predictions; empty: host name and process id.")
    host: str = Field("127.0.0.1", description="Address that `/live`, `/ready`, `/metrics` and `/state` listen on.")
    port: int = Field(0, ge=0, le=65535, description="Their port; 0 takes a free one.")
    cache: Path = Field(Path("~/.cache/gracestream"), description="Folder of converted models and fingerprints.")
    log_format: Literal["json", "text"] = Field("json", description="How the log on standard error is written.")

    def topic(self, name: str) -> str:
        """The name of a topic, or of a group, in this deployment."""
        return self.prefix + name


class SettingsError(UserError):
    """A setting that is not what it must be; the text names the environment variable."""


def load_settings(**overrides: object) -> Settings:
    """Settings from the environment; those in `overrides` that are not None win.

    Raises:
        SettingsError: one line for each setting that is wrong.
    """
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        lines = [
            f"GRACESTREAM_{'.'.join(str(part) for part in problem['loc']).upper()}: {problem['msg']},"
            f" got {problem['input']!r}"
            for problem in error.errors()
        ]
        raise SettingsError("\n".join(lines)) from error
