"""The command line `gracestream`.

`main` imports the application itself, because that import takes seconds: Ctrl-C must end the process quietly even then.
"""

import sys
from collections.abc import Sequence

INTERRUPTED_STATUS = 130
"""Exit status after Ctrl-C, as in shells: 128 + SIGINT."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command with these arguments; None: with those of the process."""
    try:
        from gracestream.workers.cli.app import run
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_STATUS)
    run(arguments)
