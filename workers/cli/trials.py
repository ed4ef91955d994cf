"""`calibrate --auto`: what trial edits showed, as a table, and the settings to use."""

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
from gracestream.workers.cli.common import (
    pluralize,
    print_json,
    print_table,
    read_valid_lines,
    stderr_console,
    stdout_console,
)
from gracestream.workers.cli.trial_runner import TrialRunner

MAX_TABLE_ROWS = 12
"""Rows of the table; --json has all of them."""

MAX_INVALID_LINES = 5
"""Lines that are left out and named."""

SHARE_COLUMNS = ("edited", "kept", "rephrases", "forms", "others", "about", "broken")


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
    """Make trial edits and print what they showed; ends with status 1 if no settings will do."""
    if plot is not None:
        require_plot(plot)
    samples = _read_samples(lines)
    found: list[TrialResult] = []
    ends = time.monotonic() + 60 * minutes
    tuning = None
    with _suppress_interrupt(), _make_progress() as progress:
        bar = progress.add_task("loading the model", total=None)
        tuning = TrialRunner(
            load_settings(model=model), samples, layers, trials, lambda: time.monotonic() > ends,
            lambda what: progress.update(bar, advance=1, description=what),
        )  # fmt: skip
        for note in tuning.notes:
            stderr_console.print(note)
        steps = tuning.measurement.count_steps(tuning.choices)
        progress.update(bar, total=steps)
        for one in tuning.measurement.measure(tuning.choices):
            found.append(one)
            if as_json:
                print_json(_trial_fields(one))
    advice = advise(
        found, max_false_positives, 0 if tuning is None else tuning.measurement.count_combinations(tuning.choices)
    )
    if plot is not None and found:
        draw(found, advice.chosen, max_false_positives, plot)
    _print_result(tuning, found, advice, max_false_positives, as_json=as_json)
    raise typer.Exit(int(advice.chosen is None))


@contextmanager
def _suppress_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C ends the work, and what comes after it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        stderr_console.print("stopped: what follows was found so far")


def _make_progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=stderr_console, transient=True, disable=not stderr_console.is_terminal)


def _read_samples(path: Path) -> list[LabelledRequest]:
    """The samples of a file; a line that is none is left out, and the first of these are named."""
    bad: list[str] = []
    samples = []
    for number, fields in read_valid_lines(path, bad.append):
        try:
            samples.append(msgspec.convert({"inputs": fields} if isinstance(fields, str) else fields, LabelledRequest))
        except msgspec.ValidationError as error:
            bad.append(f"{path}, line {number}: {error}; the line is left out")
    for why in bad[:MAX_INVALID_LINES]:
        stderr_console.print(why)
    if len(bad) > MAX_INVALID_LINES:
        stderr_console.print(f"{pluralize(len(bad) - MAX_INVALID_LINES, 'more line is', 'more lines are')} left out")
    return samples


def _print_result(
    runner: TrialRunner | None,
    trials: Sequence[TrialResult],
    advice: Advice,
    max_false_positives: float,
    *,
    as_json: bool,
) -> None:
    """The table, the findings, and the settings."""
    variables = {} if runner is None or advice.chosen is None else runner.environment_variables(advice.chosen)
    if as_json:
        print_json({"settings": variables, "findings": advice.findings})
        return
    if trials:
        print_table(_trials_table(rank_results(trials, advice, max_false_positives)[:MAX_TABLE_ROWS]))
        more = (
            f"; the best {MAX_TABLE_ROWS} of {len(trials)} settings, all with --json"
            if len(trials) > MAX_TABLE_ROWS
            else ""
        )
        stderr_console.print(
            "Shares with 95 % intervals. 'edited': trial edits that work; 'kept': those that hold at the end;"
            " 'rephrases', 'forms': other words and other spellings that get the target; 'others', 'about': requests"
            " captured that should not be, of your file and about the same subjects; 'broken': of all captured"
            f" texts, those with neither the target nor the unedited answer; 's/edit': CPU seconds{more}."
        )
    for finding in advice.findings:
        stderr_console.print(finding)
    if advice.chosen is not None and not variables:
        stderr_console.print("The defaults will do: no setting needs to be changed.")
    elif advice.chosen is not None:
        stderr_console.print(
            "Settings to use, where they differ from the defaults; take a new codebook and prefix with them:"
        )
        for name, value in variables.items():
            stdout_console.print(f"{name}={value}", soft_wrap=True, markup=False, highlight=False)


def _trials_table(rows: Sequence[TrialResult]) -> Table:
    table = Table(Column("layer", overflow="fold"), "query", "radius", *SHARE_COLUMNS, "s/edit")
    for row in rows:
        shares = (_share_cell(getattr(row, name)) for name in SHARE_COLUMNS)
        table.add_row(row.layer, row.query, row.radius, *shares, f"{row.seconds:.1f}")
    return table


def _share_cell(share: Share) -> str:
    """A share above its interval."""
    if not share.of:
        return "-"
    low, high = share.interval
    return f"{share.value:.2f}\n{low:.2f}-{high:.2f}"


def _trial_fields(trial: TrialResult) -> dict[str, object]:
    """A candidate as one JSON object."""
    shares = {
        name: {"share": share.value, "interval": share.interval, "of": share.of}
        for name in (*SHARE_COLUMNS, "nearer")
        if (share := getattr(trial, name)).of
    }
    return {**msgspec.to_builtins(trial), **shares, "reach": trial.reach}
