"""The editor's snapshots: one every `snapshot_every` deltas, written while it edits on.

The editor's thread only copies the codebook (keys and values, which takes as long as the memory does); a thread of
their own writes file and manifest. One is written at a time. What goes wrong is logged and counted, and tried again
with a delta that comes a minute later: no failure of a snapshot is one of the editor.
"""

import threading
import time

import structlog

from gracestream.pipeline.codebook import Codebook
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores import Snapshot, manifests, offset_of, write

log = structlog.get_logger()

RETRY_SECONDS = 60.0


class SnapshotWriter:
    """Writes nothing where `snapshot_url` is empty or `snapshot_every` is 0."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._every = settings.snapshot_every if settings.snapshot_url else 0
        self._written: int | None = None
        """Delta of the newest snapshot; None until the topic was asked."""
        self._not_before = 0.0
        self._thread: threading.Thread | None = None

    def offer(self, codebook: Codebook) -> None:
        """Begin to write a snapshot if one is due; between two deltas, in the thread that applies them."""
        busy = self._thread is not None and self._thread.is_alive()
        if not self._every or busy or time.monotonic() < self._not_before:
            return
        try:
            if self._written is None:
                known = (manifest.seq for manifest in manifests(self._settings, codebook.name).values())
                self._written = max((seq for seq in known if seq <= codebook.seq), default=0)
            if codebook.seq >= self._written + self._every:
                self._begin(codebook)
        except Exception as error:  # noqa: BLE001  (the editor goes on)
            self._failed(error)

    def close(self, timeout: float = 5.0) -> None:
        """Wait a little for what is being written; without its manifest it is as if it had never been begun."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _begin(self, codebook: Codebook) -> None:
        started = time.perf_counter()
        copied = codebook.copy()
        log.info("snapshot_begun", seq=copied.seq, copy_ms=round(1000 * (time.perf_counter() - started), 1))
        self._thread = threading.Thread(target=self._write, args=(copied,), name="snapshot", daemon=True)
        self._thread.start()

    def _write(self, codebook: Codebook) -> None:
        started = time.perf_counter()
        try:
            manifest = write(self._settings, Snapshot(codebook, offset_of(self._settings, codebook)))
        except Exception as error:  # noqa: BLE001  (the editor goes on)
            self._failed(error)
            return
        self._written = manifest.seq
        metrics.SNAPSHOT_SEQ.set(manifest.seq)
        seconds = round(time.perf_counter() - started, 2)
        log.info("snapshot_written", seq=manifest.seq, uri=manifest.uri, bytes=manifest.bytes, seconds=seconds)

    def _failed(self, error: Exception) -> None:
        self._not_before = time.monotonic() + RETRY_SECONDS
        metrics.SNAPSHOT_FAILURES.inc()
        log.error("snapshot_failed", reason=str(error) or type(error).__name__)
