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

from gracestream.pipeline.experiments.data import DATA_VARIABLE
from gracestream.workers.cli.common import JsonOption, LayerOption, ModelOption, print_json, print_table, stderr_console

if TYPE_CHECKING:
    from gracestream.pipeline.experiments.report import RunSpec


MAX_SEED = 2**32 - 1
"""As an editor's."""


class ExperimentName(StrEnum):
    """The experiments."""

    scotus = "scotus"
    zsre = "zsre"
    counterfact = "counterfact"
    hallucination = "hallucination"


class EditRoute(StrEnum):
    """Where corrections are decided."""

    engine = "engine"
    kafka = "kafka"


class EditorName(StrEnum):
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
    name: Annotated[ExperimentName, typer.Argument(help="Which one.")],
    editor: Annotated[
        EditorName, typer.Option(help="GRACE, or one that the paper measures it beside.")
    ] = EditorName.grace,
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
            max=MAX_SEED,
            envvar="GRACESTREAM_SEED",
        ),
    ] = 0,
    through: Annotated[
        EditRoute, typer.Option(help="kafka: start a pipeline of one's own, and correct by its topics.")
    ] = EditRoute.engine,
    data: Annotated[Path | None, typer.Option(help="Folder of the data.", envvar=DATA_VARIABLE)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; else one in results.")] = None,
    plots: Annotated[bool, typer.Option(help="Draw what comes of it, by matplotlib.")] = True,
    model: ModelOption = None,
    layer: LayerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one of the paper's streams of edits on this machine, and write what comes of it.

    The settings of an editor apply. A run whose results are there already is not run again.
    Example: gracestream experiment zsre --edits 200 --retention 200 --sweep policy=paper,nearest --sweep seed=1,2,3
    """
    from gracestream.pipeline.experiments.plots import require_matplotlib  # noqa: PLC0415  (torch takes seconds)
    from gracestream.pipeline.experiments.report import (  # noqa: PLC0415
        REPORT_VERSION,
        RunSpec,
        exclusive_lock,
        make_dir,
        read_report,
        table_columns,
        to_json,
    )
    from gracestream.pipeline.experiments.sweep import Sweep, combination_name  # noqa: PLC0415
    from gracestream.pipeline.experiments.tasks import TASKS  # noqa: PLC0415
    from gracestream.workers.cli.experiment_runner import ExperimentRunner  # noqa: PLC0415

    if data is not None:
        os.environ[DATA_VARIABLE] = str(data)
    if plots:
        require_matplotlib()
    task = TASKS[name]()
    base = RunSpec(
        experiment=name, data=task.digest(), editor=editor, edits=edits, retention=retention, every=every, seed=seed,
        settings={}, through=through.value, version=REPORT_VERSION,
    )  # fmt: skip
    sources = {name: context.get_parameter_source(name) for name in context.params}
    chosen = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    runs = _expand_runs(base, sweep or [], {"model": model, "layer": layer}, chosen)
    runner = ExperimentRunner(stderr_console.print, plots=plots)
    runner.check_runs(asked for _, asked in runs)
    ending = "" if through is EditRoute.engine else f"-{through}"
    whole = make_dir(out or Path("results") / f"{name}-{'sweep' if sweep else editor}{ending}")
    for cell, _ in runs:
        read_report(whole / combination_name(cell))  # what is no report is told before hours of work
    done = Sweep(len(runs))
    with (
        exclusive_lock(whole),
        Progress(console=stderr_console, transient=True, disable=not stderr_console.is_terminal) as progress,
    ):
        bar = progress.add_task(name)
        for number, (cell, asked) in enumerate(runs, 1):
            if cell:
                stderr_console.print(f"{number} of {len(runs)}: {combination_name(cell)}")
            progress.reset(bar)
            folder = make_dir(whole / combination_name(cell))
            with exclusive_lock(folder) if cell else nullcontext():
                report = runner.run(
                    asked, task, folder, lambda count, of: progress.update(bar, completed=count, total=of)
                )
            done.add(cell, report)
            for point in report.points if as_json else ():
                print_json({**cell, **to_json(point)})
            if report.agreeing is not None:
                stderr_console.print(f"replicas answered {report.agreeing:.1%} of the corrections as was measured")
            if sweep:  # after each, for those who stop here
                done.write(whole, plots=plots)
    if not as_json:
        _print_rows(*((done.columns, done.rows) if sweep else table_columns(report.points)))
    stderr_console.print(f"the results are in {whole}")


def _expand_runs(
    base: "RunSpec", sweep: Sequence[str], overrides: Mapping[str, str | None], explicit_options: AbstractSet[str]
) -> list[tuple[dict[str, str], "RunSpec"]]:
    """What a grid asks for, by its combinations; `explicit_options` names the options on the command line."""
    from gracestream.pipeline.experiments.sweep import combination_name, expand_grid  # noqa: PLC0415
    from gracestream.workers.cli.experiment_runner import SWEEPABLE_SETTINGS, explicit_settings  # noqa: PLC0415

    runs: list[tuple[dict[str, str], RunSpec]] = []
    for cell in expand_grid(sweep, (*SWEEPABLE_SETTINGS, "editor", "seed")):
        if twice := sorted(explicit_options & cell.keys()):
            raise typer.BadParameter(f"--{twice[0]} and --sweep {twice[0]} contradict each other")
        swept = dict(cell)
        method, seed = _parse_editor(swept.pop("editor", base.editor)), _parse_seed(swept.pop("seed", str(base.seed)))
        if base.through == EditRoute.kafka and method is not EditorName.grace:
            raise typer.BadParameter(f"--through kafka: an editor worker runs GRACE, not {method}")
        settings = explicit_settings(base.experiment, method, {**overrides, **swept})
        asked = msgspec.structs.replace(base, editor=method.value, seed=seed, settings=settings)
        if any(asked == other for _, other in runs):
            raise typer.BadParameter(f"--sweep: {combination_name(cell)} is there twice")
        runs.append((cell, asked))
    return runs


def _print_rows(columns: Iterable[str], rows: Iterable[list[str]]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    print_table(table)


def _parse_editor(name: str) -> EditorName:
    try:
        return EditorName(name)
    except ValueError:
        raise typer.BadParameter(f"--sweep editor: {name!r} is none of {', '.join(EditorName)}") from None


def _parse_seed(seed: str) -> int:
    if not (seed.isascii() and seed.isdigit() and len(seed) <= len(str(MAX_SEED)) and int(seed) <= MAX_SEED):
        raise typer.BadParameter(f"--sweep seed: {seed!r} is no number from 0 to {MAX_SEED}")
    return int(seed)
