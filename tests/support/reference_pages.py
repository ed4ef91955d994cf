"""Generates the pages of `docs/reference` from the code (`make reference`).

This is a tool of the repository and no part of the product: it needs the development requirements and the whole source
tree. Nobody edits the pages by hand; a test fails if a committed page is not current. The sources of the pages are:

1. `settings.md`: the groups of `Settings` and their variables.
2. `messages.md` and `headers.md`: the AsyncAPI document and the JSON Schemas.
3. `metrics.md`: the Prometheus metrics of the workers.
4. `alerts.md`: the alert rules in `deploy/prometheus`.
5. `log-events.md`: the log calls in the code, and their meanings in `tests/support/log_events.py`.
6. `cli.md`: the commands of `gracestream`, by Typer's own generator.
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import typer
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from typer.cli import get_docs_for_click

from gracestream.pipeline.observability import metrics
from gracestream.pipeline.settings import VARIABLES, Settings
from gracestream.schemas.generate import SCHEMA_TYPES, asyncapi_document, json_schema
from gracestream.workers.cli.app import app
from tests.support.log_events import MEANINGS, log_events
from tests.support.repository import ROOT

REFERENCE_FOLDER = ROOT / "docs" / "reference"
GOLDEN_FOLDER = ROOT / "schemas" / "golden"
ALERT_RULES_FOLDER = ROOT / "deploy" / "prometheus"

Json = Mapping[str, Any]

GOLDEN_EXAMPLES = {
    "request": "request-parameters",
    "prediction": "prediction-generator",
    "feedback": "feedback-correction",
    "outcome": "outcome-added",
    "snapshot": "snapshot-offset",
}
"""The golden record that serves as the example of each JSON message."""


# Markdown


def _render_page(title: str, introduction: str, *parts: str) -> str:
    note = "<!-- Written by `make reference`; do not edit. -->"
    return "\n\n".join([f"# {title}", note, introduction, *parts]) + "\n"


def _render_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(f"|{'|'.join(map(_render_cell, line))}|" for line in lines)


def _render_cell(text: str) -> str:
    words = " ".join(text.replace("|", "\\|").split())
    return f" {words} " if words else " "


def _escape_tags(text: str) -> str:
    """The text with each `<` escaped outside code, because Markdown would read a tag."""
    # Between backticks every second part is code.
    parts = text.split("`")
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))


# Settings

GROUP_TITLES = {
    "kafka": "Kafka",
    "redis": "Redis",
    "model": "Model",
    "editing": "Edits",
    "serving": "Answers",
    "snapshots": "Snapshots",
    "auth": "Acceptance of feedback",
    "http": "HTTP endpoints",
    "console": "Console",
    "process": "Process",
}
"""The title of each group of settings."""


def _settings_page() -> str:
    def default(value: object) -> str:
        return "(none)" if value is None else f"`{value}`" if str(value) else "(empty)"

    sections = []
    for group in fields(Settings):
        variables = [variable for variable in VARIABLES.values() if variable.group == group.name]
        rows = [
            (f"`{variable.name}`", default(variable.info.default), _escape_tags(variable.info.description or ""))
            for variable in variables
        ]
        sections += [
            f"## {GROUP_TITLES[group.name]}",
            str(inspect.getdoc(group.type)),
            _render_table(("variable", "default", "what it is"), rows),
        ]
    return _render_page(
        "Settings",
        "Every process reads its settings from environment variables, once, at its start. A file of that name in the"
        " folder that `GRACESTREAM_SECRETS_DIR` names may hold it instead; a variable of the environment wins."
        " Options of a command overrule both. A worker logs the event `setting_ignored` for a variable that only looks"
        " like one of these.",
        "An empty variable counts as not set. The word `none` removes a limit or an interval.",
        *sections,
    )


# Messages


def _describe_type(schema: Json) -> str:
    """The type of a field as text."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_describe_type, alternatives)))
    if values := schema.get("enum") or [schema[key] for key in ("const",) if key in schema]:
        return ", ".join(f"`{value}`" for value in values)
    kind = str(schema.get("type", "any"))
    element = schema.get({"array": "items", "object": "additionalProperties"}.get(kind, ""))
    return f"{kind} of {_describe_type(element)}" if isinstance(element, Mapping) else kind


def _describe_limits(schema: Json) -> str:
    """The limits and the default of a field as text; empty if there are none."""
    words = {"minimum": "from", "maximum": "to", "maxItems": "at most", "maxLength": "at most"}
    units = {"maxItems": " items", "maxLength": " characters"}
    limits = [f"{word} {schema[key]}{units.get(key, '')}" for key, word in words.items() if key in schema]
    if "default" in schema and schema["default"] not in ([], {}, None):
        limits.append(f"default `{schema['default']}`")
    return ", ".join(limits)


