"""The editor's projection of the codebook to Redis: what makes a committed delta live (design, section 5, point 4)."""

import threading
import time

import structlog
from redis.exceptions import DataError, RedisError, ResponseError

from gracestream.pipeline.codebook import Applied, Codebook
from gracestream.pipeline.observability import DEGRADED
from gracestream.pipeline.stores import Head, RadiusStore, StaleError
from gracestream.schemas.messages import one_line

log = structlog.get_logger()

PAUSE_SECONDS = 2.0
"""After a failure of Redis, for which the editor does not ask it: one that hangs takes a second for each question."""

LOOK_SECONDS = 0.1
"""Between two looks at a head that is newer than the log."""


class Projection:
    """Writes each delta to Redis, and everything anew after Redis was away or a predecessor left off."""

    def __init__(self, store: RadiusStore, codebook: Codebook, grace: float, *, pause: float = PAUSE_SECONDS) -> None:
        """`grace`: seconds for which Redis may name a head that is newer than the log before that counts."""
        self._store, self._codebook, self._grace, self._pause = store, codebook, grace, pause
        self.complete = False
        """Whether Redis has all that the codebook has."""
        self._told = ""
        """What was last said to be wrong with Redis; empty: it was seen to be whole since."""
        self._not_before = 0.0
        """When Redis is asked again."""
        self._refused_at: float | None = None
        """Since when it names a newer head."""

    def await_no_newer(self, stop: threading.Event) -> bool:
        """See that Redis is not ahead of the log, before a term is taken in which no delta could become live.

        Redis may be wrong for a moment, so a newer head counts once it has stood for `grace` seconds. False where
        `stop` was set meanwhile.

        Raises:
            StaleError: it is ahead.
        """
        deadline = time.monotonic() + self._grace
        while (head := self._newer()) is not None:
            if time.monotonic() >= deadline:
                raise StaleError(
                    f"Redis has delta {head.seq} of term {head.term}, and the log ends with delta {self._codebook.seq}"
                    f" of term {self._codebook.term}: another editor has led since, or the log was lost; if the log is"
                    f" right, delete the key {self._store.head_key}"
                )
            if stop.wait(LOOK_SECONDS):
                return False
        return True

    def make_live(self, applied: Applied) -> None:
        """Project the delta that the codebook has just applied; without Redis it stays undone until `repair`.

        Raises:
            StaleError: Redis has named a newer head for `grace` seconds: another editor leads, or the log was lost.
        """
        self._attempt(applied if self._holds(self._codebook.seq - 1) else None)

    def repair(self) -> None:
        """Project everything, unless it is there already: a Redis that was emptied is filled again.

        One that was emptied just before a delta was written has a head and few radii: they are counted, too.

        Raises:
            StaleError: as `make_live`.
        """
        if self._holds(self._codebook.seq, whole=True):
            self._told = ""
        else:
            self._attempt(None)

    def _newer(self) -> Head | None:
        """The head of Redis where it is newer than the log."""
        try:
            head = self._store.head(self._codebook.seq)
        except RedisError:
            return None  # `repair` tells
        newer = head is not None and (head.term > self._codebook.term or head.seq > self._codebook.seq)
        return head if newer else None

    def _holds(self, seq: int, *, whole: bool = False) -> bool:
        """Whether Redis has everything up to this delta, as far as this editor knows."""
        if not self.complete:
            return False
        try:
            head = self._store.head(seq)
            if head is None or head.seq != seq:
                return False
            digest, count = self._codebook.digest.hex(), len(self._codebook)
            return not whole or (head.digest == digest and self._store.count() == count)
        except DataError:
            return False  # what no editor wrote is written anew
        except RedisError as error:
            self._failed(error)
            return False

    def _attempt(self, applied: Applied | None) -> None:
        if time.monotonic() < self._not_before:
            return
        try:
            if applied is None:
                self._store.rebuild(self._codebook)
            else:
                self._store.publish(applied, self._codebook)
        except RedisError as error:
            self._failed(error)
        except StaleError as error:
            self._refused(error)
        else:
            self.complete, self._refused_at = True, None
            DEGRADED.set(0)

    def _failed(self, error: RedisError) -> None:
        """Say what is wrong, once; a command that Redis refuses is told apart from a Redis that is away."""
        self._say("redis_refused" if isinstance(error, ResponseError) else "redis_lost", one_line(error))
        self._not_before = time.monotonic() + self._pause

    def _refused(self, error: StaleError) -> None:
        """Redis names a newer head. An editor that was fenced learns so from the log: this may be a wrong value."""
        now = time.monotonic()
        self._refused_at = now if self._refused_at is None else self._refused_at
        if now - self._refused_at >= self._grace:
            raise error
        self._say("redis_ahead", str(error))

    def _say(self, event: str, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            log.warning(event, error=reason, seq=self._codebook.seq)
        self.complete = False
        DEGRADED.set(1)
