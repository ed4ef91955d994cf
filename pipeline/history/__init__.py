"""The history in the log, record by record: read, describe, audit and branch it, without a codebook or a model."""

from gracestream.pipeline.history.audit import Damage, Finding, audit_topics
from gracestream.pipeline.history.branch import branch_history
from gracestream.pipeline.history.entry_usage import read_entry_usage
from gracestream.pipeline.history.kafka_history import KafkaHistory
from gracestream.pipeline.history.near_misses import (
    MatchedRequest,
    NearMissRequest,
    find_matched_requests,
    find_near_misses,
)
from gracestream.pipeline.history.steps import HistoryStep, StepDescriber, decode_history_delta, history_steps

__all__ = [
    "Damage",
    "Finding",
    "HistoryStep",
    "KafkaHistory",
    "MatchedRequest",
    "NearMissRequest",
    "StepDescriber",
    "audit_topics",
    "branch_history",
    "decode_history_delta",
    "find_matched_requests",
    "find_near_misses",
    "history_steps",
    "read_entry_usage",
]
