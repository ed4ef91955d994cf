"""`replay`, `inspect`, `diff` and `corrections`: the history of a codebook, from `deltas`."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import UNSET
from rich.progress import track
from rich.table import Column, Table

from gracestream.pipeline.codebook import Codebook, read_query_setting, save_codebook
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.history import HistoryStep, KafkaHistory, history_steps, read_entry_usage, replay_deltas
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.schemas.deltas import Delta, decode_delta
from gracestream.schemas.messages import Feedback, decode, escape_unprintable
from gracestream.workers.cli.common import (
    NO_DELTAS_MESSAGE,
    JsonOption,
    KafkaOption,
    LayerOption,
    ModelOption,
    PrefixOption,
    connect,
    format_time,
    line_width,
    plain_cell,
    pluralize,
    print_fields,
    print_json,
    print_table,
    shorten,
    stderr_console,
    stdout_console,
)
from gracestream.workers.cli.grid import render_table

INSPECT_COLUMNS = ("seq", "term", "time", "outcome", "feedback", "inputs", "target", "entries")
"""Of the columns of `inspect`."""

MAX_SEQ_DIGITS = 18
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
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
    model: ModelOption = None,
    layer: LayerOption = None,
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
    until = None if at is None else _parse_time(at, "is no time")
    settings = connect(kafka=kafka, prefix=prefix, model=model, layer=layer)
    records: list[bytes] = []
    needed = retrain or to is not None
    codebook = replay_deltas(settings, seq, until, lambda record, *_: records.append(record) if needed else None)
    if codebook is None:
        raise UserError(NO_DELTAS_MESSAGE)
    told = codebook.describe()
    status = 0
    if retrain:
        codebook, records, compared = _reproduce(settings, records)
        told = {**codebook.describe(), "recorded_digest": told["digest"], **compared}
        status = int(compared["first_difference"] is not None)
    if output is not None:
        save_codebook(codebook, output)
    if to is not None and status == 0:
        told["copied_to"] = to
        told["copied_digest"] = _copy_to_branch(settings, to, to_codebook or codebook.name, records, replication)
    print_fields(told, as_json=as_json)
    raise typer.Exit(status)


def inspect(
    entry: Annotated[str | None, typer.Argument(help="Only what touched this entry, and who hits it.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Show long inputs and targets whole, as --json always does.")
    ] = False,
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Show a codebook's history: each delta, the correction behind it, its outcome, and what it did to which entries.

    A correction that the model fulfilled already is `unchanged`: its delta only protects that answer from later edits.
    Of one entry also the answers that it gave, as far as `predictions` still has them.
    Example: gracestream inspect
    """
    settings = connect(kafka=kafka, prefix=prefix)
    steps = [step for step in history_steps(settings) if entry is None or entry in step.entries]
    if entry is not None and not steps:
        raise UserError(f"no delta touched an entry {entry!r}; `gracestream inspect` names those that there were")
    served = None if entry is None else read_entry_usage(settings, entry)
    if as_json:
        for step in steps:
            print_json(msgspec.to_builtins(step))
        if served is not None:
            print_json({"hits": msgspec.to_builtins(served)})
        return
    for line in render_table(INSPECT_COLUMNS, [_step_row(step, full=full) for step in steps], line_width()):
        print(line)
    if served is not None:
        count = pluralize(served.count, "answer", "answers")
        stdout_console.print(f"{count} came from it" + (", the newest:" if served.recent else ""))
        if served.recent:
            table = Table("time", Column("request", overflow="fold"), "distance", "radius", "replica")
            for hit in served.recent:
                near = (f"{hit.distance:.4g}", f"{hit.radius:.4g}")
                table.add_row(*map(plain_cell, (format_time(hit.timestamp), hit.request_id, *near, hit.replica)))
            print_table(table)


