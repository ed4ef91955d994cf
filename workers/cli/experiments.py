"""`experiment`: the paper's experiments, through the engine that the editor worker runs."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.progress import Progress
from rich.table import Table

from pipeline.experiments.data import FOLDER
from pipeline.settings import load_settings
from workers.cli.common import AsJson, Layer, Model, notes, say, show


class Name(StrEnum):
    """The experiments."""

    scotus = "scotus"
    zsre = "zsre"
    counterfact = "counterfact"
    hallucination = "hallucination"


MODELS = {Name.scotus: "scotus"}
"""The models of those that are about another one than an editor's, unless a model is set."""


class Method(StrEnum):
    """The editors."""

    grace = "grace"
    ft = "ft"
    ewc = "ewc"
    retrain = "retrain"
    memory = "memory"
    defer = "defer"
    mend = "mend"
    rome = "rome"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Tuning")(experiment)


def experiment(
    name: Annotated[Name, typer.Argument(help="Which one.")],
    editor: Annotated[Method, typer.Option(help="GRACE, or one that the paper measures it beside.")] = Method.grace,
    edits: Annotated[int | None, typer.Option(help="Corrections, at most.", min=1)] = None,
    retention: Annotated[int | None, typer.Option(help="Examples that TRR is measured on, at most.", min=1)] = None,
    every: Annotated[int, typer.Option(help="Measure after so many corrections, and at the end.", min=1)] = 100,
    data: Annotated[Path | None, typer.Option(help="Folder of the data.", envvar=FOLDER)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; else results/NAME-EDITOR.")] = None,
    model: Model = None,
    layer: Layer = None,
    as_json: AsJson = False,
) -> None:
    """Run one of the paper's streams of edits on this machine, without Kafka, and write what comes of it.

    The settings of an editor apply.
    Example: gracestream experiment zsre --edits 200 --retention 200
    """
    from pipeline.environment import environment  # noqa: PLC0415  (torch takes seconds)
    from pipeline.experiments.editors.grace import Grace  # noqa: PLC0415
    from pipeline.experiments.editors.known import EDITORS  # noqa: PLC0415
    from pipeline.experiments.evaluation import Evaluation  # noqa: PLC0415
    from pipeline.experiments.report import COLUMNS, Report, cells, made, write  # noqa: PLC0415
    from pipeline.experiments.stream import Stream, first, fitting  # noqa: PLC0415
    from pipeline.experiments.tasks import TASKS  # noqa: PLC0415
    from workers.boot import load_model, plan_of  # noqa: PLC0415

    if data is not None:
        os.environ[FOLDER] = str(data)
    folder = made(out or Path("results") / f"{name}-{editor}")
    task = first(TASKS[name](), edits, retention)
    settings = load_settings(model=model, layer=layer)
    if "model" not in settings.model_fields_set and name in MODELS:
        settings = load_settings(model=MODELS[name], layer=layer)
    plan, loaded = plan_of(settings), load_model(settings)
    task, left_out = fitting(task, loaded)
    if left_out:
        notes.print(f"{left_out} examples and texts are left out: the model cannot take them, or not at this length")
    with Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
        bar = progress.add_task(name, total=len(task.edits))
        method = EDITORS[editor](loaded, plan, task.traffic)
        stream = Stream(task, method, Evaluation(loaded, task.measure), at_work=lambda: progress.advance(bar))
        points = list(stream.run([*range(every, len(task.edits), every), len(task.edits)]))
    report = Report(
        experiment=name, measure=task.measure, editor=editor, model=loaded.fingerprint, layer=loaded.layer,
        environment=environment(loaded, plan), left_out=left_out, points=points, made=stream.made,
    )  # fmt: skip
    write(report, method.engine.codebook if isinstance(method, Grace) else None, folder)
    if as_json:
        for point in points:
            say(msgspec.json.decode(msgspec.json.encode(point)))  # which makes null of NaN
        return
    table = Table(*COLUMNS)
    for point in points:
        table.add_row(*cells(point))
    show(table)
    notes.print(f"the results are in {folder}")
