"""The command line. Commands are thin: each reads its options and calls a module whose name says what it does."""

import errno
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from gracestream.pipeline.kafka import describe_error
from gracestream.pipeline.observability import silence_libraries
from gracestream.workers.cli import (
    audit,
    dead_letters,
    deployment,
    evaluation,
    experiments,
    feedback,
    history,
    keys,
    model,
    near_misses,
    snapshots,
    stack,
)
from gracestream.workers.cli.common import EXPECTED_ERRORS

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""There is no room for what is written, on standard output or elsewhere."""

SETTING_OPTIONS = ("--kafka", "--redis", "--prefix", "--codebook", "--model", "--layer")
"""Options that overrule a variable of the environment."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gracestream {version('gracestream')}")
        raise typer.Exit


app = typer.Typer(
    name="gracestream",
    help="Correct deployed transformer models live: edits stream over Kafka to every replica, weights stay as they are."
    " Settings are environment variables, GRACESTREAM_…; README.md lists them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options of `gracestream` itself."""


COMMAND_MODULES = (
    stack,
    deployment,
    feedback,
    keys,
    dead_letters,
    history,
    near_misses,
    audit,
    snapshots,
    model,
    evaluation,
    experiments,
)
for group in COMMAND_MODULES:
    group.register(app)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what goes wrong in an expected way is one sentence on standard error and exit status 1."""
    given = sys.argv[1:] if arguments is None else arguments
    silence_libraries()  # until a worker sets up its log
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 shows what it can
    try:
        app(args=list(given), standalone_mode=True)
    except EXPECTED_ERRORS as error:
        _exit_with_error(_replace_variable_names(given, describe_error(error)))
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # what is left of it must not be tried again at the interpreter's end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit_with_error(f"cannot write{f' to {error.filename}' if error.filename else ''}: {error.strerror}")


def _replace_variable_names(arguments: Sequence[str], message: str) -> str:
    """A message with the options of a command that were used in place of the variables that they overrule."""
    for option in SETTING_OPTIONS:
        if any(word == option or word.startswith(f"{option}=") for word in arguments):
            message = re.sub(rf"\bGRACESTREAM_{option.removeprefix('--').upper()}\b", option, message)
    return message


def _exit_with_error(reason: str) -> NoReturn:
    print(f"gracestream: {reason}", file=sys.stderr)
    sys.exit(1)
