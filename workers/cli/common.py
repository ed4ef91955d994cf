"""What the commands share: options, the errors that are one sentence, JSON lines, tables."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from kafka.errors import KafkaError
from redis.exceptions import RedisError
from rich.console import Console

from pipeline.clients import await_kafka
from pipeline.errors import UserError
from pipeline.settings import Settings, load_settings

EXPECTED = (UserError, KafkaError, RedisError)
"""What can go wrong without a defect in the program: one sentence, and exit status 1."""

Kafka = Annotated[str | None, typer.Option("--kafka", help="Bootstrap servers; else GRACESTREAM_KAFKA.")]
Redis = Annotated[str | None, typer.Option("--redis", help="URL of Redis; else GRACESTREAM_REDIS.")]
Prefix = Annotated[str | None, typer.Option("--prefix", help="Prefix of topics; else GRACESTREAM_PREFIX.")]
Codebook = Annotated[str | None, typer.Option("--codebook", help="The codebook; else GRACESTREAM_CODEBOOK.")]
Model = Annotated[str | None, typer.Option("--model", help="Folder, hub id, or a known name; else GRACESTREAM_MODEL.")]
Layer = Annotated[str | None, typer.Option("--layer", help="Path of the module to wrap; else GRACESTREAM_LAYER.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON lines on standard output instead of a table.")]
Lines = Annotated[Path, typer.Argument(help="A file of JSON lines; - is standard input.", allow_dash=True)]

screen = Console()
notes = Console(stderr=True)


def connected(**options: object) -> Settings:
    """Settings, once their Kafka answers."""
    settings = load_settings(**options)
    await_kafka(settings, report=notes.print)
    return settings


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The JSON values of a file, with their line numbers; empty lines are passed over.

    Raises:
        typer.BadParameter: the file cannot be read, or a line is not JSON.
    """
    try:
        source = sys.stdin.buffer if str(path) == "-" else path.open("rb")
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from error
    with source:
        for number, line in enumerate(source, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise typer.BadParameter(f"{path}, line {number} is not JSON: {error}") from error


def say(fields: object) -> None:
    """One JSON line on standard output, at once."""
    print(json.dumps(fields, ensure_ascii=False), flush=True)
