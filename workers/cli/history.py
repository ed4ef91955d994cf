"""`replay`, `inspect`, `diff` and `corrections`: reading the history of a codebook from `deltas`."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec import UNSET
from rich.progress import track
from rich.table import Column, Table

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.settings import KafkaSettings, ModelSettings, Settings, load_settings
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

if TYPE_CHECKING:
    from gracestream.pipeline.codebook import Codebook
    from gracestream.pipeline.history import HistoryStep

INSPECT_COLUMNS = ("seq", "term", "time", "outcome", "feedback", "inputs", "target", "entries")
"""The columns of `inspect`."""

MAX_SEQ_DIGITS = 18
"""Largest number of digits of a delta's number: it fits into 64 bits."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (replay, inspect, compare, corrections):
        app.command("diff" if command is compare else None, rich_help_panel="History")(command)


def replay(
    seq: Annotated[int | None, typer.Option(min=0, help="Up to this delta; default: all.")] = None,
    at: Annotated[str | None, typer.Option(help="Up to this time by Kafka's clock (default zone: UTC).")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the codebook to this safetensors file.")] = None,
    reproduce: Annotated[
        bool, typer.Option("--reproduce", help="Make each decision again, training included, and compare.")
    ] = False,
    to: Annotated[str | None, typer.Option(help="Branch the history: copy it to topics with this prefix.")] = None,
    to_codebook: Annotated[
        str | None, typer.Option(help="Name of the codebook in the copy; default: the same.")
    ] = None,
    replication: Annotated[
        int | None, typer.Option(min=1, help="Copies of each partition in the copy; default: as for `deltas`.")
    ] = None,
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
    model: ModelOption = None,
    layer: LayerOption = None,
) -> None:
    """Replay `deltas` into a codebook, checking every digest, and describe the codebook.

    The digest is the one that replicas report on /state. With --reproduce the model decides and trains again on all
    feedback that the editor decided on, including rejected feedback; the first decision that differs is reported, with
    exit status 1. Feedback that could not be read, or was rejected by signatures or limits, is left out.
    With --to the history (with --reproduce the reproduced one) is copied, so that an editor with that prefix continues
    from there.
    Example: gracestream replay --seq 41 --output codebook.safetensors
    """
    if to_codebook is not None and to is None:
        raise typer.BadParameter("--to-codebook names the codebook of a copy, so it needs --to")
    from gracestream.pipeline.codebook import save_codebook
    from gracestream.pipeline.replay import replay_deltas

    until = None if at is None else _parse_time(at, "is not a time")
    settings = connect(kafka=kafka, topic_prefix=prefix, model=model, layer=layer)
    records: list[bytes] = []
    keep_records = reproduce or to is not None
    codebook = replay_deltas(
        settings.kafka, seq, until, lambda record, *_: records.append(record) if keep_records else None
    )
    if codebook is None:
        raise UserError(NO_DELTAS_MESSAGE)
    fields = codebook.describe()
    status = 0
    if reproduce:
        codebook, records, comparison = _reproduce(settings, records)
        fields = {**codebook.describe(), "recorded_digest": fields["digest"], **comparison}
        status = int(comparison["first_difference"] is not None)
    if output is not None:
        save_codebook(codebook, output)
    if to is not None and status == 0:
        fields["copied_to"] = to
        fields["copied_digest"] = _copy_to_branch(
            settings.kafka, to, to_codebook or codebook.name, records, replication
        )
    print_fields(fields, as_json=as_json)
    raise typer.Exit(status)


def inspect(
    entry: Annotated[str | None, typer.Argument(help="Only deltas that changed this entry, and its answers.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Show long inputs and targets in full, as --json always does.")
    ] = False,
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Show a codebook's history: each delta with its correction, its outcome, and its changes of entries.

    A correction whose target the model gave already is `unchanged`: its delta only protects the answer from later
    edits. With an entry, also its answers are shown, as far as `predictions` still has them.
    Example: gracestream inspect
    """
    from gracestream.pipeline.history import history_steps, read_entry_usage

    settings = connect(kafka=kafka, topic_prefix=prefix)
    steps = [step for step in history_steps(settings.kafka) if entry is None or entry in step.entries]
    if entry is not None and not steps:
        raise UserError(f"no delta changed an entry {entry!r}; `gracestream inspect` lists the entries of each delta")
    usage = None if entry is None else read_entry_usage(settings.kafka, entry)
    if as_json:
        for step in steps:
            print_json(msgspec.to_builtins(step))
        if usage is not None:
            print_json({"usage": msgspec.to_builtins(usage)})
        return
    for line in render_table(INSPECT_COLUMNS, [_step_row(step, full=full) for step in steps], line_width()):
        print(line)
    if usage is not None:
        count = pluralize(usage.count, "answer", "answers")
        stdout_console.print(f"{count} came from it" + (", the newest:" if usage.recent else ""))
        if usage.recent:
            table = Table("time", Column("request", overflow="fold"), "distance", "radius", "replica")
            for answer in usage.recent:
                distances = (f"{answer.distance:.4g}", f"{answer.radius:.4g}")
                table.add_row(
                    *map(plain_cell, (format_time(answer.timestamp), answer.request_id, *distances, answer.replica))
                )
            print_table(table)


def compare(
    before: Annotated[str, typer.Argument(help="A delta's number, or a time (default zone: UTC).")],
    after: Annotated[str, typer.Argument(help="The second point, in the same form.")],
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Show the changes between two points of the history: inputs with another answer, and changed entries.

    Example: gracestream diff 12 41
    """
    points = _parse_point(before), _parse_point(after)
    from gracestream.pipeline.replay import diff_history

    settings = connect(kafka=kafka, topic_prefix=prefix)
    difference = diff_history(settings.kafka, settings.model.codebook, *points)
    if as_json:
        print_json(msgspec.to_builtins(difference))
        return
    columns = [Column(name, overflow="fold") for name in ("inputs", "answer before", "answer after", "feedback")]
    title = pluralize(len(difference.inputs), "input has another answer", "inputs have another answer")
    table = Table(*columns, title=title)
    for change in difference.inputs:
        answers = (change.before or "(the model's own)", change.after or "(the model's own)")
        table.add_row(*map(plain_cell, (change.inputs, *answers, change.feedback_id)))
    print_table(table)
    if difference.exceptions:
        table = Table(*(Column(name, overflow="fold") for name in ("inputs", "exception", "feedback")))
        for exception in difference.exceptions:
            change_text = (
                f"{'not answered' if exception.excepted else 'may be answered again'} by {exception.except_from}"
            )
            table.add_row(*map(plain_cell, (exception.inputs, change_text, exception.feedback_id)))
        print_table(table)
    title = pluralize(len(difference.entries), "entry differs", "entries differ")
    table = Table(Column("entry", overflow="fold"), "what", title=title)
    for entry_id, change_text in difference.entries.items():
        table.add_row(plain_cell(entry_id), plain_cell(change_text))
    print_table(table)


def corrections(
    seq: Annotated[
        int | None, typer.Option(min=0, help="The corrections in force after this delta; default: now.")
    ] = None,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Print the corrections in force, oldest first, as JSON lines for `correct`, such as for another model or layer.

    Exceptions from them are printed, too. Undone and superseded corrections are left out. A signed correction is
    printed as it was sent, byte for byte: its signature is valid for a codebook of the same name.
    Example: gracestream corrections --prefix old- | gracestream correct --prefix new-
    """
    from gracestream.pipeline.replay import iter_active_corrections

    for record in iter_active_corrections(connect(kafka=kafka, topic_prefix=prefix).kafka, seq):
        feedback = decode(record, Feedback)
        if feedback.signature is UNSET:
            print_json(msgspec.to_builtins(feedback))
        else:
            print(record.decode(), flush=True)


def _reproduce(settings: Settings, records: list[bytes]) -> tuple["Codebook", list[bytes], dict[str, Any]]:
    """Decide and train again; return the resulting codebook, its records, and the comparison with the recorded ones.

    Raises:
        LayerError: the model has no such layer as the history's.
    """
    from gracestream.pipeline.editing import describe_environment
    from gracestream.pipeline.history import KafkaHistory
    from gracestream.pipeline.model import LayerError
    from gracestream.pipeline.reproduction import ReproductionRun
    from gracestream.workers.bootstrap import load_model

    lead = decode_delta(records[0])
    try:
        model = load_model(_with_recorded_values(lead, settings.model), settings.editing.policy)
    except LayerError as error:
        raise LayerError(
            f"the history belongs to a model with a layer {lead.layer!r}; set --model to that model: {error}"
        ) from error
    history = KafkaHistory(settings.kafka)
    no_change_decisions = list(
        history.no_change_decisions()
    )  # before the feedback, so that the feedback of each is read
    run = ReproductionRun(
        model, history.feedback_since(0), lambda plan: describe_environment(model, plan), no_change_decisions
    )
    is_terminal = stderr_console.is_terminal
    tracked = track(
        records, "deciding and training again", console=stderr_console, transient=True, disable=not is_terminal
    )
    if all(map(run.reproduce, tracked)):
        run.finish_seq()
    assert run.codebook is not None
    return run.codebook, run.records, msgspec.to_builtins(run.report)


def _with_recorded_values(lead: Delta, settings: ModelSettings) -> ModelSettings:
    """The settings; if layer or query are not set, with those of the history's lead delta."""
    from gracestream.pipeline.codebook import read_query_setting

    recorded: dict[str, str] = {}
    if "layer" not in settings.model_fields_set:
        recorded["layer"] = lead.layer
    if settings.query_source == "auto" and (query := read_query_setting(lead)) is not None:
        recorded["query_source"] = query
    return settings.model_copy(update=recorded)


def _copy_to_branch(
    source: KafkaSettings, prefix: str, codebook: str, records: list[bytes], replication: int | None
) -> str:
    """Copy the records to topics with this prefix; return the digest of the copy."""
    from gracestream.pipeline.history import branch_history

    target = load_settings(kafka=source.servers, topic_prefix=prefix).kafka
    return branch_history(source, target, codebook, records, replication)


def _parse_point(text: str) -> int | datetime:
    if text.isdecimal() and len(text) <= MAX_SEQ_DIGITS:
        return int(text)
    return _parse_time(text, "is neither a delta's number nor a time")


def _parse_time(text: str, problem: str) -> datetime:
    """A time in ISO 8601; UTC unless it has a zone.

    Raises:
        typer.BadParameter: the text is not a time; `problem` describes it in the message.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {problem} like 2026-11-20T18:00:00") from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _step_row(step: "HistoryStep", *, full: bool) -> list[list[str]]:
    """The lines of each cell of a delta's row, in the order of `INSPECT_COLUMNS`."""
    entries = (f"{entry_id} {change}" for entry_id, change in step.entries.items())
    feedback = "" if step.feedback_id is None else step.feedback_id + (f" by {step.author}" if step.author else "")
    inputs = f"(undoes {', '.join(step.undoes)})" if step.undoes else step.inputs or ""
    prompt_and_target = [escape_unprintable(text) if full else shorten(text) for text in (inputs, step.target or "")]
    cells = [
        str(step.seq),
        str(step.term),
        format_time(step.timestamp),
        step.outcome or step.op,
        escape_unprintable(feedback),
        *prompt_and_target,
    ]
    return [*([text] for text in cells), list(map(escape_unprintable, entries))]
