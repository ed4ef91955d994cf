"""`python -m workers.cli` is `gracestream`."""

from workers.cli import main

main()
