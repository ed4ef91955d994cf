"""`near-misses`: what entries might have answered and did not."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer
from rich.table import Column, Table

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.history import MatchedRequest, NearMissRequest, find_matched_requests
from gracestream.pipeline.history import find_near_misses as missed_requests
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import to_display_text
from gracestream.workers.cli.common import (
    JsonOption,
    KafkaOption,
    PrefixOption,
    connect,
    format_time,
    plain_cell,
    print_json,
    print_table,
    shorten,
    stderr_console,
)

MAX_NEAR_MISSES = 10_000
"""Near misses that are listed or searched at most, the newest."""

SAME_HELP = "Print corrections that give the prompts of these requests the entry's target; may be repeated."

EXCEPT_HELP = "Print exceptions that keep the entry from answering the prompts of these requests; may be repeated."


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="History")(near_misses)


def near_misses(
    entry: Annotated[str | None, typer.Argument(help="Only those of this entry.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=MAX_NEAR_MISSES, help="So many, the newest.")] = 50,
    same: Annotated[list[str] | None, typer.Option("--same", metavar="REQUEST", help=SAME_HELP)] = None,
    excepted: Annotated[list[str] | None, typer.Option("--except", metavar="REQUEST", help=EXCEPT_HELP)] = None,
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """List requests that an entry might have answered and the unedited model did, newest first.

    The reason `answer`: the prompt is within the entry's radius, but the entry did not give its target there. Another
    reason names the words by which the prompt asks for something else.
    With --same it prints the correction of each request that asks for the same, which gives its prompt a key.
    With --except it prints an exception for each request that asks for something else: a near miss, or one that an
    entry answered. The entry's edit answers that prompt no more.
    Example: gracestream near-misses --same REQUEST | gracestream correct
    """
    settings = connect(kafka=kafka, prefix=prefix)
    if same or excepted:
        _print_feedback(settings, same or [], excepted or [], entry)
        return
    listed = missed_requests(settings, limit, entry)
    if as_json:
        for missed in listed:
            print_json(msgspec.to_builtins(missed))
        return
    if not listed:
        stderr_console.print("there is no near miss" if entry is None else "there is no near miss of this entry")
        return
    folded = [Column(name, overflow="fold") for name in ("request", "entry", "reason")]
    table = Table("time", *folded, "distance", "radius", "inputs", "answer", "target")
    for missed in listed:
        inputs = "(no longer in the topic)" if missed.inputs is None else shorten(to_display_text(missed.inputs))
        near = (f"{missed.distance:.4g}", f"{missed.radius:.4g}")
        names = (format_time(missed.timestamp), missed.request_id, missed.entry_id, missed.detail or missed.reason)
        table.add_row(*map(plain_cell, (*names, *near, inputs, shorten(missed.answer), shorten(missed.target))))
    print_table(table)


def _print_feedback(settings: Settings, same: list[str], excepted: list[str], entry: str | None) -> None:
    """The lines that `correct` takes, once there is one for each request."""
    found = {missed.request_id: missed for missed in missed_requests(settings, MAX_NEAR_MISSES, entry)} if same else {}
    served = find_matched_requests(settings, excepted) if excepted else {}
    lines = [_correction_fields(found, request_id) for request_id in same]
    for line in [*lines, *(_exception_fields(served, request_id) for request_id in excepted)]:
        print_json(line)


def _exception_fields(matched_requests: Mapping[str, MatchedRequest], request_id: str) -> dict[str, object]:
    served = matched_requests.get(request_id)
    if served is None:
        raise UserError(
            f"no entry answered request {request_id!r}, and it is no near miss, as far as `predictions` tells;"
            " list near misses without --except"
        )
    if served.inputs is None:
        raise UserError(f"the inputs of request {request_id!r} are no longer in the topic `requests`")
    inputs = msgspec.to_builtins(served.inputs)
    return {"inputs": inputs, "except_from": served.entry_id, "request_id": request_id}


def _correction_fields(near_miss_requests: Mapping[str, NearMissRequest], request_id: str) -> dict[str, object]:
    missed = near_miss_requests.get(request_id)
    if missed is None:
        raise UserError(
            f"request {request_id!r} is no near miss among the newest {MAX_NEAR_MISSES}; list them without --same"
        )
    if missed.inputs is None:
        raise UserError(f"the inputs of request {request_id!r} are no longer in the topic `requests`")
    if not missed.target:
        raise UserError(
            f"the prediction of request {request_id!r} does not name the entry's target: write a correction"
        )
    return {"inputs": msgspec.to_builtins(missed.inputs), "target": missed.target, "request_id": request_id}
