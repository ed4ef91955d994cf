"""Decisions that left no delta: what their outcomes on `edits` say, so that they can be made again.

Such an outcome is `rejected`, or `unchanged` where nothing is to be kept: the correction of a used id, or an undo of
nothing. Its headers name the codebook that it was decided on, what its sender was allowed, and what it saw of the
traffic as far as another status could have come of that. What was not decided on, because it could not be read or was
not let in, has no such headers.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gracestream.schemas.deltas import Seen, Standing
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
    """What became of the feedback at an offset, decided on the codebook as of delta `seq` of `term`."""

    offset: int
    term: int
    seq: int
    outcome: Outcome
    context: Seen | None
    standing: Standing | UnsetType = UNSET

    def headers(self) -> list[tuple[str, bytes]]:
        """What the outcome carries, beside the feedback's offset."""
        headers = [(TERM_HEADER, str(self.term).encode()), (CODEBOOK_SEQ_HEADER, str(self.seq).encode())]
        if self.context is not None:
            headers.append((CONTEXT_HEADER, msgspec.json.encode(self.context)))
        if self.standing is not UNSET:
            headers.append((STANDING_HEADER, msgspec.json.encode(self.standing)))
        return headers


def parse_no_change(record: Any) -> NoChangeDecision | None:
    """The decision that a record of `edits` tells of; None where it left a delta, or nothing was decided."""
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


def _decode_context(header: bytes | None) -> Seen | None:
    try:
        return None if header is None else msgspec.json.decode(header, type=Seen)
    except msgspec.ValidationError:
        return None  # of a radius that no delta can hold; no traffic bounds it, so it is the plan's
