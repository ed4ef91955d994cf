"""A replica's codebook, kept at the head that Redis names (design, section 5, points 4 to 6 and 9).

The contract:

1. It changes in `advance` alone, between batches, in the thread that runs the model.
2. It holds what the head names, and never less than it held before: a Redis that went backwards is not followed.
3. While Redis is away it stays as it is, and after a grace period follows the log's end; `degraded` says so.
4. Radii are the log's. Those in Redis are compared with them; a difference is counted, logged, and not served.
"""

import time
from typing import Literal

import numpy as np
import structlog
from redis.exceptions import RedisError

from pipeline import metrics
from pipeline.codebook import Codebook, DeltaFault
from pipeline.follower import Follower
from pipeline.index import KeyIndex
from pipeline.radius_store import Head, RadiusStore
from pipeline.settings import Settings

log = structlog.get_logger()

CATCH_UP_SECONDS = 5.0
"""How long a batch waits for deltas that are live but have not been read yet."""


UNREAD_SECONDS = 0.5
"""How long a batch waits for a `min_seq` that is not in the log as far as it was read: it may be on its way."""


class Mirror:
    """Codebook and index of one replica."""

    def __init__(
        self, codebook: Codebook, index: KeyIndex, store: RadiusStore, follower: Follower, settings: Settings
    ) -> None:
        self.codebook, self.index = codebook, index
        self.degraded = False
        self._store, self._follower, self._settings = store, follower, settings
        self._lost_at: float | None = None

    def read_head(self, min_seq: int = 0) -> Head | Literal["lost"] | None:
        """What Redis says, in one round trip; "lost" when it does not answer. Safe in any thread.

        With a `min_seq` beyond the head it asks again: for at most `min_seq_wait` seconds once that delta has been read
        from the log and so is about to become live, and for a moment where it may not have been read yet.
        """
        started = time.monotonic()
        deadline = started + self._settings.min_seq_wait
        while True:
            try:
                head = self._store.head(self.codebook.seq)
            except RedisError as error:
                if self._lost_at is None:
                    log.warning("redis_lost", error=str(error), seq=self.codebook.seq)
                return "lost"
            reached = head is not None and head.seq >= min_seq
            now = time.monotonic()
            unread = min_seq > self._follower.latest_seq and now > started + UNREAD_SECONDS
            if reached or not min_seq or unread or now > deadline:
                return head
            time.sleep(0.01)

    def catch_up(self, timeout: float) -> bool:
        """At start: reach the head that Redis names now, or the log's end where it names none.

        Raises:
            DeltaFault: the history cannot be followed that far.
        """
        deadline = time.monotonic() + timeout
        head = self.read_head()
        if not isinstance(head, Head):
            if not self._follower.wait_for_end(timeout):
                return False
            self._apply_until(self._follower.latest_seq)
        while time.monotonic() < deadline:
            self.advance(head)
            if not isinstance(head, Head) or self.codebook.seq >= head.seq:
                return True
            time.sleep(0.05)
        return False

    def advance(self, head: Head | Literal["lost"] | None) -> None:
        """Apply what has become live, before the next batch.

        Raises:
            DeltaFault: the history cannot be followed; the replica must stop.
        """
        goal = self._goal(head)
        if goal > self.codebook.seq:
            self._apply_until(goal)
        elif not isinstance(head, Head):
            self._follower.raise_fault()
        if isinstance(head, Head):
            metrics.HEAD_SEQ.set(head.seq)
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

    def _apply_until(self, seq: int) -> None:
        for record in self._follower.take(seq, CATCH_UP_SECONDS):
            started = time.perf_counter()
            applied = self.codebook.apply(record)
            if applied is None:
                log.warning("delta_dropped", seq=self.codebook.seq, term=self.codebook.term)
                continue
            self.index.refresh(applied)
            log.info(
                "delta_applied",
                seq=applied.delta.seq,
                op=applied.delta.op,
                entries=len(applied.delta.entries),
                ms=round(1000 * (time.perf_counter() - started), 2),
            )

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
