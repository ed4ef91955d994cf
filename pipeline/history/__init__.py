"""The history in the log: read, replay, compare, branch, reproduce and audit it."""

from gracestream.pipeline.history.active_corrections import iter_active_corrections
from gracestream.pipeline.history.audit import Damage, Finding, audit_topics
from gracestream.pipeline.history.branch import branch_history
from gracestream.pipeline.history.diff import diff_history
from gracestream.pipeline.history.entry_usage import read_entry_usage
from gracestream.pipeline.history.kafka_history import KafkaHistory
from gracestream.pipeline.history.near_misses import (
    MatchedRequest,
    NearMissRequest,
    find_matched_requests,
    find_near_misses,
)
from gracestream.pipeline.history.replay import HistoryStep, history_steps, replay_deltas, replay_with_offset
from gracestream.pipeline.history.reproduce import ReproductionRun

__all__ = [
    "Damage",
    "Finding",
    "HistoryStep",
    "KafkaHistory",
    "MatchedRequest",
    "NearMissRequest",
    "ReproductionRun",
    "audit_topics",
    "branch_history",
    "diff_history",
    "find_matched_requests",
    "find_near_misses",
    "history_steps",
    "iter_active_corrections",
    "read_entry_usage",
    "replay_deltas",
    "replay_with_offset",
]
