"""The exceptions of a codebook: prompts that some of its entries do not serve, though they lie within their radius.

1. An exception holds for prompts whose query lies within its radius, and that are the same request: its wording and
   theirs differ in capitals at most. Without a wording the query decides alone.
2. It concerns the entries that it names alone: the next entry whose radius holds the prompt may serve it.
3. It is part of the codebook, as entries are: of the log, the snapshots and the state digest.
"""

import struct
from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np
from msgspec import UNSET

from gracestream.pipeline.search import Points, exact_distance
from gracestream.schemas.deltas import ExceptionChange


class PromptExceptions:
    """Exceptions by the id of the feedback that asked for them."""

    def __init__(self, exceptions: Iterable[ExceptionChange] = ()) -> None:
        self._all: dict[str, ExceptionChange] = {}
        self._of_entry: dict[str, set[str]] = {}
        self._queries = Points()
        """The reach of each is its radius."""
        for one in exceptions:
            self.apply(one)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, feedback_id: object) -> bool:
        return feedback_id in self._all

    def __iter__(self) -> Iterator[ExceptionChange]:
        """In the order of their ids."""
        return iter([self._all[name] for name in sorted(self._all)])

    def get(self, feedback_id: str) -> ExceptionChange | None:
        """None where there is none of this id."""
        return self._all.get(feedback_id)

    def apply(self, change: ExceptionChange) -> None:
        """Add, change or remove one."""
        name = change.feedback_id
        if (before := self._all.pop(name, None)) is not None:
            self._queries.drop(name)
            for entry_id in before.entry_ids:
                self._of_entry[entry_id].discard(name)
                if not self._of_entry[entry_id]:
                    del self._of_entry[entry_id]
        if not change.removed:
            self._all[name] = change
            self._queries.put(name, query_of(change), change.radius)
            for entry_id in change.entry_ids:
                self._of_entry.setdefault(entry_id, set()).add(name)

    def exempt(self, entry_id: str, query_D: Callable[[], np.ndarray], asked: Callable[[], str]) -> bool:
        """Whether an entry is not to serve a prompt, of which `query_D` gives the query and `asked` the wording."""
        return any(
            exact_distance(query_D(), query_of(one)) < one.radius and same_request(one.wording, asked())
            for one in map(self._all.__getitem__, self._of_entry.get(entry_id, ()))
        )

    def near(self, query_D: np.ndarray, wording: str, noise: float) -> list[ExceptionChange]:
        """Those that may hold for this prompt in some batch, in the order of their ids."""
        names = [self._queries.names[row] for row in self._queries.reaching(query_D, noise)]
        return [self._all[name] for name in sorted(names) if same_request(self._all[name].wording, wording)]

    def digested(self) -> bytes:
        """What the state digest covers; empty where there is none."""
        return b"".join(_digested(one) for one in self)


def same_request(excepted: str, asked: str) -> bool:
    """Whether an exception of one wording holds for another; without a wording it holds for every one."""
    return not excepted or excepted.casefold() == asked.casefold()


def query_of(exception: ExceptionChange) -> np.ndarray:
    """The query (D) of an exception that is not removed."""
    assert exception.query is not UNSET
    return exception.query.array()


def _digested(one: ExceptionChange) -> bytes:
    """No entry id is this long, so none of it can be taken for an entry."""
    encoded = msgspec.msgpack.encode(one)
    return b"exception " + struct.pack("<q", len(encoded)) + encoded
