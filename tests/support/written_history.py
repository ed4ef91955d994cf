"""A codebook's history, written record by record without an editor or a model, for tests of replicas and replay."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gracestream.pipeline.codebook.codebook import AppliedDelta, Codebook
from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.pipeline.stores.redis_head import RedisHeadStore
from gracestream.schemas.deltas import Cause, EntryChange
from gracestream.schemas.messages import Feedback, encode
from tests.support.tiny_models import LAYER, MODEL, added, sealed


class History:
    """Writes `deltas` as an editor does, and publishes them on request."""

    def __init__(self, settings: Settings, model: str = MODEL, layer: str = LAYER) -> None:
        self.settings = settings
        self.codebook = Codebook(settings.model.codebook, model, layer)
        self.redis = redis_client(settings.redis, timeout=30.0)  # 32 MiB take over 1 s on a busy machine
        self.store = RedisHeadStore(self.redis, settings.kafka.topic_prefix, settings.model.codebook)
        self._producer = producer(settings.kafka)
        self._applied: AppliedDelta | None = None

    def close(self) -> None:
        """Close the connections."""
        self._producer.close(timeout=5)
        self.redis.close()

    def write(self, value: bytes | None, topic: str = "deltas", headers: Sequence[tuple[str, bytes]] = ()) -> int:
        """Write one record; returns its offset."""
        sent = self._producer.send(self.settings.kafka.topic(topic), value=value, headers=list(headers), partition=0)
        offset: int = sent.get(timeout=30).offset
        return offset

    def lead(self, **fields: Any) -> int:
        """Write the `lead` delta of a new term; returns its seq."""
        return self.step(op="lead", **fields)

    def add(self, entry_id: str, key: list[float], radius: float = 1.0, **fields: Any) -> int:
        """Write a delta with a new entry; returns its seq."""
        return self.step(added(entry_id, key, radius), **fields)

    def step(self, *entries: EntryChange, feedback: Feedback | None = None, **fields: Any) -> int:
        """Write one delta, and the feedback that caused it if given; returns its seq."""
        if feedback is not None:
            offset = self.write(encode(feedback), "feedback")
            fields["cause"] = Cause(feedback_id=feedback.feedback_id, offset=offset, entry_id=entries[0].entry_id)
        record = sealed(self.codebook, *entries, **fields)
        self.write(record)
        self._applied = self.codebook.apply(record)
        return self.codebook.seq

    def publish(self) -> None:
        """Write the newest delta's radii and the head."""
        assert self._applied is not None
        self.store.publish(self._applied, self.codebook)

    def redis_key(self, name: str) -> str:
        """The full name of `head`, `radii` or `changed` in Redis."""
        return next(key for key in self.store._keys if key.endswith(f":{name}"))

    def empty_redis(self) -> None:
        """Delete this deployment's keys, as a restart of a Redis without persistence does."""
        self.redis.delete(*self.store._keys)


def same(ours: Codebook, theirs: Codebook) -> bool:
    """True if two codebooks are equal bit for bit, with equal positions in equal histories."""
    return (
        (ours.name, ours.model, ours.layer, ours.term, ours.seq)
        == (theirs.name, theirs.model, theirs.layer, theirs.term, theirs.seq)
        and ours.digest == theirs.digest
        and ours.state_digest() == theirs.state_digest()
        and ours.entry_ids == theirs.entry_ids
        and ours.labels == theirs.labels
        and all(
            np.array_equal(mine.view(np.uint32), its.view(np.uint32))
            for mine, its in (
                (ours.keys_ND, theirs.keys_ND),
                (ours.values_NV, theirs.values_NV),
                (ours.radii_N, theirs.radii_N),
            )
        )
    )
