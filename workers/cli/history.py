"""`replay` and `inspect`: the history of a codebook, from `deltas`."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Column, Table
from rich.text import Text

from pipeline.codebook_file import save
from pipeline.replay import Step, describe, replay_deltas
from workers.cli.common import AsJson, Kafka, Prefix, connected, notes, say, screen


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (replay, inspect):
        app.command(rich_help_panel="History")(command)


def replay(
    seq: Annotated[int | None, typer.Option(min=0, help="Up to this delta; else all.")] = None,
    at: Annotated[datetime | None, typer.Option(help="Up to this time (UTC unless it says), by Kafka's clock.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the codebook to this safetensors file.")] = None,
    as_json: AsJson = False,
    kafka: Kafka = None,
    prefix: Prefix = None,
) -> None:
    """Fold `deltas` into a codebook, checking every digest, and say what came out.

    The digest is the one that replicas report on /state.
    Example: gracestream replay --seq 41 --output codebook.safetensors
    """
    settings = connected(kafka=kafka, prefix=prefix)
    until = None if at is None else (at if at.tzinfo else at.replace(tzinfo=UTC))
    codebook = replay_deltas(settings, seq, until)
    if codebook is None:
        notes.print("there are no deltas up to there")
        raise typer.Exit(1)
    if output is not None:
        save(codebook, output)
    told = codebook.facts()
    if as_json:
        say(told)
        return
    table = Table("field", Column("value", overflow="fold"))
    for field, value in told.items():
        table.add_row(field, Text(str(value)))
    screen.print(table)


def inspect(
    entry: Annotated[str | None, typer.Argument(help="Only the steps that touched this entry.")] = None,
    as_json: AsJson = False,
    kafka: Kafka = None,
    prefix: Prefix = None,
) -> None:
    """Show a codebook's history: each delta, the correction behind it, and what it did to which entries.

    Example: gracestream inspect
    """
    settings = connected(kafka=kafka, prefix=prefix)
    steps = [step for step in describe(settings) if entry is None or entry in step.entries]
    if entry is not None and not steps:
        notes.print(f"no delta touched an entry {entry!r}")
        raise typer.Exit(1)
    if as_json:
        for step in steps:
            say(msgspec.to_builtins(step))
        return
    fold = [Column(name, overflow="fold") for name in ("inputs", "target", "entries")]
    table = Table("seq", "term", "time", "op", *fold)
    for step in steps:
        table.add_row(*(Text(cell) for cell in _row(step)))  # as it is: no markup
    screen.print(table)


def _row(step: Step) -> tuple[str, ...]:
    time = datetime.fromtimestamp(step.timestamp, UTC).strftime("%Y-%m-%d %H:%M:%S")
    entries = "\n".join(f"{entry_id} {what}" for entry_id, what in step.entries.items())
    return (str(step.seq), str(step.term), time, step.op, step.inputs or "", step.target or "", entries)
