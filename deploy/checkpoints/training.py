"""Common parts of the trained checkpoints: deterministic training, names by content, and progress reports.

1. Training gives the same bits on every run of one machine.
2. The name of a checkpoint's folder changes with its recipe and its data.

Not promised: equal bits on machines with another CPU or another version of torch.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from gracestream.pipeline.model import ProgressCallback

T = TypeVar("T")


REPORTS = 20
"""Progress lines of one part of a build."""


def digest(recipe: object, rows: bytes) -> str:
    """A hash of the recipe's `repr` and of the data: 8 hexadecimal digits."""
    return hashlib.sha256(repr(recipe).encode() + rows).hexdigest()[:8]


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """A context with a fixed seed and one thread; its end restores the caller's random state and threads.

    Sums over several threads would depend on their number, and so would the trained bits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def reported(items: Iterable[T], total: int, what: str, report: ProgressCallback) -> Iterator[T]:
    """Yield the items; after every twentieth of them, report their number and the estimated remaining time."""
    started, reported = time.monotonic(), 0
    for done, item in enumerate(items, 1):
        yield item
        if done * REPORTS // total > reported:
            reported = done * REPORTS // total
            left = (time.monotonic() - started) * (total - done) / done
            report(f"{what}: {done} of {total} ({done / total:.0%}), about {left:.0f} s left")