def _fields_table(schema: Json) -> str:
    required = set(schema.get("required", ()))
    rows = []
    for name, field in schema["properties"].items():
        limits = _describe_limits(field)
        described = _escape_tags(field.get("description", ""))
        need = "yes" if name in required else ""
        rows.append(
            (f"`{name}`", _describe_type(field), need, " ".join(filter(None, [described, limits and f"({limits})"])))
        )
    return _render_table(("field", "type", "required", "what it is"), rows)


def _message_sections(name: str, schema: Json, documented_types: set[str]) -> Iterator[str]:
    """The sections of one message: its fields, an example, and its nested types.

    `documented_types` collects the nested types, so that each is described once per page.
    """
    yield f"## {schema['title']}"
    yield _escape_tags(schema["description"])
    yield f"JSON Schema: `schemas/json/{name}.schema.json`."
    if variants := [variant for variant in schema.get("oneOf", ()) if "title" in variant]:
        yield "One of these kinds, and none of the fields of another:\n\n" + "\n".join(
            f"- {variant['title']}: {', '.join(f'`{field}`' for field in variant['required'])}" for variant in variants
        )
    yield _fields_table(schema)
    if name in GOLDEN_EXAMPLES:
        golden = next(GOLDEN_FOLDER.glob(f"v*/{GOLDEN_EXAMPLES[name]}.json"))
        example = json.dumps(msgspec.json.decode(golden.read_bytes()), indent=2, ensure_ascii=False)
        yield f"```json\n{example}\n```"
    for title, definition in schema.get("definitions", {}).items():
        if title not in documented_types:
            documented_types.add(title)
            yield f"### {title}"
            yield _escape_tags(definition["description"])
            yield _fields_table(definition)


def _topics_table(document: Json) -> str:
    rows = []
    for name, channel in document["channels"].items():
        kafka = channel["bindings"]["kafka"]["topicConfiguration"]
        forever = kafka.get("retention.ms") == -1
        cleanup = "never" if forever else "compacted" if kafka["cleanup.policy"] == ["compact"] else "by age"
        large = kafka.get("max.message.bytes")
        size = f" Records up to {large // 2**20} MiB." if large else ""
        rows.append((f"`{name}`", str(channel["x-partitions"]), cleanup, _escape_tags(channel["description"]) + size))
    return _render_table(("topic", "partitions", "deleted", "what it holds"), rows)


def _messages_page() -> str:
    document = asyncapi_document()
    known: set[str] = set()
    sections = [
        part for name, kind in SCHEMA_TYPES.items() for part in _message_sections(name, json_schema(kind), known)
    ]
    return _render_page(
        "Messages and topics",
        "Messages that people write and read are JSON; deltas are MessagePack. Readers ignore fields that they do not"
        " know. `v` is the version of a message's schema. Timestamps are Kafka's. `schemas/asyncapi.yaml` holds the"
        " same for tools, and [headers](headers.md) has a page of its own.",
        "## Topics",
        "`GRACESTREAM_TOPIC_PREFIX` goes before each name.",
        _topics_table(document),
        *sections,
    )


def _headers_page() -> str:
    messages = asyncapi_document()["components"]["messages"]
    parts = []
    for name, message in messages.items():
        headers = message.get("headers")
        if headers is None:
            continue
        parts.append(f"## {message['title']}\n\nMessage `{name}`.")
        if "description" in headers:
            parts.append(_escape_tags(headers["description"]))
        required = set(headers.get("required", ()))
        rows = [
            (f"`{header}`", "yes" if header in required else "", _escape_tags(field.get("description", "")))
            for header, field in headers.get("properties", {}).items()
        ]
        if rows:
            parts.append(_render_table(("header", "always", "what it is"), rows))
    return _render_page(
        "Headers",
        "Values of Kafka headers are UTF-8 text, numbers in decimal. The names are in `schemas/headers.py`.",
        *parts,
    )


# Metrics


