"""The command line: `gracestream`."""

import sys
from collections.abc import Sequence

INTERRUPTED_STATUS = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, with those of the process where none are given; Ctrl-C ends it from its first moment on."""
    try:
        from gracestream.workers.cli.app import run  # noqa: PLC0415  (it takes seconds, in which Ctrl-C may come)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_STATUS)
    run(arguments)
