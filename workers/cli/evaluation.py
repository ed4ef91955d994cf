"""`evaluate`: what a deployment's codebook does to cases of one's own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.progress import Progress
from rich.table import Column, Table

from gracestream.pipeline.errors import UserError
from gracestream.schemas.messages import to_display_text
from gracestream.workers.cli.common import (
    NO_DELTAS_MESSAGE,
    JsonOption,
    KafkaOption,
    LayerOption,
    LinesArgument,
    ModelOption,
    PrefixOption,
    connect,
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
    seq: Annotated[int | None, typer.Option(min=0, help="The codebook after this delta; else as it is now.")] = None,
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
    model: ModelOption = None,
    layer: LayerOption = None,
) -> None:
    """Measure a deployment's codebook on cases of your own: what should be answered, and what should not change.

    Each line is an object with `inputs` and either `target`, the right answer, or `unchanged`: true. The model answers
    here, from the codebook that `deltas` gives; no replica is asked. Ends with status 1 if a case is not answered as it
    asks. With --json each case is a line, and the last line counts them.
    Example: gracestream evaluate cases.jsonl
    """
    from gracestream.pipeline.history import replay_deltas  # noqa: PLC0415
    from gracestream.pipeline.tuning.evaluation import evaluate as answered  # noqa: PLC0415  (torch takes seconds)
    from gracestream.pipeline.tuning.evaluation import summarize  # noqa: PLC0415
    from gracestream.workers.bootstrap import load_model  # noqa: PLC0415

    cases = _read_cases(lines)
    settings = connect(kafka=kafka, prefix=prefix, model=model, layer=layer)
    codebook = replay_deltas(settings, seq)
    if codebook is None:
        raise UserError(NO_DELTAS_MESSAGE)
    if "layer" not in settings.model_fields_set:
        settings = settings.model_copy(update={"layer": codebook.layer})
    loaded = load_model(settings)
    _require_valid_inputs(loaded, cases, lines)
    with Progress(console=stderr_console, transient=True, disable=not stderr_console.is_terminal) as progress:
        bar = progress.add_task("answering", total=len(cases))
        given = list(cases.values())
        results = answered(
            loaded,
            codebook,
            given,
            lambda done: progress.update(bar, completed=done),
            checked=settings.check_answers,
        )
    found = summarize(results)
    if as_json:
        for result in results:
            print_json(msgspec.to_builtins(result))
        print_json({"seq": codebook.seq, **msgspec.to_builtins(found)})
    elif found.passed < found.cases:
        print_table(_failures_table(list(cases), results))
    stderr_console.print(
        f"delta {codebook.seq}: {found.correct} of {found.with_target} correct ({found.exact} exactly),"
        f" {found.unchanged} of {found.to_stay} unchanged; an entry serves {found.captured} of {found.cases},"
        f" {found.broken} of them with broken output"
    )
    raise typer.Exit(int(found.passed < found.cases))


def _read_cases(path: Path) -> dict[int, "EvaluationCase"]:
    """The cases of a file by the numbers of their lines.

    Raises:
        typer.BadParameter: a line is no case, or there is none.
    """
    from gracestream.pipeline.tuning.evaluation import EvaluationCase  # noqa: PLC0415

    cases = {}
    for number, fields in read_json_lines(path):
        try:
            cases[number] = msgspec.convert(fields, EvaluationCase)
        except msgspec.ValidationError as error:
            raise typer.BadParameter(f"{path}, line {number}: {error}") from error
    if not cases:
        raise typer.BadParameter(f"{path} has no lines; each is an object with `inputs` and `target` or `unchanged`")
    return cases


def _require_valid_inputs(model: "EditableModel", cases: Mapping[int, "EvaluationCase"], path: Path) -> None:
    """Raises typer.BadParameter where the model cannot answer a case."""
    from gracestream.pipeline.model import InputError  # noqa: PLC0415

    for number, case in cases.items():
        try:
            model.task.batch_key(model.task.tokenize(case.inputs), case.parameters)
        except InputError as error:
            raise typer.BadParameter(f"{path}, line {number}: {error}") from error


def _failures_table(numbers: Sequence[int], results: Sequence["CaseResult"]) -> Table:
    """The cases that were not answered as they ask."""
    table = Table("line", *(Column(name, overflow="fold") for name in ("inputs", "expected", "answer", "entry")))
    for number, result in zip(numbers, results, strict=True):
        if not result.passed:
            expected = result.unedited if result.expected is None else result.expected
            texts = (to_display_text(result.inputs), expected, result.answer, result.entry_id or "-")
            table.add_row(str(number), *(plain_cell(shorten(text)) for text in texts))
    return table
