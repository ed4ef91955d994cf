"""Spent signatures: a signed record counts once, whatever became of it (design, section 6).

Whoever may write to `feedback` can send a signed record again. So the outcome of a signed record carries a mark, and
a later record with the same mark is a copy without effect.

1. A verified signature spends the author's id, also for another text that the author signs under this id. An id is
   spent for its author alone: nobody can use up the ids of others.
2. A signature that could not be verified spends the very bytes of its record. So a record that was refused since its
   author was not listed has no effect later, when the author is.
3. Marks stand in the header `spends` of outcomes, in the transaction of the outcome. An editor that takes over reads
   them from `edits`, and knows what each of its predecessors knew.
4. The record that made a mark is no copy of itself: an editor that reads it again, after a failure, decides on it.
5. A mark takes 24 bytes of memory, and the newest some 150. Records without a signature leave none.

Not promised: that a record is new in a deployment of the same codebook name under another prefix.
"""

import hashlib
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from gracestream.schemas.headers import SPENT_MARK_HEADER

MARK_BYTES = 16

MAX_RECENT_MARKS = 2**16
"""Marks in a dict, which is quick to change, before they go into an array, which is small."""


def mark_of_id(author: str, feedback_id: str) -> bytes:
    """What a verified signature of this author spends."""
    return _hash_mark(b"id", msgspec.json.encode((author, feedback_id)))


def mark_of_record(record: bytes) -> bytes:
    """What a signature spends that could not be verified."""
    return _hash_mark(b"record", record)


def mark_header(mark: bytes) -> tuple[str, bytes]:
    """The header of the outcome."""
    return SPENT_MARK_HEADER, mark.hex().encode()


MarkReader = Callable[[int], Iterable[tuple[int, bytes | None, int]]]
"""Given an offset of `edits`: for each outcome from there on its offset, its mark, and the offset of its feedback."""


class SpentMarks:
    """The marks so far, each with the offset of the feedback that made it first.

    Args:
        read_marks: Reads the marks of `edits`.
    """

    def __init__(self, read_marks: MarkReader) -> None:
        self._read_marks, self._next_outcome_offset = read_marks, 0
        self._recent: dict[bytes, int] = {}
        self._marks, self._offsets = np.empty(0, f"S{MARK_BYTES}"), np.empty(0, np.int64)  # in the order of marks

    def __len__(self) -> int:
        return len(self._recent) + len(self._marks)

    @property
    def array_bytes(self) -> int:
        """Memory of the marks that are no longer recent."""
        return int(self._marks.nbytes + self._offsets.nbytes)

    def catch_up(self) -> None:
        """Read the marks of the outcomes that were written since the last call.

        Raises:
            KafkaError: `edits` cannot be read.
        """
        for offset, mark, made_by in self._read_marks(self._next_outcome_offset):
            if mark is not None:
                self.add(mark, made_by)
            self._next_outcome_offset = offset + 1

    def first_offset(self, mark: bytes) -> int | None:
        """The offset of the feedback that made this mark; None where there was none."""
        recent = self._recent.get(mark)
        if recent is not None:
            return recent
        wanted = np.array([mark], self._marks.dtype)  # numpy drops zeros at the end, so both sides must be numpy's
        row = int(np.searchsorted(self._marks, wanted)[0])
        return int(self._offsets[row]) if row < len(self._marks) and self._marks[row] == wanted[0] else None

    def add(self, mark: bytes, offset: int) -> None:
        """Note what the feedback at an offset spends; the first that made a mark keeps it."""
        if self.first_offset(mark) is None:
            self._recent[mark] = offset
        if len(self._recent) >= max(
            MAX_RECENT_MARKS, len(self._marks) // 8
        ):  # a share, so that sorting stays cheap for each
            marks = np.concatenate([self._marks, np.array(list(self._recent), self._marks.dtype)])
            offsets = np.concatenate([self._offsets, np.array(list(self._recent.values()), np.int64)])
            order = np.argsort(marks)
            self._marks, self._offsets = marks[order], offsets[order]
            self._recent.clear()


def _hash_mark(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha256(kind + b"\0" + content).digest()[:MARK_BYTES]