def compare(
    before: Annotated[str, typer.Argument(help="A delta's number, or a time (UTC unless it says).")],
    after: Annotated[str, typer.Argument(help="Likewise.")],
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Say what changed between two points of the history: which inputs are answered otherwise, and which entries.

    Example: gracestream diff 12 41
    """
    points = _parse_point(before), _parse_point(after)
    from gracestream.pipeline.history import diff_history  # noqa: PLC0415  (torch takes seconds that other commands need not wait)

    found = diff_history(connect(kafka=kafka, prefix=prefix), *points)
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    fold = [Column(name, overflow="fold") for name in ("inputs", "answer before", "answer after", "feedback")]
    title = pluralize(len(found.inputs), "input is answered otherwise", "inputs are answered otherwise")
    table = Table(*fold, title=title)
    for change in found.inputs:
        answers = (change.before or "(the model's own)", change.after or "(the model's own)")
        table.add_row(*map(plain_cell, (change.inputs, *answers, change.feedback_id)))
    print_table(table)
    if found.exceptions:
        table = Table(*(Column(name, overflow="fold") for name in ("inputs", "exception", "feedback")))
        for one in found.exceptions:
            what = f"{'not answered' if one.excepted else 'may be answered again'} by {one.except_from}"
            table.add_row(*map(plain_cell, (one.inputs, what, one.feedback_id)))
        print_table(table)
    title = pluralize(len(found.entries), "entry differs", "entries differ")
    table = Table(Column("entry", overflow="fold"), "what", title=title)
    for entry_id, what in found.entries.items():
        table.add_row(plain_cell(entry_id), plain_cell(what))
    print_table(table)


def corrections(
    seq: Annotated[int | None, typer.Option(min=0, help="Those that held after this delta; else now.")] = None,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Print the corrections in force, oldest first, as the JSON lines that `correct` takes: for another model or layer.

    Exceptions from them are printed, too. Those that were undone or corrected again are left out. A signed one is
    printed as it was sent, byte for byte: its signature is good where the codebook has the same name.
    Example: gracestream corrections --prefix old- | gracestream correct --prefix new-
    """
    from gracestream.pipeline.history import iter_active_corrections  # noqa: PLC0415  (torch takes seconds)

    for record in iter_active_corrections(connect(kafka=kafka, prefix=prefix), seq):
        feedback = decode(record, Feedback)
        if feedback.signature is UNSET:
            print_json(msgspec.to_builtins(feedback))
        else:
            print(record.decode(), flush=True)


def _reproduce(settings: Settings, records: list[bytes]) -> tuple[Codebook, list[bytes], dict[str, Any]]:
    """The codebook that training anew gives, its records, and how they compare."""
    from gracestream.pipeline.editing import describe_environment  # noqa: PLC0415
    from gracestream.pipeline.history import ReproductionRun  # noqa: PLC0415
    from gracestream.pipeline.model import LayerError  # noqa: PLC0415
    from gracestream.workers.bootstrap import load_model  # noqa: PLC0415

    lead = decode_delta(records[0])
    settings = _with_recorded_settings(lead, settings)
    try:
        model = load_model(settings)
    except LayerError as error:
        raise LayerError(
            f"the history is of a model with a layer {lead.layer!r}; set --model as it was: {error}"
        ) from error
    history = KafkaHistory(settings)
    fruitless = list(history.no_change_decisions())  # before the feedback: all of theirs is there then
    retraining = ReproductionRun(
        model, history.feedback_since(0), lambda plan: describe_environment(model, plan), fruitless
    )
    shown = stderr_console.is_terminal
    tracked = track(records, "deciding and training anew", console=stderr_console, transient=True, disable=not shown)
    if all(map(retraining.reproduce, tracked)):
        retraining.finish_seq()
    assert retraining.codebook is not None
    return retraining.codebook, retraining.records, msgspec.to_builtins(retraining.report)


def _with_recorded_settings(lead: Delta, settings: Settings) -> Settings:
    """The settings, with the layer and the queries of a history where they are not set."""
    found: dict[str, str] = {}
    if "layer" not in settings.model_fields_set:
        found["layer"] = lead.layer
    if settings.query == "auto" and (query := read_query_setting(lead)) is not None:
        found["query"] = query
    return settings.model_copy(update=found)


def _copy_to_branch(
    settings: Settings, prefix: str, codebook: str, records: list[bytes], replication: int | None
) -> str:
    from gracestream.pipeline.history import branch_history  # noqa: PLC0415

    target = load_settings(kafka=settings.kafka, prefix=prefix, codebook=codebook)
    return branch_history(settings, target, records, replication)


def _parse_point(text: str) -> int | datetime:
    if text.isdecimal() and len(text) <= MAX_SEQ_DIGITS:
        return int(text)
    return _parse_time(text, "is neither a delta's number nor a time")


def _parse_time(text: str, problem: str) -> datetime:
    """Raises typer.BadParameter where it is none: what is given `problem`."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {problem} like 2026-11-20T18:00:00") from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _step_row(step: HistoryStep, *, full: bool) -> list[list[str]]:
    """The lines of each cell."""
    entries = (f"{entry_id} {what}" for entry_id, what in step.entries.items())
    whose = "" if step.feedback_id is None else step.feedback_id + (f" by {step.author}" if step.author else "")
    inputs = f"(undoes {', '.join(step.undoes)})" if step.undoes else step.inputs or ""
    asked = [escape_unprintable(text) if full else shorten(text) for text in (inputs, step.target or "")]
    told = [
        str(step.seq),
        str(step.term),
        format_time(step.timestamp),
        step.outcome or step.op,
        escape_unprintable(whose),
        *asked,
    ]
    return [*([text] for text in told), list(map(escape_unprintable, entries))]
