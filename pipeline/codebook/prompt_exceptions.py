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

from gracestream.pipeline.search import PointSet, exact_distance
from gracestream.schemas.deltas import ExceptionChange


class PromptExceptions:
    """Exceptions by the id of the feedback that asked for them."""

    def __init__(self, exceptions: Iterable[ExceptionChange] = ()) -> None:
        self._by_id: dict[str, ExceptionChange] = {}
        self._ids_by_entry: dict[str, set[str]] = {}
        self._queries = PointSet()
        """The reach of each is its radius."""
        for one in exceptions:
            self.apply(one)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, feedback_id: object) -> bool:
        return feedback_id in self._by_id

    def __iter__(self) -> Iterator[ExceptionChange]:
        """In the order of their ids."""
        return iter([self._by_id[name] for name in sorted(self._by_id)])

    def get(self, feedback_id: str) -> ExceptionChange | None:
        """None where there is none of this id."""
        return self._by_id.get(feedback_id)

    def apply(self, change: ExceptionChange) -> None:
        """Add, change or remove one."""
        name = change.feedback_id
        if (before := self._by_id.pop(name, None)) is not None:
            self._queries.remove(name)
            for entry_id in before.entry_ids:
                self._ids_by_entry[entry_id].discard(name)
                if not self._ids_by_entry[entry_id]:
                    del self._ids_by_entry[entry_id]
        if not change.removed:
            self._by_id[name] = change
            self._queries.upsert(name, exception_query(change), change.radius)
            for entry_id in change.entry_ids:
                self._ids_by_entry.setdefault(entry_id, set()).add(name)

    def is_exempt(self, entry_id: str, get_query: Callable[[], np.ndarray], get_wording: Callable[[], str]) -> bool:
        """True if an exception forbids this entry to serve the prompt; query and wording are computed on demand."""
        return any(
            exact_distance(get_query(), exception_query(one)) < one.radius
            and is_same_request(one.wording, get_wording())
            for one in map(self._by_id.__getitem__, self._ids_by_entry.get(entry_id, ()))
        )

    def find_matching(self, query_D: np.ndarray, wording: str, tolerance: float) -> list[ExceptionChange]:
        """Those that may hold for this prompt in some batch, in the order of their ids."""
        names = [self._queries.names[row] for row in self._queries.containing(query_D, tolerance)]
        return [self._by_id[name] for name in sorted(names) if is_same_request(self._by_id[name].wording, wording)]

    def digest_bytes(self) -> bytes:
        """What the state digest covers; empty where there is none."""
        return b"".join(_encode_for_digest(one) for one in self)


def is_same_request(exception_wording: str, prompt_wording: str) -> bool:
    """Whether an exception of one wording holds for another; without a wording it holds for every one."""
    return not exception_wording or exception_wording.casefold() == prompt_wording.casefold()


def exception_query(exception: ExceptionChange) -> np.ndarray:
    """The query (D) of an exception that is not removed."""
    assert exception.query is not UNSET
    return exception.query.array()


def _encode_for_digest(exception: ExceptionChange) -> bytes:
    """No entry id is this long, so none of it can be taken for an entry."""
    encoded = msgspec.msgpack.encode(exception)
    return b"exception " + struct.pack("<q", len(encoded)) + encoded
