"""A replica's codebook, kept at the head that Redis names (design, section 5, points 4 to 6 and 9).

The contract:

1. It changes in `advance` alone, in the thread that runs the model, between micro-batches. At start, before there are
   any, it may begin as a snapshot that is no further than the head.
2. It holds what the head names, and never less than it held before: a Redis that went backwards is not followed.
3. Redis is untrusted input. While it does not answer, or says otherwise than the log, the codebook stays as it is, and
   after a grace period follows the log's end; `degraded` says so. A head behind the log begins a new grace period only
   where it is the highest since it fell behind. Doubt that returns within a grace period is the same doubt, and
   `degraded` stays until there has been none for a grace period. A digest that is not the log's is a fault only once
   it has stood for the grace period and the log has been read to its end meanwhile: then there are two histories.
4. A record of `deltas` that cannot be read or applied is a fault as soon as it was read, whether it is live or not.
5. Radii are the log's. Those in Redis are compared with them; a difference is counted, logged, and not served.
6. No batch waits for a Redis that lately did not answer a question in time: see `redis_away`. A head that is not read
   in time holds up one batch; the next waits only after a grace period without such a head.
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

from gracestream.pipeline.codebook import AppliedDelta, Codebook, CodebookLookup, KeyIndex
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka import TopicError, history_error_at
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores import Head, RedisHeadStore, Snapshot, SnapshotError, load_newest_snapshot
from gracestream.schemas.messages import to_one_line

log = structlog.get_logger()

DELTA_WAIT_SECONDS = 5.0
"""How long a batch waits for deltas that are live but have not been read yet; the next ones do not wait as well."""

UNSEEN_SEQ_WAIT_SECONDS = 0.5
"""How long a request waits for a `min_seq` that is not in the log as far as it was read: it may be on its way."""

HEAD_TIMEOUT_SECONDS = 0.5
"""How long a batch waits for the head; a Redis that takes longer counts as away."""

MIN_GOOD_ANSWERS, MAX_GOOD_ANSWERS = 3, 48
"""Good answers in a row after which batches ask Redis again: twice as many each time, from the first to the second."""

HEAD_RETRY_SECONDS = 0.2
"""How often a starting replica asks again for a head that the log has not reached."""

PROGRESS_LOG_SECONDS = 5.0
"""How often a starting replica says how far it has come."""

MAX_LOGGED_ITEMS = 16
"""Up to so many deltas, or wrong radii, at once have a line of the log each."""

DistrustReason = Literal["", "redis_lost", "redis_empty", "redis_disagrees", "redis_ahead", "redis_behind"]
"""Why Redis is not believed: no answer that can be read, no head, another digest than the log's, a delta that the log
does not hold, no news of deltas that it holds. Empty: it is believed.
"""


class CodebookReplica:
    """Codebook and index of one replica."""

    def __init__(
        self, codebook: Codebook, index: KeyIndex, store: RedisHeadStore, follower: DeltaFollower, settings: Settings
    ) -> None:
        self.codebook, self.index = codebook, index
        self.lookup = CodebookLookup(codebook, index)
        self.degraded = False
        self.unread_head_seq = 0
        """The delta that is live but could not be read in time; 0: none."""
        self._last_unread_head: tuple[int, float] | None = None
        """The highest head that was not read in time, and when such a head was last named."""
        self.redis_unavailable = False
        """The circuit breaker: whether Redis lately failed to answer a question within `HEAD_TIMEOUT_SECONDS`.

        Meanwhile no batch asks; whoever follows the head while there are no batches goes on asking. Several answers in
        time, one after the other, let batches ask again: a Redis that hangs now and then may still answer one.
        """
        self._good_answers = 0
        """Answers in time since the last failure."""
        self._good_answers_needed = 0
        """How many of them close the breaker; 0: it has not opened lately."""
        self._store, self._follower, self._settings = store, follower, settings
        self._distrust_reason: DistrustReason = ""
        self._distrusted_since = 0.0
        """When the present doubt began, for whatever reason; doubt that returns within a grace period goes on."""
        self._last_distrust_at = -math.inf
        """When an answer last gave reason for doubt."""
        self._is_recurring = False
        """Whether the present doubt has returned within a grace period."""
        self._reason_since = 0.0
        """Since when for this reason."""
        self._head_behind_since: tuple[int, float] | None = None
        """The highest head since the head has been behind the log, and since when it has been that one.

        A lower head restarts nothing: two old heads in turn would keep the replica on old edits for ever.
        """

    def read_head(self) -> Head | Literal["lost"] | None:
        """What Redis says, in one round trip; "lost" when it gives no answer that can be read. Safe in any thread."""
        asked = time.monotonic()
        try:
            head = self._store.read_head(self.codebook.seq)
        except RedisError as error:
            self._record_failure(to_one_line(error))
            return "lost"
        if time.monotonic() - asked > HEAD_TIMEOUT_SECONDS:
            self._record_failure(f"no answer in {HEAD_TIMEOUT_SECONDS} s")
        else:
            self._record_answer()
        return head

    def wait_for_head(
        self, pending_head: "Future[Head | Literal['lost'] | None] | None"
    ) -> Head | Literal["lost"] | None:
        """The head that a batch uses, or "lost" if Redis did not answer within `HEAD_TIMEOUT_SECONDS`."""
        if pending_head is None or (self.redis_unavailable and not pending_head.done()):
            return "lost"
        try:
            return pending_head.result(HEAD_TIMEOUT_SECONDS)
        except TimeoutError:
            self._record_failure(f"no answer in {HEAD_TIMEOUT_SECONDS} s")
            return "lost"

    def should_wait_for(self, seq: int, waited_seconds: float) -> bool:
        """Whether a request that has waited so many seconds for delta `seq` does well to wait on.

        For at most `min_seq_wait` seconds once that delta has been read from the log and so is about to become live,
        and for a moment where it may not have been read yet.
        """
        read = seq <= self._follower.latest_seq
        return waited_seconds < (self._settings.min_seq_wait if read else UNSEEN_SEQ_WAIT_SECONDS)

    def start(self) -> None:
        """Begin with the newest good snapshot, where there is one, and read the log from there on."""
        snapshot = self._load_snapshot()
        if snapshot is None:
            self._follower.start()
            return
        self.codebook.replace_with(snapshot.codebook)
        self.index.refresh()
        self._follower.start(snapshot.offset + 1, self.codebook.seq, self.codebook.term)

    def catch_up(self, timeout: float) -> bool:
        """At start: reach the head that Redis names, or the log's end where it names none or none of the log's.

        False after `timeout` seconds in which nothing came of the log; a log that takes longer is waited for.

        Raises:
            HistoryError: the history cannot be followed that far.
        """
        head, asked = self.read_head(), time.monotonic()
        progress = CatchUpProgress(self.codebook.seq)
        while True:
            read_all = self._follower.at_end
            if read_all and time.monotonic() > asked + HEAD_RETRY_SECONDS:
                head, asked = self.read_head(), time.monotonic()
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
        """Apply what has become live, before the next batch.

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
        """Which codebook this is, for `/state`."""
        return {**self.codebook.describe(), "degraded": self.degraded}

    def _record_answer(self) -> None:
        self._good_answers += 1
        if self._good_answers >= self._good_answers_needed:
            self.redis_unavailable = False
        if self._good_answers >= 2 * MAX_GOOD_ANSWERS:
            self._good_answers_needed = 0

    def _record_failure(self, reason: str) -> None:
        self._good_answers = 0
        if self.redis_unavailable:
            return
        log.warning("redis_lost", error=reason, seq=self.codebook.seq)
        self.redis_unavailable = True
        self._good_answers_needed = min(2 * self._good_answers_needed or MIN_GOOD_ANSWERS, MAX_GOOD_ANSWERS)

    def _update_unread_head(self, seq: int) -> None:
        """Remember a head that was not read in time, until it is, or no such head was named for a grace period."""
        self.unread_head_seq = seq if self.codebook.seq < seq else 0
        highest = self._last_unread_head[0] if self._last_unread_head else 0
        if self.unread_head_seq:
            self._last_unread_head = max(seq, highest), time.monotonic()
        elif self.codebook.seq >= highest or self._unread_pause_is_over():
            self._last_unread_head = None

    def _unread_pause_is_over(self) -> bool:
        pause = max(self._settings.redis_grace, DELTA_WAIT_SECONDS)
        return self._last_unread_head is None or time.monotonic() - self._last_unread_head[1] >= pause

    def _is_following_log(self) -> bool:
        """Whether Redis has not been believed for so long that the log's end counts instead."""
        return bool(self._distrust_reason) and time.monotonic() - self._distrusted_since >= self._settings.redis_grace

    def _update_trust(self, head: Head | Literal["lost"] | None) -> None:
        """Believe Redis or not, by what it says and what the log holds.

        Raises:
            HistoryError: there are two histories.
        """
        now, doubt = time.monotonic(), self._distrust_reason_for(head)
        if doubt != self._distrust_reason:
            if not self._distrust_reason:
                self._is_recurring = now - self._last_distrust_at < self._settings.redis_grace
                if not self._is_recurring:
                    self._distrusted_since = (
                        self._head_behind_since[1] if doubt == "redis_behind" and self._head_behind_since else now
                    )
            if not doubt:
                log.info("redis_back", seq=self.codebook.seq)
            elif doubt != "redis_lost":  # which whoever asked has logged
                seq = head.seq if isinstance(head, Head) else None
                log.warning(doubt, head=seq, seq=self.codebook.seq, read=self._follower.latest_seq)
            self._distrust_reason, self._reason_since = doubt, now
        grace, complete_at = self._settings.redis_grace, self._follower.caught_up_at
        if doubt in {"redis_ahead", "redis_disagrees"}:  # what the log holds now may not have been read yet
            self._follower.request_end_check()
        overdue = doubt == "redis_disagrees" and complete_at >= self._reason_since and now - self._reason_since >= grace
        old = now - self._distrusted_since >= grace
        if doubt:
            self._last_distrust_at = now
            self.degraded = doubt != "redis_ahead" or (old and complete_at >= self._distrusted_since)
        elif not (self._is_recurring and old and now - self._last_distrust_at < grace):
            self.degraded = False
        metrics.DEGRADED.set(int(self.degraded))
        if overdue:
            raise HistoryError(
                f"Redis and the log have disagreed on the digest of delta {self.codebook.seq} for"
                f" {now - self._reason_since:.0f} s: are they of one cluster? Set GRACESTREAM_REDIS, or delete the key"
                f" {self._store.head_key}, and start this replica again"
            )

    def _distrust_reason_for(self, head: Head | Literal["lost"] | None) -> DistrustReason:
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
        elif now - self._head_behind_since[1] >= self._settings.redis_grace:
            return "redis_behind"
        return ""

    def _load_snapshot(self) -> Snapshot | None:
        if not self._settings.snapshot_url:
            return None
        head = self.read_head()
        try:
            upto = head.seq if isinstance(head, Head) else None
            return load_newest_snapshot(self._settings, self.codebook.model, self.codebook.layer, upto)
        except (SnapshotError, TopicError, KafkaError, OSError) as error:
            log.warning("snapshots_unreachable", reason=str(error) or type(error).__name__)
            return None

    def _apply_until(self, seq: int) -> None:
        """Waits at most `DELTA_WAIT_SECONDS` for deltas that are not read yet.

        It does not wait after a wait in vain, until no unread head was named for a grace period: one good answer in
        between would let a head that is wrong now and then hold up a batch each time.
        """
        may_wait = seq <= self._follower.latest_seq or self._unread_pause_is_over()
        deadline = time.monotonic() + (DELTA_WAIT_SECONDS if may_wait else 0.0)
        while self.codebook.seq < seq:
            left = deadline - time.monotonic()
            records = self._follower.poll(seq, max(0.0, left))
            if records:
                self._apply(records)
            if not records or left <= 0:
                return

    def _apply(self, records: Sequence[tuple[int, bytes]]) -> None:
        changes: list[AppliedDelta] = []
        started = time.perf_counter()
        try:
            for offset, record in records:
                try:
                    applied = self.codebook.apply(record)
                except HistoryError as fault:
                    raise history_error_at(offset, fault) from fault
                if applied is None:
                    log.warning("delta_dropped", seq=self.codebook.seq, term=self.codebook.term)
                else:
                    changes.append(applied)
        finally:  # also of what came before a fault
            if changes:
                self.index.refresh(*changes)
        ms = round(1000 * (time.perf_counter() - started), 2)
        for applied in changes if len(changes) <= MAX_LOGGED_ITEMS else ():
            delta = applied.delta
            log.info("delta_applied", seq=delta.seq, op=delta.op, entries=len(delta.entries), ms=ms)
        if len(changes) > MAX_LOGGED_ITEMS:
            log.info("deltas_applied", deltas=len(changes), seq=self.codebook.seq, entries=len(self.codebook), ms=ms)

    def _check_next_delta(self) -> None:
        """Nothing after a record that cannot be applied ever can be, so it stops the replica before it is live."""
        waiting = self._follower.peek()
        if waiting is not None:
            offset, record = waiting
            try:
                self.codebook.check(record)
            except HistoryError as fault:
                raise history_error_at(offset, fault) from fault

    def _compare_radii(self, head: Head) -> None:
        """Count and log radii that are not the log's."""
        if head.seq != self.codebook.seq or not head.changed_radii:
            return
        wrong = 0
        for entry_id, radius in head.changed_radii.items():
            ours = self.codebook.radii_N[self.codebook.slot(entry_id)] if entry_id in self.codebook else None
            with np.errstate(over="ignore"):
                theirs = None if radius is None else np.float32(radius)
            if theirs == ours:
                continue
            wrong += 1
            metrics.RADIUS_MISMATCH.inc()
            if wrong <= MAX_LOGGED_ITEMS:
                own = None if ours is None else float(ours)
                log.error("radius_mismatch", entry_id=to_one_line(entry_id), redis=radius, log=own)


class CatchUpProgress:
    """How a starting replica comes along: it says so every few seconds, and knows since when nothing has come."""

    def __init__(self, seq: int) -> None:
        self._started_at = self._progressed_at = self._logged_at = time.monotonic()
        self._first_seq, self._last_position = seq, (seq, -1)

    def seconds_without_progress(self, seq: int, follower: DeltaFollower) -> float:
        """Seconds since the codebook, or the reading of the log, came any further."""
        now, seen = time.monotonic(), (seq, follower.next_offset)
        if seen != self._last_position:
            self._progressed_at, self._last_position = now, seen
        if now - self._logged_at > PROGRESS_LOG_SECONDS:
            self._logged_at = now
            percent = round(100 * follower.next_offset / follower.initial_end, 1) if follower.initial_end else 0.0
            rate = round((seq - self._first_seq) / (now - self._started_at))
            log.info("catching_up", seq=seq, percent=percent, deltas_per_second=rate)
        return now - self._progressed_at
