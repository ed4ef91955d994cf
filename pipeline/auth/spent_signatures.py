"""Spent signatures: a signed record counts once, whatever its outcome (docs/explanation/security-model.md).

Anyone who may write to `feedback` can send a signed record again. So the outcome of a signed record carries a mark. A
later record with the same mark is a copy and has no effect.

1. A verified signature spends the id of the feedback, even if the author signs another text with this id. An id is
   spent only for its author, so nobody can spend the ids of others.
2. An unverified signature spends the exact bytes of its record. If a record was rejected because its author was not
   listed, a copy has no effect after the author is listed.
3. Marks are in the header `spends` of outcomes, in the transaction of the outcome. A new editor reads them from
   `edits`, and so knows every mark of its predecessors.
4. A record is not a copy of itself. An editor that reads it again after a failure decides on it.
5. A mark takes 24 bytes of memory, and about 150 while it is recent. Unsigned records have none.

Not promised: detection of copies across deployments that use the same codebook name with different prefixes.
"""

import hashlib
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from gracestream.schemas.headers import SPENT_MARK_HEADER

MARK_BYTES = 16
"""Bytes of a mark: the first half of a SHA-256, to save memory."""

MAX_RECENT_MARKS = 2**16
"""Number of marks in the dict, which is fast to change, before they move into the arrays, which are small."""


def mark_of_id(author: str, feedback_id: str) -> bytes:
    """The mark of a verified signature: a hash of author and feedback id."""
    return _hash_mark(b"id", msgspec.json.encode((author, feedback_id)))


def mark_of_record(record: bytes) -> bytes:
    """The mark of an unverified signature: a hash of the bytes of the record."""
    return _hash_mark(b"record", record)


def mark_header(mark: bytes) -> tuple[str, bytes]:
    """The header of an outcome that spends this mark."""
    return SPENT_MARK_HEADER, mark.hex().encode()


MarkReader = Callable[[int], Iterable[tuple[int, bytes | None, int]]]
"""Reads `edits` from an offset. For each outcome: its offset, its mark or None, and the offset of its feedback."""


class SpentMarks:
    """The spent marks, each with the offset of the first feedback record that spent it.

    Args:
        read_marks: Reads marks from `edits`.
    """

    def __init__(self, read_marks: MarkReader) -> None:
        self._read_marks, self._next_outcome_offset = read_marks, 0
        self._recent: dict[bytes, int] = {}
        self._marks, self._offsets = np.empty(0, f"S{MARK_BYTES}"), np.empty(0, np.int64)  # both sorted by mark

    def __len__(self) -> int:
        return len(self._recent) + len(self._marks)

    @property
    def array_bytes(self) -> int:
        """Memory in bytes of the marks in the arrays."""
        return int(self._marks.nbytes + self._offsets.nbytes)

    def catch_up(self) -> None:
        """Read the marks of the outcomes that were written since the last call.

        Raises:
            KafkaError: `edits` cannot be read.
        """
        for offset, mark, feedback_offset in self._read_marks(self._next_outcome_offset):
            if mark is not None:
                self.add(mark, feedback_offset)
            self._next_outcome_offset = offset + 1

    def first_offset(self, mark: bytes) -> int | None:
        """The offset of the feedback that spent this mark; None if it is not spent."""
        recent = self._recent.get(mark)
        if recent is not None:
            return recent
        # numpy drops trailing zero bytes of an item, so it must compare an item with an item, not with `mark`.
        key = np.array([mark], self._marks.dtype)
        row = int(np.searchsorted(self._marks, key)[0])
        return int(self._offsets[row]) if row < len(self._marks) and self._marks[row] == key[0] else None

    def add(self, mark: bytes, offset: int) -> None:
        """Record that the feedback at an offset spends a mark. If the mark is spent already, its first offset stays."""
        if self.first_offset(mark) is None:
            self._recent[mark] = offset
        # Sorting costs about as much as the arrays are long. The limit is at least an eighth of this length, so the
        # cost for each mark stays small however many there are.
        if len(self._recent) >= max(MAX_RECENT_MARKS, len(self._marks) // 8):
            marks = np.concatenate([self._marks, np.array(list(self._recent), self._marks.dtype)])
            offsets = np.concatenate([self._offsets, np.array(list(self._recent.values()), np.int64)])
            order = np.argsort(marks)
            self._marks, self._offsets = marks[order], offsets[order]
            self._recent.clear()


def _hash_mark(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha256(kind + b"\0" + content).digest()[:MARK_BYTES]
