"""Every setting, in one place: environment variables with the prefix `GRACESTREAM_`, or files of that name.

Passwords are `SecretStr`, and the URLs of Redis and of snapshots, which may hold one, are left out of what `repr`
shows: none gets into a log or an error by accident.
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
    """Read from the environment once, at the start of a process, and never changed after."""

    model_config = SettingsConfigDict(env_prefix="GRACESTREAM_", frozen=True, extra="ignore")

    kafka: str = Field("localhost:9092", description="Kafka bootstrap servers, `host:port`, comma separated.")
    redis: str = Field(
        "redis://localhost:6379/0", repr=False, description="URL of Redis or Valkey; `rediss://` for TLS."
    )
    prefix: str = Field("", pattern=r"^[A-Za-z0-9._-]*$", description="Put before every topic, group and Redis key.")
    codebook: str = Field("default", min_length=1, description="Name of the codebook, written into every delta.")
    startup_timeout: FiniteFloat = Field(60.0, gt=0, description="Seconds to wait for Kafka and Redis at start.")

    secrets: str = Field("", description="Folder of files that are named as these variables and hold their values.")
    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="How clients speak to Kafka: with TLS (SSL), with a user and password (SASL), or both."
    )
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "SCRAM-SHA-512", description="How the user and password are proven to Kafka."
    )
    kafka_username: str = Field("", description="User of Kafka, for SASL.")
    kafka_password: SecretStr = Field(SecretStr(""), description="That user's password.")
    kafka_ca: str = Field(
        "", description="File (PEM) of the authorities that Kafka is trusted by; empty: the system's."
    )
    kafka_certificate: str = Field("", description="File (PEM) of the client certificate shown to Kafka.")
    kafka_key: str = Field("", description="File (PEM) of its key; empty: in the file of the certificate.")
    kafka_key_password: SecretStr = Field(SecretStr(""), description="Password of that key, where it has one.")
    kafka_check_hostname: bool = Field(True, description="Whether Kafka's certificate must bear the host's name.")
    redis_password: SecretStr = Field(SecretStr(""), description="Password of Redis, where its URL has none.")
    redis_ca: str = Field(
        "", description="File (PEM) of the authorities that Redis is trusted by; empty: the system's."
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
    query: Literal["auto", "last", "first", "mean", "encoder"] = Field(
        "auto",
        description="What makes the query: a token of the prompt, or encoder: a sentence encoder, of its text; auto:"
        " encoder for a causal language model unless `policy` is paper, else the last token, or a classifier's [CLS].",
    )
    encoder: str = Field(
        "minilm",
        min_length=1,
        description="The sentence encoder that makes queries: a local folder, a hub id, `id@revision`, or `minilm`.",
    )
    replace: Literal["auto", "last", "all"] = Field(
        "auto", description="Which prompt tokens take the value; auto: last for generators, all for classifiers."
    )

    policy: Literal["nearest", "paper"] = Field("nearest", description="Codebook maintenance; paper: Algorithm 1.")
    radius: FiniteFloat = Field(
        1.0,
        gt=0,
        description="Radius of a new entry, in units of `radius_unit`; with an encoder's queries 0.6 unless it is set.",
    )
    radius_unit: Literal["median", "absolute"] = Field(
        "median", description="median: the median nearest-neighbour distance of recent traffic; absolute: as it is."
    )
    max_radius: FiniteFloat = Field(
        0.0,
        ge=0,
        description="No radius grows beyond it, absolute, but for what batch noise needs; 0: no such limit; with"
        " an encoder's queries 1 unless it is set.",
    )
    scope_radius: bool = Field(
        True,
        description="With an encoder's queries, `policy` nearest and a generator: a new entry's radius also keeps"
        " clear of other requests about its subject; off where `radius` is set, unless this is set, too.",
    )
    scope_alpha: FiniteFloat = Field(
        0.05,
        ge=0.01,
        le=0.2,
        description="For `scope_radius`: the share of other requests about a subject that may lie within a radius.",
    )
    expand: Literal["cover", "paper"] = Field(
        "cover", description="How the paper policy expands: just to cover the query, or by the initial radius."
    )
    guard: bool = Field(True, description="Give an earlier edit an entry of its own when a new one takes its query.")
    wording: bool = Field(
        True,
        description="Serve a prompt within a radius only where its words can ask for the same as the correction's:"
        " numbers, names, negation, words that exclude each other; with `policy` paper false unless it is set.",
    )
    traffic: int = Field(512, ge=0, description="Unflagged recent queries that new radii keep clear of; 0: none.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of everything random in the editor.")

    max_steps: int = Field(
        100,
        ge=1,
        description="Optimisation steps after which an edit is given up; over 16 tokens of target, in proportion more.",
    )
    learning_rate: FiniteFloat = Field(2.0, gt=0, le=1e6, description="Adam's learning rate for values.")
    margin: FiniteFloat = Field(3.0, ge=0, description="Logit margin at which a value counts as trained.")
    edit_batch: int = Field(
        16, ge=1, le=64, description="Waiting corrections whose values are trained together, at most."
    )
    init: Literal["layer", "label", "random"] = Field(
        "layer", description="A value starts as the layer's own output, as that of an entry of its label, or at random."
    )

    forms: bool = Field(
        True,
        description="Train a causal model's values on other forms of the inputs, too; with `policy` paper false unless"
        " it is set.",
    )

    check_answers: bool = Field(
        True, description="Answer unedited, and mark a near miss, where an entry does not give its target on a prompt."
    )
    max_new_tokens: int = Field(64, ge=1, description="Tokens to generate where a request does not say.")
    new_tokens_limit: int = Field(512, ge=1, description="A request for more tokens than this is refused.")
    max_input_tokens: int = Field(512, ge=1, description="A longer prompt is refused.")
    max_target_tokens: int = Field(64, ge=1, description="A longer correction is refused.")
    max_record_bytes: int = Field(
        262_144, ge=1024, le=2**20, description="A larger request or feedback record is refused; at most 1 MiB."
    )

    authors: str = Field(
        "", description="TOML file of who may edit, with which keys and roles; empty: there is no list."
    )
    require_signature: bool = Field(False, description="Refuse feedback that no author on the list has signed.")
    edits_per_minute: int = Field(0, ge=0, description="Feedback of one author that is taken in a minute; 0: all.")

    batch: int = Field(16, ge=1, description="Requests of one micro-batch at most.")
    batch_wait: FiniteFloat = Field(0.02, ge=0, description="Seconds that a micro-batch waits for more requests.")
    min_seq_wait: FiniteFloat = Field(5.0, ge=0, description="Seconds that a request waits for a `min_seq` in the log.")
    redis_grace: FiniteFloat = Field(
        5.0, ge=0, description="Seconds without Redis after which a replica follows the log."
    )
    session_timeout: FiniteFloat = Field(
        10.0, gt=0, description="Seconds after which Kafka takes a silent replica's or editor's work."
    )
    stuck_after: FiniteFloat = Field(
        300.0,
        gt=0,
        le=7 * 24 * 3600,
        description="Seconds that a batch or an edit may take before `/live` answers 503 and another worker takes it.",
    )
    shutdown_timeout: FiniteFloat = Field(
        9.0, gt=0, description="Seconds after SIGTERM in which a worker ends, its work done or left to another."
    )

    snapshot_url: str = Field(
        "",
        repr=False,
        description="Folder, or URL that fsspec knows, of snapshots; the same for all workers. Empty: none.",
    )
    snapshot_every: int = Field(
        1000, ge=0, description="Deltas between two snapshots of the editor; 0: none of its own."
    )
    snapshot_keep: int = Field(3, ge=1, description="Snapshots that are kept; older ones are deleted.")

    replica: str = Field("", description="Name of this replica in predictions; empty: host name and process id.")
    host: str = Field("127.0.0.1", description="Address that `/live`, `/ready`, `/metrics` and `/state` listen on.")
    port: int = Field(0, ge=0, le=65535, description="Their port; 0 takes a free one.")
    cache: Path = Field(Path("~/.cache/gracestream"), description="Folder of converted models and fingerprints.")
    log_format: Literal["json", "text"] = Field("json", description="How the log on standard error is written.")

    @field_validator("new_tokens_limit")
    @classmethod
    def _check_new_tokens_limit(cls, limit: int, info: ValidationInfo) -> int:
        if limit < info.data.get("max_new_tokens", 0):
            raise ValueError(f"be at least GRACESTREAM_MAX_NEW_TOKENS, which is {info.data['max_new_tokens']}")
        return limit

    def topic(self, name: str) -> str:
        """The name of a topic, or of a group, in this deployment."""
        return self.prefix + name


TYPO_CUTOFF = 0.8
"""How like a setting's name is (of 1) that may be a slip."""


