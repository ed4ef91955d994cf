"""Copies of what the log holds: the published head in Redis, and snapshots in files."""

from gracestream.pipeline.stores.head_listener import HeadListener
from gracestream.pipeline.stores.redis_client import ping_redis, redact_url, redis_client, wait_for_redis
from gracestream.pipeline.stores.redis_head import Head, RedisHeadStore, StaleHeadError
from gracestream.pipeline.stores.snapshot_files import SnapshotError
from gracestream.pipeline.stores.snapshots import (
    Snapshot,
    find_delta_offset,
    list_manifests,
    load_newest_snapshot,
    write_snapshot,
)

__all__ = [
    "Head",
    "HeadListener",
    "RedisHeadStore",
    "Snapshot",
    "SnapshotError",
    "StaleHeadError",
    "find_delta_offset",
    "list_manifests",
    "load_newest_snapshot",
    "ping_redis",
    "redact_url",
    "redis_client",
    "wait_for_redis",
    "write_snapshot",
]
