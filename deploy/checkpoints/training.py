"""What trained checkpoints share: equal bits on every run of a machine, in a folder named for what they are."""

import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from gracestream.pipeline.model import ProgressCallback

T = TypeVar("T")


REPORTS = 20
"""Lines of one part of a build: one for every twentieth of it."""


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


def reported(items: Iterable[T], total: int, what: str, report: ProgressCallback) -> Iterator[T]:
    """The items; a line for every twentieth of them says how many are done and how long the others may take."""
    started, told = time.monotonic(), 0
    for done, item in enumerate(items, 1):
        yield item
        if done * REPORTS // total > told:
            told = done * REPORTS // total
            left = (time.monotonic() - started) * (total - done) / done
            report(f"{what}: {done} of {total} ({done / total:.0%}), about {left:.0f} s left")
