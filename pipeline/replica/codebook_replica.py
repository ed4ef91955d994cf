"""A replica's codebook, kept at the head that Redis names (docs/explanation/consistency.md).

Guarantees:

1. The codebook changes in `sync_to_head` alone, in the model's thread, between steps. Only at start, before any
   batch, it may be replaced by a snapshot that is not ahead of the head.
2. It holds every delta up to the head, and never goes back, even if the head in Redis does.
3. Redis is untrusted input. While it does not answer or contradicts the log, the codebook stays as it is. After
   `redis_outage_grace` seconds the codebook follows the end of the log. `degraded` is set at once; for a head ahead of
   the log, it is set after the grace period.
4. A record of `deltas` that cannot be read or applied stops the replica as soon as it is read, published or not.
5. Radii are the log's. Those in Redis are compared with them; a difference is counted and logged, and never served.
6. No batch waits for a Redis that recently failed to answer in time (`redis_unavailable`). A head that cannot be read
   from the log in time delays one batch. The next batch waits only after a grace period without such a head.

How distrust of Redis (point 3) is timed:

- The grace period starts when Redis falls behind. It restarts only at a head above every head seen since, so two old
  heads in turn do not restart it.
- Distrust that returns within a grace period counts as the same distrust. `degraded` stays set until Redis has been
  trustworthy for a grace period.
- A wrong digest stops the replica only after the grace period, and after the log has been read to its end meanwhile.
  Then there are two histories.

Not promised: an answer from the newest delta in the log. A delta counts once Redis names it, or after the grace period.
"""

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Literal

import numpy as np
import structlog
from kafka.errors import KafkaError
from redis.exceptions import RedisError

from gracestream.pipeline.codebook import AppliedDelta, Codebook, KeyIndex
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka import TopicError, history_error_at
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.replica.catch_up_progress import CatchUpProgress
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores import Head, RedisHeadStore, Snapshot, SnapshotError, load_newest_snapshot
from gracestream.schemas.messages import to_one_line

log = structlog.get_logger()

DELTA_WAIT_SECONDS = 5.0
"""Seconds that a batch waits for published deltas that have not been read. The next batches do not wait for them."""

UNSEEN_SEQ_WAIT_SECONDS = 0.5
"""Seconds that a request waits for a `min_seq` that has not been read from the log: it may be on its way."""

HEAD_TIMEOUT_SECONDS = 0.5
"""Seconds that a batch waits for the head. A slower Redis counts as unavailable."""

MIN_GOOD_ANSWERS, MAX_GOOD_ANSWERS = 3, 48
"""Consecutive timely answers that let batches ask Redis again: first the minimum, then twice as many each time.

At most the maximum. Twice the maximum of timely answers resets the count.
"""

HEAD_RETRY_SECONDS = 0.2
"""Seconds between two reads of the head by a starting replica that has read the log to its end."""

MAX_LOGGED_ITEMS = 16
"""Deltas, or wrong radii, that are logged line by line; more of them are summarised or dropped."""

DistrustReason = Literal["", "redis_lost", "redis_empty", "redis_disagrees", "redis_ahead", "redis_behind"]
"""Why Redis is not trusted; empty if it is.

`redis_lost`: no readable answer. `redis_empty`: no head. `redis_disagrees`: another digest than the log's.
`redis_ahead`: a delta that the log does not hold. `redis_behind`: the head has not followed the log for a grace period.
"""


