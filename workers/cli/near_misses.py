"""`near-misses`: listing requests that an entry might have answered, and making feedback from them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Column, Table

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.settings import KafkaSettings
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

if TYPE_CHECKING:
    from gracestream.pipeline.history import MatchedRequest, NearMissRequest

MAX_NEAR_MISSES = 10_000
"""Largest number of near misses that are listed or searched, the newest first."""

SAME_HELP = "Print a correction with the entry's target for this request; may be repeated."

EXCEPT_HELP = "Print an exception that keeps the entry from answering this request; may be repeated."


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="History")(near_misses)


def near_misses(
    entry: Annotated[str | None, typer.Argument(help="Only near misses of this entry.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=MAX_NEAR_MISSES, help="Number of near misses, the newest.")
    ] = 50,
    same: Annotated[list[str] | None, typer.Option("--same", metavar="REQUEST", help=SAME_HELP)] = None,
    excepted: Annotated[list[str] | None, typer.Option("--except", metavar="REQUEST", help=EXCEPT_HELP)] = None,
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """List requests that an entry might have answered but the unedited model did, newest first.

    The reason says why the entry did not answer. `wording`: the prompt is within the radius, but its words disagree
    with the correction; the table shows them. `distance`: the prompt has all names of the correction, but is a little
    outside the radius. `answer`: the entry matched, but its value did not give the target on this prompt.
    If the prompt asks for the same, send what --same prints: a correction of the prompt with the entry's target. It
    gives the prompt a key, and after `answer` a value of its own.
    If it asks for something else, nothing needs to be done: the unedited model has answered. --except prints an
    exception, which ends the near miss. It also takes a request that an entry answered: once the exception is sent, the
    entry's edit no longer answers this prompt.
    Example: gracestream near-misses --same REQUEST | gracestream correct
    """
    from gracestream.pipeline.history import find_near_misses as missed_requests

    settings = connect(kafka=kafka, topic_prefix=prefix)
    if same or excepted:
        _print_feedback(settings.kafka, same or [], excepted or [], entry)
        return
    near_miss_list = missed_requests(settings.kafka, limit, entry)
    if as_json:
        for near_miss in near_miss_list:
            print_json(msgspec.to_builtins(near_miss))
        return
    if not near_miss_list:
        stderr_console.print("there are no near misses" if entry is None else "there are no near misses of this entry")
        return
    folded = [Column(name, overflow="fold") for name in ("request", "entry", "reason")]
    table = Table("time", *folded, "distance", "radius", "inputs", "answer", "target")
    for near_miss in near_miss_list:
        inputs = "(no longer in the topic)" if near_miss.inputs is None else shorten(to_display_text(near_miss.inputs))
        distances = (f"{near_miss.distance:.4g}", f"{near_miss.radius:.4g}")
        names = (
            format_time(near_miss.timestamp),
            near_miss.request_id,
            near_miss.entry_id,
            near_miss.detail or near_miss.reason,
        )
        table.add_row(
            *map(plain_cell, (*names, *distances, inputs, shorten(near_miss.answer), shorten(near_miss.target)))
        )
    print_table(table)


def _print_feedback(settings: KafkaSettings, same: list[str], excepted: list[str], entry: str | None) -> None:
    """Print feedback for `correct`: a correction for each request of `same`, an exception for each of `excepted`.

    Raises:
        UserError: there is no feedback for a request; then nothing is printed.
    """
    from gracestream.pipeline.history import find_matched_requests
    from gracestream.pipeline.history import find_near_misses as missed_requests

    near_miss_requests = (
        {near_miss.request_id: near_miss for near_miss in missed_requests(settings, MAX_NEAR_MISSES, entry)}
        if same
        else {}
    )
    matched_requests = find_matched_requests(settings, excepted) if excepted else {}
    lines = [_correction_fields(near_miss_requests, request_id) for request_id in same]
    for line in [*lines, *(_exception_fields(matched_requests, request_id) for request_id in excepted)]:
        print_json(line)


def _exception_fields(matched_requests: Mapping[str, "MatchedRequest"], request_id: str) -> dict[str, object]:
    matched = matched_requests.get(request_id)
    if matched is None:
        raise UserError(
            f"no entry answered request {request_id!r}, and it is not a near miss, as far as `predictions` shows;"
            " list near misses without --except"
        )
    if matched.inputs is None:
        raise UserError(f"the inputs of request {request_id!r} are no longer in the topic `requests`")
    inputs = msgspec.to_builtins(matched.inputs)
    return {"inputs": inputs, "except_from": matched.entry_id, "request_id": request_id}


def _correction_fields(near_miss_requests: Mapping[str, "NearMissRequest"], request_id: str) -> dict[str, object]:
    near_miss = near_miss_requests.get(request_id)
    if near_miss is None:
        raise UserError(
            f"request {request_id!r} is not among the newest {MAX_NEAR_MISSES} near misses; list them without --same"
        )
    if near_miss.inputs is None:
        raise UserError(f"the inputs of request {request_id!r} are no longer in the topic `requests`")
    if not near_miss.target:
        raise UserError(
            f"the prediction of request {request_id!r} does not name the entry's target: write a correction"
        )
    return {"inputs": msgspec.to_builtins(near_miss.inputs), "target": near_miss.target, "request_id": request_id}