class SettingsError(UserError):
    """A setting that is not what it must be; the text names the environment variable."""


def load_settings(**overrides: object) -> Settings:
    """Settings from the environment, then from the files of `GRACESTREAM_SECRETS`; `overrides` that are not None win.

    Raises:
        SettingsError: one line for each setting that is wrong. No value of a secret stands in it.
    """
    chosen = {name: value for name, value in overrides.items() if value is not None}
    folder = str(chosen.get("secrets", os.environ.get("GRACESTREAM_SECRETS", "")))
    if folder and not (Path(folder).is_dir() and os.access(folder, os.R_OK | os.X_OK)):
        raise SettingsError(f"GRACESTREAM_SECRETS: {folder!r} is no folder that can be read")
    try:
        settings = Settings(_secrets_dir=folder or None, **chosen)  # type: ignore[call-arg,arg-type]
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
    """Of these variables those that are none of gracestream's and look like one, which is given."""
    ours = "GRACESTREAM_"
    known = [name.upper() for name in Settings.model_fields]
    unknown = [name for name in environment if name.startswith(ours) and name.removeprefix(ours) not in known]
    found = {name: get_close_matches(name.removeprefix(ours), known, n=1, cutoff=TYPO_CUTOFF) for name in unknown}
    return {name: ours + close[0] for name, close in found.items() if close}


