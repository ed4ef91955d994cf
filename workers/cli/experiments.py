"""`experiment`: the paper's experiments, through the engine that the editor worker runs."""

import os
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.progress import Progress
from rich.table import Table

from gracestream.pipeline.experiments.data import FOLDER
from gracestream.workers.cli.common import AsJson, Layer, Model, notes, say, show

if TYPE_CHECKING:
    from gracestream.pipeline.experiments.report import Asked


MOST_SEED = 2**32 - 1
"""As an editor's."""


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
    context: typer.Context,
    name: Annotated[Name, typer.Argument(help="Which one.")],
    editor: Annotated[Method, typer.Option(help="GRACE, or one that the paper measures it beside.")] = Method.grace,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE,VALUE: a run for each. Several make a grid. NAME: editor, seed, or a setting."),
    ] = None,
    edits: Annotated[int | None, typer.Option(help="Corrections, at most.", min=1)] = None,
    retention: Annotated[int | None, typer.Option(help="Examples that TRR is measured on, at most.", min=1)] = None,
    every: Annotated[int, typer.Option(help="Measure after so many corrections, and at the end.", min=1)] = 100,
    seed: Annotated[
        int,
        typer.Option(
            help="Draws which edits, in which order; 0: as the data have them.",
            min=0,
            max=MOST_SEED,
            envvar="GRACESTREAM_SEED",
        ),
    ] = 0,
    through: Annotated[
        Through, typer.Option(help="kafka: start a pipeline of one's own, and correct by its topics.")
    ] = Through.engine,
    data: Annotated[Path | None, typer.Option(help="Folder of the data.", envvar=FOLDER)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; else one in results.")] = None,
    plots: Annotated[bool, typer.Option(help="Draw what comes of it, by matplotlib.")] = True,
    model: Model = None,
    layer: Layer = None,
    as_json: AsJson = False,
) -> None:
    """Run one of the paper's streams of edits on this machine, and write what comes of it.

    The settings of an editor apply. A run whose results are there already is not run again.
    Example: gracestream experiment zsre --edits 200 --retention 200 --sweep policy=paper,nearest --sweep seed=1,2,3
    """
    from gracestream.pipeline.experiments.plots import require_plots  # noqa: PLC0415  (torch takes seconds)
    from gracestream.pipeline.experiments.report import VERSION, Asked, alone, columns_of, made, plain, read  # noqa: PLC0415
    from gracestream.pipeline.experiments.sweep import Sweep, title  # noqa: PLC0415
    from gracestream.pipeline.experiments.tasks import TASKS  # noqa: PLC0415
    from gracestream.workers.cli.experiment_runner import Runner  # noqa: PLC0415

    if data is not None:
        os.environ[FOLDER] = str(data)
    if plots:
        require_plots()
    task = TASKS[name]()
    base = Asked(
        experiment=name, data=task.digest(), editor=editor, edits=edits, retention=retention, every=every, seed=seed,
        settings={}, through=through.value, version=VERSION,
    )  # fmt: skip
    sources = {name: context.get_parameter_source(name) for name in context.params}
    chosen = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    runs = _runs(base, sweep or [], {"model": model, "layer": layer}, chosen)
    runner = Runner(notes.print, plots=plots)
    runner.require(asked for _, asked in runs)
    ending = "" if through is Through.engine else f"-{through}"
    whole = made(out or Path("results") / f"{name}-{'sweep' if sweep else editor}{ending}")
    for cell, _ in runs:
        read(whole / title(cell))  # what is no report is told before hours of work
    done = Sweep(len(runs))
    with alone(whole), Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
        bar = progress.add_task(name)
        for number, (cell, asked) in enumerate(runs, 1):
            if cell:
                notes.print(f"{number} of {len(runs)}: {title(cell)}")
            progress.reset(bar)
            folder = made(whole / title(cell))
            with alone(folder) if cell else nullcontext():
                report = runner.run(
                    asked, task, folder, lambda count, of: progress.update(bar, completed=count, total=of)
                )
            done.add(cell, report)
            for point in report.points if as_json else ():
                say({**cell, **plain(point)})
            if report.agreeing is not None:
                notes.print(f"replicas answered {report.agreeing:.1%} of the corrections as was measured")
            if sweep:  # after each, for those who stop here
                done.write(whole, plots=plots)
    if not as_json:
        _show(*((done.columns, done.rows) if sweep else columns_of(report.points)))
    notes.print(f"the results are in {whole}")


def _runs(
    base: "Asked", sweep: Sequence[str], given: Mapping[str, str | None], chosen: AbstractSet[str]
) -> list[tuple[dict[str, str], "Asked"]]:
    """What a grid asks for, by its combinations; `chosen` names the options on the command line."""
    from gracestream.pipeline.experiments.sweep import grid, title  # noqa: PLC0415
    from gracestream.workers.cli.experiment_runner import SWEPT, settings_of  # noqa: PLC0415

    runs: list[tuple[dict[str, str], Asked]] = []
    for cell in grid(sweep, (*SWEPT, "editor", "seed")):
        if twice := sorted(chosen & cell.keys()):
            raise typer.BadParameter(f"--{twice[0]} and --sweep {twice[0]} contradict each other")
        swept = dict(cell)
        method, seed = _method(swept.pop("editor", base.editor)), _number(swept.pop("seed", str(base.seed)))
        if base.through == Through.kafka and method is not Method.grace:
            raise typer.BadParameter(f"--through kafka: an editor worker runs GRACE, not {method}")
        settings = settings_of(base.experiment, method, {**given, **swept})
        asked = msgspec.structs.replace(base, editor=method.value, seed=seed, settings=settings)
        if any(asked == other for _, other in runs):
            raise typer.BadParameter(f"--sweep: {title(cell)} is there twice")
        runs.append((cell, asked))
    return runs


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
    if not (seed.isascii() and seed.isdigit() and len(seed) <= len(str(MOST_SEED)) and int(seed) <= MOST_SEED):
        raise typer.BadParameter(f"--sweep seed: {seed!r} is no number from 0 to {MOST_SEED}")
    return int(seed)
