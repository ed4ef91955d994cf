"""A feedback record on its way through the editor: read, parsed, decided.

The facts of a decision are a `DecisionResult` of `pipeline.editing`, made once and passed on as it is.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from gracestream.pipeline.editing import DecisionResult
from gracestream.schemas.deltas import Standing
from gracestream.schemas.messages import Feedback

Headers = tuple[tuple[str, bytes], ...]


class FeedbackRecord(NamedTuple):
    """A record of the topic `feedback`; `timestamp_ms` is Kafka's timestamp."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None

    @property
    def size_bytes(self) -> int:
        """Bytes of the key and the value."""
        return len(self.key or b"") + len(self.value or b"")


@dataclass(frozen=True, slots=True)
class ParsedFeedback:
    """A parsed record: accepted feedback, or the result of a record that needs no decision.

    Attributes:
        record: The record.
        feedback: The accepted feedback; None if `early_result` decides the record.
        headers: For the outcome.
        early_result: The result of a record that needs no decision: unreadable, rejected, or committed before without
            an outcome.
        copy_of_offset: The offset of the first record with this signed id, if this record is a copy.
        standing: The rights of the sender.
    """

    record: FeedbackRecord
    feedback: Feedback | None = None
    headers: Headers = ()
    early_result: DecisionResult | None = None
    copy_of_offset: int | None = None
    standing: Standing | UnsetType = UNSET

    @property
    def offset(self) -> int:
        """The offset of the record."""
        return self.record.offset


@dataclass(frozen=True, slots=True)
class DecidedFeedback:
    """A decided record, ready to commit.

    Attributes:
        record: The record; a dead letter has its key and value.
        result: The decision.
        headers: Of the outcome, besides the offset of the record.
    """

    record: FeedbackRecord = field(repr=False)
    result: DecisionResult
    headers: Headers = ()

    @property
    def size_bytes(self) -> int:
        """Bytes that it holds in memory and adds to a transaction.

        Without the outcome, which is short, and the delta: a result with a delta is committed at once.
        """
        return self.record.size_bytes + sum(len(name) + len(value) for name, value in self.headers)

    def with_seconds(self, seconds: float) -> "DecidedFeedback":
        """The same, with the time that the decision took in its outcome, if it has one."""
        if self.result.outcome is None:
            return self
        outcome = msgspec.structs.replace(self.result.outcome, seconds=seconds)
        return replace(self, result=replace(self.result, outcome=outcome))
