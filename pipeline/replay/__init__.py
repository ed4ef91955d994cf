"""The codebook as of any delta: replay the history, compare two points of it, list the corrections in force."""

from gracestream.pipeline.replay.active_corrections import iter_active_corrections
from gracestream.pipeline.replay.diff import diff_history
from gracestream.pipeline.replay.replay import replay_deltas, replay_with_offset

__all__ = ["diff_history", "iter_active_corrections", "replay_deltas", "replay_with_offset"]
