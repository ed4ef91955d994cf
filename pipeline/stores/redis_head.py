"""Stores the published head and the radius of every entry in Redis (docs/explanation/consistency.md).

Each codebook has three keys, in one slot of a cluster. `head` has the term, seq and digest of the head. `radii` has the
radius of each entry id, as the shortest decimal of a float32. `changed` is a sorted set of entry ids; the score is the
seq that last changed the radius. A message on the channel `published` tells replicas to read the head.

1. Each read is one script. A write is a script for every `RADII_PER_SCRIPT` radii, and the last one writes the head.
   Redis runs scripts one at a time, so a new head is never visible without its radii.
2. A write never replaces a head of a newer term or seq.
3. Redis is untrusted input: a key may have any type and content. A read transfers a limited number of bytes. It raises
   RedisError for a head that no editor wrote, and for an answer that redis-py cannot parse.
4. A write replaces whatever no editor wrote.

Not promised: durability. The log is the truth, and `rebuild` restores a lost or altered Redis from it. Nor that a
message of the channel is sent or arrives: it is a hint.
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
"""Lua: reads the head. `written` is true if it has the form that an editor writes; `empty` if there is none.

A longer field is not transferred, and becomes '?'. Numbers stay below 2^53, which Lua represents exactly.
"""

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
for at = 7, #ARGV, 2 do
    if ARGV[at + 1] == '' then redis.call('HDEL', KEYS[2], ARGV[at])
    else redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1]) end
    redis.call('ZADD', KEYS[3], seq, ARGV[at])
end
if ARGV[4] == 'last' then
    redis.call('HSET', KEYS[1], 'term', ARGV[1], 'seq', ARGV[2], 'digest', ARGV[3])
    redis.pcall('PUBLISH', ARGV[6], ARGV[2])
end
return 1
"""
)
"""Lua: writes radii and, in the last call of a write, the head.

ARGV: term, seq, digest, 'last' to write the head, 'anew' to delete all radii first, the channel, then pairs of entry id
and radius. An empty radius removes it.

1. Delete keys of a type that no editor writes; other commands would fail on them.
2. Return 0 if the present head is newer.
3. Write the radii, with their seq in `changed`.
4. Write the head, send the hint, and return 1. `pcall` goes on if the user may not send the hint.
"""

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
"""Lua: reads the head and the radii that changed after it.

ARGV: the seq after which changes are wanted, the limit on their number, and the limit on their bytes. The answer is
empty without a head, and has '?' in place of a head that no editor wrote. Radii of deltas after the head are left out.
"""

RADII_PER_SCRIPT = 2000
"""Limit on the radii of one script call.

Redis serves no other client during a script, and a script accepts a limited number of arguments, some thousands.
"""

MAX_CHANGED_BYTES = 2**20
"""Limit on the bytes of changed entry ids and radii in one read; radii beyond it are not compared with the log."""

_COUNT_PATTERN = re.compile(rb"\d{1,16}")
_DIGEST_PATTERN = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Head:
    """The published head.

    Attributes:
        term: Term of the published delta.
        seq: Its sequence number.
        digest: Its digest in hex.
        changed_radii: By entry id, radii that changed after the seq of the query; None for a removed entry.
    """

    term: int
    seq: int
    digest: str
    changed_radii: dict[str, float | None]


class StaleHeadError(UserError):
    """Redis has a newer head than the one to write: another editor has acquired leadership, or the log was lost."""


class RedisHeadStore:
    """The head and the radii of one codebook in Redis. Methods raise RedisError if Redis does not answer."""

    def __init__(self, client: Redis, prefix: str, codebook: str) -> None:
        """`prefix` is the deployment's, and `codebook` the name of the codebook."""
        name = f"{prefix}gracestream:{{{codebook}}}"
        self._client: Any = client
        self._keys = [f"{name}:head", f"{name}:radii", f"{name}:changed"]
        self.head_key = self._keys[0]
        self.channel = f"{name}:published"
        self._publish = client.register_script(_PUBLISH_SCRIPT)
        self._read = client.register_script(_READ_SCRIPT)

    def read_head(self, since: int) -> Head | None:
        """The published head, with up to `RADII_PER_SCRIPT` radii that changed after delta `since`.

        It returns None if no delta was ever published.

        Raises:
            RedisError: no answer; or the head was not written by an editor.
        """
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
                raise ValueError("this is not a head")  # noqa: TRY301  (all such faults have one message)
            changed = {
                entry.decode(errors="backslashreplace"): _parse_radius(radius)
                for entry, radius in zip(pairs[::2], pairs[1::2], strict=True)
            }
            return Head(int(term), int(seq), digest.decode(), changed)
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise DataError(
                f"{self._keys[0]} or {self._keys[1]} holds content that gracestream did not write: {error}"
            ) from error

    def read_radii(self) -> dict[str, float]:
        """All radii, by entry id."""
        return {entry.decode(): float(radius) for entry, radius in self._client.hgetall(self._keys[1]).items()}

    def count_radii(self) -> int:
        """The number of radii."""
        count: int = ask_redis(self._client, lambda: self._client.hlen(self._keys[1]))
        return count

    def publish(self, applied: AppliedDelta, codebook: Codebook) -> None:
        """Publish the delta that the codebook has just applied: its radii, then the head.

        Raises:
            StaleHeadError: a newer delta or term is published already.
        """
        changes = {
            change.entry_id: _format_radius(codebook, change.entry_id) if change.entry_id in codebook else ""
            for change in applied.delta.entries
        }
        self._write(changes, codebook, "")

    def rebuild(self, codebook: Codebook) -> None:
        """Replace everything by the radii and the head of a codebook, if Redis does not agree with the log.

        Raises:
            StaleHeadError: a newer delta or term is published already.
        """
        self._write({entry_id: _format_radius(codebook, entry_id) for entry_id in codebook.entry_ids}, codebook, "anew")

    def _write(self, changes: dict[str, str], codebook: Codebook, mode: str) -> None:
        """Write radii ('' removes one) in several scripts; the last one writes the head.

        Until then, replicas serve the head published before. With the mode "anew", the first script deletes all radii.
        """
        pairs = list(changes.items())
        for start in range(0, max(len(pairs), 1), RADII_PER_SCRIPT):
            flat = [text for pair in pairs[start : start + RADII_PER_SCRIPT] for text in pair]
            part = "last" if start + RADII_PER_SCRIPT >= len(pairs) else "more"
            first_mode = mode if start == 0 else ""
            args: list[str | int] = [
                codebook.term,
                codebook.seq,
                codebook.digest.hex(),
                part,
                first_mode,
                self.channel,
                *flat,
            ]
            if not ask_redis(self._client, partial(self._publish, keys=self._keys, args=args)):
                raise StaleHeadError(
                    f"delta {codebook.seq} of term {codebook.term} is not published: Redis has a newer one;"
                    " another editor has acquired leadership, or the log was lost"
                )


def _format_radius(codebook: Codebook, entry_id: str) -> str:
    return str(np.float32(codebook.radii_N[codebook.slot(entry_id)]))


def _parse_radius(text: bytes) -> float | None:
    """A radius; None for a removed entry; NaN for malformed text, since NaN differs from every radius of the log."""
    try:
        return float(text) if text else None
    except ValueError:
        return float("nan")
