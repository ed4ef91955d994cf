"""Damage in a deployment's topics: feedback that the editor has passed without deciding on it, and the like.

What is checked, for each feedback record with an id that lies before the editors' group offset:

1. It has an outcome on `edits`.
2. If it made a delta, its outcome names that delta.
3. If its outcome names a delta, that delta is on `deltas`.

How damage comes about: a producer that keeps its epoch may commit a part of a transaction (`pipeline.transactions`).
Deployments of gracestream before that module existed may have lost corrections in this way.

Not promised: a check of dead letters, which Kafka deletes by age, or of feedback whose id cannot be read. Digests are
checked by `pipeline.replay`. Memory grows by some 200 bytes for each feedback record that has an outcome.
"""

import time
from dataclasses import dataclass, field
from typing import Literal

from kafka import TopicPartition
from msgspec import UNSET

from pipeline.clients import consumer
from pipeline.editor_log import feedback_offset
from pipeline.follower import READING
from pipeline.reading import read_topic
from pipeline.settings import Settings
from pipeline.topics import DELTAS, EDITS, FEEDBACK
from schemas.deltas import decode_delta
from schemas.messages import Outcome, decode, peek_id

SECOND_LOOK_SECONDS = 1.0
"""The brokers finish a transaction topic by topic, so what is missing now may be visible a moment later."""

Damage = Literal["no outcome", "delta without outcome", "outcome without delta"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with one feedback record. `record` is its value, as it was sent."""

    offset: int
    feedback_id: str
    damage: Damage
    record: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Audit:
    """Findings in the order of feedback; `checked` counts the feedback records that were looked at."""

    checked: int
    findings: list[Finding]


def audit(settings: Settings) -> Audit:
    """Compare `feedback`, `edits` and `deltas`; an editor may go on working meanwhile.

    Raises:
        KafkaError: a topic could not be read.
        InvalidMessage: `edits` or `deltas` holds a record that is none of ours.
    """
    end = _group_offset(settings)
    found = _look(settings, end)
    if found.findings:
        time.sleep(SECOND_LOOK_SECONDS)
        found = _look(settings, end)
    return found


def _look(settings: Settings, end: int | None) -> Audit:
    delta_of: dict[tuple[str, int], int] = {}
    for record in read_topic(settings, DELTAS, **READING):
        delta = decode_delta(record.value)
        if delta.cause is not UNSET:
            delta_of[delta.cause.feedback_id, delta.cause.offset] = delta.seq
    named: dict[int, int | None] = {}
    for record in read_topic(settings, EDITS):
        outcome = decode(record.value, Outcome)
        named[feedback_offset(record)] = None if outcome.seq is UNSET else outcome.seq
    if end is None:  # Kafka forgets the offset of a group that was idle for a week
        end = max(named, default=-1) + 1
    checked, findings = 0, []
    for record in read_topic(settings, FEEDBACK):
        if record.offset >= end:
            break
        checked += 1
        feedback_id = peek_id(record.value, "feedback_id")
        if feedback_id is not None and (
            damage := _damage(record.offset, delta_of.get((feedback_id, record.offset)), named)
        ):
            findings.append(Finding(record.offset, feedback_id, damage, record.value))
    return Audit(checked, findings)


def _damage(offset: int, delta_seq: int | None, named: dict[int, int | None]) -> Damage | None:
    if offset not in named:
        return "no outcome" if delta_seq is None else "delta without outcome"
    return "outcome without delta" if named[offset] not in (None, delta_seq) else None


def _group_offset(settings: Settings) -> int | None:
    """How far the editors have come in `feedback`; None if Kafka knows of no editor."""
    reader = consumer(settings, group_id=settings.topic("editor"))
    try:
        offset: int | None = reader.committed(TopicPartition(settings.topic(FEEDBACK), 0))
        return offset
    finally:
        reader.close()
