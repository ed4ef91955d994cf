"""Projections of the log: the published head in Redis, and snapshots in files."""

from gracestream.pipeline.stores.redis_client import ping_redis, redis_client, wait_for_redis, without_password
from gracestream.pipeline.stores.redis_head import Head, RadiusStore, StaleError
from gracestream.pipeline.stores.snapshot_files import SnapshotError
from gracestream.pipeline.stores.snapshots import Snapshot, manifests, newest, offset_of, write

__all__ = [
    "Head",
    "RadiusStore",
    "Snapshot",
    "SnapshotError",
    "StaleError",
    "manifests",
    "newest",
    "offset_of",
    "ping_redis",
    "redis_client",
    "wait_for_redis",
    "without_password",
    "write",
]
