"""The editor's projection of the codebook to Redis: what makes a committed delta live (design, section 5, point 4)."""

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
"""After a failure of Redis, for which the editor does not ask it: one that hangs takes a second for each question."""

HEAD_CHECK_SECONDS = 0.1
"""Between two looks at a head that is newer than the log."""


class RedisPublisher:
    """Writes each delta to Redis, and everything anew after Redis was away or a predecessor left off."""

    def __init__(
        self,
        store: RedisHeadStore,
        codebook: Codebook,
        grace_seconds: float,
        *,
        retry_seconds: float = REDIS_RETRY_SECONDS,
    ) -> None:
        """`grace_seconds`: seconds for which Redis may name a head that is newer than the log before that counts."""
        self._store, self._codebook, self._grace_seconds, self._retry_seconds = (
            store,
            codebook,
            grace_seconds,
            retry_seconds,
        )
        self.in_sync = False
        """Whether Redis has all that the codebook has."""
        self._last_problem = ""
        """What was last said to be wrong with Redis; empty: it was seen to be whole since."""
        self._retry_at = 0.0
        """When Redis is asked again."""
        self._ahead_since: float | None = None
        """Since when it names a newer head."""

    def wait_until_not_ahead(self, stop: threading.Event) -> bool:
        """See that Redis is not ahead of the log, before a term is taken in which no delta could become live.

        Redis may be wrong for a moment, so a newer head counts once it has stood for `grace` seconds. False where
        `stop` was set meanwhile.

        Raises:
            StaleError: it is ahead.
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

    def publish(self, applied: AppliedDelta) -> None:
        """Project the delta that the codebook has just applied; without Redis it stays undone until `reconcile`.

        Raises:
            StaleError: Redis has named a newer head for `grace` seconds: another editor leads, or the log was lost.
        """
        self._try_publish(applied if self._redis_has(self._codebook.seq - 1) else None)

    def reconcile(self) -> None:
        """Project everything, unless it is there already: a Redis that was emptied is filled again.

        One that was emptied just before a delta was written has a head and few radii: they are counted, too.

        Raises:
            StaleError: as `publish`.
        """
        if self._redis_has(self._codebook.seq, full_check=True):
            self._last_problem = ""
        else:
            self._try_publish(None)

    def _newer_head(self) -> Head | None:
        """The head of Redis where it is newer than the log."""
        try:
            head = self._store.read_head(self._codebook.seq)
        except RedisError:
            return None  # `repair` tells
        newer = head is not None and (head.term > self._codebook.term or head.seq > self._codebook.seq)
        return head if newer else None

    def _redis_has(self, seq: int, *, full_check: bool = False) -> bool:
        """Whether Redis has everything up to this delta, as far as this editor knows."""
        if not self.in_sync:
            return False
        try:
            head = self._store.read_head(seq)
            if head is None or head.seq != seq:
                return False
            digest, count = self._codebook.digest.hex(), len(self._codebook)
            return not full_check or (head.digest == digest and self._store.count_radii() == count)
        except DataError:
            return False  # what no editor wrote is written anew
        except RedisError as error:
            self._handle_failure(error)
            return False

    def _try_publish(self, applied: AppliedDelta | None) -> None:
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
        """Say what is wrong, once; a command that Redis refuses is told apart from a Redis that is away."""
        self._report_problem("redis_refused" if isinstance(error, ResponseError) else "redis_lost", to_one_line(error))
        self._retry_at = time.monotonic() + self._retry_seconds

    def _handle_newer_head(self, error: StaleHeadError) -> None:
        """Redis names a newer head. An editor that was fenced learns so from the log: this may be a wrong value."""
        now = time.monotonic()
        self._ahead_since = now if self._ahead_since is None else self._ahead_since
        if now - self._ahead_since >= self._grace_seconds:
            raise error
        self._report_problem("redis_ahead", str(error))

    def _report_problem(self, event: str, reason: str) -> None:
        if reason != self._last_problem:
            self._last_problem = reason
            log.warning(event, error=reason, seq=self._codebook.seq)
        self.in_sync = False
        DEGRADED.set(1)
