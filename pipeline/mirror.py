"""A replica's codebook, kept at the head that Redis names (design, section 5, points 4 to 6 and 9).

The contract:

1. It changes in `advance` alone, in the thread that runs the model, never between the look-up of a micro-batch and its
   answers; at start, before there are any, it may begin as a snapshot that is no further than the head.
2. It holds what the head names, and never less than it held before: a Redis that went backwards is not followed.
3. While Redis is away it stays as it is, and after a grace period follows the log's end; `degraded` says so.
4. A record of `deltas` that cannot be read or applied is a fault as soon as it was read, whether it is live or not.
5. Radii are the log's. Those in Redis are compared with them; a difference is counted, logged, and not served.
"""

import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
import structlog
from kafka.errors import KafkaError
from redis.exceptions import RedisError

from pipeline import metrics
from pipeline.codebook import Applied, Codebook, DeltaFault
from pipeline.follower import Follower, fault_at
from pipeline.index import KeyIndex
from pipeline.radius_store import Head, RadiusStore
from pipeline.settings import Settings
from pipeline.snapshot_store import SnapshotError
from pipeline.snapshots import Snapshot, newest
from pipeline.topics import TopicError

log = structlog.get_logger()

CATCH_UP_SECONDS = 5.0
"""How long a batch waits for deltas that are live but have not been read yet; the next ones do not wait as well."""

UNREAD_SECONDS = 0.5
"""How long a request waits for a `min_seq` that is not in the log as far as it was read: it may be on its way."""

PROGRESS_SECONDS = 5.0
"""How often a starting replica says how far it has come."""

FEW = 16
"""Up to so many deltas at once have a line of the log each."""