def to_environment_variables(values: Mapping[str, object]) -> dict[str, str]:
    """Fields of `Settings` as the variables that a child process reads them from, secrets in plain text."""
    return {
        f"GRACESTREAM_{name.upper()}": value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        for name, value in values.items()
    }


def _describe_secret_error(error: Exception) -> str:
    """Why a file of `GRACESTREAM_SECRETS` cannot be read; pydantic-settings names the field, and has the reason."""
    reason = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(reason, OSError):
        return f"GRACESTREAM_SECRETS: {to_one_line(error)}: its file holds no text in UTF-8"
    user = f"; the user {os.geteuid()} must have the right to read it" if isinstance(reason, PermissionError) else ""
    return f"GRACESTREAM_SECRETS: {reason.filename!r} cannot be read: {reason.strerror}{user}"


SECRET_FIELDS = {"redis", "snapshot_url", "kafka_password", "kafka_key_password", "redis_password"}
"""Settings whose value no error shows."""

FILE_FIELDS = ("kafka_ca", "kafka_certificate", "kafka_key", "redis_ca", "redis_certificate", "redis_key")


def _describe_problem(problem: ErrorDetails) -> str:
    field = str(problem["loc"][0])
    value = "its value" if field in SECRET_FIELDS else repr(problem["input"])
    rule = re.sub(r"^(Value error,|\w+ should) ", "should ", problem["msg"])
    return f"GRACESTREAM_{field.upper()}: {value} {rule}"


def _model_contradictions(settings: Settings) -> Iterator[str]:
    if "encoder" in settings.model_fields_set and settings.query == "auto" and settings.policy == "paper":
        yield (
            "GRACESTREAM_ENCODER is set, and with GRACESTREAM_POLICY=paper the layer makes the queries: set"
            " GRACESTREAM_QUERY=encoder, or unset GRACESTREAM_ENCODER"
        )


def _kafka_contradictions(settings: Settings) -> Iterator[str]:
    protocol = settings.kafka_security_protocol
    name, password = settings.kafka_username, settings.kafka_password.get_secret_value()
    for variable, value in {"GRACESTREAM_KAFKA_USERNAME": name, "GRACESTREAM_KAFKA_PASSWORD": password}.items():
        if protocol.startswith("SASL") and not value:
            yield f"{variable} is not set, and GRACESTREAM_KAFKA_SECURITY_PROTOCOL={protocol} needs it"
        if not protocol.startswith("SASL") and value:
            yield (
                f"{variable} is set, and GRACESTREAM_KAFKA_SECURITY_PROTOCOL={protocol} has no use for it: choose"
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
        return  # no URL at all, which whoever connects says
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
            yield f"GRACESTREAM_{field.upper()}: {path!r} is no file that can be read"
