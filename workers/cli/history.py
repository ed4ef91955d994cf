"""`replay`, `inspect`, `diff` and `corrections`: the history of a codebook, from `deltas`."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import UNSET
from rich.progress import track
from rich.table import Column, Table

from gracestream.pipeline.codebook import Codebook, query_in, save
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.history import KafkaHistory, Step, describe, hits, replay_deltas
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.schemas.deltas import Delta, decode_delta
from gracestream.schemas.messages import Feedback, decode, printable
from gracestream.workers.cli.common import (
    NO_DELTAS,
    AsJson,
    Kafka,
    Layer,
    Model,
    Prefix,
    cell,
    clock,
    connected,
    counted,
    notes,
    say,
    screen,
    shortened,
    show,
    tell,
    width,
)
from gracestream.workers.cli.grid import grid

HEAD = ("seq", "term", "time", "outcome", "feedback", "inputs", "target", "entries")
"""Of the columns of `inspect`."""

MOST_DIGITS = 18
"""Of a delta's number."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (replay, inspect, compare, corrections):
        app.command("diff" if command is compare else None, rich_help_panel="History")(command)


def replay(
    seq: Annotated[int | None, typer.Option(min=0, help="Up to this delta; else all.")] = None,
    at: Annotated[str | None, typer.Option(help="Up to this time (UTC unless it says), by Kafka's clock.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the codebook to this safetensors file.")] = None,
    retrain: Annotated[bool, typer.Option("--retrain", help="Decide and train anew, and compare.")] = False,
    to: Annotated[str | None, typer.Option(help="Copy the history to topics of this prefix, to branch it.")] = None,
    to_codebook: Annotated[str | None, typer.Option(help="Name of the codebook there; else the same.")] = None,
    replication: Annotated[
        int | None, typer.Option(min=1, help="Copies of each partition there; else as many as `deltas` has here.")
    ] = None,
    as_json: AsJson = False,
    kafka: Kafka = None,
    prefix: Prefix = None,
    model: Model = None,
    layer: Layer = None,
) -> None:
    """Fold `deltas` into a codebook, checking every digest, and say what came out.

    The digest is the one that replicas report on /state. With --retrain all feedback that the editor decided on, also
    what it rejected, is decided and trained anew on the model, and the first decision that comes out otherwise is
    reported, with exit status 1. Feedback that could not be read, or was refused by signatures or limits, is left out.
    With --to the history (the retrained one, if it was) is copied, so that an editor with that prefix goes on from
    there.
    Example: gracestream replay --seq 41 --output codebook.safetensors
    """
    if to_codebook is not None and to is None:
        raise typer.BadParameter("--to-codebook names the codebook of a copy, so it needs --to")
    until = None if at is None else _time(at, "is no time")
    settings = connected(kafka=kafka, prefix=prefix, model=model, layer=layer)
    records: list[bytes] = []
    needed = retrain or to is not None
    codebook = replay_deltas(settings, seq, until, lambda record, *_: records.append(record) if needed else None)
    if codebook is None:
        raise UserError(NO_DELTAS)
    told = codebook.facts()
    status = 0
    if retrain:
        codebook, records, compared = _retrained(settings, records)
        told = {**codebook.facts(), "recorded_digest": told["digest"], **compared}
        status = int(compared["first_difference"] is not None)
    if output is not None:
        save(codebook, output)
    if to is not None and status == 0:
        told["copied_to"] = to
        told["copied_digest"] = _branched(settings, to, to_codebook or codebook.name, records, replication)
    tell(told, as_json=as_json)
    raise typer.Exit(status)


def inspect(
    entry: Annotated[str | None, typer.Argument(help="Only what touched this entry, and who hits it.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Show long inputs and targets whole, as --json always does.")
    ] = False,
    as_json: AsJson = False,
    kafka: Kafka = None,
    prefix: Prefix = None,
) -> None:
    """Show a codebook's history: each delta, the correction behind it, its outcome, and what it did to which entries.

    A correction that the model fulfilled already is `unchanged`: its delta only protects that answer from later edits.
    Of one entry also the answers that it gave, as far as `predictions` still has them.
    Example: gracestream inspect
    """
    settings = connected(kafka=kafka, prefix=prefix)
    steps = [step for step in describe(settings) if entry is None or entry in step.entries]
    if entry is not None and not steps:
        raise UserError(f"no delta touched an entry {entry!r}; `gracestream inspect` names those that there were")
    served = None if entry is None else hits(settings, entry)
    if as_json:
        for step in steps:
            say(msgspec.to_builtins(step))
        if served is not None:
            say({"hits": msgspec.to_builtins(served)})
        return
    for line in grid(HEAD, [_row(step, full=full) for step in steps], width()):
        print(line)
    if served is not None:
        count = counted(served.count, "answer", "answers")
        screen.print(f"{count} came from it" + (", the newest:" if served.recent else ""))
        if served.recent:
            table = Table("time", Column("request", overflow="fold"), "distance", "radius", "replica")
            for hit in served.recent:
                near = (f"{hit.distance:.4g}", f"{hit.radius:.4g}")
                table.add_row(*map(cell, (clock(hit.timestamp), hit.request_id, *near, hit.replica)))
            show(table)