class Mirror:
    """Codebook and index of one replica."""

    def __init__(
        self, codebook: Codebook, index: KeyIndex, store: RadiusStore, follower: Follower, settings: Settings
    ) -> None:
        self.codebook, self.index = codebook, index
        self.degraded = False
        self.unread = 0
        """The delta that is live but could not be read in time; 0: none."""
        self._store, self._follower, self._settings = store, follower, settings
        self._lost_at: float | None = None

    def read_head(self) -> Head | Literal["lost"] | None:
        """What Redis says, in one round trip; "lost" when it does not answer. Safe in any thread."""
        try:
            return self._store.head(self.codebook.seq)
        except RedisError as error:
            if self._lost_at is None:
                log.warning("redis_lost", error=str(error), seq=self.codebook.seq)
            return "lost"

    def may_reach(self, seq: int, waited: float) -> bool:
        """Whether a request that has waited so many seconds for delta `seq` does well to wait on.

        For at most `min_seq_wait` seconds once that delta has been read from the log and so is about to become live,
        and for a moment where it may not have been read yet.
        """
        read = seq <= self._follower.latest_seq
        return waited < (self._settings.min_seq_wait if read else UNREAD_SECONDS)

    def start(self) -> None:
        """Begin with the newest good snapshot, where there is one, and read the log from there on."""
        snapshot = self._snapshot()
        if snapshot is None:
            self._follower.start()
            return
        self.codebook.take_over(snapshot.codebook)
        self.index.refresh()
        self._follower.start(snapshot.offset + 1, self.codebook.seq, self.codebook.term)

    def catch_up(self, patience: float) -> bool:
        """At start: reach the head that Redis names now, or the log's end where it names none.

        False after `patience` seconds in which nothing came of the log; a log that takes longer is waited for.

        Raises:
            DeltaFault: the history cannot be followed that far.
        """
        head = self.read_head()
        progress = Progress(self.codebook.seq)
        while True:
            read_all = self._follower.at_end
            if isinstance(head, Head):
                self.advance(head)
                done = self.codebook.seq >= head.seq
            else:
                self._apply_until(self._follower.latest_seq)
                done = read_all
            if done:
                self.advance(head)
                return True
            if progress.idle(self.codebook.seq, self._follower) > patience:
                return False
            time.sleep(0.01)

    def advance(self, head: Head | Literal["lost"] | None) -> None:
        """Apply what has become live, before the next batch.

        Raises:
            DeltaFault: the history cannot be followed; the replica must stop.
        """
        goal = self._goal(head)
        if goal > self.codebook.seq:
            self._apply_until(goal)
        self._look_ahead()
        if isinstance(head, Head):
            metrics.HEAD_SEQ.set(head.seq)
            self.unread = head.seq if self.codebook.seq < head.seq else 0
            self._compare(head)
        metrics.show(self.codebook)

    def state(self) -> dict[str, object]:
        """Which codebook this is, for `/state`."""
        return {**self.codebook.facts(), "degraded": self.degraded}

    def _goal(self, head: Head | Literal["lost"] | None) -> int:
        if isinstance(head, Head):
            if self.degraded:
                log.info("redis_back", head=head.seq, seq=self.codebook.seq)
            self._lost_at, self.degraded = None, False
            metrics.DEGRADED.set(0)
            return head.seq
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        lost = head == "lost" or self._follower.latest_seq > 0
        self.degraded = lost
        metrics.DEGRADED.set(int(lost))
        return self._follower.latest_seq if now - self._lost_at >= self._settings.redis_grace else 0

    def _snapshot(self) -> Snapshot | None:
        if not self._settings.snapshot_url:
            return None
        head = self.read_head()
        try:
            upto = head.seq if isinstance(head, Head) else None
            return newest(self._settings, self.codebook.model, self.codebook.layer, upto)
        except (SnapshotError, TopicError, KafkaError, OSError) as error:
            log.warning("snapshots_unreachable", reason=str(error) or type(error).__name__)
            return None

    def _apply_until(self, seq: int) -> None:
        """Waits at most `CATCH_UP_SECONDS` for deltas that are not read yet, and not at all after one did in vain."""
        deadline = time.monotonic() + (0.0 if self.unread else CATCH_UP_SECONDS)
        while self.codebook.seq < seq:
            left = deadline - time.monotonic()
            records = self._follower.take(seq, max(0.0, left))
            if records:
                self._apply(records)
            if not records or left <= 0:
                return

    def _apply(self, records: Sequence[tuple[int, bytes]]) -> None:
        changes: list[Applied] = []
        started = time.perf_counter()
        try:
            for offset, record in records:
                try:
                    applied = self.codebook.apply(record)
                except DeltaFault as fault:
                    raise fault_at(offset, fault) from fault
                if applied is None:
                    log.warning("delta_dropped", seq=self.codebook.seq, term=self.codebook.term)
                else:
                    changes.append(applied)
        finally:  # also of what came before a fault
            if changes:
                self.index.refresh(*changes)
        ms = round(1000 * (time.perf_counter() - started), 2)
        for applied in changes if len(changes) <= FEW else ():
            delta = applied.delta
            log.info("delta_applied", seq=delta.seq, op=delta.op, entries=len(delta.entries), ms=ms)
        if len(changes) > FEW:
            log.info("deltas_applied", deltas=len(changes), seq=self.codebook.seq, entries=len(self.codebook), ms=ms)

    def _look_ahead(self) -> None:
        """Nothing after a record that cannot be applied ever can be, so it stops the replica before it is live."""
        waiting = self._follower.next_record()
        if waiting is not None:
            offset, record = waiting
            try:
                self.codebook.check(record)
            except DeltaFault as fault:
                raise fault_at(offset, fault) from fault

    def _compare(self, head: Head) -> None:
        if head.seq != self.codebook.seq:
            return
        if head.digest != self.codebook.digest.hex():
            raise DeltaFault(f"Redis and the log disagree on the digest of delta {head.seq}: are they of one cluster?")
        for entry_id, radius in head.changed.items():
            ours = self.codebook.radii_N[self.codebook.slot(entry_id)] if entry_id in self.codebook else None
            if (None if radius is None else np.float32(radius)) != ours:
                metrics.RADIUS_MISMATCH.inc()
                log.error("radius_mismatch", entry_id=entry_id, redis=radius, log=None if ours is None else float(ours))


class Progress:
    """How a starting replica comes along: it says so every few seconds, and knows since when nothing has come."""

    def __init__(self, seq: int) -> None:
        self._began = self._moved = self._told = time.monotonic()
        self._first, self._seen = seq, (seq, -1)

    def idle(self, seq: int, follower: Follower) -> float:
        """Seconds since the codebook, or the reading of the log, came any further."""
        now, seen = time.monotonic(), (seq, follower.offset)
        if seen != self._seen:
            self._moved, self._seen = now, seen
        if now - self._told > PROGRESS_SECONDS:
            self._told = now
            percent = round(100 * follower.offset / follower.end, 1) if follower.end else 0.0
            rate = round((seq - self._first) / (now - self._began))
            log.info("catching_up", seq=seq, percent=percent, deltas_per_second=rate)
        return now - self._moved
