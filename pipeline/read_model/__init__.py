"""The topics as tables: predictions joined with requests, feedback with outcomes, and the history of entries.

A file of SQLite holds them. It can be deleted at any time, and is rebuilt from the topics.
"""

from gracestream.pipeline.read_model.follower import TopicFollower
from gracestream.pipeline.read_model.queries import (
    DeltaRow,
    EntryRow,
    FeedbackRow,
    Page,
    PredictionFilter,
    PredictionRow,
    entry_timeline,
    find_entry,
    find_feedback,
    find_predictions,
    find_request,
    find_responsible,
    replicas,
    timeline,
)
from gracestream.pipeline.read_model.store import ReadModelStore, StoreError

__all__ = [
    "DeltaRow",
    "EntryRow",
    "FeedbackRow",
    "Page",
    "PredictionFilter",
    "PredictionRow",
    "ReadModelStore",
    "StoreError",
    "TopicFollower",
    "entry_timeline",
    "find_entry",
    "find_feedback",
    "find_predictions",
    "find_request",
    "find_responsible",
    "replicas",
    "timeline",
]
