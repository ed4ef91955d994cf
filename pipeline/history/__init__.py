"""The history in the log: read, replay, compare, branch and audit it."""

from gracestream.pipeline.history.active_corrections import in_force
from gracestream.pipeline.history.audit import Damage, Finding, audit
from gracestream.pipeline.history.branch import branch
from gracestream.pipeline.history.diff import diff
from gracestream.pipeline.history.entry_usage import hits
from gracestream.pipeline.history.kafka_history import KafkaHistory
from gracestream.pipeline.history.near_misses import Missed, Served, near_misses, served_by
from gracestream.pipeline.history.replay import Step, describe, fold_log, replay_deltas
from gracestream.pipeline.history.reproduce import Retraining

__all__ = [
    "Damage",
    "Finding",
    "KafkaHistory",
    "Missed",
    "Retraining",
    "Served",
    "Step",
    "audit",
    "branch",
    "describe",
    "diff",
    "fold_log",
    "hits",
    "in_force",
    "near_misses",
    "replay_deltas",
    "served_by",
]
