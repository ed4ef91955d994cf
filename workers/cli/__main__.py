"""`python -m gracestream.workers.cli` runs `gracestream`."""

from gracestream.workers.cli import main

main()
