"""`evaluate`: measuring a deployment's codebook on a user's own cases."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.progress import Progress
from rich.table import Column, Table

from gracestream.pipeline.errors import UserError
from gracestream.schemas.messages import Feedback, to_display_text
from gracestream.workers.cli.common import (
    NO_DELTAS_MESSAGE,
    JsonOption,
    KafkaOption,
    LayerOption,
    LinesArgument,
    ModelOption,
    PrefixOption,
    connect,
    convert_fields,
    plain_cell,
    print_json,
    print_table,
    read_json_lines,
    shorten,
    stderr_console,
)

if TYPE_CHECKING:
    from gracestream.pipeline.model import EditableModel
    from gracestream.pipeline.tuning.evaluation import CaseResult, EvaluationCase


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Tuning")(evaluate)


def evaluate(
    lines: LinesArgument,
    seq: Annotated[int | None, typer.Option(min=0, help="The codebook after this delta; default: the newest.")] = None,
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
    model: ModelOption = None,
    layer: LayerOption = None,
) -> None:
    """Measure a deployment's codebook on your own cases: answers to get right, and answers that must not change.

    Each line is an object with `inputs` and either `target`, the right answer, or `unchanged`: true. The other fields
    of feedback are ignored; an unknown field is an error. The model runs in this process with the codebook from
    `deltas`; replicas get no requests. Ends with status 1 if a case fails. With --json each case is a line, and the
    last line counts them.
    Example: gracestream evaluate cases.jsonl
    """
    from gracestream.pipeline.replay import replay_deltas
    from gracestream.pipeline.tuning.evaluation import evaluate as evaluate_cases
    from gracestream.pipeline.tuning.evaluation import summarize
    from gracestream.workers.bootstrap import load_model

    cases = _read_cases(lines)
    settings = connect(kafka=kafka, topic_prefix=prefix, model=model, layer=layer)
    codebook = replay_deltas(settings.kafka, seq)
    if codebook is None:
        raise UserError(NO_DELTAS_MESSAGE)
    if "layer" not in settings.model.model_fields_set:
        settings = settings.replace(layer=codebook.layer)
    loaded = load_model(settings.model, settings.editing.policy)
    _require_valid_inputs(loaded, cases, lines)
    with Progress(console=stderr_console, transient=True, disable=not stderr_console.is_terminal) as progress:
        bar = progress.add_task("answering", total=len(cases))
        case_list = list(cases.values())
        results = evaluate_cases(
            loaded,
            codebook,
            case_list,
            lambda done: progress.update(bar, completed=done),
            checked=settings.serving.check_answers,
        )
    summary = summarize(results)
    if as_json:
        for result in results:
            print_json(msgspec.to_builtins(result))
        print_json({"seq": codebook.seq, **msgspec.to_builtins(summary)})
    elif summary.passed < summary.cases:
        print_table(_failures_table(list(cases), results))
    stderr_console.print(
        f"delta {codebook.seq}: {summary.correct} of {summary.with_target} correct ({summary.exact} exactly),"
        f" {summary.unchanged} of {summary.to_stay} unchanged; an entry serves {summary.captured} of {summary.cases},"
        f" {summary.broken} of them with broken output"
    )
    raise typer.Exit(int(summary.passed < summary.cases))


def _read_cases(path: Path) -> dict[int, "EvaluationCase"]:
    """The cases of a file by line number.

    Raises:
        typer.BadParameter: a line is not a case, or the file has no lines.
    """
    from gracestream.pipeline.tuning.evaluation import EvaluationCase

    cases = {}
    for number, fields in read_json_lines(path):
        try:
            cases[number] = convert_fields(fields, EvaluationCase, Feedback)
        except ValueError as error:
            raise typer.BadParameter(f"{path}, line {number}: {error}") from error
    if not cases:
        raise typer.BadParameter(f"{path} has no lines; each is an object with `inputs` and `target` or `unchanged`")
    return cases


def _require_valid_inputs(model: "EditableModel", cases: Mapping[int, "EvaluationCase"], path: Path) -> None:
    """Check that the model can answer every case.

    Raises:
        typer.BadParameter: it cannot; the message names the line.
    """
    from gracestream.pipeline.model import InputError

    for number, case in cases.items():
        try:
            model.task.batch_key(model.task.tokenize(case.inputs), case.parameters)
        except InputError as error:
            raise typer.BadParameter(f"{path}, line {number}: {error}") from error


def _failures_table(numbers: Sequence[int], results: Sequence["CaseResult"]) -> Table:
    """The table of failed cases; `numbers` are the line numbers of all cases."""
    table = Table("line", *(Column(name, overflow="fold") for name in ("inputs", "expected", "answer", "entry")))
    for number, result in zip(numbers, results, strict=True):
        if not result.passed:
            expected = result.unedited if result.expected is None else result.expected
            texts = (to_display_text(result.inputs), expected, result.answer, result.entry_id or "-")
            table.add_row(str(number), *(plain_cell(shorten(text)) for text in texts))
    return table
