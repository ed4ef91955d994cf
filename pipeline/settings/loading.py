"""Loads all groups of settings, and reports every fault at once."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import SettingsError as SourceError

from gracestream.pipeline.settings.auth import AuthSettings
from gracestream.pipeline.settings.console import ConsoleSettings
from gracestream.pipeline.settings.editing import EditingSettings
from gracestream.pipeline.settings.group import NONE_WORD, PREFIX, SettingsError, SettingsGroup
from gracestream.pipeline.settings.http import HttpSettings
from gracestream.pipeline.settings.kafka import KafkaSettings
from gracestream.pipeline.settings.model import ModelSettings
from gracestream.pipeline.settings.process import ProcessSettings
from gracestream.pipeline.settings.redis import RedisSettings
from gracestream.pipeline.settings.serving import ServingSettings
from gracestream.pipeline.settings.snapshots import SnapshotSettings
from gracestream.schemas.messages import to_one_line


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a process, in groups."""

    kafka: KafkaSettings
    redis: RedisSettings
    model: ModelSettings
    editing: EditingSettings
    serving: ServingSettings
    snapshots: SnapshotSettings
    auth: AuthSettings
    http: HttpSettings
    console: ConsoleSettings
    process: ProcessSettings

    def replace(self, **values: object) -> Self:
        """A copy with other values, which are not checked. Names are flat, as those of `load_settings`."""
        changed: dict[str, dict[str, object]] = {}
        for name, value in values.items():
            variable = variable_of(name)
            changed.setdefault(variable.group, {})[variable.field] = value
        groups = {name: getattr(self, name).model_copy(update=update) for name, update in changed.items()}
        return replace(self, **groups)

    def without(self, names: Iterable[str]) -> Self:
        """A copy in which these settings have their defaults and count as not set. Names are flat."""
        changed: dict[str, SettingsGroup] = {}
        for variable in map(variable_of, names):
            group = changed.get(variable.group, getattr(self, variable.group))
            changed[variable.group] = group.model_copy(update={variable.field: variable.info.default})
            changed[variable.group].model_fields_set.discard(variable.field)
        return replace(self, **changed)  # type: ignore[arg-type]

    def value(self, name: str) -> object:
        """The value of a setting by its flat name."""
        variable = variable_of(name)
        return getattr(getattr(self, variable.group), variable.field)

    def explicit_values(self) -> dict[str, object]:
        """The values that were set, rather than left at their defaults, by their flat names."""
        return {
            variable.flat_name: self.value(variable.flat_name)
            for variable in VARIABLES.values()
            if variable.field in getattr(self, variable.group).model_fields_set
        }


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable.

    Attributes:
        name: Its name.
        group: The group of `Settings` that it belongs to.
        field: The field of that group that it sets.
        info: The field's default, description and type.
    """

    name: str
    group: str
    field: str
    info: FieldInfo

    @property
    def flat_name(self) -> str:
        """The name without prefix, in small letters: the keyword of `load_settings`."""
        return self.name.removeprefix(PREFIX).lower()

    @property
    def is_secret(self) -> bool:
        """Whether no log and no error shows its value."""
        return not self.info.repr or "SecretStr" in str(self.info.annotation)

    @property
    def accepts_none_word(self) -> bool:
        """Whether the text `none` stands for None."""
        return NONE_WORD in self.info.metadata


GROUPS: dict[str, type[SettingsGroup]] = {
    field.name: field.type for field in fields(Settings) if isinstance(field.type, type)
}
"""The type of each group, by its name in `Settings`."""

VARIABLES = {
    group_type.variable(field): Variable(group_type.variable(field), group, field, info)
    for group, group_type in GROUPS.items()
    for field, info in group_type.model_fields.items()
}
"""All variables, by name."""

SECRET_VARIABLES = frozenset(name for name, variable in VARIABLES.items() if variable.is_secret)
"""Names of the variables whose value no error shows."""

TYPO_CUTOFF = 0.8
"""Similarity, from 0 to 1, at which an unknown variable counts as a misspelt setting (`difflib`)."""


def variable_of(flat_name: str) -> Variable:
    """The variable of a flat name, such as `kafka_ca`.

    Raises:
        TypeError: there is no such variable.
    """
    try:
        return VARIABLES[PREFIX + flat_name.upper()]
    except KeyError:
        raise TypeError(f"{flat_name!r} is not a setting") from None


def load_settings(**overrides: object) -> Settings:
    """Load and check the settings.

    `overrides` that are not None come first, then the environment, then the files in `GRACESTREAM_SECRETS_DIR`. Names
    are flat: `kafka_ca` overrides `GRACESTREAM_KAFKA_CA`. An empty text overrides a setting with None where it may be
    None.

    Raises:
        SettingsError: a setting is not valid. The text has one line per fault and no value of a secret.
    """
    given: dict[str, dict[str, object]] = {group: {} for group in GROUPS}
    for flat_name, value in overrides.items():
        if value is not None:
            variable = variable_of(flat_name)
            may_be_none = variable.info.default is None or variable.accepts_none_word
            given[variable.group][variable.name] = None if value == "" and may_be_none else value
    folder = _secrets_folder(given["process"])
    groups: dict[str, Any] = {}
    problems: list[str] = []
    for name, group_type in GROUPS.items():
        try:
            group = group_type(_secrets_dir=folder, **given[name])  # type: ignore[call-arg]
            groups[name] = group
            problems += group.contradictions()
        except ValidationError as error:
            problems += map(_describe_problem, error.errors())
        except (OSError, SourceError) as error:
            raise SettingsError(_describe_secret_error(error, group_type)) from error
    if "model" in groups and "editing" in groups:
        problems += _encoder_contradictions(groups["model"], groups["editing"])
    if problems:
        raise SettingsError("\n".join(problems))
    return Settings(**groups)


def unknown_variables(environment: Iterable[str]) -> dict[str, str]:
    """Variables that are probably misspelt settings, each with the name of the setting."""
    known = [name.removeprefix(PREFIX) for name in VARIABLES]
    unknown = [name for name in environment if name.startswith(PREFIX) and name not in VARIABLES]
    matches = {name: get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=TYPO_CUTOFF) for name in unknown}
    return {name: PREFIX + close[0] for name, close in matches.items() if close}


def to_environment_variables(values: Mapping[str, object]) -> dict[str, str]:
    """Environment variables that set these values in a child process, with secrets in plain text. Names are flat."""
    return {variable_of(name).name: to_text(name, value) for name, value in values.items()}


def to_text(name: str, value: object) -> str:
    """The text by which a variable sets this value; a secret is in plain text. The name is flat."""
    if value is None:
        return "none" if variable_of(name).accepts_none_word else ""  # an empty variable counts as not set
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


def _secrets_folder(overrides: Mapping[str, object]) -> str | None:
    """The folder of secrets.

    Raises:
        SettingsError: it is not a readable folder.
    """
    variable = ProcessSettings.variable("secrets_dir")
    folder = overrides.get(variable, os.environ.get(variable))
    if not folder:
        return None
    if not (Path(str(folder)).is_dir() and os.access(str(folder), os.R_OK | os.X_OK)):
        raise SettingsError(f"{variable}: {folder!r} is not a readable folder")
    return str(folder)


def _describe_secret_error(error: Exception, group: type[SettingsGroup]) -> str:
    """The reason why a file in `GRACESTREAM_SECRETS_DIR` cannot be read; the cause of the error has it."""
    reason = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(reason, OSError):
        named = re.search(r'field "(\w+)"', str(error))
        variable = group.variable(named[1]) if named else to_one_line(error)
        return f"GRACESTREAM_SECRETS_DIR: the file of {variable} is not text in UTF-8"
    user = f"; the user {os.geteuid()} must have the right to read it" if isinstance(reason, PermissionError) else ""
    return f"GRACESTREAM_SECRETS_DIR: {reason.filename!r} cannot be read: {reason.strerror}{user}"


def _describe_problem(problem: ErrorDetails) -> str:
    name = str(problem["loc"][0])
    value = "its value" if name in SECRET_VARIABLES else repr(problem["input"])
    # pydantic writes "Value error, …" or "Input should …"; both become "should …", after the variable and its value.
    rule = re.sub(r"^(Value error,|\w+ should) ", "should ", problem["msg"])
    return f"{name}: {value} {rule}"


def _encoder_contradictions(model: ModelSettings, editing: EditingSettings) -> Iterator[str]:
    if "encoder" in model.model_fields_set and model.query_source == "auto" and editing.policy == "paper":
        yield (
            "GRACESTREAM_ENCODER is set, and with GRACESTREAM_POLICY=paper the layer makes the queries: set"
            " GRACESTREAM_QUERY_SOURCE=encoder, or unset GRACESTREAM_ENCODER"
        )
