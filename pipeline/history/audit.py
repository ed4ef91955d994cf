"""Damage in a deployment's topics: feedback that the editor has passed without deciding on it, and the like.

What is checked, for each feedback record with an id that lies before the editors' group offset or the last outcome:

1. It has exactly one outcome on `edits`.
2. It made one delta at most.
3. Its outcome names the delta that it made, and no other.

How damage comes about: a producer that keeps its epoch may commit a part of a transaction
(`pipeline.kafka.transactions`).
Deployments of gracestream before that module existed may have lost corrections in this way.

Not promised: a check of dead letters, which Kafka deletes by age, or of feedback whose id cannot be read. Digests are
checked by `pipeline.history.replay`. Memory grows by some 300 bytes for each feedback record that has an outcome.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kafka import TopicPartition
from msgspec import UNSET

from gracestream.pipeline.kafka import DELTA_CONSUMER_OPTIONS, DELTAS, EDITS, FEEDBACK, consumer, read_topic
from gracestream.pipeline.settings import Settings
from gracestream.schemas.deltas import decode_delta
from gracestream.schemas.headers import feedback_offset_of
from gracestream.schemas.messages import Outcome, decode, peek_id

RECHECK_DELAY_SECONDS = 1.0
"""The brokers finish a transaction topic by topic, so what is missing now may be visible a moment later."""

Damage = Literal[
    "no outcome",
    "delta without outcome",
    "outcome without delta",
    "outcome without its delta",
    "several outcomes",
    "several deltas",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with one feedback record. `record` is its value, as it was sent."""

    offset: int
    feedback_id: str
    damage: Damage
    record: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Findings in the order of feedback; `checked` counts the feedback records that were looked at."""

    checked: int
    findings: list[Finding]


def audit_topics(settings: Settings) -> AuditReport:
    """Compare `feedback`, `edits` and `deltas`; an editor may go on working meanwhile.

    Raises:
        KafkaError: a topic could not be read.
        InvalidMessage: `edits` or `deltas` holds a record that is none of ours.
    """
    end = _committed_group_offset(settings)
    found = _check_topics(settings, end)
    if found.findings:
        time.sleep(RECHECK_DELAY_SECONDS)
        found = _check_topics(settings, end)
    return found


def _check_topics(settings: Settings, committed_offset: int) -> AuditReport:
    made: dict[tuple[str, int], list[int]] = {}
    for record in read_topic(settings, DELTAS, **DELTA_CONSUMER_OPTIONS):
        delta = decode_delta(record.value)
        if delta.cause is not UNSET:
            made.setdefault((delta.cause.feedback_id, delta.cause.offset), []).append(delta.seq)
    named: dict[int, list[int | None]] = {}
    for record in read_topic(settings, EDITS):
        outcome = decode(record.value, Outcome)
        named.setdefault(feedback_offset_of(record), []).append(None if outcome.seq is UNSET else outcome.seq)
    end = max(committed_offset, max(named, default=-1) + 1)
    checked, findings = 0, []
    for record in read_topic(settings, FEEDBACK):
        if record.offset >= end:
            break
        checked += 1
        feedback_id = peek_id(record.value, "feedback_id")
        if feedback_id is not None:
            damage = _classify_damage(made.get((feedback_id, record.offset), []), named.get(record.offset, []))
            if damage is not None:
                findings.append(Finding(record.offset, feedback_id, damage, record.value))
    return AuditReport(checked, findings)


def _classify_damage(delta_seqs: Sequence[int], outcome_seqs: Sequence[int | None]) -> Damage | None:
    """What is wrong with feedback that made these deltas, and whose outcomes name these."""
    if len(delta_seqs) > 1:
        return "several deltas"
    if len(outcome_seqs) > 1:
        return "several outcomes"
    if not outcome_seqs:
        return "delta without outcome" if delta_seqs else "no outcome"
    if outcome_seqs[0] == (delta_seqs[0] if delta_seqs else None):
        return None
    return "outcome without its delta" if delta_seqs else "outcome without delta"


def _committed_group_offset(settings: Settings) -> int:
    """How far the editors have come in `feedback`; 0 if Kafka has forgotten it, as after a week without an editor."""
    reader = consumer(settings, group_id=settings.topic("editor"))
    try:
        return int(reader.committed(TopicPartition(settings.topic(FEEDBACK), 0)) or 0)
    finally:
        reader.close()
