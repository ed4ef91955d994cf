"""`python -m workers.cli` is `gracestream`."""

from gracestream.workers.cli import main

main()
