"""The progress of a starting replica that reads the log."""

import time

import structlog

from gracestream.pipeline.replica.delta_follower import DeltaFollower

log = structlog.get_logger()

PROGRESS_LOG_SECONDS = 5.0
"""Seconds between two log lines about the progress of a starting replica."""


class CatchUpProgress:
    """Logs the progress every few seconds, and measures the time without any."""

    def __init__(self, seq: int) -> None:
        self._started_at = self._progressed_at = self._logged_at = time.monotonic()
        self._first_seq, self._last_position = seq, (seq, -1)

    def seconds_without_progress(self, seq: int, follower: DeltaFollower) -> float:
        """Seconds since the codebook or the reading of the log last advanced."""
        now, position = time.monotonic(), (seq, follower.next_offset)
        if position != self._last_position:
            self._progressed_at, self._last_position = now, position
        if now - self._logged_at > PROGRESS_LOG_SECONDS:
            self._logged_at = now
            percent = round(100 * follower.next_offset / follower.initial_end, 1) if follower.initial_end else 0.0
            rate = round((seq - self._first_seq) / (now - self._started_at))
            log.info("catch_up_progress", seq=seq, percent=percent, deltas_per_second=rate)
        return now - self._progressed_at
