"""The exceptions of a codebook: prompts that some entries do not serve, although the query is within their radius.

1. An exception applies to a prompt if the prompt's query is within the exception's radius and its wording is the same
   but for capitals. An exception without a wording applies by the query alone.
2. An exception concerns only the entries that it names. Another entry whose radius contains the query may serve the
   prompt.
3. Exceptions are part of the codebook like entries: of the log, the snapshots and the state digest.
"""

import struct
from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np
from msgspec import UNSET

from gracestream.pipeline.search import PointSet, exact_distance
from gracestream.schemas.deltas import ExceptionChange


class PromptExceptions:
    """Exceptions by the id of the feedback that requested them."""

    def __init__(self, exceptions: Iterable[ExceptionChange] = ()) -> None:
        self._by_id: dict[str, ExceptionChange] = {}
        self._ids_by_entry: dict[str, set[str]] = {}
        self._queries = PointSet()
        """The queries of the exceptions, with their radii."""
        for change in exceptions:
            self.apply(change)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, feedback_id: object) -> bool:
        return feedback_id in self._by_id

    def __iter__(self) -> Iterator[ExceptionChange]:
        """The exceptions, sorted by id."""
        return iter([self._by_id[feedback_id] for feedback_id in sorted(self._by_id)])

    def get(self, feedback_id: str) -> ExceptionChange | None:
        """The exception of this id, or None."""
        return self._by_id.get(feedback_id)

    def apply(self, change: ExceptionChange) -> None:
        """Add, replace or remove an exception."""
        feedback_id = change.feedback_id
        if (previous := self._by_id.pop(feedback_id, None)) is not None:
            self._queries.remove(feedback_id)
            for entry_id in previous.entry_ids:
                self._ids_by_entry[entry_id].discard(feedback_id)
                if not self._ids_by_entry[entry_id]:
                    del self._ids_by_entry[entry_id]
        if not change.removed:
            self._by_id[feedback_id] = change
            self._queries.upsert(feedback_id, exception_query(change), change.radius)
            for entry_id in change.entry_ids:
                self._ids_by_entry.setdefault(entry_id, set()).add(feedback_id)

    def is_exempt(self, entry_id: str, get_query: Callable[[], np.ndarray], get_wording: Callable[[], str]) -> bool:
        """True if an exception prevents this entry from serving the prompt.

        The getters are called only for entries with exceptions: most prompts need neither query nor wording here.
        """
        return any(
            exact_distance(get_query(), exception_query(exception)) < exception.radius
            and is_same_request(exception.wording, get_wording())
            for exception in map(self._by_id.__getitem__, self._ids_by_entry.get(entry_id, ()))
        )

    def find_matching(self, query_D: np.ndarray, wording: str, tolerance: float) -> list[ExceptionChange]:
        """The exceptions that may apply to this prompt in some batch, sorted by id.

        `tolerance` is added to each radius, since the query differs between batches.
        """
        feedback_ids = [self._queries.names[row] for row in self._queries.containing(query_D, tolerance)]
        return [
            self._by_id[feedback_id]
            for feedback_id in sorted(feedback_ids)
            if is_same_request(self._by_id[feedback_id].wording, wording)
        ]

    def digest_bytes(self) -> bytes:
        """The bytes of all exceptions for the state digest; empty if there is none."""
        return b"".join(_encode_for_digest(exception) for exception in self)


def is_same_request(exception_wording: str, prompt_wording: str) -> bool:
    """True if an exception of the first wording applies to a prompt of the second. Without a wording it always does."""
    return not exception_wording or exception_wording.casefold() == prompt_wording.casefold()


def exception_query(exception: ExceptionChange) -> np.ndarray:
    """The query (D) of an exception. The change must not be a removal."""
    assert exception.query is not UNSET
    return exception.query.array()


def _encode_for_digest(exception: ExceptionChange) -> bytes:
    """One exception for the state digest.

    Read as the length of an entry id, the first 8 bytes exceed any id. So an exception cannot pass for an entry.
    """
    encoded = msgspec.msgpack.encode(exception)
    return b"exception " + struct.pack("<q", len(encoded)) + encoded
