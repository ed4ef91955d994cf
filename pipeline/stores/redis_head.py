"""Redis: which delta is live, and the radius of every entry (design, section 5, points 4 and 5).

Three keys a codebook, in one slot of a cluster: `head` (term, seq, digest), `radii` (entry id: radius) and `changed`
(entry id, scored by the seq that last changed its radius). Radii are written as the shortest decimal of the float32.
Writes and reads are one script each, so nobody sees a head without its radii.

Redis is untrusted input. Keys may be of any type and hold anything; a read takes a bounded number of bytes and raises
RedisError for a head that no editor wrote, and for an answer that redis-py cannot read. A write replaces what no editor
wrote.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from redis import Redis
from redis.exceptions import DataError

from gracestream.pipeline.codebook import AppliedDelta, Codebook
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores.redis_bounds import ask_redis

_HEAD_SCRIPT = """
local head = {}
for at, name in ipairs({'term', 'seq', 'digest'}) do
    local length = redis.call('HSTRLEN', KEYS[1], name)
    head[at] = length > 64 and '?' or redis.call('HGET', KEYS[1], name) or ''
end
local function count(text) return #text <= 16 and string.match(text, '^%d+$') and tonumber(text) < 2^53 end
local empty = head[1] == '' and head[2] == '' and head[3] == ''
local written = count(head[1]) and count(head[2]) and #head[3] == 64 and string.match(head[3], '^[0-9a-f]+$')
"""
"""The head as an editor writes it; `written`: whether one did."""

_PUBLISH_SCRIPT = (
    """
for at, kind in ipairs({'hash', 'hash', 'zset'}) do
    if redis.call('TYPE', KEYS[at]).ok ~= kind then redis.call('DEL', KEYS[at]) end
end
"""
    + _HEAD_SCRIPT
    + """
local term, seq = tonumber(ARGV[1]), tonumber(ARGV[2])
if written and (term < tonumber(head[1]) or seq < tonumber(head[2])) then return 0 end
if ARGV[5] == 'anew' then redis.call('DEL', KEYS[2], KEYS[3]) end
for at = 6, #ARGV, 2 do
    if ARGV[at + 1] == '' then redis.call('HDEL', KEYS[2], ARGV[at])
    else redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1]) end
    redis.call('ZADD', KEYS[3], seq, ARGV[at])
end
if ARGV[4] == 'live' then redis.call('HSET', KEYS[1], 'term', ARGV[1], 'seq', ARGV[2], 'digest', ARGV[3]) end
return 1
"""
)

_READ_SCRIPT = (
    _HEAD_SCRIPT
    + """
