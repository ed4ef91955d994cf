"""`calibrate --auto`: what trial edits showed, as a table, and the settings to use."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from gracestream.pipeline.editing import Sample
from gracestream.pipeline.settings import load_settings
from gracestream.pipeline.tuning.advice import Advice, advise, ranked
from gracestream.pipeline.tuning.plot import draw, require_plot
from gracestream.pipeline.tuning.trials import Share, Tried
from gracestream.workers.cli.common import counted, notes, read_good_lines, say, screen, show
from gracestream.workers.cli.trial_runner import Tuning

SHOWN = 12
"""Rows of the table; --json has all of them."""

BAD = 5
"""Lines that are left out and named."""

SHARES = ("edited", "kept", "rephrases", "forms", "others", "about", "broken")


def find_settings(
    lines: Path,
    layers: Sequence[str],
    model: str | None,
    trials: int,
    bound: float,
    minutes: float,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    """Make trial edits and print what they showed; ends with status 1 if no settings will do."""
    if plot is not None:
        require_plot(plot)
    samples = _read(lines)
    found: list[Tried] = []
    ends = time.monotonic() + 60 * minutes
    tuning = None
    with _stoppable(), _progress() as progress:
        bar = progress.add_task("loading the model", total=None)
        tuning = Tuning(
            load_settings(model=model), samples, layers, trials, lambda: time.monotonic() > ends,
            lambda what: progress.update(bar, advance=1, description=what),
        )  # fmt: skip
        for note in tuning.notes:
            notes.print(note)
        steps = tuning.measuring.steps(tuning.choices)
        progress.update(bar, total=steps)
        for one in tuning.measuring.tried(tuning.choices):
            found.append(one)
            if as_json:
                say(_plain(one))
    advice = advise(found, bound, 0 if tuning is None else tuning.measuring.candidates(tuning.choices))
    if plot is not None and found:
        draw(found, advice.chosen, bound, plot)
    _tell(tuning, found, advice, bound, as_json=as_json)
    raise typer.Exit(int(advice.chosen is None))


@contextmanager
def _stoppable() -> Iterator[None]:
    """Inside, Ctrl-C ends the work, and what comes after it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        notes.print("stopped: what follows was found so far")


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal)


def _read(path: Path) -> list[Sample]:
    """The samples of a file; a line that is none is left out, and the first of these are named."""
    bad: list[str] = []
    samples = []
    for number, fields in read_good_lines(path, bad.append):
        try:
            samples.append(msgspec.convert({"inputs": fields} if isinstance(fields, str) else fields, Sample))
        except msgspec.ValidationError as error:
            bad.append(f"{path}, line {number}: {error}; the line is left out")
    for why in bad[:BAD]:
        notes.print(why)
    if len(bad) > BAD:
        notes.print(f"{counted(len(bad) - BAD, 'more line is', 'more lines are')} left out")
    return samples


def _tell(tuning: Tuning | None, found: Sequence[Tried], advice: Advice, bound: float, *, as_json: bool) -> None:
    """The table, the findings, and the settings."""
    variables = {} if tuning is None or advice.chosen is None else tuning.variables(advice.chosen)
    if as_json:
        say({"settings": variables, "findings": advice.findings})
        return
    if found:
        show(_table(ranked(found, advice, bound)[:SHOWN]))
        more = f"; the best {SHOWN} of {len(found)} settings, all with --json" if len(found) > SHOWN else ""
        notes.print(
            "Shares with 95 % intervals. 'edited': trial edits that work; 'kept': those that hold at the end;"
            " 'rephrases', 'forms': other words and other spellings that get the target; 'others', 'about': requests"
            " captured that should not be, of your file and about the same subjects; 'broken': of all captured"
            f" texts, those with neither the target nor the unedited answer; 's/edit': CPU seconds{more}."
        )
    for finding in advice.findings:
        notes.print(finding)
    if advice.chosen is not None and not variables:
        notes.print("The defaults will do: no setting needs to be changed.")
    elif advice.chosen is not None:
        notes.print("Settings to use, where they differ from the defaults; take a new codebook and prefix with them:")
        for name, value in variables.items():
            screen.print(f"{name}={value}", soft_wrap=True, markup=False, highlight=False)


def _table(rows: Sequence[Tried]) -> Table:
    table = Table(Column("layer", overflow="fold"), "query", "radius", *SHARES, "s/edit")
    for row in rows:
        shares = (_cell(getattr(row, name)) for name in SHARES)
        table.add_row(row.layer, row.query, row.radius, *shares, f"{row.seconds:.1f}")
    return table


def _cell(share: Share) -> str:
    """A share above its interval."""
    if not share.of:
        return "-"
    low, high = share.interval
    return f"{share.value:.2f}\n{low:.2f}-{high:.2f}"


def _plain(one: Tried) -> dict[str, object]:
    """A candidate as one JSON object."""
    shares = {
        name: {"share": share.value, "interval": share.interval, "of": share.of}
        for name in (*SHARES, "nearer")
        if (share := getattr(one, name)).of
    }
    return {**msgspec.to_builtins(one), **shares, "reach": one.reach}
