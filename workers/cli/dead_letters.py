"""`dlq list` and `dlq resend`: list dead letters, and send their records again."""

import base64
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Column, Table

from gracestream.pipeline.kafka import (
    DLQ_TOPICS,
    DeadLetter,
    DeadLetterError,
    DeadLetterSource,
    list_dead_letters,
    resend_dead_letters,
)
from gracestream.workers.cli.common import (
    MAX_CELL_CHARACTERS,
    JsonOption,
    KafkaOption,
    PrefixOption,
    connect,
    plain_cell,
    pluralize,
    print_json,
    print_table,
    shorten,
    stderr_console,
    stdout_console,
)

SourceArgument = Annotated[
    DeadLetterSource | None, typer.Argument(help="Source of the letters; default: both.", show_default=False)
]

dlq = typer.Typer(
    help="List dead letters (requests and feedback that could not be processed), and send them again.",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    dlq.command("list")(print_dead_letters)
    dlq.command("resend")(resend)
    app.add_typer(dlq, name="dlq", rich_help_panel="Traffic")


def print_dead_letters(
    of: SourceArgument = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of letters of each queue, the newest.")] = 50,
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """List dead letters, the newest last: their offset, the reason, and their origin.

    With --json the whole value is in `value`, or in `value_base64` if it is not UTF-8; likewise the key.
    Example: gracestream dlq list feedback --limit 5
    """
    settings = connect(kafka=kafka, topic_prefix=prefix)
    letters = [
        letter for source in _selected_sources(of) for letter in list_dead_letters(settings.kafka, source, last=limit)
    ]
    if as_json:
        for letter in letters:
            print_json(_letter_fields(letter))
        return
    if not letters:
        stderr_console.print(f"no dead letters of {' or '.join(_selected_sources(of))}")
        return
    table = Table(
        "queue", "offset", "time", Column("reason", overflow="fold"), "from", "bytes", Column("value", overflow="fold")
    )
    for letter in letters:
        table.add_row(*map(plain_cell, _letter_row(letter)))
    print_table(table)


def resend(
    of: SourceArgument = None,
    offset: Annotated[list[int] | None, typer.Option(min=0, help="Offset of a dead letter; may be repeated.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All dead letters except requests whose sender got an error reply.")
    ] = False,
    answered: Annotated[
        bool, typer.Option("--answered", help="With --all: also requests whose sender got an error reply.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be sent.")] = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Send dead letters to their topic again, unchanged, after their cause (such as a limit or a defect) is removed.

    The letters stay in their queue. Of equal letters only the first is sent, so a letter that comes back is not
    multiplied. With --all a request whose sender got an error reply is left out: the sender may have asked again. An
    invalid record becomes a dead letter again: correct it (`dlq list --json`) and use `send` or `correct`.
    Example: gracestream dlq resend requests --offset 17 --offset 18
    """
    if every == bool(offset):
        raise DeadLetterError("name the dead letters: --offset, which may be repeated, or --all")
    if offset and of is None:
        raise DeadLetterError("name the source of the offset: `dlq resend requests` or `dlq resend feedback`")
    if answered and not every:
        raise DeadLetterError("--answered needs --all; a letter named by its --offset is sent in any case")
    settings = connect(kafka=kafka, topic_prefix=prefix)
    any_too_large = False
    for source in _selected_sources(of):
        result = resend_dead_letters(settings.kafka, source, offset, include_answered=answered, dry_run=dry_run)
        summary = f"{'would send' if dry_run else 'sent'} {len(result.sent)} to {settings.kafka.topic(source)}"
        if result.answered:
            summary += f"; left out {len(result.answered)} whose sender got an error reply (--answered sends them too)"
        if result.duplicates:
            summary += (
                f"; left out {len(result.duplicates)}, each equal to a letter that {'is' if dry_run else 'was'} sent"
            )
        if result.truncated:
            summary += f"; {pluralize(len(result.truncated), 'is', 'are')} truncated and cannot be sent"
        if result.too_large:
            summary += f"; larger than the topic allows: those at offset {', '.join(map(str, result.too_large))}"
        stdout_console.print(summary, soft_wrap=True)
        any_too_large |= bool(result.too_large)
    raise typer.Exit(int(any_too_large))


def _selected_sources(of: DeadLetterSource | None) -> list[DeadLetterSource]:
    return list(DLQ_TOPICS) if of is None else [of]


def _letter_row(letter: DeadLetter) -> tuple[str, ...]:
    # A character has at most 4 bytes in UTF-8, so these bytes hold more characters than a cell shows.
    value = (letter.value or b"")[: 4 * (MAX_CELL_CHARACTERS + 1)].decode(errors="backslashreplace")
    return (
        letter.queue,
        str(letter.offset),
        datetime.fromtimestamp(letter.timestamp, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        letter.reason,
        f"{letter.source_partition}/{letter.source_offset}",
        f"{letter.size}{', cut' if letter.truncated else ''}",
        shorten(value),
    )


def _letter_fields(letter: DeadLetter) -> dict[str, object]:
    return {
        "queue": letter.queue,
        "offset": letter.offset,
        "time": datetime.fromtimestamp(letter.timestamp, UTC).isoformat(),
        "reason": letter.reason,
        "source_partition": letter.source_partition,
        "source_offset": letter.source_offset,
        "size": letter.size,
        "cut": letter.truncated,
        "unanswered": letter.unanswered,
        **_text_or_base64("key", letter.key),
        **_text_or_base64("value", letter.value),
    }


def _text_or_base64(name: str, content: bytes | None) -> dict[str, str | None]:
    try:
        return {name: None if content is None else content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(content or b"").decode()}
