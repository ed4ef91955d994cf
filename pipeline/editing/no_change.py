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
from gracestream.schemas.headers import CODEBOOK_SEQ, SEEN, STANDING, TERM, feedback_offset
from gracestream.schemas.messages import Outcome, decode


@dataclass(frozen=True, slots=True)
class Fruitless:
    """What became of the feedback at an offset, decided on the codebook as of delta `seq` of `term`."""

    offset: int
    term: int
    seq: int
    outcome: Outcome
    seen: Seen | None
    standing: Standing | UnsetType = UNSET

    def headers(self) -> list[tuple[str, bytes]]:
        """What the outcome carries, beside the feedback's offset."""
        headers = [(TERM, str(self.term).encode()), (CODEBOOK_SEQ, str(self.seq).encode())]
        if self.seen is not None:
            headers.append((SEEN, msgspec.json.encode(self.seen)))
        if self.standing is not UNSET:
            headers.append((STANDING, msgspec.json.encode(self.standing)))
        return headers


def fruitless_in(record: Any) -> Fruitless | None:
    """The decision that a record of `edits` tells of; None where it left a delta, or nothing was decided."""
    headers = dict(record.headers)
    if CODEBOOK_SEQ not in headers:
        return None
    return Fruitless(
        offset=feedback_offset(record),
        term=int(headers[TERM]),
        seq=int(headers[CODEBOOK_SEQ]),
        outcome=decode(record.value, Outcome),
        seen=_seen(headers.get(SEEN)),
        standing=msgspec.json.decode(headers[STANDING], type=Standing) if STANDING in headers else UNSET,
    )


def _seen(header: bytes | None) -> Seen | None:
    try:
        return None if header is None else msgspec.json.decode(header, type=Seen)
    except msgspec.ValidationError:
        return None  # of a radius that no delta can hold; no traffic bounds it, so it is the plan's