def compare(
    before: Annotated[str, typer.Argument(help="A delta's number, or a time (UTC unless it says).")],
    after: Annotated[str, typer.Argument(help="Likewise.")],
    as_json: AsJson = False,
    kafka: Kafka = None,
    prefix: Prefix = None,
) -> None:
    """Say what changed between two points of the history: which inputs are answered otherwise, and which entries.

    Example: gracestream diff 12 41
    """
    points = _point(before), _point(after)
    from gracestream.pipeline.history import diff  # noqa: PLC0415  (torch takes seconds that other commands need not wait)

    found = diff(connected(kafka=kafka, prefix=prefix), *points)
    if as_json:
        say(msgspec.to_builtins(found))
        return
    fold = [Column(name, overflow="fold") for name in ("inputs", "answer before", "answer after", "feedback")]
    title = counted(len(found.inputs), "input is answered otherwise", "inputs are answered otherwise")
    table = Table(*fold, title=title)
    for change in found.inputs:
        answers = (change.before or "(the model's own)", change.after or "(the model's own)")
        table.add_row(*map(cell, (change.inputs, *answers, change.feedback_id)))
    show(table)
    if found.exceptions:
        table = Table(*(Column(name, overflow="fold") for name in ("inputs", "exception", "feedback")))
        for one in found.exceptions:
            what = f"{'not answered' if one.excepted else 'may be answered again'} by {one.except_from}"
            table.add_row(*map(cell, (one.inputs, what, one.feedback_id)))
        show(table)
    title = counted(len(found.entries), "entry differs", "entries differ")
    table = Table(Column("entry", overflow="fold"), "what", title=title)
    for entry_id, what in found.entries.items():
        table.add_row(cell(entry_id), cell(what))
    show(table)


def corrections(
    seq: Annotated[int | None, typer.Option(min=0, help="Those that held after this delta; else now.")] = None,
    kafka: Kafka = None,
    prefix: Prefix = None,
) -> None:
    """Print the corrections in force, oldest first, as the JSON lines that `correct` takes: for another model or layer.

    Exceptions from them are printed, too. Those that were undone or corrected again are left out. A signed one is
    printed as it was sent, byte for byte: its signature is good where the codebook has the same name.
    Example: gracestream corrections --prefix old- | gracestream correct --prefix new-
    """
    from gracestream.pipeline.history import in_force  # noqa: PLC0415  (torch takes seconds)

    for record in in_force(connected(kafka=kafka, prefix=prefix), seq):
        feedback = decode(record, Feedback)
        if feedback.signature is UNSET:
            say(msgspec.to_builtins(feedback))
        else:
            print(record.decode(), flush=True)


def _retrained(settings: Settings, records: list[bytes]) -> tuple[Codebook, list[bytes], dict[str, Any]]:
    """The codebook that training anew gives, its records, and how they compare."""
    from gracestream.pipeline.editing import environment  # noqa: PLC0415
    from gracestream.pipeline.history import Retraining  # noqa: PLC0415
    from gracestream.pipeline.model import LayerError  # noqa: PLC0415
    from gracestream.workers.bootstrap import load_model  # noqa: PLC0415

    lead = decode_delta(records[0])
    settings = _with_those_of(lead, settings)
    try:
        model = load_model(settings)
    except LayerError as error:
        raise LayerError(
            f"the history is of a model with a layer {lead.layer!r}; set --model as it was: {error}"
        ) from error
    history = KafkaHistory(settings)
    fruitless = list(history.fruitless())  # before the feedback: all of theirs is there then
    retraining = Retraining(model, history.corrections(0), lambda plan: environment(model, plan), fruitless)
    shown = notes.is_terminal
    tracked = track(records, "deciding and training anew", console=notes, transient=True, disable=not shown)
    if all(map(retraining.fold, tracked)):
        retraining.settle()
    assert retraining.codebook is not None
    return retraining.codebook, retraining.records, msgspec.to_builtins(retraining.compared)


def _with_those_of(lead: Delta, settings: Settings) -> Settings:
    """The settings, with the layer and the queries of a history where they are not set."""
    found: dict[str, str] = {}
    if "layer" not in settings.model_fields_set:
        found["layer"] = lead.layer
    if settings.query == "auto" and (query := query_in(lead)) is not None:
        found["query"] = query
    return settings.model_copy(update=found)


def _branched(settings: Settings, prefix: str, codebook: str, records: list[bytes], replication: int | None) -> str:
    from gracestream.pipeline.history import branch  # noqa: PLC0415

    target = load_settings(kafka=settings.kafka, prefix=prefix, codebook=codebook)
    return branch(settings, target, records, replication)


def _point(given: str) -> int | datetime:
    if given.isdecimal() and len(given) <= MOST_DIGITS:
        return int(given)
    return _time(given, "is neither a delta's number nor a time")


def _time(given: str, wrong: str) -> datetime:
    """Raises typer.BadParameter where it is none: what is given `wrong`."""
    try:
        time = datetime.fromisoformat(given)
    except ValueError as error:
        raise typer.BadParameter(f"{given!r} {wrong} like 2026-11-20T18:00:00") from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _row(step: Step, *, full: bool) -> list[list[str]]:
    """The lines of each cell."""
    entries = (f"{entry_id} {what}" for entry_id, what in step.entries.items())
    whose = "" if step.feedback_id is None else step.feedback_id + (f" by {step.author}" if step.author else "")
    inputs = f"(undoes {', '.join(step.undoes)})" if step.undoes else step.inputs or ""
    asked = [printable(text) if full else shortened(text) for text in (inputs, step.target or "")]
    told = [str(step.seq), str(step.term), clock(step.timestamp), step.outcome or step.op, printable(whose), *asked]
    return [*([text] for text in told), list(map(printable, entries))]
