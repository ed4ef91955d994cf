"""All settings: environment variables with the prefix `GRACESTREAM_`, or files of these names.

1. `load_settings` checks, at the start of a process, everything that can be checked without a connection.
2. Secrets do not appear in logs or errors. Passwords are `SecretStr`. The URLs of Redis and of snapshots, which may
   contain a password, are excluded from `repr`, and no error shows their values.

Not promised: that a path or an address stays valid after the start.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, FiniteFloat, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as SourceError

from gracestream.pipeline.errors import UserError
from gracestream.schemas.messages import to_one_line


class Settings(BaseSettings):
    """The settings of a process. They are read once, at its start, and never change."""

    model_config = SettingsConfigDict(env_prefix="GRACESTREAM_", frozen=True, extra="ignore")

    kafka: str = Field("localhost:9092", description="Kafka bootstrap servers, `host:port`, comma separated.")
    redis: str = Field(
        "redis://localhost:6379/0", repr=False, description="URL of Redis or Valkey; `rediss://` for TLS."
    )
    topic_prefix: str = Field(
        "", pattern=r"^[A-Za-z0-9._-]*$", description="Put before every topic, group and Redis key."
    )
    codebook: str = Field("default", min_length=1, description="Name of the codebook, written into every delta.")
    startup_timeout: FiniteFloat = Field(60.0, gt=0, description="Seconds to wait for Kafka and Redis at start.")

    secrets_dir: str = Field(
        "", description="Folder of files that have the names of these variables and contain their values."
    )
    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT",
        description="Protocol of Kafka connections: with TLS (SSL), with user and password (SASL), or both.",
    )
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "SCRAM-SHA-512", description="Mechanism by which the user and password are verified."
    )
    kafka_username: str = Field("", description="User of Kafka, for SASL.")
    kafka_password: SecretStr = Field(SecretStr(""), description="That user's password.")
    kafka_ca: str = Field(
        "", description="File (PEM) of the authorities that may sign Kafka's certificate; empty: the system's."
    )
    kafka_certificate: str = Field("", description="File (PEM) of the client certificate shown to Kafka.")
    kafka_key: str = Field("", description="File (PEM) of its key; empty: in the file of the certificate.")
    kafka_key_password: SecretStr = Field(SecretStr(""), description="Password of that key, if it has one.")
    kafka_check_hostname: bool = Field(True, description="Whether Kafka's certificate must match the host name.")
    redis_password: SecretStr = Field(SecretStr(""), description="Password of Redis, if its URL has none.")
    redis_ca: str = Field(
        "", description="File (PEM) of the authorities that may sign Redis's certificate; empty: the system's."
    )
    redis_certificate: str = Field("", description="File (PEM) of the client certificate shown to Redis.")
    redis_key: str = Field("", description="File (PEM) of its key; empty: in the file of the certificate.")

    model: str = Field(
        "smollm2", description="A local folder, a hub id, `id@revision`, or a name that `gracestream up` knows."
    )
    layer: str | None = Field(
        None, description="The module to wrap, as `gracestream layers` lists; by default that of a model known by name."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="The model's weights.")
    threads: int = Field(0, ge=0, description="Torch threads of a worker; 0 leaves torch's own choice.")
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

    policy: Literal["nearest", "paper"] = Field(
        "nearest", description="How edits change the codebook; paper: Algorithm 1."
    )
    radius: FiniteFloat = Field(
        1.0,
        gt=0,
        description="Radius of a new entry, in units of `radius_unit`; if not set, 0.6 for queries of an encoder.",
    )
    radius_unit: Literal["median", "absolute"] = Field(
        "median",
        description="Unit of `radius`: the median nearest-neighbour distance of recent traffic, or 1 (absolute).",
    )
    max_radius: FiniteFloat = Field(
        0.0,
        ge=0,
        description="Limit on every radius, absolute, except for the numerical tolerance; 0: no limit; if not set,"
        " 1 for queries of an encoder.",
    )
    use_scope_radius: bool = Field(
        True,
        description="For queries of an encoder, `policy` nearest and a generator: a new radius also excludes other"
        " requests about the subject of its entry. Off if `radius` is set, unless this is set, too.",
    )
    scope_error_rate: FiniteFloat = Field(
        0.05,
        ge=0.01,
        le=0.2,
        description="For `use_scope_radius`: the share of other requests about a subject that may be within a radius.",
    )
    expand: Literal["cover", "paper"] = Field(
        "cover",
        description="How the paper policy expands a radius: just to include the query, or by the initial radius.",
    )
    retention_guard: bool = Field(
        True,
        description="Retention guard: give an earlier edit its own entry if a new entry would take over its query.",
    )
    check_wording: bool = Field(
        True,
        description="Do not serve a prompt within a radius if its wording disagrees with the correction's: numbers,"
        " names, negation, words that exclude each other. If not set, false for `policy` paper.",
    )
    traffic_sample_size: int = Field(
        512, ge=0, description="Number of recent unflagged queries that new radii exclude; 0: none."
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the editor's random numbers.")

    max_steps: int = Field(
        100,
        ge=1,
        description="Limit on the optimisation steps of an edit; for targets over 16 tokens, proportionally higher.",
    )
    learning_rate: FiniteFloat = Field(2.0, gt=0, le=1e6, description="Adam's learning rate for values.")
    stop_margin: FiniteFloat = Field(3.0, ge=0, description="Logit margin at which a value counts as trained.")
    edit_batch_size: int = Field(
        16, ge=1, le=64, description="Limit on the waiting corrections whose values are trained in one batch."
    )
    value_init: Literal["layer", "label", "random"] = Field(
        "layer", description="Initial value: the output of the layer, the value of an entry with the label, or random."
    )

    train_prompt_forms: bool = Field(
        True,
        description="Train a causal model's values on other forms of the inputs, too; if not set, false for `policy`"
        " paper.",
    )

    check_answers: bool = Field(
        True,
        description="If the value of an entry does not produce its target on a prompt, answer unedited (near miss).",
    )
    default_max_new_tokens: int = Field(
        64, ge=1, description="Tokens to generate if the request does not set `max_new_tokens`."
    )
    max_new_tokens: int = Field(512, ge=1, description="A request for more tokens is rejected.")
    max_input_tokens: int = Field(512, ge=1, description="A prompt of more tokens is rejected.")
    max_target_tokens: int = Field(64, ge=1, description="A correction whose target has more tokens is rejected.")
    max_record_bytes: int = Field(
        262_144, ge=1024, le=2**20, description="A larger request or feedback record is rejected; at most 1 MiB."
    )

    authors_file: str = Field(
        "", description="TOML file with the authors, their keys and roles; empty: no list of authors."
    )
    require_signature: bool = Field(False, description="Reject feedback that is not signed by an author on the list.")
    feedback_rate_limit: int = Field(
        0, ge=0, description="Limit on the feedback records accepted from one author per minute; 0: no limit."
    )

    request_batch_size: int = Field(16, ge=1, description="Limit on the requests in one micro-batch.")
    batch_max_wait: FiniteFloat = Field(0.02, ge=0, description="Seconds that a micro-batch waits for more requests.")
    min_seq_wait: FiniteFloat = Field(5.0, ge=0, description="Seconds that a request waits for its `min_seq`.")
    redis_outage_grace: FiniteFloat = Field(
        5.0, ge=0, description="Seconds without Redis after which a replica follows the log instead."
    )
    session_timeout: FiniteFloat = Field(
        10.0,
        gt=0,
        description="Seconds without a heartbeat after which Kafka assigns a worker's partitions to another one.",
    )
    stall_timeout: FiniteFloat = Field(
        300.0,
        gt=0,
        le=7 * 24 * 3600,
        description="Seconds after which a batch or an edit is stalled: `/live` answers 503, another worker takes it.",
    )
    shutdown_timeout: FiniteFloat = Field(
        9.0,
        gt=0,
        description="Seconds after SIGTERM within which a worker stops. Another worker takes unfinished work.",
    )

    snapshot_url: str = Field(
        "",
        repr=False,
        description="Folder or fsspec URL for snapshots, the same for all workers; empty: no snapshots.",
    )
    snapshot_interval: int = Field(
        1000, ge=0, description="Deltas between two snapshots by the editor; 0: the editor writes none."
    )
    snapshot_keep: int = Field(3, ge=1, description="Number of snapshots to keep; older ones are deleted.")

    worker_name: str = Field("", description="Name of this replica in predictions; empty: host name and process id.")
    http_host: str = Field(
        "127.0.0.1", description="Address of the HTTP endpoints `/live`, `/ready`, `/metrics` and `/state`."
    )
    http_port: int = Field(0, ge=0, le=65535, description="Port of these endpoints; 0: a free port.")
    cache_dir: Path = Field(Path("~/.cache/gracestream"), description="Folder for converted models and fingerprints.")
    log_format: Literal["json", "text"] = Field("json", description="Format of the log on standard error.")

    @field_validator("max_new_tokens")
    @classmethod
    def _check_max_new_tokens(cls, limit: int, info: ValidationInfo) -> int:
        if limit < info.data.get("default_max_new_tokens", 0):
            raise ValueError(
                f"be at least GRACESTREAM_DEFAULT_MAX_NEW_TOKENS, which is {info.data['default_max_new_tokens']}"
            )
        return limit

    def topic(self, name: str) -> str:
        """The full name of a topic or group in this deployment: with the prefix."""
        return self.topic_prefix + name


TYPO_CUTOFF = 0.8
"""Similarity, from 0 to 1, at which an unknown variable counts as a misspelt setting (`difflib`)."""


class SettingsError(UserError):
    """A setting is not valid. The text names the environment variable."""


def load_settings(**overrides: object) -> Settings:
    """Load and check the settings.

    `overrides` that are not None come first, then the environment, then the files in `GRACESTREAM_SECRETS_DIR`.

    Raises:
        SettingsError: a setting is not valid. The text has one line per fault and no value of a secret.
    """
    overrides = {name: value for name, value in overrides.items() if value is not None}
    folder = str(overrides.get("secrets_dir") or os.environ.get("GRACESTREAM_SECRETS_DIR", ""))
    if folder and not (Path(folder).is_dir() and os.access(folder, os.R_OK | os.X_OK)):
        raise SettingsError(f"GRACESTREAM_SECRETS_DIR: {folder!r} is not a readable folder")
    try:
        settings = Settings(_secrets_dir=folder or None, **overrides)  # type: ignore[call-arg,arg-type]
    except ValidationError as error:
        raise SettingsError("\n".join(_describe_problem(problem) for problem in error.errors())) from error
    except (OSError, SourceError) as error:
        raise SettingsError(_describe_secret_error(error)) from error
    contradictions = (
        *_model_contradictions(settings),
        *_kafka_contradictions(settings),
        *_redis_contradictions(settings),
    )
    if problems := [*contradictions, *_unreadable_files(settings)]:
        raise SettingsError("\n".join(problems))
    return settings


def unknown_variables(environment: Iterable[str]) -> dict[str, str]:
    """Variables that are probably misspelt settings, each with the name of the setting."""
    prefix = "GRACESTREAM_"
    known = [name.upper() for name in Settings.model_fields]
    unknown = [name for name in environment if name.startswith(prefix) and name.removeprefix(prefix) not in known]
    matches = {name: get_close_matches(name.removeprefix(prefix), known, n=1, cutoff=TYPO_CUTOFF) for name in unknown}
    return {name: prefix + close[0] for name, close in matches.items() if close}


def to_environment_variables(values: Mapping[str, object]) -> dict[str, str]:
    """Environment variables that set these fields of `Settings` in a child process, with secrets in plain text."""
    return {
        f"GRACESTREAM_{name.upper()}": value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        for name, value in values.items()
    }


def _describe_secret_error(error: Exception) -> str:
    """The reason why a file in `GRACESTREAM_SECRETS_DIR` cannot be read; the cause of the error has it."""
    reason = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(reason, OSError):
        return f"GRACESTREAM_SECRETS_DIR: {to_one_line(error)}: its file is not text in UTF-8"
    user = f"; the user {os.geteuid()} must have the right to read it" if isinstance(reason, PermissionError) else ""
    return f"GRACESTREAM_SECRETS_DIR: {reason.filename!r} cannot be read: {reason.strerror}{user}"


SECRET_FIELDS = {"redis", "snapshot_url", "kafka_password", "kafka_key_password", "redis_password"}
"""Settings whose value no error shows."""

FILE_FIELDS = ("kafka_ca", "kafka_certificate", "kafka_key", "redis_ca", "redis_certificate", "redis_key")
"""Settings that name a file, which must be readable at start."""


def _describe_problem(problem: ErrorDetails) -> str:
    field = str(problem["loc"][0])
    value = "its value" if field in SECRET_FIELDS else repr(problem["input"])
    # pydantic writes "Value error, …" or "Input should …"; both become "should …", after the variable and its value.
    rule = re.sub(r"^(Value error,|\w+ should) ", "should ", problem["msg"])
    return f"GRACESTREAM_{field.upper()}: {value} {rule}"


def _model_contradictions(settings: Settings) -> Iterator[str]:
    if "encoder" in settings.model_fields_set and settings.query_source == "auto" and settings.policy == "paper":
        yield (
            "GRACESTREAM_ENCODER is set, and with GRACESTREAM_POLICY=paper the layer makes the queries: set"
            " GRACESTREAM_QUERY_SOURCE=encoder, or unset GRACESTREAM_ENCODER"
        )


def _kafka_contradictions(settings: Settings) -> Iterator[str]:
    protocol = settings.kafka_security_protocol
    name, password = settings.kafka_username, settings.kafka_password.get_secret_value()
    for variable, value in {"GRACESTREAM_KAFKA_USERNAME": name, "GRACESTREAM_KAFKA_PASSWORD": password}.items():
        if protocol.startswith("SASL") and not value:
            yield f"{variable} is not set, and GRACESTREAM_KAFKA_SECURITY_PROTOCOL={protocol} needs it"
        if not protocol.startswith("SASL") and value:
            yield (
                f"{variable} is set, and GRACESTREAM_KAFKA_SECURITY_PROTOCOL={protocol} does not use it: choose"
                " SASL_SSL, or unset one of them"
            )
    for field in ("kafka_ca", "kafka_certificate", "kafka_key"):
        if getattr(settings, field) and not protocol.endswith("SSL"):
            yield (
                f"GRACESTREAM_{field.upper()} is set, and GRACESTREAM_KAFKA_SECURITY_PROTOCOL={protocol} is without"
                " TLS: choose SSL or SASL_SSL, or unset one of them"
            )
    if not settings.kafka_certificate:
        for field in ("kafka_key", "kafka_key_password"):
            if getattr(settings, field):
                yield f"GRACESTREAM_{field.upper()} is set without GRACESTREAM_KAFKA_CERTIFICATE"


def _redis_contradictions(settings: Settings) -> Iterator[str]:
    try:
        url = urlsplit(settings.redis)
    except ValueError:
        return  # not a URL; `ping_redis` reports it
    if settings.redis_password and url.password:
        yield "GRACESTREAM_REDIS_PASSWORD is set, and GRACESTREAM_REDIS has a password too: keep one of them"
    for field in ("redis_ca", "redis_certificate", "redis_key"):
        if getattr(settings, field) and url.scheme != "rediss":
            yield f"GRACESTREAM_{field.upper()} is set, and GRACESTREAM_REDIS does not begin with rediss://"
    if settings.redis_key and not settings.redis_certificate:
        yield "GRACESTREAM_REDIS_KEY is set without GRACESTREAM_REDIS_CERTIFICATE"


def _unreadable_files(settings: Settings) -> Iterator[str]:
    for field in FILE_FIELDS:
        path = getattr(settings, field)
        if path and not (Path(path).is_file() and os.access(path, os.R_OK)):
            yield f"GRACESTREAM_{field.upper()}: {path!r} is not a readable file"
