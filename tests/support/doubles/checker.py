"""Checks the records on the topics after a run for faults.

It takes records, not a broker: of the test double, or of a real Kafka read with `read_committed`. It uses their
`offset`, `key`, `value` and `headers` only.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from msgspec import UNSET

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.stores.redis_head import Head
from gracestream.schemas.deltas import Delta, decode_delta
from gracestream.schemas.headers import FEEDBACK_OFFSET_HEADER
from gracestream.schemas.messages import Feedback, InvalidMessage, Outcome, Prediction, decode, peek_id

Kind = Literal["lost", "doubled", "aborted", "offset", "chain", "digest", "served"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a run.

    `lost`: feedback without an outcome. `doubled`: two outcomes, deltas or dead letters of one record. `aborted`: a
    record was read but never committed. `offset`: records disagree on the offset of their feedback. `chain`: the
    history cannot be replayed, or had two writers at once. `digest`: readers of one history hold different states.
    `served`: an answer is from a state that the history never had.
    """

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Follower:
    """The state of a reader that has read everything, as in `/state`."""

    name: str
    seq: int
    digest: str
    state_digest: str


@dataclass(frozen=True, slots=True)
class Left:
    """Everything that a run left behind.

    `position`: the group's offset in `feedback`. `head` and `radii`: as in Redis. `read`: the records of `deltas` that
    each reader got during the run, by offset. `predictions`: each must come from the codebook that it names.
    `taken`: the ids of all feedback that Kafka has acknowledged; `feedback` may contain them more than once.
    """

    feedback: Sequence[Any]
    edits: Sequence[Any]
    deltas: Sequence[Any]
    dead_letters: Sequence[Any]
    position: int | None
    head: Head | None
    radii: Mapping[str, float]
    followers: Sequence[Follower] = ()
    read: Mapping[str, Sequence[tuple[int, bytes]]] = field(default_factory=dict)
    predictions: Sequence[Any] = ()
    taken: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class State:
    """A codebook after one of its deltas, as far as answers name it: the term, and the radius of each entry."""

    term: int
    radii: Mapping[str, float]


def faults(left: Left) -> list[Fault]:
    """All faults; empty if there is none."""
    found = [*_of_outcomes(left), *_of_taken(left), *_of_letters(left), *_of_readers(left)]
    deltas = [decode_delta(record.value) for record in left.deltas]
    found += _of_causes(left, deltas)
    states = {0: State(0, {})}
    try:
        codebook = _replayed(left, deltas, states)
    except HistoryError as fault:
        return [*found, Fault("chain", str(fault))]
    return [*found, *_of_states(left, codebook), *_of_predictions(left, states)]


def _of_outcomes(left: Left) -> Iterator[Fault]:
    offsets = [_header(record, FEEDBACK_OFFSET_HEADER) for record in left.edits]
    for offset, times in Counter(offsets).items():
        if times > 1:
            yield Fault("doubled", f"feedback {offset} has {times} outcomes")
    if offsets != sorted(offsets):
        yield Fault("offset", f"outcomes are not in the order of feedback: {offsets}")
    unreadable = {record.offset for record in left.feedback if peek_id(record.value, "feedback_id") is None}
    answered = set(offsets) | {_header(letter, "source_offset") for letter in left.dead_letters} & unreadable
    for record in left.feedback:
        if record.offset not in answered:
            yield Fault("lost", f"feedback {record.offset} has no outcome")
    ids = {record.offset: peek_id(record.value, "feedback_id") for record in left.feedback}
    for record, offset in zip(left.edits, offsets, strict=True):
        if ids.get(offset) != (given := decode(record.value, Outcome).feedback_id):
            yield Fault("offset", f"the outcome of {given!r} says that it is of feedback {offset}, {ids.get(offset)!r}")
    end = left.feedback[-1].offset + 1 if left.feedback else None
    if end is not None and left.position != end:
        yield Fault("offset", f"the group is at {left.position}, and feedback ends at {end}")


def _of_taken(left: Left) -> Iterator[Fault]:
    answered = {decode(record.value, Outcome).feedback_id for record in left.edits}
    for feedback_id in left.taken:
        if feedback_id not in answered:
            yield Fault("lost", f"Kafka has taken {feedback_id!r}, and there is no outcome of it")


def _of_letters(left: Left) -> Iterator[Fault]:
    for offset, times in Counter(_header(letter, "source_offset") for letter in left.dead_letters).items():
        if times > 1:
            yield Fault("doubled", f"feedback {offset} was dead-lettered {times} times")
    values = {record.offset: record.value for record in left.feedback}
    for letter in left.dead_letters:
        if letter.value != values.get(_header(letter, "source_offset")):
            yield Fault("offset", f"the letter at {letter.offset} is not what it says that it is")


