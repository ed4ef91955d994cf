"""The editor: turns feedback into deltas, one at a time, in transactions."""

from gracestream.pipeline.editor.accepted_feedback import admission_from_settings
from gracestream.pipeline.editor.editor import STAY_SECONDS, Editor, EditorServices
from gracestream.pipeline.editor.feedback_processor import Intake, Read, failed
from gracestream.pipeline.editor.log import EditorLog, Result, may_pass
from gracestream.pipeline.editor.redis_publisher import Projection
from gracestream.pipeline.editor.snapshot_writer import SnapshotWriter
from gracestream.pipeline.editor.traffic_reader import RequestTail

__all__ = [
    "STAY_SECONDS",
    "Editor",
    "EditorLog",
    "EditorServices",
    "Intake",
    "Projection",
    "Read",
    "RequestTail",
    "Result",
    "SnapshotWriter",
    "admission_from_settings",
    "failed",
    "may_pass",
]
