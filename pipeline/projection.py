"""The editor's projection of the codebook to Redis: what makes a committed delta live (design, section 5, point 4)."""

import structlog
from redis.exceptions import RedisError, ResponseError

from pipeline.codebook import Applied, Codebook
from pipeline.metrics import DEGRADED
from pipeline.radius_store import RadiusStore, StaleError

log = structlog.get_logger()


class Projection:
    """Writes each delta to Redis, and everything anew after Redis was away or a predecessor left off."""

    def __init__(self, store: RadiusStore, codebook: Codebook) -> None:
        self._store, self._codebook = store, codebook
        self.complete = False
        """Whether Redis has all that the codebook has."""
        self._told = ""
        """What was last said to be wrong with Redis; empty: it was seen to be whole since."""

    def require_no_newer(self) -> None:
        """See that Redis is not ahead of the log, before a term is taken in which no delta could become live.

        Raises:
            StaleError: it is.
        """
        try:
            head = self._store.head(self._codebook.seq)
        except RedisError:
            return  # `repair` tells
        if head is not None and (head.term > self._codebook.term or head.seq > self._codebook.seq):
            raise StaleError(
                f"Redis has delta {head.seq} of term {head.term}, and the log ends with delta {self._codebook.seq} of"
                f" term {self._codebook.term}: another editor has led since, or the log was lost"
            )

    def make_live(self, applied: Applied) -> None:
        """Project the delta that the codebook has just applied; without Redis it stays undone until `repair`.

        Raises:
            StaleError: Redis knows a newer head: another editor leads.
        """
        self._attempt(applied if self._holds(self._codebook.seq - 1) else None)

    def repair(self) -> None:
        """Project everything, unless it is there already: a Redis that was emptied is filled again.

        One that was emptied just before a delta was written has a head and few radii: they are counted, too.

        Raises:
            StaleError: Redis knows a newer head: another editor leads.
        """
        if self._holds(self._codebook.seq, whole=True):
            self._told = ""
        else:
            self._attempt(None)

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
        except RedisError as error:
            self._failed(error)
            return False

    def _attempt(self, applied: Applied | None) -> None:
        try:
            if applied is None:
                self._store.rebuild(self._codebook)
            else:
                self._store.publish(applied, self._codebook)
        except RedisError as error:
            self._failed(error)
        else:
            self.complete = True
            DEGRADED.set(0)

    def _failed(self, error: RedisError) -> None:
        """Say what is wrong, once; a command that Redis refuses is told apart from a Redis that is away."""
        if str(error) != self._told:
            self._told = str(error)
            event = "redis_refused" if isinstance(error, ResponseError) else "redis_lost"
            log.warning(event, error=self._told, seq=self._codebook.seq)
        self.complete = False
        DEGRADED.set(1)
