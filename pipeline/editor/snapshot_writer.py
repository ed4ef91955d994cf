"""Writes the editor's snapshots, one every `interval` deltas, in a background thread.

1. The editor's thread only copies the codebook, which takes as long as copying its keys and values in memory.
2. A background thread writes the file and then the manifest. At most one snapshot is being written.
3. A failed snapshot never stops the editor. It is logged and counted, and the next delta after `SNAPSHOT_RETRY_SECONDS`
   tries again.

Not promised: a snapshot at an exact delta. While one is being written, due snapshots wait for a later delta.
"""

import threading
import time

import structlog

from gracestream.pipeline.codebook import Codebook
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.settings import KafkaSettings, SnapshotSettings
from gracestream.pipeline.stores import Snapshot, find_delta_offset, list_manifests, write_snapshot

log = structlog.get_logger()

SNAPSHOT_RETRY_SECONDS = 60.0
"""Seconds after a failure during which no snapshot is started."""


class SnapshotWriter:
    """Writes nothing if the settings have no URL or no interval."""

    def __init__(self, kafka: KafkaSettings, settings: SnapshotSettings) -> None:
        self._kafka, self._url, self._keep = kafka, settings.url, settings.keep
        self._interval_deltas = settings.interval
        self._last_snapshot_seq: int | None = None
        """Delta of the newest snapshot of this codebook; None until the topic has been read."""
        self._retry_at = 0.0
        """Monotonic time before which no snapshot is started."""
        self._thread: threading.Thread | None = None

    def maybe_write(self, codebook: Codebook) -> None:
        """Start writing a snapshot if one is due. Call it between two deltas, in the thread that applies them."""
        busy = self._thread is not None and self._thread.is_alive()
        if self._url is None or self._interval_deltas is None or busy or time.monotonic() < self._retry_at:
            return
        try:
            if self._last_snapshot_seq is None:
                manifest_seqs = (manifest.seq for manifest in list_manifests(self._kafka, codebook.name).values())
                self._last_snapshot_seq = max((seq for seq in manifest_seqs if seq <= codebook.seq), default=0)
            if codebook.seq >= self._last_snapshot_seq + self._interval_deltas:
                self._start_write(codebook, self._url)
        except Exception as error:  # noqa: BLE001  (the editor goes on)
            self._record_failure(error)

    def close(self, timeout: float = 5.0) -> None:
        """Wait up to `timeout` seconds for the snapshot that is being written.

        An unfinished snapshot has no manifest, so readers ignore its file.
        """
        if self._thread is not None:
            self._thread.join(timeout)

    def _start_write(self, codebook: Codebook, url: str) -> None:
        started = time.perf_counter()
        codebook_copy = codebook.copy()
        log.info("snapshot_started", seq=codebook_copy.seq, copy_ms=round(1000 * (time.perf_counter() - started), 1))
        self._thread = threading.Thread(target=self._write, args=(codebook_copy, url), name="snapshot", daemon=True)
        self._thread.start()

    def _write(self, codebook: Codebook, url: str) -> None:
        started = time.perf_counter()
        try:
            snapshot = Snapshot(codebook, find_delta_offset(self._kafka, codebook))
            manifest = write_snapshot(self._kafka, snapshot, url, self._keep)
        except Exception as error:  # noqa: BLE001  (the editor goes on)
            self._record_failure(error)
            return
        self._last_snapshot_seq = manifest.seq
        metrics.SNAPSHOT_SEQ.set(manifest.seq)
        seconds = round(time.perf_counter() - started, 2)
        log.info("snapshot_written", seq=manifest.seq, uri=manifest.uri, bytes=manifest.bytes, seconds=seconds)

    def _record_failure(self, error: Exception) -> None:
        self._retry_at = time.monotonic() + SNAPSHOT_RETRY_SECONDS
        metrics.SNAPSHOT_FAILURES.inc()
        log.error(
            "snapshot_failed",
            reason=str(error) or type(error).__name__,
            consequence="replicas that start read more of the log; the editor tries again in a minute",
        )
