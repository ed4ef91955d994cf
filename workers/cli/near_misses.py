"""`near-misses`: what entries might have answered and did not."""

from typing import Annotated

import msgspec
import typer
from rich.table import Column, Table

from pipeline.near_misses import near_misses as missed_requests
from schemas.messages import in_one_text
from workers.cli.common import AsJson, Kafka, Prefix, cell, clock, connected, notes, say, shortened, show


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="History")(near_misses)


def near_misses(
    entry: Annotated[str | None, typer.Argument(help="Only those of this entry.")] = None,
    most: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="So many, the newest.")] = 50,
    as_json: AsJson = False,
    kafka: Kafka = None,
    prefix: Prefix = None,
) -> None:
    """List requests that an entry might have answered and the unedited model did, newest first.

    The reason `answer`: the prompt is within the entry's radius, but the entry did not give its target there. Another
    reason names the words by which the prompt asks for something else. Correct a prompt that asks for the same, or send
    it among the `rephrases` of a new correction, and it gets a key of its own.
    Example: gracestream near-misses --limit 20
    """
    found = missed_requests(connected(kafka=kafka, prefix=prefix), most, entry)
    if as_json:
        for missed in found:
            say(msgspec.to_builtins(missed))
        return
    if not found:
        notes.print("there is no near miss" if entry is None else "there is no near miss of this entry")
        return
    folded = [Column(name, overflow="fold") for name in ("request", "entry")]
    table = Table("time", *folded, "reason", "distance", "radius", "inputs", "answer")
    for missed in found:
        inputs = "(no longer in the topic)" if missed.inputs is None else shortened(in_one_text(missed.inputs))
        near = (f"{missed.distance:.4g}", f"{missed.radius:.4g}")
        names = (clock(missed.timestamp), missed.request_id, missed.entry_id, missed.detail or missed.reason)
        table.add_row(*map(cell, (*names, *near, inputs, shortened(missed.answer))))
    show(table)
