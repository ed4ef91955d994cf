"""Shared parts of the commands: options, expected errors, reading JSON lines, printing JSON and tables."""

import codecs
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from kafka.errors import KafkaError
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.kafka import wait_for_kafka
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.schemas.messages import Message, check_field_names, escape_unprintable

EXPECTED_ERRORS = (UserError, KafkaError, RedisError)
"""Errors without a defect in the program; the command prints their message and exits with status 1."""

KafkaOption = Annotated[str | None, typer.Option("--kafka", help="Bootstrap servers; default: GRACESTREAM_KAFKA.")]
RedisOption = Annotated[str | None, typer.Option("--redis", help="URL of Redis; default: GRACESTREAM_REDIS.")]
PrefixOption = Annotated[
    str | None, typer.Option("--prefix", help="Prefix of topics; default: GRACESTREAM_TOPIC_PREFIX.")
]
CodebookOption = Annotated[str | None, typer.Option("--codebook", help="The codebook; default: GRACESTREAM_CODEBOOK.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Folder, hub id, id@revision or known name; default: GRACESTREAM_MODEL.")
]
LayerOption = Annotated[
    str | None, typer.Option("--layer", help="Path of the module to wrap; default: GRACESTREAM_LAYER.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON lines on standard output instead of a table.")]
LinesArgument = Annotated[Path, typer.Argument(help="A file of JSON lines; - is standard input.", allow_dash=True)]

NO_DELTAS_MESSAGE = "the history has no delta up to this point; `gracestream inspect` lists its deltas"

MAX_CELL_CHARACTERS = 100
"""Characters of a long text that a table cell shows."""

NO_WRAP_WIDTH = 2**20
"""Width of a line, in characters, if standard output is not a terminal: no line breaks."""

T = TypeVar("T", bound=msgspec.Struct)

stdout_console = Console()
stderr_console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


def connect(*, await_name: bool = False, **options: object) -> Settings:
    """Load the settings and wait for their Kafka; with `await_name` also wait until its host name resolves."""
    settings = load_settings(**options)
    wait_for_kafka(settings.kafka, report=stderr_console.print, await_name=await_name)
    return settings


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The JSON values of a file with their line numbers; empty lines are skipped.

    Raises:
        typer.BadParameter: the file cannot be read, or a line is not JSON.
    """
    return ((number, value) for number, value, _ in read_lines_with_bytes(path))


def read_valid_lines(path: Path, on_invalid: Callable[[str], object]) -> Iterator[tuple[int, Any]]:
    """Like `read_json_lines`, but a line that is not JSON is skipped and reported to `on_invalid`."""
    for number, line in _nonempty_lines(path):
        try:
            yield number, _parse_line(path, number, line)
        except typer.BadParameter as error:
            on_invalid(f"{error}; the line is skipped")


def read_lines_with_bytes(path: Path) -> Iterator[tuple[int, Any, bytes]]:
    """Like `read_json_lines`, with the bytes of each line."""
    return ((number, _parse_line(path, number, line), line) for number, line in _nonempty_lines(path))


def _nonempty_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers from 1; `-` is standard input.

    Raises:
        typer.BadParameter: the file cannot be opened.
    """
    if str(path) == "-" and sys.stdin.isatty():
        stderr_console.print("reading JSON lines from the keyboard; Ctrl-D ends the input")
    try:
        source = sys.stdin.buffer if str(path) == "-" else path.open("rb")
    except FileNotFoundError as error:
        raise typer.BadParameter(
            f"there is no file {str(path)!r}; give a file of JSON lines, or - for standard input"
        ) from error
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from error
    with source:
        yield from ((number, line.strip()) for number, line in enumerate(source, 1) if line.strip())


def _parse_line(path: Path, number: int, line: bytes) -> Any:
    """The JSON value of a line.

    Raises:
        typer.BadParameter: the line is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(line.decode())
    except RecursionError:
        raise typer.BadParameter(f"{path}, line {number} is nested too deeply") from None
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise typer.BadParameter(f"{path}, line {number} is not JSON: {reason}") from error


def convert_fields(fields: object, kind: type[T], message_type: type[Message]) -> T:
    """The JSON value of a line as `kind`; a text alone is its `inputs`.

    The line may have the other fields of `message_type`, too, so that a file of such messages can be used.

    Raises:
        ValueError: the value is not valid, or has an unknown field.
    """
    check_field_names(fields, kind, message_type)
    return msgspec.convert({"inputs": fields} if isinstance(fields, str) else fields, kind)


def print_json(fields: object) -> None:
    """Print one JSON line on standard output and flush it.

    Unprintable characters are escaped, because a hostile value could send control sequences to a terminal. If standard
    output is not UTF-8, all characters beyond ASCII are escaped, too.
    """
    utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    text = json.dumps(fields, ensure_ascii=not utf8)
    print(
        "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text), flush=True
    )


def print_fields(fields: Mapping[str, object], *, as_json: bool) -> None:
    """Print fields and their values, as a table or as one JSON line."""
    if as_json:
        print_json(fields)
        return
    table = Table("field", Column("value", overflow="fold"))
    for field, value in fields.items():
        table.add_row(field, plain_cell(str(value)))
    print_table(table)


def plain_cell(*lines: str) -> Text:
    """A table cell with one line per text, without markup and with unprintable characters escaped."""
    return Text("\n".join(map(escape_unprintable, lines)))


def shorten(text: str) -> str:
    """The text for a table cell: printable, and cut after `MAX_CELL_CHARACTERS` characters."""
    start = escape_unprintable(text[: MAX_CELL_CHARACTERS + 1])
    return f"{start[:MAX_CELL_CHARACTERS]}…" if len(start) > MAX_CELL_CHARACTERS else start


def format_time(timestamp: float) -> str:
    """A time in seconds since 1970 as date and time of day in UTC."""
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%d %H:%M:%S")


def line_width() -> int:
    """The width of standard output in characters: the terminal's, or else `NO_WRAP_WIDTH`."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else NO_WRAP_WIDTH


def print_table(table: Table) -> None:
    """Print a table on standard output."""
    Console(width=line_width(), height=1).print(table)  # without a height rich ignores the width on a dumb terminal


def pluralize(number: int, singular: str, plural: str) -> str:
    """A number and its noun, in the singular for 1."""
    return f"{number} {singular if number == 1 else plural}"
