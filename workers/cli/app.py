"""The command line. Commands are thin: each reads its options and calls a module whose name says what it does."""

import sys
from collections.abc import Sequence

import typer

from pipeline.security import plainly
from workers.cli import dead_letters, experiments, history, keys, local, snapshots, traffic, tuning, work
from workers.cli.common import EXPECTED

app = typer.Typer(
    name="gracestream",
    help="Correct deployed transformer models live: edits stream over Kafka to every replica, weights stay as they are."
    " Settings are environment variables, GRACESTREAM_…; README.md lists them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (local, work, traffic, keys, dead_letters, history, snapshots, tuning, experiments):
    group.register(app)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what goes wrong in an expected way is one sentence on standard error and exit status 1."""
    try:
        app(args=list(arguments) if arguments is not None else None, standalone_mode=True)
    except EXPECTED as error:
        print(f"gracestream: {plainly(error)}", file=sys.stderr)
        sys.exit(1)
