"""`calibrate --auto`: running trial edits, and printing their results and the settings to use."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from gracestream.pipeline.editing import LabelledRequest
from gracestream.pipeline.settings import load_settings
from gracestream.pipeline.tuning.advice import Advice, advise, rank_results
from gracestream.pipeline.tuning.plot import draw, require_plot
from gracestream.pipeline.tuning.trials import Share, TrialResult
from gracestream.schemas.messages import Request
from gracestream.workers.cli.common import (
    convert_fields,
    pluralize,
    print_json,
    print_table,
    read_valid_lines,
    stderr_console,
    stdout_console,
)
from gracestream.workers.cli.trial_runner import TrialRunner

MAX_TABLE_ROWS = 12
"""Largest number of rows of the table; --json prints all results."""

MAX_INVALID_LINES = 5
"""Largest number of skipped lines with a message of their own."""

SHARE_COLUMNS = ("edited", "kept", "rephrases", "forms", "others", "about", "broken")
"""Fields of a result that are shares, in the order of the columns."""


def find_settings(
    lines: Path,
    layers: Sequence[str],
    model: str | None,
    trials: int,
    max_false_positives: float,
    minutes: float,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    """Make trial edits, and print their results and the advice.

    Raises:
        typer.Exit: with status 1 if no settings are good enough.
    """
    if plot is not None:
        require_plot(plot)
    labelled_requests = _read_labelled_requests(lines)
    results: list[TrialResult] = []
    deadline = time.monotonic() + 60 * minutes
    runner = None
    with _suppress_interrupt(), _make_progress() as progress:
        task = progress.add_task("loading the model", total=None)
        runner = TrialRunner(
            load_settings(model=model), labelled_requests, layers, trials, lambda: time.monotonic() > deadline,
            lambda step: progress.update(task, advance=1, description=step),
        )  # fmt: skip
        for note in runner.notes:
            stderr_console.print(note)
        steps = runner.measurement.count_steps(runner.choices)
        progress.update(task, total=steps)
        for result in runner.measurement.measure(runner.choices):
            results.append(result)
            if as_json:
                print_json(_trial_fields(result))
    advice = advise(
        results, max_false_positives, 0 if runner is None else runner.measurement.count_combinations(runner.choices)
    )
    if plot is not None and results:
        draw(results, advice.chosen, max_false_positives, plot)
    _print_result(runner, results, advice, max_false_positives, as_json=as_json)
    raise typer.Exit(int(advice.chosen is None))


@contextmanager
def _suppress_interrupt() -> Iterator[None]:
    """A context that Ctrl-C leaves, so that the results so far are printed."""
    try:
        yield
    except KeyboardInterrupt:
        stderr_console.print("stopped; these are the results so far")


def _make_progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=stderr_console, transient=True, disable=not stderr_console.is_terminal)


def _read_labelled_requests(path: Path) -> list[LabelledRequest]:
    """The labelled requests of a file; invalid lines are skipped, and the first of them are reported."""
    problems: list[str] = []
    labelled_requests = []
    for number, fields in read_valid_lines(path, problems.append):
        try:
            labelled_requests.append(convert_fields(fields, LabelledRequest, Request))
        except ValueError as error:
            problems.append(f"{path}, line {number}: {error}; the line is skipped")
    for problem in problems[:MAX_INVALID_LINES]:
        stderr_console.print(problem)
    if len(problems) > MAX_INVALID_LINES:
        stderr_console.print(
            f"{pluralize(len(problems) - MAX_INVALID_LINES, 'more line is', 'more lines are')} skipped"
        )
    return labelled_requests


def _print_result(
    runner: TrialRunner | None,
    trials: Sequence[TrialResult],
    advice: Advice,
    max_false_positives: float,
    *,
    as_json: bool,
) -> None:
    """Print the table, the findings and the settings."""
    variables = {} if runner is None or advice.chosen is None else runner.environment_variables(advice.chosen)
    if as_json:
        print_json({"settings": variables, "findings": advice.findings})
        return
    if trials:
        print_table(_trials_table(rank_results(trials, advice, max_false_positives)[:MAX_TABLE_ROWS]))
        rest_note = (
            f"; the table has the best {MAX_TABLE_ROWS} of {len(trials)} settings, --json all of them"
            if len(trials) > MAX_TABLE_ROWS
            else ""
        )
        stderr_console.print(
            "Shares with 95 % intervals. 'edited': trial edits that work; 'kept': working edits that hold at the end;"
            " 'rephrases', 'forms': rephrases and other spellings that get the target; 'others', 'about': wrongly"
            " captured requests, of your file and about the same subjects; 'broken': captured texts with neither the"
            f" target nor the unedited answer; 's/value': seconds of training a value{rest_note}."
        )
    for finding in advice.findings:
        stderr_console.print(finding)
    if advice.chosen is not None and not variables:
        stderr_console.print("The defaults are good enough: no setting needs to be changed.")
    elif advice.chosen is not None:
        stderr_console.print(
            "Settings to use, where they differ from the defaults; use them with a new codebook and a new prefix:"
        )
        for name, value in variables.items():
            stdout_console.print(f"{name}={value}", soft_wrap=True, markup=False, highlight=False)


def _trials_table(rows: Sequence[TrialResult]) -> Table:
    table = Table(Column("layer", overflow="fold"), "query", "radius", *SHARE_COLUMNS, "s/value")
    for row in rows:
        shares = (_share_cell(getattr(row, name)) for name in SHARE_COLUMNS)
        table.add_row(row.layer, row.query, row.radius, *shares, f"{row.seconds:.1f}")
    return table


def _share_cell(share: Share) -> str:
    """A share, and its interval on the next line; `-` if there are no cases."""
    if not share.of:
        return "-"
    low, high = share.interval
    return f"{share.value:.2f}\n{low:.2f}-{high:.2f}"


def _trial_fields(trial: TrialResult) -> dict[str, object]:
    """A result as the fields of one JSON object."""
    shares = {
        name: {"share": share.value, "interval": share.interval, "of": share.of}
        for name in (*SHARE_COLUMNS, "nearer")
        if (share := getattr(trial, name)).of
    }
    return {**msgspec.to_builtins(trial), **shares, "reach": trial.reach}
