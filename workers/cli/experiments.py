"""`experiment`: running the paper's experiments with the editor worker's engine."""

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
"""Largest seed, as for GRACESTREAM_SEED."""


class ExperimentName(StrEnum):
    """The experiments by name; the same names as in `TASKS`, whose import takes seconds."""

    scotus = "scotus"
    zsre = "zsre"
    counterfact = "counterfact"
    hallucination = "hallucination"


class EditRoute(StrEnum):
    """The place of decisions: this process (`engine`), or an editor worker (`kafka`)."""

    engine = "engine"
    kafka = "kafka"


class Expansion(StrEnum):
    """How the paper policy expands a radius: just to include the query (`cover`), or by the initial radius."""

    cover = "cover"
    paper = "paper"


class EditorName(StrEnum):
    """The editors by name; the same names as in `EDITOR_FACTORIES`, whose import takes seconds."""

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
    name: Annotated[ExperimentName, typer.Argument(help="Name of the experiment.")],
    editor: Annotated[EditorName, typer.Option(help="GRACE, or a baseline of the paper.")] = EditorName.grace,
    expand: Annotated[
        Expansion, typer.Option(help="How the paper policy expands a radius: to the query, or by the initial radius.")
    ] = Expansion.cover,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE,VALUE: one run per value; several make a grid. NAME: editor, expand, seed or a setting."
        ),
    ] = None,
    edits: Annotated[int | None, typer.Option(help="Largest number of corrections.", min=1)] = None,
    retention: Annotated[int | None, typer.Option(help="Largest number of examples for TRR.", min=1)] = None,
    every: Annotated[int, typer.Option(help="Corrections between two measurements.", min=1)] = 100,
    seed: Annotated[
        int,
        typer.Option(
            help="Shuffles the edits; 0: the order of the data.",
            min=0,
            max=MAX_SEED,
            envvar="GRACESTREAM_SEED",
        ),
    ] = 0,
    through: Annotated[
        EditRoute, typer.Option(help="kafka: start a separate pipeline, and send corrections through its topics.")
    ] = EditRoute.engine,
    data: Annotated[Path | None, typer.Option(help="Folder of the data.", envvar=DATA_VARIABLE)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; default: a folder in results.")] = None,
    plots: Annotated[bool, typer.Option(help="Draw plots of the results with matplotlib.")] = True,
    model: ModelOption = None,
    layer: LayerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one of the paper's streams of edits on this machine, and write the results.

    The editor's settings apply. A run whose results exist is not repeated.
    Example: gracestream experiment zsre --edits 200 --retention 200 --sweep policy=paper,nearest --sweep seed=1,2,3
    """
    from gracestream.pipeline.experiments.plots import require_matplotlib
    from gracestream.pipeline.experiments.report import (
        REPORT_VERSION,
        RunSpec,
        exclusive_lock,
        make_dir,
        read_report,
        table_columns,
        to_json,
    )
    from gracestream.pipeline.experiments.sweep import Sweep, combination_name
    from gracestream.pipeline.experiments.tasks import TASKS
    from gracestream.workers.cli.experiment_runner import ExperimentRunner

    if data is not None:
        os.environ[DATA_VARIABLE] = str(data)
    if plots:
        require_matplotlib()
    task = TASKS[name]()
    base = RunSpec(
        experiment=name, data=task.digest(), editor=editor, edits=edits, retention=retention, every=every, seed=seed,
        settings={}, expand=expand.value, through=through.value, version=REPORT_VERSION,
    )  # fmt: skip
    sources = {name: context.get_parameter_source(name) for name in context.params}
    explicit_options = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    runs = _expand_runs(base, sweep or [], {"model": model, "layer": layer}, explicit_options)
    runner = ExperimentRunner(stderr_console.print, plots=plots)
    runner.check_runs(spec for _, spec in runs)
    suffix = "" if through is EditRoute.engine else f"-{through}"
    results_folder = make_dir(out or Path("results") / f"{name}-{'sweep' if sweep else editor}{suffix}")
    for combination, _ in runs:
        read_report(results_folder / combination_name(combination))  # fail on a damaged report before hours of work
    finished = Sweep(len(runs))
    with (
        exclusive_lock(results_folder),
        Progress(console=stderr_console, transient=True, disable=not stderr_console.is_terminal) as progress,
    ):
        bar = progress.add_task(name)
        for number, (combination, spec) in enumerate(runs, 1):
            if combination:
                stderr_console.print(f"{number} of {len(runs)}: {combination_name(combination)}")
            progress.reset(bar)
            folder = make_dir(results_folder / combination_name(combination))
            with exclusive_lock(folder) if combination else nullcontext():
                report = runner.run(
                    spec, task, folder, lambda count, total: progress.update(bar, completed=count, total=total)
                )
            finished.add(combination, report)
            for measurement in report.points if as_json else ():
                print_json({**combination, **to_json(measurement)})
            if report.agreeing is not None:
                stderr_console.print(f"replicas agree with the scores on {report.agreeing:.1%} of the corrections")
            if sweep:  # after each run, so that an interrupted grid has its table, too
                finished.write(results_folder, plots=plots)
    if not as_json:
        _print_rows(*((finished.columns, finished.rows) if sweep else table_columns(report.points)))
    stderr_console.print(f"the results are in {results_folder}")


def _expand_runs(
    base: "RunSpec", sweep: Sequence[str], overrides: Mapping[str, str | None], explicit_options: AbstractSet[str]
) -> list[tuple[dict[str, str], "RunSpec"]]:
    """The runs of a grid with their combinations.

    Raises:
        typer.BadParameter: the grid contradicts an option of the command line (`explicit_options`), names an unknown
            editor or seed, or has a run twice.
        SweepError, SettingsError: the grid is malformed, or a setting is wrong.
    """
    from gracestream.pipeline.experiments.sweep import combination_name, expand_grid
    from gracestream.workers.cli.experiment_runner import SWEEPABLE_SETTINGS, explicit_settings

    runs: list[tuple[dict[str, str], RunSpec]] = []
    for combination in expand_grid(sweep, (*SWEEPABLE_SETTINGS, "editor", "expand", "seed")):
        if repeated := sorted(explicit_options & combination.keys()):
            raise typer.BadParameter(f"--{repeated[0]} and --sweep {repeated[0]} contradict each other")
        remaining = dict(combination)
        editor, seed = (
            _parse_editor(remaining.pop("editor", base.editor)),
            _parse_seed(remaining.pop("seed", str(base.seed))),
        )
        expand = _parse_expansion(remaining.pop("expand", base.expand))
        if base.through == EditRoute.kafka and editor is not EditorName.grace:
            raise typer.BadParameter(f"--through kafka: an editor worker runs GRACE, not {editor}")
        if expand is not Expansion.cover and (base.through == EditRoute.kafka or editor is not EditorName.grace):
            raise typer.BadParameter(f"expand={expand}: only grace has it, and only with --through engine")
        settings = explicit_settings(base.experiment, editor, {**overrides, **remaining})
        spec = msgspec.structs.replace(base, editor=editor.value, seed=seed, settings=settings, expand=expand.value)
        if any(spec == earlier for _, earlier in runs):
            raise typer.BadParameter(f"--sweep: {combination_name(combination)} is given twice")
        runs.append((combination, spec))
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
        raise typer.BadParameter(f"--sweep editor: {name!r} is not one of {', '.join(EditorName)}") from None


def _parse_expansion(name: str) -> Expansion:
    try:
        return Expansion(name)
    except ValueError:
        raise typer.BadParameter(f"--sweep expand: {name!r} is not one of {', '.join(Expansion)}") from None


def _parse_seed(seed: str) -> int:
    if not (seed.isascii() and seed.isdigit() and len(seed) <= len(str(MAX_SEED)) and int(seed) <= MAX_SEED):
        raise typer.BadParameter(f"--sweep seed: {seed!r} is not a number from 0 to {MAX_SEED}")
    return int(seed)
