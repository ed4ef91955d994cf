"""`experiment`: the paper's experiments, through the engine that the editor worker runs."""

import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from pipeline.experiments.data import FOLDER
from workers.cli.common import AsJson, Layer, Model, notes, say, show


class Name(StrEnum):
    """The experiments."""

    scotus = "scotus"
    zsre = "zsre"
    counterfact = "counterfact"
    hallucination = "hallucination"


class Through(StrEnum):
    """Where corrections are decided."""

    engine = "engine"
    kafka = "kafka"


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
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE,VALUE: a run for each. Several make a grid. NAME: editor, seed, or a setting."),
    ] = None,
    edits: Annotated[int | None, typer.Option(help="Corrections, at most.", min=1)] = None,
    retention: Annotated[int | None, typer.Option(help="Examples that TRR is measured on, at most.", min=1)] = None,
    every: Annotated[int, typer.Option(help="Measure after so many corrections, and at the end.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="Draws which edits, in which order; 0: as the data have them.", min=0)] = 0,
    through: Annotated[
        Through, typer.Option(help="kafka: start a pipeline of one's own, and correct by its topics.")
    ] = Through.engine,
    data: Annotated[Path | None, typer.Option(help="Folder of the data.", envvar=FOLDER)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; else results/NAME-EDITOR.")] = None,
    plots: Annotated[bool, typer.Option(help="Draw what comes of it, by matplotlib.")] = True,
    model: Model = None,
    layer: Layer = None,
    as_json: AsJson = False,
) -> None:
    """Run one of the paper's streams of edits on this machine, and write what comes of it.

    The settings of an editor apply. A run whose results are there already is not run again.
    Example: gracestream experiment zsre --edits 200 --retention 200 --sweep policy=paper,nearest --sweep seed=0,1,2
    """
    from pipeline.experiments.plots import require_plots  # noqa: PLC0415  (torch takes seconds)
    from pipeline.experiments.report import COLUMNS, Asked, cells, made, plain  # noqa: PLC0415
    from pipeline.experiments.sweep import Sweep, grid, title  # noqa: PLC0415
    from pipeline.experiments.tasks import TASKS  # noqa: PLC0415
    from workers.experiments import SWEPT, Runner, settings_of  # noqa: PLC0415

    if data is not None:
        os.environ[FOLDER] = str(data)
    if plots:
        require_plots()
    task = TASKS[name]()
    digest = task.digest()
    whole = made(out or Path("results") / (f"{name}-sweep" if sweep else f"{name}-{editor}"))
    runs = []
    for cell in grid(sweep or [], (*SWEPT, "editor", "seed")):
        chosen = dict(cell)
        method, drawn = _method(chosen.pop("editor", editor)), _number(chosen.pop("seed", str(seed)))
        if through is Through.kafka and method is not Method.grace:
            raise typer.BadParameter(f"--through kafka: an editor worker runs GRACE, not {method}")
        settings = settings_of(name, {"model": model, "layer": layer, **chosen})
        asked = Asked(
            experiment=name, data=digest, editor=method, edits=edits, retention=retention, every=every, seed=drawn,
            settings=settings, through=through.value,
        )  # fmt: skip
        runs.append((cell, asked))
    done = Sweep()
    with Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
        runner = Runner(notes.print, plots=plots)
        bar = progress.add_task(name)
        for number, (cell, asked) in enumerate(runs, 1):
            if cell:
                notes.print(f"{number} of {len(runs)}: {title(cell)}")
            progress.reset(bar)
            folder = made(whole / title(cell))
            report = runner.run(asked, task, folder, lambda count, of: progress.update(bar, completed=count, total=of))
            done.add(cell, report)
            for point in report.points if as_json else ():
                say({**cell, **plain(point)})
    if sweep:
        done.write(whole, plots=plots)
    if not as_json:
        _show(*((done.columns, done.rows) if sweep else (COLUMNS, map(cells, report.points))))
    notes.print(f"the results are in {whole}")


def _show(columns: Iterable[str], rows: Iterable[list[str]]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    show(table)


def _method(name: str) -> Method:
    try:
        return Method(name)
    except ValueError:
        raise typer.BadParameter(f"--sweep editor: {name!r} is none of {', '.join(Method)}") from None


def _number(seed: str) -> int:
    if not (seed.isascii() and seed.isdigit()):
        raise typer.BadParameter(f"--sweep seed: {seed!r} is no number from 0 on")
    return int(seed)
