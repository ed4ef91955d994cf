"""Redis: which delta is live, and the radius of every entry (design, section 5, points 4 and 5).

Three keys a codebook, in one slot of a cluster: `head` (term, seq, digest), `radii` (entry id: radius) and `changed`
(entry id, scored by the seq that last changed its radius). Radii are written as the shortest decimal of the float32.
Writes and reads are one script each, so nobody sees a head without its radii.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from redis import Redis
from redis.exceptions import DataError

from pipeline.codebook import Applied, Codebook
from pipeline.errors import UserError
from pipeline.settings import Settings

_PUBLISH = """
local term, seq = tonumber(ARGV[1]), tonumber(ARGV[2])
local head = redis.call('HMGET', KEYS[1], 'term', 'seq')
local live_term, live_seq = tonumber(head[1] or '0'), tonumber(head[2] or '0')
if term < live_term or seq < live_seq then return 0 end
for at = 5, #ARGV, 2 do
    if ARGV[at + 1] == '' then redis.call('HDEL', KEYS[2], ARGV[at])
    else redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1]) end
    redis.call('ZADD', KEYS[3], seq, ARGV[at])
end
if ARGV[4] == 'live' then redis.call('HSET', KEYS[1], 'term', ARGV[1], 'seq', ARGV[2], 'digest', ARGV[3]) end
return 1
"""

_READ = """
local head = redis.call('HMGET', KEYS[1], 'term', 'seq', 'digest')
if not head[1] then return {} end
local changed = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[1], head[2], 'LIMIT', 0, ARGV[2])
local answer = {head[1], head[2], head[3]}
for _, entry in ipairs(changed) do
    answer[#answer + 1] = entry
    answer[#answer + 1] = redis.call('HGET', KEYS[2], entry) or ''
end
return answer
"""

BATCH = 2000
"""Radii of one script call; Redis serves nobody else meanwhile, and a script takes some thousand arguments."""


@dataclass(frozen=True, slots=True)
class Head:
    """What is live: the delta (term, seq, digest in hex), and radii that changed since the seq that was asked about."""

    term: int
    seq: int
    digest: str
    changed: dict[str, float | None]


class StaleError(UserError):
    """Redis knows a newer head than the one that was to be written: another editor leads, or the log was lost."""


class RadiusStore:
    """The keys of one codebook. Raises redis-py's RedisError where Redis does not answer."""

    def __init__(self, client: Redis, settings: Settings) -> None:
        name = f"{settings.prefix}gracestream:{{{settings.codebook}}}"
        self._client: Any = client
        self._keys = [f"{name}:head", f"{name}:radii", f"{name}:changed"]
        self._publish = client.register_script(_PUBLISH)
        self._read = client.register_script(_READ)

    def head(self, since: int) -> Head | None:
        """The head, and up to 2,000 radii that changed after delta `since`; None when nothing was ever live."""
        answer = self._read(keys=self._keys, args=[since, BATCH])
        if not answer:
            return None
        try:
            term, seq, digest, *pairs = [part.decode() for part in answer]
            changed = {
                entry: float(radius) if radius else None for entry, radius in zip(pairs[::2], pairs[1::2], strict=True)
            }
            return Head(int(term), int(seq), digest, changed)
        except (ValueError, AttributeError) as error:
            raise DataError(
                f"{self._keys[0]} or {self._keys[1]} holds what gracestream never wrote: {error}"
            ) from error

    def radii(self) -> dict[str, float]:
        """Every radius."""
        return {entry.decode(): float(radius) for entry, radius in self._client.hgetall(self._keys[1]).items()}

    def count(self) -> int:
        """How many radii there are."""
        count: int = self._client.hlen(self._keys[1])
        return count

    def publish(self, applied: Applied, codebook: Codebook) -> None:
        """Make the delta that the codebook has just applied live.

        Raises:
            StaleError: a newer delta or term is live already.
        """
        changes = {
            change.entry_id: _text(codebook, change.entry_id) if change.entry_id in codebook else ""
            for change in applied.delta.entries
        }
        self._write(changes, codebook)

    def rebuild(self, codebook: Codebook) -> None:
        """Write every radius and the head: for a Redis that is empty or behind the log.

        Raises:
            StaleError: a newer delta or term is live already.
        """
        known = {entry.decode() for entry in self._client.hkeys(self._keys[1])}
        gone = dict.fromkeys(known - set(codebook.entry_ids), "")
        self._write({**gone, **{entry_id: _text(codebook, entry_id) for entry_id in codebook.entry_ids}}, codebook)

    def _write(self, changes: dict[str, str], codebook: Codebook) -> None:
        """The head comes with the last radii: until then replicas serve what was live before."""
        pairs = list(changes.items())
        for start in range(0, max(len(pairs), 1), BATCH):
            flat = [part for pair in pairs[start : start + BATCH] for part in pair]
            last = "live" if start + BATCH >= len(pairs) else "more"
            args: list[str | int] = [codebook.term, codebook.seq, codebook.digest.hex(), last, *flat]
            if not self._publish(keys=self._keys, args=args):
                raise StaleError(
                    f"delta {codebook.seq} of term {codebook.term} is not made live: Redis has a newer one;"
                    " another editor has led since, or the log was lost"
                )


def _text(codebook: Codebook, entry_id: str) -> str:
    return str(np.float32(codebook.radii_N[codebook.slot(entry_id)]))
