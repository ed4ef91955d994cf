"""Check that every worker holds the codebook that the log gives: for a nightly job.

It asks each worker for its state, replays `deltas` up to the same delta, and compares the digests. The exit status is 1
where one differs. GRACESTREAM_KAFKA names the cluster; the arguments are the workers' addresses:

    .venv/bin/python examples/nightly_replay.py http://editor:8000 http://replica-1:8000
"""

import json
import subprocess
import sys
import urllib.request
from typing import Any

FIELDS = ("seq", "term", "digest", "state_digest", "entries")


def state_of(worker: str) -> dict[str, Any]:
    """The codebook that a worker reports."""
    with urllib.request.urlopen(f"{worker}/state", timeout=30) as answer:  # noqa: S310 - the operator names the address
        return {field: value for field, value in json.load(answer).items() if field in FIELDS}


def replayed(seq: int) -> dict[str, Any]:
    """The codebook after delta `seq`, from the log alone."""
    command = [sys.executable, "-m", "gracestream.workers.cli", "replay", "--json", "--seq", str(seq)]
    told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {field: value for field, value in told.items() if field in FIELDS}


def main(workers: list[str]) -> int:
    """Print a line for each worker; the exit status."""
    wrong = 0
    for worker in workers:
        held = state_of(worker)
        log = replayed(held["seq"])
        wrong += held != log
        print(json.dumps({"worker": worker, "equal": held == log, "worker_state": held, "log_state": log}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
