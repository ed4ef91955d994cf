"""The editor: turns feedback into deltas and outcomes, in transactions, and publishes deltas in Redis."""

from gracestream.pipeline.editor.accepted_feedback import admission_from_settings
from gracestream.pipeline.editor.editor import KEEP_ALIVE_SECONDS, Editor, EditorServices
from gracestream.pipeline.editor.feedback import DecidedFeedback, FeedbackRecord, ParsedFeedback
from gracestream.pipeline.editor.feedback_processor import FeedbackProcessor, model_failure
from gracestream.pipeline.editor.log import EditorLog, is_retriable
from gracestream.pipeline.editor.redis_publisher import RedisPublisher
from gracestream.pipeline.editor.snapshot_writer import SnapshotWriter
from gracestream.pipeline.editor.traffic_reader import TrafficReader

__all__ = [
    "KEEP_ALIVE_SECONDS",
    "DecidedFeedback",
    "Editor",
    "EditorLog",
    "EditorServices",
    "FeedbackProcessor",
    "FeedbackRecord",
    "ParsedFeedback",
    "RedisPublisher",
    "SnapshotWriter",
    "TrafficReader",
    "admission_from_settings",
    "is_retriable",
    "model_failure",
]
