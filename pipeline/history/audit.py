"""Audits a deployment's topics for lost corrections: feedback that an editor passed without deciding on it.

Checked for each feedback record with an id that lies before the editors' group offset or the last outcome:

1. It has exactly one outcome on `edits`.
2. It has at most one delta.
3. Its outcome names its delta, and no other.

Cause of such damage: a producer that keeps its epoch may commit a part of a transaction
(`pipeline.kafka.transactions`). Deployments of gracestream before that module existed may have lost corrections in this
way.

Not promised: a check of dead letters, which Kafka deletes by age, or of feedback whose id cannot be read.
`pipeline.replay` checks digests.

Memory: some 300 bytes for each feedback record with an outcome.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kafka import TopicPartition
from msgspec import UNSET

from gracestream.pipeline.kafka import DELTA_CONSUMER_OPTIONS, DELTAS, EDITS, FEEDBACK, consumer, read_topic
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.deltas import decode_delta
from gracestream.schemas.headers import feedback_offset_of
from gracestream.schemas.messages import Outcome, decode, peek_id

RECHECK_DELAY_SECONDS = 1.0
"""Seconds until damage is checked again: brokers end a transaction topic by topic, so records may appear late."""

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
    """The damage of one feedback record; `record` is its value."""

    offset: int
    feedback_id: str
    damage: Damage
    record: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Findings in the order of feedback; `checked` counts the feedback records that were examined."""

    checked: int
    findings: list[Finding]


def audit_topics(settings: KafkaSettings) -> AuditReport:
    """Compare `feedback`, `edits` and `deltas`. An editor may keep working meanwhile.

    Raises:
        KafkaError: a topic cannot be read.
        InvalidMessage: `edits` or `deltas` holds a record that gracestream did not write.
    """
    end = _committed_group_offset(settings)
    report = _check_topics(settings, end)
    if report.findings:
        time.sleep(RECHECK_DELAY_SECONDS)
        report = _check_topics(settings, end)
    return report


def _check_topics(settings: KafkaSettings, committed_offset: int) -> AuditReport:
    """Check every feedback record before `committed_offset` or the last outcome, whichever is later."""
    delta_seqs: dict[tuple[str, int], list[int]] = {}
    for record in read_topic(settings, DELTAS, **DELTA_CONSUMER_OPTIONS):
        delta = decode_delta(record.value)
        if delta.cause is not UNSET:
            delta_seqs.setdefault((delta.cause.feedback_id, delta.cause.offset), []).append(delta.seq)
    outcome_seqs: dict[int, list[int | None]] = {}
    for record in read_topic(settings, EDITS):
        outcome = decode(record.value, Outcome)
        outcome_seqs.setdefault(feedback_offset_of(record), []).append(None if outcome.seq is UNSET else outcome.seq)
    end = max(committed_offset, max(outcome_seqs, default=-1) + 1)
    checked, findings = 0, []
    for record in read_topic(settings, FEEDBACK):
        if record.offset >= end:
            break
        checked += 1
        feedback_id = peek_id(record.value, "feedback_id")
        if feedback_id is not None:
            damage = _classify_damage(
                delta_seqs.get((feedback_id, record.offset), []), outcome_seqs.get(record.offset, [])
            )
            if damage is not None:
                findings.append(Finding(record.offset, feedback_id, damage, record.value))
    return AuditReport(checked, findings)


def _classify_damage(delta_seqs: Sequence[int], outcome_seqs: Sequence[int | None]) -> Damage | None:
    """The damage of feedback with deltas of these seqs and outcomes that name these seqs; None if there is none."""
    if len(delta_seqs) > 1:
        return "several deltas"
    if len(outcome_seqs) > 1:
        return "several outcomes"
    if not outcome_seqs:
        return "delta without outcome" if delta_seqs else "no outcome"
    if outcome_seqs[0] == (delta_seqs[0] if delta_seqs else None):
        return None
    return "outcome without its delta" if delta_seqs else "outcome without delta"


def _committed_group_offset(settings: KafkaSettings) -> int:
    """The editors' group offset in `feedback`; 0 if Kafka has forgotten it, as after a week without an editor."""
    reader = consumer(settings, group_id=settings.topic("editor"))
    try:
        return int(reader.committed(TopicPartition(settings.topic(FEEDBACK), 0)) or 0)
    finally:
        reader.close()
