"""`dlq list` and `dlq replay`: the records that were set aside, and another try for them."""

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
    replay_dead_letters,
)
from gracestream.workers.cli.common import (
    MAX_CELL_CHARACTERS,
    JsonOption,
    KafkaOption,
    PrefixOption,
    connect,
    plain_cell,
    print_json,
    print_table,
    shorten,
    stderr_console,
    stdout_console,
)

SourceArgument = Annotated[DeadLetterSource | None, typer.Argument(help="Whose; else of both.", show_default=False)]

dlq = typer.Typer(
    help="Look at the dead letters: requests and feedback that could not be taken. Send them again.",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    dlq.command("list")(print_dead_letters)
    dlq.command("replay")(resend_dead_letters)
    app.add_typer(dlq, name="dlq", rich_help_panel="Traffic")


def print_dead_letters(
    of: SourceArgument = None,
    limit: Annotated[int, typer.Option(min=1, help="The last so many of each queue.")] = 50,
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """List dead letters, the newest last: where they are, why, and where they came from.

    With --json the whole value stands in `value`, or in `value_base64` where it is not UTF-8; likewise the key.
    Example: gracestream dlq list feedback --limit 5
    """
    settings = connect(kafka=kafka, prefix=prefix)
    found = [letter for source in _selected_sources(of) for letter in list_dead_letters(settings, source, last=limit)]
    if as_json:
        for letter in found:
            print_json(_letter_fields(letter))
        return
    if not found:
        stderr_console.print(f"no dead letters of {' or '.join(_selected_sources(of))}")
        return
    table = Table(
        "queue", "offset", "time", Column("reason", overflow="fold"), "from", "bytes", Column("value", overflow="fold")
    )
    for letter in found:
        table.add_row(*map(plain_cell, _letter_row(letter)))
    print_table(table)


def resend_dead_letters(
    of: SourceArgument = None,
    offset: Annotated[list[int] | None, typer.Option(min=0, help="Of the dead letter; may be repeated.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All that are there, but for requests that got an answer.")
    ] = False,
    answered: Annotated[
        bool, typer.Option("--answered", help="With --all: also requests whose sender got an error for an answer.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Send dead letters to their topic again, as they were: once their cause is gone, such as a limit or a defect.

    The letters stay where they are. Of equal ones the first is sent, so one that came back is not multiplied. With
    --all a request whose sender got an error for an answer is left out: the sender knows, and may have asked again. A
    record that is wrong in itself comes back: mend it (`dlq list --json`) and use `send` or `correct`.
    Example: gracestream dlq replay requests --offset 17 --offset 18
    """
    if every == bool(offset):
        raise DeadLetterError("say which dead letters: --offset, which may be repeated, or --all")
    if offset and of is None:
        raise DeadLetterError("say whose offset that is: `dlq replay requests` or `dlq replay feedback`")
    if answered and not every:
        raise DeadLetterError("--answered goes with --all; a letter that is named by its --offset is sent in any case")
    settings = connect(kafka=kafka, prefix=prefix)
    refused = False
    for source in _selected_sources(of):
        done = replay_dead_letters(settings, source, offset, include_answered=answered, dry_run=dry_run)
        told = f"{'would send' if dry_run else 'sent'} {len(done.sent)} to {settings.topic(source)}"
        if done.answered:
            told += (
                f"; left out {len(done.answered)} whose sender got an error for an answer (--answered sends them too)"
            )
        if done.duplicates:
            told += f"; left out {len(done.duplicates)}, each equal to one {'that is' if dry_run else 'that was'} sent"
        if done.truncated:
            told += f"; {len(done.truncated)} were cut and cannot be sent"
        if done.too_large:
            told += f"; larger than that topic takes: those at offset {', '.join(map(str, done.too_large))}"
        stdout_console.print(told, soft_wrap=True)
        refused |= bool(done.too_large)
    raise typer.Exit(int(refused))


def _selected_sources(of: DeadLetterSource | None) -> list[DeadLetterSource]:
    return list(DLQ_TOPICS) if of is None else [of]


def _letter_row(letter: DeadLetter) -> tuple[str, ...]:
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
