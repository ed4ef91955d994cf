"""Check in a nightly job that every worker holds the codebook of the log.

The script asks each worker for its state, replays `deltas` up to the same delta, and compares the digests. The exit
status is 1 if a worker differs. GRACESTREAM_KAFKA names the cluster; the arguments are the workers' addresses:

    .venv/bin/python examples/nightly_replay.py http://editor:8000 http://replica-1:8000
"""

import json
import subprocess
import sys
import urllib.request
from typing import Any

FIELDS = ("seq", "term", "digest", "state_digest", "entries")
"""The fields of a state that must be equal."""


def state_of(worker: str) -> dict[str, Any]:
    """The state that a worker reports on `/state`."""
    with urllib.request.urlopen(f"{worker}/state", timeout=30) as answer:  # noqa: S310 - the operator names the address
        return {field: value for field, value in json.load(answer).items() if field in FIELDS}


def replayed(seq: int) -> dict[str, Any]:
    """The state after delta `seq`, from the log alone."""
    command = [sys.executable, "-m", "gracestream.workers.cli", "replay", "--json", "--seq", str(seq)]
    state = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {field: value for field, value in state.items() if field in FIELDS}


def main(workers: list[str]) -> int:
    """Print a JSON line for each worker; return the exit status."""
    num_different = 0
    for worker in workers:
        worker_state = state_of(worker)
        log_state = replayed(worker_state["seq"])
        num_different += worker_state != log_state
        print(
            json.dumps(
                {
                    "worker": worker,
                    "equal": worker_state == log_state,
                    "worker_state": worker_state,
                    "log_state": log_state,
                }
            )
        )
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
