"""What trained checkpoints share: equal bits on every run of a machine, in a folder named for what they are."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def digest(recipe: object, rows: bytes) -> str:
    """A name that changes with the recipe, by its `repr`, and with the data."""
    return hashlib.sha256(repr(recipe).encode() + rows).hexdigest()[:8]


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """A fixed seed and one thread; the caller's random state and threads come back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
