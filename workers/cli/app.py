"""The command-line application: registers all commands, runs one of them, and reports expected errors.

1. An expected error (`EXPECTED_ERRORS`, or no room to write) is one sentence on standard error and exit status 1.
2. Any other exception is a defect and shows its traceback.
"""

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
    console,
    dead_letters,
    deployment,
    evaluation,
    experiments,
    feedback,
    history,
    imports,
    keys,
    model,
    near_misses,
    snapshots,
    stack,
)
from gracestream.workers.cli.common import EXPECTED_ERRORS

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write without room for it: the disk is full, or a quota or a size limit is reached."""

SETTING_OPTIONS = {
    "--kafka": "GRACESTREAM_KAFKA",
    "--redis": "GRACESTREAM_REDIS",
    "--prefix": "GRACESTREAM_TOPIC_PREFIX",
    "--codebook": "GRACESTREAM_CODEBOOK",
    "--model": "GRACESTREAM_MODEL",
    "--layer": "GRACESTREAM_LAYER",
}
"""Options that override an environment variable, with its name."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gracestream {version('gracestream')}")
        raise typer.Exit


app = typer.Typer(
    name="gracestream",
    help="Correct deployed transformer models live: edits stream over Kafka to every replica, and weights never change."
    " Settings are environment variables, GRACESTREAM_…; docs/reference/settings.md lists them.",
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
    """Handle the options of `gracestream` itself."""


COMMAND_MODULES = (
    stack,
    deployment,
    console,
    feedback,
    imports,
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
"""Modules with commands, in the order of the help."""

for group in COMMAND_MODULES:
    group.register(app)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command with these arguments, or with those of the process; see the module's docstring for errors."""
    command_line = sys.argv[1:] if arguments is None else arguments
    silence_libraries()  # until a worker sets up its log output
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 shows what it can
    try:
        app(args=list(command_line), standalone_mode=True)
    except EXPECTED_ERRORS as error:
        _exit_with_error(_replace_variable_names(command_line, describe_error(error)))
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # the interpreter would flush the rest at exit, and fail again: send it to /dev/null
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit_with_error(f"cannot write{f' to {error.filename}' if error.filename else ''}: {error.strerror}")


def _replace_variable_names(arguments: Sequence[str], message: str) -> str:
    """The message with each overridden variable replaced by the option that the user gave."""
    for option, variable in SETTING_OPTIONS.items():
        if any(word == option or word.startswith(f"{option}=") for word in arguments):
            message = re.sub(rf"\b{variable}\b", option, message)
    return message


def _exit_with_error(reason: str) -> NoReturn:
    print(f"gracestream: {reason}", file=sys.stderr)
    sys.exit(1)
