"""Decisions without a delta, as their outcomes on `edits` record them; a reproduction can repeat them.

The status of such an outcome is `rejected`, or `unchanged` if there is nothing to remember: a correction that was sent
again, or an undo of nothing. The headers record the codebook version, the sender's permissions, and the traffic
distances that could have changed the status (docs/explanation/messages-and-topics.md).

Not covered: feedback that could not be read or was not accepted. No decision was made, and its outcome has no such
headers.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gracestream.schemas.deltas import DecisionContext, Standing
from gracestream.schemas.headers import (
    CODEBOOK_SEQ_HEADER,
    CONTEXT_HEADER,
    STANDING_HEADER,
    TERM_HEADER,
    feedback_offset_of,
)
from gracestream.schemas.messages import Outcome, decode


@dataclass(frozen=True, slots=True)
class NoChangeDecision:
    """A decision that left the codebook unchanged.

    Attributes:
        offset: The offset of the feedback.
        term: The term of the editor.
        seq: The newest delta that the codebook had applied.
        outcome: The outcome on `edits`.
        context: The recorded traffic distances; None if the decision read none.
        standing: The sender's permissions; UNSET without a list of authors.
    """

    offset: int
    term: int
    seq: int
    outcome: Outcome
    context: DecisionContext | None
    standing: Standing | UnsetType = UNSET

    def headers(self) -> list[tuple[str, bytes]]:
        """The headers of the outcome's record, besides the offset of the feedback."""
        headers = [(TERM_HEADER, str(self.term).encode()), (CODEBOOK_SEQ_HEADER, str(self.seq).encode())]
        if self.context is not None:
            headers.append((CONTEXT_HEADER, msgspec.json.encode(self.context)))
        if self.standing is not UNSET:
            headers.append((STANDING_HEADER, msgspec.json.encode(self.standing)))
        return headers


def parse_no_change(record: Any) -> NoChangeDecision | None:
    """The decision behind a record of `edits`; None if it left a delta, or if there was no decision.

    Raises:
        InvalidMessage: the record's value is no outcome.
    """
    headers = dict(record.headers)
    if CODEBOOK_SEQ_HEADER not in headers:
        return None
    return NoChangeDecision(
        offset=feedback_offset_of(record),
        term=int(headers[TERM_HEADER]),
        seq=int(headers[CODEBOOK_SEQ_HEADER]),
        outcome=decode(record.value, Outcome),
        context=_decode_context(headers.get(CONTEXT_HEADER)),
        standing=msgspec.json.decode(headers[STANDING_HEADER], type=Standing) if STANDING_HEADER in headers else UNSET,
    )


def _decode_context(header: bytes | None) -> DecisionContext | None:
    """The recorded context; None without a header, or if its radius is not a valid one."""
    try:
        return None if header is None else msgspec.json.decode(header, type=DecisionContext)
    except msgspec.ValidationError:
        # An infinite initial radius, say, is valid in the configuration but not in a delta. No traffic bounds it, so a
        # repeated decision takes it from the configuration again.
        return None