def _of_readers(left: Left) -> Iterator[Fault]:
    committed = {record.offset: record.value for record in left.deltas}
    for name, records in left.read.items():
        for offset, value in records:
            if committed.get(offset) != value:
                yield Fault("aborted", f"{name} has read a delta at offset {offset} that was never committed")
        if [offset for offset, _ in records] != sorted({offset for offset, _ in records}):
            yield Fault("doubled", f"{name} has read a delta twice")


def _of_causes(left: Left, deltas: Sequence[Delta]) -> Iterator[Fault]:
    given = {record.offset: _feedback_id(record.value) for record in left.feedback}
    causes = [delta.cause for delta in deltas if delta.cause is not UNSET]
    for offset, times in Counter(cause.offset for cause in causes).items():
        if times > 1:
            yield Fault("doubled", f"feedback {offset} has made {times} deltas")
    for feedback_id, offsets in _together((cause.feedback_id, cause.offset) for cause in causes).items():
        if len(offsets) > 1:
            yield Fault("doubled", f"{feedback_id!r} came more than once, and has made a delta at each of {offsets}")
    for cause in causes:
        if given.get(cause.offset) != cause.feedback_id:
            yield Fault("offset", f"a delta names {cause.feedback_id!r} at {cause.offset}, where it is not")
    delta_seqs = {delta.cause.offset: delta.seq for delta in deltas if delta.cause is not UNSET}
    outcome_seqs = {
        _header(record, FEEDBACK_OFFSET_HEADER): outcome.seq
        for record in left.edits
        if (outcome := decode(record.value, Outcome)).seq is not UNSET
    }
    for offset in sorted(delta_seqs.keys() | outcome_seqs.keys()):
        if delta_seqs.get(offset) != outcome_seqs.get(offset):
            yield Fault(
                "offset",
                f"feedback {offset} made delta {delta_seqs.get(offset)}, not {outcome_seqs.get(offset)} of its outcome",
            )


def _replayed(left: Left, deltas: Sequence[Delta], states: dict[int, State]) -> Codebook | None:
    """The codebook after the last delta. `states` gets the state after each delta that an answer names."""
    if not deltas:
        return None
    named = {decode(record.value, Prediction).codebook_seq for record in left.predictions}
    codebook = Codebook(deltas[0].codebook, deltas[0].model, deltas[0].layer)
    for record in left.deltas:
        if codebook.apply(record.value) is None:
            raise HistoryError(f"the delta at offset {record.offset} is of a lower term: two have written at once")
        if codebook.seq in named:
            radii = dict(zip(codebook.entry_ids, codebook.radii_N.tolist(), strict=True))
            states[codebook.seq] = State(codebook.term, radii)
    return codebook


def _of_states(left: Left, codebook: Codebook | None) -> Iterator[Fault]:
    if codebook is None:
        return
    facts = (codebook.seq, codebook.digest.hex(), codebook.state_digest())
    for follower in left.followers:
        if (follower.seq, follower.digest, follower.state_digest) != facts:
            yield Fault("digest", f"{follower.name} is at {follower}, and the log at {facts}")
    head = left.head
    if head is None or (head.term, head.seq, head.digest) != (codebook.term, codebook.seq, codebook.digest.hex()):
        yield Fault("digest", f"Redis is at {head}, and the log at {codebook.term}, {facts}")
    radii = dict(zip(codebook.entry_ids, codebook.radii_N, strict=True))
    if {entry: np.float32(radius) for entry, radius in left.radii.items()} != radii:
        yield Fault("digest", f"Redis has the radii {left.radii}, and the log {radii}")


def _of_predictions(left: Left, states: Mapping[int, State]) -> Iterator[Fault]:
    for record in left.predictions:
        answer = decode(record.value, Prediction)
        text = f"the answer to {answer.request_id!r} is from delta {answer.codebook_seq} of term {answer.term}"
        state, edit = states.get(answer.codebook_seq), answer.edit
        if state is None or state.term != answer.term:
            yield Fault("served", f"{text}, and the log has {state and state.term} as its term")
        elif edit is not UNSET and state.radii.get(edit.entry_id) != edit.radius:
            yield Fault("served", f"{text}: {edit}, and the log has {state.radii.get(edit.entry_id)} as its radius")
        elif edit is not UNSET and not 0 <= edit.distance < edit.radius:
            yield Fault("served", f"{text}: {edit} is not within its radius")


def _together(pairs: Iterator[tuple[str, int]]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for name, offset in pairs:
        found.setdefault(name, set()).add(offset)
    return found


def _feedback_id(value: bytes | None) -> str | None:
    try:
        return decode(value, Feedback).feedback_id
    except InvalidMessage:
        return None


def _header(record: Any, name: str) -> int:
    return int(dict(record.headers)[name])