if empty then return {} end
if not written then return {'?', '?', '?'} end
local changed = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[1], head[2], 'LIMIT', 0, ARGV[2])
local answer, room = {head[1], head[2], head[3]}, tonumber(ARGV[3])
for _, entry in ipairs(changed) do
    room = room - #entry - 64
    if room < 0 then break end
    local length = redis.call('HSTRLEN', KEYS[2], entry)
    answer[#answer + 1] = entry
    answer[#answer + 1] = length > 64 and 'nan' or redis.call('HGET', KEYS[2], entry) or ''
end
return answer
"""
)

RADII_PER_SCRIPT = 2000
"""Radii of one script call; Redis serves nobody else meanwhile, and a script takes some thousand arguments."""

MAX_CHANGED_BYTES = 2**20
"""Of entry ids and radii that are read at once; those beyond are not compared with the log's."""

_COUNT_PATTERN = re.compile(rb"\d{1,16}")
_DIGEST_PATTERN = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Head:
    """What is live: the delta (term, seq, digest in hex), and radii that changed since the seq that was asked about."""

    term: int
    seq: int
    digest: str
    changed_radii: dict[str, float | None]


class StaleHeadError(UserError):
    """Redis knows a newer head than the one that was to be written: another editor leads, or the log was lost."""


class RedisHeadStore:
    """The keys of one codebook. Raises redis-py's RedisError where Redis does not answer."""

    def __init__(self, client: Redis, settings: Settings) -> None:
        name = f"{settings.prefix}gracestream:{{{settings.codebook}}}"
        self._client: Any = client
        self._keys = [f"{name}:head", f"{name}:radii", f"{name}:changed"]
        self.head_key = self._keys[0]
        self._publish = client.register_script(_PUBLISH_SCRIPT)
        self._read = client.register_script(_READ_SCRIPT)

    def read_head(self, since: int) -> Head | None:
        """The head, and up to 2,000 radii that changed after delta `since`; None when nothing was ever live."""
        answer = ask_redis(
            self._client, lambda: self._read(keys=self._keys, args=[since, RADII_PER_SCRIPT, MAX_CHANGED_BYTES])
        )
        if not answer:
            return None
        try:
            term, seq, digest, *pairs = answer
            if not (
                _COUNT_PATTERN.fullmatch(term) and _COUNT_PATTERN.fullmatch(seq) and _DIGEST_PATTERN.fullmatch(digest)
            ):
                raise ValueError("this is no head")  # noqa: TRY301  (one sentence says it for all)
            changed = {
                entry.decode(errors="backslashreplace"): _parse_radius(radius)
                for entry, radius in zip(pairs[::2], pairs[1::2], strict=True)
            }
            return Head(int(term), int(seq), digest.decode(), changed)
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise DataError(
                f"{self._keys[0]} or {self._keys[1]} holds what gracestream never wrote: {error}"
            ) from error

    def read_radii(self) -> dict[str, float]:
        """Every radius."""
        return {entry.decode(): float(radius) for entry, radius in self._client.hgetall(self._keys[1]).items()}

    def count_radii(self) -> int:
        """How many radii there are."""
        count: int = ask_redis(self._client, lambda: self._client.hlen(self._keys[1]))
        return count

    def publish(self, applied: AppliedDelta, codebook: Codebook) -> None:
        """Make the delta that the codebook has just applied live.

        Raises:
            StaleHeadError: a newer delta or term is live already.
        """
        changes = {
            change.entry_id: _format_radius(codebook, change.entry_id) if change.entry_id in codebook else ""
            for change in applied.delta.entries
        }
        self._write(changes, codebook, "")

    def rebuild(self, codebook: Codebook) -> None:
        """Write every radius and the head in place of what is there: for a Redis that is not as the log says.

        Raises:
            StaleHeadError: a newer delta or term is live already.
        """
        self._write({entry_id: _format_radius(codebook, entry_id) for entry_id in codebook.entry_ids}, codebook, "anew")

    def _write(self, changes: dict[str, str], codebook: Codebook, mode: str) -> None:
        """The head comes with the last radii: until then replicas serve what was live before."""
        pairs = list(changes.items())
        for start in range(0, max(len(pairs), 1), RADII_PER_SCRIPT):
            flat = [part for pair in pairs[start : start + RADII_PER_SCRIPT] for part in pair]
            last = "live" if start + RADII_PER_SCRIPT >= len(pairs) else "more"
            first = mode if start == 0 else ""
            args: list[str | int] = [codebook.term, codebook.seq, codebook.digest.hex(), last, first, *flat]
            if not ask_redis(self._client, partial(self._publish, keys=self._keys, args=args)):
                raise StaleHeadError(
                    f"delta {codebook.seq} of term {codebook.term} is not made live: Redis has a newer one;"
                    " another editor has led since, or the log was lost"
                )


def _format_radius(codebook: Codebook, entry_id: str) -> str:
    return str(np.float32(codebook.radii_N[codebook.slot(entry_id)]))


def _parse_radius(text: bytes) -> float | None:
    """A radius as it was written; not a number where it is none, which is unlike any of the log's."""
    try:
        return float(text) if text else None
    except ValueError:
        return float("nan")