class CodebookReplica:
    """The codebook and key index of one replica.

    `read_head` and `wait_for_head` are safe in any thread. Once requests are answered, everything else that changes
    state runs in the model's thread.
    """

    def __init__(
        self, codebook: Codebook, index: KeyIndex, store: RedisHeadStore, follower: DeltaFollower, settings: Settings
    ) -> None:
        self.codebook, self.index = codebook, index
        self.degraded = False
        """True while the replica answers without a trustworthy Redis."""
        self.unread_head_seq = 0
        """The published delta that could not be read in time; 0 if there is none."""
        self._last_unread_head: tuple[int, float] | None = None
        """The highest head that could not be read in time, and the monotonic time when Redis last named such a head."""
        self.redis_unavailable = False
        """A circuit breaker: True if Redis recently failed to answer within `HEAD_TIMEOUT_SECONDS`.

        While it is open, batches do not ask Redis; only the idle loop of the replica does. Several consecutive timely
        answers close it, since a Redis with occasional hangs may answer single requests.
        """
        self._good_answers = 0
        """Timely answers since the last failure."""
        self._good_answers_needed = 0
        """Timely answers that close the breaker; 0 if it has not opened recently."""
        self._store, self._follower, self._settings = store, follower, settings
        self._distrust_reason: DistrustReason = ""
        self._distrusted_since = 0.0
        """Monotonic time when the present distrust began, whatever its reasons since then."""
        self._last_distrust_at = -math.inf
        """Monotonic time of the last answer that gave a reason for distrust."""
        self._is_recurring = False
        """True if the present distrust returned within a grace period."""
        self._reason_since = 0.0
        """Monotonic time since which the reason has been the present one."""
        self._head_behind_since: tuple[int, float] | None = None
        """The highest head since Redis fell behind the log, and the monotonic time when Redis first named it.

        A lower head does not restart the time: two old heads in turn would keep the replica on old edits for ever.
        """

    def read_head(self) -> Head | Literal["lost"] | None:
        """The head in Redis, in one round trip; None if there is none. Safe in any thread.

        "lost" if Redis gives no answer that can be read.
        """
        started = time.perf_counter()
        try:
            head = self._store.read_head(self.codebook.seq)
        except RedisError as error:
            self._record_failure(to_one_line(error))
            return "lost"
        seconds = time.perf_counter() - started
        metrics.REDIS_READ_SECONDS.observe(seconds)
        if seconds > HEAD_TIMEOUT_SECONDS:
            self._record_failure(f"no answer in {HEAD_TIMEOUT_SECONDS} s")
        else:
            self._record_answer()
        return head

    def wait_for_head(
        self, pending_head: "Future[Head | Literal['lost'] | None] | None"
    ) -> Head | Literal["lost"] | None:
        """The head for a batch, or "lost" if Redis does not answer within `HEAD_TIMEOUT_SECONDS`.

        Args:
            pending_head: The result of `read_head` in another thread; None if Redis was not asked.
        """
        if pending_head is None or (self.redis_unavailable and not pending_head.done()):
            return "lost"
        try:
            return pending_head.result(HEAD_TIMEOUT_SECONDS)
        except TimeoutError:
            self._record_failure(f"no answer in {HEAD_TIMEOUT_SECONDS} s")
            return "lost"

    def should_wait_for(self, seq: int, waited_seconds: float) -> bool:
        """True if a request that has waited `waited_seconds` for delta `seq` should wait on.

        The limit is `min_seq_wait` once the delta has been read from the log and awaits publication. Otherwise it is
        `UNSEEN_SEQ_WAIT_SECONDS`, since the delta may not exist.
        """
        is_read = seq <= self._follower.latest_seq
        return waited_seconds < (self._settings.serving.min_seq_wait if is_read else UNSEEN_SEQ_WAIT_SECONDS)

    def start(self) -> None:
        """Load the newest valid snapshot, if there is one, and follow the log from there."""
        snapshot = self._load_snapshot()
        if snapshot is None:
            self._follower.start()
            return
        self.codebook.replace_with(snapshot.codebook)
        self.index.refresh()
        self._follower.start(snapshot.offset + 1, self.codebook.seq, self.codebook.term)

    def catch_up(self, timeout: float) -> bool:
        """At start: reach the head in Redis, or the end of the log if Redis names no head of this log.

        False after `timeout` seconds without progress. A log that takes longer but progresses is waited for.

        Raises:
            HistoryError: the history cannot be followed that far.
        """
        head, head_read_at = self.read_head(), time.monotonic()
        progress = CatchUpProgress(self.codebook.seq)
        while True:
            read_all = self._follower.at_end
            if read_all and time.monotonic() > head_read_at + HEAD_RETRY_SECONDS:
                head, head_read_at = self.read_head(), time.monotonic()
            if isinstance(head, Head):
                self.sync_to_head(head)
                done = self.codebook.seq >= head.seq or (read_all and self.degraded)
            else:
                self._apply_until(self._follower.latest_seq)
                done = read_all
            if done:
                self.sync_to_head(head)
                return True
            if progress.seconds_without_progress(self.codebook.seq, self._follower) > timeout:
                return False
            time.sleep(0.01)

    def sync_to_head(self, head: Head | Literal["lost"] | None) -> None:
        """Apply the deltas that were published since the last call. Call it before each batch, in the model's thread.

        1. Apply deltas up to the head, or up to the end of the log if Redis has been distrusted for a grace period.
        2. Check the next delta, which stops the replica even before it is published.
        3. Compare the radii in Redis with the codebook.
        4. Decide whether Redis is trusted.

        Raises:
            HistoryError: the history cannot be followed; the replica must stop.
        """
        goal = head.seq if isinstance(head, Head) else 0
        if self._is_following_log():
            goal = max(goal, self._follower.latest_seq)
        if goal > self.codebook.seq:
            self._apply_until(goal)
        self._check_next_delta()
        if isinstance(head, Head):
            metrics.HEAD_SEQ.set(head.seq)
            self._update_unread_head(head.seq)
            self._compare_radii(head)
        self._update_trust(head)
        metrics.set_codebook_gauges(self.codebook.seq, self.codebook.term, len(self.codebook))

    def state(self) -> dict[str, object]:
        """The codebook's identity and `degraded`, for `/state`."""
        return {**self.codebook.describe(), "degraded": self.degraded}

    def _record_answer(self) -> None:
        """Count a timely answer of Redis; enough of them close the circuit breaker."""
        self._good_answers += 1
        if self._good_answers >= self._good_answers_needed:
            self.redis_unavailable = False
        if self._good_answers >= 2 * MAX_GOOD_ANSWERS:
            self._good_answers_needed = 0

    def _record_failure(self, reason: str) -> None:
        """Open the circuit breaker. Each time it opens, closing it takes twice as many timely answers."""
        self._good_answers = 0
        if self.redis_unavailable:
            return
        log.warning(
            "redis_lost",
            reason=reason,
            seq=self.codebook.seq,
            consequence="the replica is degraded: it keeps its codebook, and follows the log after the grace period",
        )
        self.redis_unavailable = True
        self._good_answers_needed = min(2 * self._good_answers_needed or MIN_GOOD_ANSWERS, MAX_GOOD_ANSWERS)

    def _update_unread_head(self, seq: int) -> None:
        """Remember a head that could not be read in time.

        It is forgotten once it is applied, or once Redis has named no such head for a grace period.
        """
        self.unread_head_seq = seq if self.codebook.seq < seq else 0
        highest = self._last_unread_head[0] if self._last_unread_head else 0
        if self.unread_head_seq:
            self._last_unread_head = max(seq, highest), time.monotonic()
        elif self.codebook.seq >= highest or self._unread_pause_is_over():
            self._last_unread_head = None

    def _unread_pause_is_over(self) -> bool:
        """True if Redis has named no unreadable head for a grace period, so that a batch may wait for deltas again."""
        pause = max(self._settings.redis.outage_grace, DELTA_WAIT_SECONDS)
        return self._last_unread_head is None or time.monotonic() - self._last_unread_head[1] >= pause

    def _is_following_log(self) -> bool:
        """True if Redis has been distrusted for a grace period, so that the end of the log counts as the head."""
        return (
            bool(self._distrust_reason)
            and time.monotonic() - self._distrusted_since >= self._settings.redis.outage_grace
        )

    def _update_trust(self, head: Head | Literal["lost"] | None) -> None:
        """Compare the head with the log, and update `degraded`.

        Raises:
            HistoryError: Redis and the log have disagreed on a digest for a grace period: there are two histories.
        """
        now, reason = time.monotonic(), self._distrust_reason_for(head)
        if reason != self._distrust_reason:
            if not self._distrust_reason:
                self._is_recurring = now - self._last_distrust_at < self._settings.redis.outage_grace
                if not self._is_recurring:
                    self._distrusted_since = (
                        self._head_behind_since[1] if reason == "redis_behind" and self._head_behind_since else now
                    )
            if not reason:
                log.info("redis_recovered", seq=self.codebook.seq)
            elif reason != "redis_lost":  # `_record_failure` has logged that
                seq = head.seq if isinstance(head, Head) else None
                log.warning(
                    "redis_distrusted",
                    reason=reason,
                    head=seq,
                    seq=self.codebook.seq,
                    read=self._follower.latest_seq,
                    consequence="the replica keeps its codebook, and follows the log after the grace period",
                )
            self._distrust_reason, self._reason_since = reason, now
        grace, caught_up_at = self._settings.redis.outage_grace, self._follower.caught_up_at
        if reason in {"redis_ahead", "redis_disagrees"}:  # the log may hold records that were not read yet
            self._follower.request_end_check()
        disagreement_is_final = (
            reason == "redis_disagrees" and caught_up_at >= self._reason_since and now - self._reason_since >= grace
        )
        is_past_grace = now - self._distrusted_since >= grace
        if reason:
            self._last_distrust_at = now
            self.degraded = reason != "redis_ahead" or (is_past_grace and caught_up_at >= self._distrusted_since)
        elif not (self._is_recurring and is_past_grace and now - self._last_distrust_at < grace):
            self.degraded = False
        metrics.DEGRADED.set(int(self.degraded))
        if disagreement_is_final:
            raise HistoryError(
                f"Redis and the log have disagreed on the digest of delta {self.codebook.seq} for"
                f" {now - self._reason_since:.0f} s: are they of one cluster? Set GRACESTREAM_REDIS, or delete the key"
                f" {self._store.head_key}, and start this replica again"
            )

    def _distrust_reason_for(self, head: Head | Literal["lost"] | None) -> DistrustReason:
        """The reason to distrust this answer of Redis; empty if there is none."""
        if head == "lost":
            return "redis_lost"
        if head is None:
            return "redis_empty" if self._follower.latest_seq > 0 else ""
        if head.seq > self.codebook.seq:
            return "redis_ahead" if self._follower.at_end else ""
        if head.seq == self.codebook.seq and head.digest != self.codebook.digest.hex():
            return "redis_disagrees"
        now = time.monotonic()
        if head.seq >= self._follower.latest_seq or not self._follower.at_end:
            self._head_behind_since = None
        elif self._head_behind_since is None or self._head_behind_since[0] < head.seq:
            self._head_behind_since = head.seq, now
        elif now - self._head_behind_since[1] >= self._settings.redis.outage_grace:
            return "redis_behind"
        return ""

    def _load_snapshot(self) -> Snapshot | None:
        """The newest valid snapshot that is not ahead of the head; None if there is none or it cannot be fetched."""
        url = self._settings.snapshots.url
        if url is None:
            return None
        head = self.read_head()
        try:
            max_seq = head.seq if isinstance(head, Head) else None
            return load_newest_snapshot(self._settings.kafka, url, self.codebook, max_seq)
        except (SnapshotError, TopicError, KafkaError, OSError) as error:
            log.warning(
                "snapshot_search_failed",
                reason=str(error) or type(error).__name__,
                consequence="the replica reads the whole log, so its start takes longer",
            )
            return None

    def _apply_until(self, seq: int) -> None:
        """Apply deltas up to `seq`; waits up to `DELTA_WAIT_SECONDS` for deltas that are not read yet.

        After a wait that timed out, no batch waits again before a grace period without an unreadable head has passed.
        Otherwise a head that is wrong now and then would delay a batch each time.
        """
        may_wait = seq <= self._follower.latest_seq or self._unread_pause_is_over()
        deadline = time.monotonic() + (DELTA_WAIT_SECONDS if may_wait else 0.0)
        while self.codebook.seq < seq:
            remaining = deadline - time.monotonic()
            records = self._follower.poll(seq, max(0.0, remaining))
            if records:
                self._apply(records)
            if not records or remaining <= 0:
                return

    def _apply(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Apply records, refresh the index, and log the deltas.

        Raises:
            HistoryError: a record cannot be applied. The records before it are applied.
        """
        applied_deltas: list[AppliedDelta] = []
        started = time.perf_counter()
        try:
            for offset, record in records:
                try:
                    applied = self.codebook.apply(record)
                except HistoryError as fault:
                    raise history_error_at(offset, fault) from fault
                if applied is None:
                    log.warning(
                        "stale_delta_ignored",
                        seq=self.codebook.seq,
                        term=self.codebook.term,
                        consequence="none: a fenced editor wrote the delta, and no worker applies it",
                    )
                else:
                    applied_deltas.append(applied)
        finally:  # the index must also hold the deltas before a fault
            if applied_deltas:
                self.index.refresh(*applied_deltas)
        ms = round(1000 * (time.perf_counter() - started), 2)
        for applied in applied_deltas if len(applied_deltas) <= MAX_LOGGED_ITEMS else ():
            delta = applied.delta
            log.info("delta_applied", seq=delta.seq, op=delta.op, entries=len(delta.entries), ms=ms)
        if len(applied_deltas) > MAX_LOGGED_ITEMS:
            log.info(
                "deltas_applied", deltas=len(applied_deltas), seq=self.codebook.seq, entries=len(self.codebook), ms=ms
            )

    def _check_next_delta(self) -> None:
        """Check the next delta before it is published: no later delta could be applied after it.

        Raises:
            HistoryError: it cannot be applied.
        """
        next_record = self._follower.peek()
        if next_record is not None:
            offset, record = next_record
            try:
                self.codebook.check(record)
            except HistoryError as fault:
                raise history_error_at(offset, fault) from fault

    def _compare_radii(self, head: Head) -> None:
        """Count and log radii in Redis that differ from the codebook's, if both are at the same delta."""
        if head.seq != self.codebook.seq or not head.changed_radii:
            return
        mismatches = 0
        for entry_id, radius in head.changed_radii.items():
            ours = self.codebook.radii_N[self.codebook.slot(entry_id)] if entry_id in self.codebook else None
            with np.errstate(over="ignore"):  # a radius beyond float32 becomes infinite, and so differs
                theirs = None if radius is None else np.float32(radius)
            if theirs == ours:
                continue
            mismatches += 1
            metrics.RADIUS_MISMATCH.inc()
            if mismatches <= MAX_LOGGED_ITEMS:
                log_radius = None if ours is None else float(ours)
                log.error(
                    "radius_mismatch_found",
                    entry_id=to_one_line(entry_id),
                    redis=radius,
                    log=log_radius,
                    consequence="none for answers, which use the log's radius; somebody else writes to Redis",
                    remedy="let only the editor write to Redis, and give each deployment its own prefix",
                )
