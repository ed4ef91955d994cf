"""A test double of Redis, in memory: the three keys of a codebook and the scripts of `pipeline.stores.redis_head`.

`tests/contract/test_redis_head.py` tests that it behaves like the real Redis.
"""

from collections.abc import Callable, Sequence
from typing import Any

from gracestream.pipeline.stores import redis_head
from tests.support.doubles.kafka import Step, no_step


class MemoryRedis:
    """The server. `client` returns a client of it."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[str, str]] = {}
        self.scores: dict[str, dict[str, int]] = {}

    def client(self, step: Step = no_step) -> Any:
        """A client. Each of its scripts calls `step` before and after."""
        return _Client(self, step)

    def flush(self) -> None:
        """Delete everything, as a restart without persistence does."""
        self.hashes.clear()
        self.scores.clear()


class _Client:
    def __init__(self, server: MemoryRedis, step: Step) -> None:
        self._server, self._step = server, step

    def register_script(self, script: str) -> Callable[..., Any]:
        run = {redis_head._PUBLISH_SCRIPT: self._publish, redis_head._READ_SCRIPT: self._read}[script]

        def call(keys: Sequence[str], args: Sequence[Any]) -> Any:
            self._step("redis")
            answer = run(keys, [str(argument) for argument in args])
            self._step("redis done")
            return answer

        return call

    def hlen(self, name: str) -> int:
        self._step("redis")
        return len(self._server.hashes.get(name, {}))

    def hgetall(self, name: str) -> dict[bytes, bytes]:
        self._step("redis")
        return {entry.encode(): text.encode() for entry, text in self._server.hashes.get(name, {}).items()}

    def _publish(self, keys: Sequence[str], args: Sequence[str]) -> int:
        head, radii = (self._server.hashes.setdefault(key, {}) for key in keys[:2])
        changed = self._server.scores.setdefault(keys[2], {})
        term, seq, digest, part, mode, _channel, *pairs = args
        if int(term) < int(head.get("term", 0)) or int(seq) < int(head.get("seq", 0)):
            return 0
        if mode == "anew":
            radii.clear()
            changed.clear()
        for entry, radius in zip(pairs[::2], pairs[1::2], strict=True):
            if radius:
                radii[entry] = radius
            else:
                radii.pop(entry, None)
            changed[entry] = int(seq)
        if part == "last":
            head.update(term=term, seq=seq, digest=digest)
        return 1

    def _read(self, keys: Sequence[str], args: Sequence[str]) -> list[bytes]:
        head, radii = (self._server.hashes.get(key, {}) for key in keys[:2])
        if not head:
            return []
        since, limit = int(args[0]), int(args[1])
        scores = self._server.scores.get(keys[2], {})
        changed = sorted((score, entry) for entry, score in scores.items() if since < score <= int(head["seq"]))
        pairs = [text for _, entry in changed[:limit] for text in (entry, radii.get(entry, ""))]
        return [text.encode() for text in (head["term"], head["seq"], head["digest"], *pairs)]
