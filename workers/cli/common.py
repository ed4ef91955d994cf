"""What the commands share: options, the errors that are one sentence, JSON lines, tables."""

import codecs
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from kafka.errors import KafkaError
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.kafka import wait_for_kafka
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.schemas.messages import escape_unprintable

EXPECTED_ERRORS = (UserError, KafkaError, RedisError)
"""What can go wrong without a defect in the program: one sentence, and exit status 1."""

KafkaOption = Annotated[str | None, typer.Option("--kafka", help="Bootstrap servers; else GRACESTREAM_KAFKA.")]
RedisOption = Annotated[str | None, typer.Option("--redis", help="URL of Redis; else GRACESTREAM_REDIS.")]
PrefixOption = Annotated[str | None, typer.Option("--prefix", help="Prefix of topics; else GRACESTREAM_PREFIX.")]
CodebookOption = Annotated[str | None, typer.Option("--codebook", help="The codebook; else GRACESTREAM_CODEBOOK.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Folder, hub id, id@revision, or a known name; else GRACESTREAM_MODEL.")
]
LayerOption = Annotated[str | None, typer.Option("--layer", help="Path of the module to wrap; else GRACESTREAM_LAYER.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON lines on standard output instead of a table.")]
LinesArgument = Annotated[Path, typer.Argument(help="A file of JSON lines; - is standard input.", allow_dash=True)]

NO_DELTAS_MESSAGE = "the history has no delta up to there; `gracestream inspect` shows those that it has"

MAX_CELL_CHARACTERS = 100
"""Characters of a long text that a table shows."""

NO_WRAP_WIDTH = 2**20
"""Characters of a line where no terminal says how many fit."""

stdout_console = Console()
stderr_console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


def connect(*, await_name: bool = False, **options: object) -> Settings:
    """Settings, once their Kafka answers; with `await_name` also once its host name is known."""
    settings = load_settings(**options)
    wait_for_kafka(settings, report=stderr_console.print, await_name=await_name)
    return settings


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The JSON values of a file, with their line numbers; empty lines are passed over.

    Raises:
        typer.BadParameter: the file cannot be read, or a line is not JSON.
    """
    return ((number, value) for number, value, _ in read_lines_with_bytes(path))


def read_valid_lines(path: Path, on_invalid: Callable[[str], object]) -> Iterator[tuple[int, Any]]:
    """Likewise, without the lines that are not JSON; `on_invalid` is told why each is left out."""
    for number, line in _nonempty_lines(path):
        try:
            yield number, _parse_line(path, number, line)
        except typer.BadParameter as error:
            on_invalid(f"{error}; the line is left out")


def read_lines_with_bytes(path: Path) -> Iterator[tuple[int, Any, bytes]]:
    """Likewise, each with its own bytes."""
    return ((number, _parse_line(path, number, line), line) for number, line in _nonempty_lines(path))


def _nonempty_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers."""
    if str(path) == "-" and sys.stdin.isatty():
        stderr_console.print("reading JSON lines from the keyboard; Ctrl-D ends them")
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
        typer.BadParameter: it is none.
    """
    try:
        return json.loads(line.decode())
    except RecursionError:
        raise typer.BadParameter(f"{path}, line {number} is nested too deeply") from None
    except ValueError as error:
        why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise typer.BadParameter(f"{path}, line {number} is not JSON: {why}") from error


def print_json(fields: object) -> None:
    """One JSON line on standard output, at once.

    What does not print is escaped, since a hostile value may steer a terminal; where standard output is not UTF-8, so
    is all that is not ASCII.
    """
    utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    text = json.dumps(fields, ensure_ascii=not utf8)
    print("".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text), flush=True)


def print_fields(fields: Mapping[str, object], *, as_json: bool) -> None:
    """Fields and their values, as a table or as one JSON line."""
    if as_json:
        print_json(fields)
        return
    table = Table("field", Column("value", overflow="fold"))
    for field, value in fields.items():
        table.add_row(field, plain_cell(str(value)))
    print_table(table)


def plain_cell(*lines: str) -> Text:
    """A cell of a table that shows texts as they are, each on a line: no markup, and nothing that steers a terminal."""
    return Text("\n".join(map(escape_unprintable, lines)))


def shorten(text: str) -> str:
    """A text for a cell of a table: printable, and its beginning where it is long."""
    start = escape_unprintable(text[: MAX_CELL_CHARACTERS + 1])
    return f"{start[:MAX_CELL_CHARACTERS]}…" if len(start) > MAX_CELL_CHARACTERS else start


def format_time(timestamp: float) -> str:
    """A time in seconds as date and time of day, UTC."""
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%d %H:%M:%S")


def line_width() -> int:
    """Characters that fit on a line of standard output; each line is as long as it is, where no terminal breaks it."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else NO_WRAP_WIDTH


def print_table(table: Table) -> None:
    """A table on standard output."""
    Console(width=line_width(), height=1).print(table)  # without a height a dumb terminal has 80 columns for rich


def pluralize(number: int, singular: str, plural: str) -> str:
    """A number, and what is counted in the right form."""
    return f"{number} {singular if number == 1 else plural}"