def _metrics_page() -> str:
    groups = {
        "Replicas and the editor": None,
        "Replicas": metrics.REPLICA_REGISTRY,
        "The editor": metrics.EDITOR_REGISTRY,
    }
    names_by_group = {name: _metric_names(registry) for name, registry in groups.items() if registry is not None}
    all_metrics = [metric for metric in vars(metrics).values() if isinstance(metric, MetricWrapperBase)]
    parts = []
    for group in groups:
        rows = []
        for metric in all_metrics:
            (family,) = metric.describe()
            owner = next(
                (name for name, names in names_by_group.items() if family.name in names), "Replicas and the editor"
            )
            if owner == group:
                name = family.name + ("_total" if family.type == "counter" else "")
                labels = ", ".join(f"`{label}`" for label in metric._labelnames)  # no public attribute has them
                rows.append((f"`{name}`", family.type, labels, _escape_tags(family.documentation)))
        parts += [f"## {group}", _render_table(("metric", "type", "labels", "what it is"), rows)]
    return _render_page(
        "Metrics",
        "Every worker exports these in Prometheus' format on `/metrics`, with the process metrics of"
        " `prometheus-client`. A histogram has the series `_bucket`, `_sum` and `_count`. The lag of `requests` is that"
        " of the consumer group `inference`, as Kafka's own tools and exporters show it.",
        *parts,
    )


def _metric_names(registry: CollectorRegistry) -> set[str]:
    return {family.name for family in registry.collect()}


# Alerts


def _alerts_page() -> str:
    parts = []
    for file in ("alerts.yml", "compose-alerts.yml"):
        document = yaml.safe_load((ALERT_RULES_FOLDER / file).read_text(encoding="utf-8"))
        parts.append(f"## Rules in `deploy/prometheus/{file}`")
        for group in document["groups"]:
            for rule in group["rules"]:
                summary = re.sub(r"\{\{.*?\}\}", _template_variable, rule["annotations"]["summary"])
                description = re.sub(r"\{\{.*?\}\}", _template_variable, rule["annotations"]["description"])
                lasts = f", after {rule['for']}" if "for" in rule else ""
                parts += [
                    f"### {rule['alert']}",
                    f"Severity {rule['labels']['severity']}{lasts}. {summary}",
                    " ".join(description.split()),
                    f"```promql\n{rule['expr'].strip()}\n```",
                ]
    return _render_page(
        "Alerts",
        "Prometheus evaluates these rules. Alerts reach nobody until `deploy/prometheus/prometheus.yml` names an"
        " Alertmanager. The descriptions say what happens meanwhile, and where to look.",
        *parts,
    )


def _template_variable(match: re.Match[str]) -> str:
    """A template variable as a placeholder in capitals: `{{ $labels.job }}` becomes `JOB`."""
    words = re.findall(r"\w+", match[0])
    name = words[1] if words[0] == "labels" else words[0]
    return f"`{name.upper()}`"


# Log events


def _log_events_page() -> str:
    events, parts = log_events(), []
    for workers, meanings in MEANINGS.items():
        rows = [
            (
                f"`{name}`",
                " or ".join(events[name].levels),
                ", ".join(f"`{field}`" for field in events[name].fields),
                _escape_tags(meaning),
                _escape_tags("; or: ".join(events[name].consequences)),
            )
            for name, meaning in meanings.items()
        ]
        parts += [f"## {workers}", _render_table(("event", "level", "fields", "meaning", "consequence"), rows)]
    return _render_page(
        "Log events",
        "Workers log to standard error, one event a line, as JSON by default. Each line has `event`, `level`,"
        " `timestamp`, the kind of worker as `worker`, and its name as `name`. Warnings and errors have `consequence`,"
        " which says what the event means for the service, and `remedy` where there is one. A failure of unknown cause"
        " has its traceback as `exception`. Warnings of libraries have the name of their logger as `logger`, and their"
        " text as `event`.",
        *parts,
    )


# Commands


def _cli_page() -> str:
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="gracestream")
    body = text.split("\n", 2)[2].strip()  # drop the generator's title, which is this page's, too
    body = re.sub(r"^Example: (.*)$", r"\n```console\n$ \1\n```", body, flags=re.MULTILINE)
    body = re.sub(r"\n{3,}", "\n\n", body)
    return _render_page(
        "Command line",
        "An expected error is one sentence on standard error, and exit status 1. Commands print tables, or JSON lines"
        " with `--json`; `send`, `correct` and `undo` print tables at a terminal only.",
        body,
    )


def render_pages() -> Mapping[str, str]:
    """The text of every generated page, by file name."""
    return {
        "settings.md": _settings_page(),
        "messages.md": _messages_page(),
        "headers.md": _headers_page(),
        "metrics.md": _metrics_page(),
        "alerts.md": _alerts_page(),
        "log-events.md": _log_events_page(),
        "cli.md": _cli_page(),
    }


def write_pages(folder: Path = REFERENCE_FOLDER) -> None:
    """Write every page into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in render_pages().items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_pages()
