"""Publishes committed deltas in Redis: radii and head (docs/explanation/consistency.md).

1. A delta is published once Redis names it, or a later delta, as the head. Replicas then apply it.
2. Redis never goes back: the script in Redis rejects an older head (`pipeline.stores.redis_head`).
3. The editor goes on without Redis. After an outage, or after a predecessor stopped half-way, `reconcile` writes all
   radii and the head again.
4. A head that is newer than the log for `grace_seconds` stops the editor: another editor leads, or the log was lost.

Not promised: that Redis holds the newest delta at every moment. `in_sync` says whether it does.
"""

import threading
import time

import structlog
from redis.exceptions import DataError, RedisError, ResponseError

from gracestream.pipeline.codebook import AppliedDelta, Codebook
from gracestream.pipeline.observability import DEGRADED
from gracestream.pipeline.stores import Head, RedisHeadStore, StaleHeadError
from gracestream.schemas.messages import to_one_line

log = structlog.get_logger()

REDIS_RETRY_SECONDS = 2.0
"""Seconds after a failure during which Redis is not asked. Each call to an unresponsive Redis takes a second."""

HEAD_CHECK_SECONDS = 0.1
"""Seconds between two reads of a head that is newer than the log."""


class RedisPublisher:
    """Publishes one delta at a time, or the whole codebook where Redis may lack earlier deltas."""

    def __init__(
        self,
        store: RedisHeadStore,
        codebook: Codebook,
        grace_seconds: float,
        *,
        retry_seconds: float = REDIS_RETRY_SECONDS,
    ) -> None:
        """`grace_seconds`: seconds for which Redis may name a head that is newer than the log."""
        self._store, self._codebook, self._grace_seconds, self._retry_seconds = (
            store,
            codebook,
            grace_seconds,
            retry_seconds,
        )
        self.in_sync = False
        """True if Redis holds everything that the codebook holds, as far as is known."""
        self._last_problem = ""
        """The last problem that was logged, so that it is logged once; empty after a successful check."""
        self._retry_at = 0.0
        """Monotonic time before which Redis is not asked."""
        self._ahead_since: float | None = None
        """Monotonic time since which Redis names a newer head; None if it does not."""

    def wait_until_not_ahead(self, stop: threading.Event) -> bool:
        """Wait until Redis is not ahead of the log; False if `stop` is set first.

        Called before a term begins, since Redis would reject each delta of that term. A wrong head may be transient, so
        it counts only after `grace_seconds`.

        Raises:
            StaleHeadError: Redis is ahead of the log for that long.
        """
        deadline = time.monotonic() + self._grace_seconds
        while (head := self._newer_head()) is not None:
            if time.monotonic() >= deadline:
                raise StaleHeadError(
                    f"Redis has delta {head.seq} of term {head.term}, and the log ends with delta {self._codebook.seq}"
                    f" of term {self._codebook.term}: another editor has led since, or the log was lost; if the log is"
                    f" right, delete the key {self._store.head_key}"
                )
            if stop.wait(HEAD_CHECK_SECONDS):
                return False
        return True

    def stand_by(self) -> None:
        """Report no problem, and forget the last one: this editor publishes nothing until it leads again."""
        self._last_problem, self._ahead_since = "", None
        DEGRADED.set(0)

    def publish(self, applied: AppliedDelta) -> None:
        """Publish the delta that the codebook has just applied; if Redis fails, a later `reconcile` publishes it.

        Raises:
            StaleHeadError: Redis has named a newer head for `grace_seconds`: another editor leads, or the log was lost.
        """
        self._try_publish(applied if self._redis_has(self._codebook.seq - 1) else None)

    def reconcile(self) -> None:
        """Publish the whole codebook unless Redis holds it already, for example after Redis was emptied.

        The check also counts the radii: a Redis that was emptied just before a delta has a valid head, but few radii.

        Raises:
            StaleHeadError: as `publish`.
        """
        if self._redis_has(self._codebook.seq, full_check=True):
            self._last_problem = ""
        else:
            self._try_publish(None)

    def _newer_head(self) -> Head | None:
        """The head in Redis if it is newer than the log; else None."""
        try:
            head = self._store.read_head(self._codebook.seq)
        except RedisError:
            return None  # `reconcile` reports it
        newer = head is not None and (head.term > self._codebook.term or head.seq > self._codebook.seq)
        return head if newer else None

    def _redis_has(self, seq: int, *, full_check: bool = False) -> bool:
        """True if Redis holds everything up to delta `seq`, as far as this editor knows.

        `full_check` also compares the digest and the number of radii.
        """
        if not self.in_sync:
            return False
        try:
            head = self._store.read_head(seq)
            if head is None or head.seq != seq:
                return False
            digest, count = self._codebook.digest.hex(), len(self._codebook)
            return not full_check or (head.digest == digest and self._store.count_radii() == count)
        except DataError:
            return False  # no editor wrote this head, so it is replaced
        except RedisError as error:
            self._handle_failure(error)
            return False

    def _try_publish(self, applied: AppliedDelta | None) -> None:
        """Publish one delta, or everything if `applied` is None; does nothing until `_retry_at`."""
        if time.monotonic() < self._retry_at:
            return
        try:
            if applied is None:
                self._store.rebuild(self._codebook)
            else:
                self._store.publish(applied, self._codebook)
        except RedisError as error:
            self._handle_failure(error)
        except StaleHeadError as error:
            self._handle_newer_head(error)
        else:
            self.in_sync, self._ahead_since = True, None
            DEGRADED.set(0)

    def _handle_failure(self, error: RedisError) -> None:
        """Log a failure once: Redis rejected a command, or did not answer."""
        reason = to_one_line(error)
        if self._is_new_problem(reason):
            if isinstance(error, ResponseError):
                log.warning(
                    "redis_command_rejected",
                    reason=reason,
                    seq=self._codebook.seq,
                    consequence="the editor publishes nothing; replicas follow the log once their grace period ends",
                    remedy="allow the editor the commands in deploy/redis.acl",
                )
            else:
                log.warning(
                    "redis_lost",
                    reason=reason,
                    seq=self._codebook.seq,
                    consequence="the editor goes on; its deltas are published once Redis answers again",
                )
        self._retry_at = time.monotonic() + self._retry_seconds

    def _handle_newer_head(self, error: StaleHeadError) -> None:
        """Tolerate a newer head for `grace_seconds`, then raise.

        A fenced editor learns from the log that another one leads. So a newer head may just be a wrong value.
        """
        now = time.monotonic()
        self._ahead_since = now if self._ahead_since is None else self._ahead_since
        if now - self._ahead_since >= self._grace_seconds:
            raise error
        if self._is_new_problem(str(error)):
            log.warning(
                "redis_distrusted",
                reason=str(error),
                seq=self._codebook.seq,
                consequence="the editor publishes nothing, and stops if Redis names that head for the grace period",
            )

    def _is_new_problem(self, reason: str) -> bool:
        """Report `degraded`; True if the problem differs from the last one, so that it must be logged."""
        self.in_sync = False
        DEGRADED.set(1)
        is_new, self._last_problem = reason != self._last_problem, reason
        return is_new
