"""Shared parts of the tests of snapshots."""

import secrets
from pathlib import Path

from structlog.typing import EventDict

from gracestream.pipeline.codebook import Codebook
from gracestream.pipeline.kafka.topics import SNAPSHOTS
from gracestream.pipeline.replay.replay import replay_with_offset
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores.snapshots import Snapshot, load_newest_snapshot, write_snapshot
from gracestream.schemas.messages import SnapshotManifest, encode
from tests.support.tiny_models import LAYER, MODEL
from tests.support.written_history import History


def snapshot(settings: Settings, seq: int | None = None) -> SnapshotManifest:
    """Write a snapshot, as the command does."""
    folded = replay_with_offset(settings.kafka, seq)
    assert folded is not None
    return write_snapshot(settings.kafka, folded, url_of(settings), settings.snapshots.keep)


def newest(settings: Settings) -> Snapshot | None:
    """The snapshot that a starting replica loads."""
    return load_newest_snapshot(settings.kafka, url_of(settings), Codebook(settings.model.codebook, MODEL, LAYER))


def url_of(settings: Settings) -> str:
    assert settings.snapshots.url is not None
    return settings.snapshots.url


def file_of(manifest: SnapshotManifest) -> Path:
    return Path(manifest.uri.removeprefix("file://"))


def write_manifest(history: History, manifest: SnapshotManifest | bytes, key: bytes | None = None) -> None:
    """Write a record to `snapshots` that no editor would write."""
    value = manifest if isinstance(manifest, bytes) else encode(manifest)
    topic = history.settings.kafka.topic(SNAPSHOTS)
    history._producer.send(topic, key=key or secrets.token_bytes(4), value=value, partition=0).get(30)


def reasons(events: list[EventDict]) -> list[str]:
    return [event["reason"] for event in events if event["event"] == "snapshot_rejected"]


def loaded(events: list[EventDict]) -> list[int]:
    return [event["seq"] for event in events if event["event"] == "snapshot_loaded"]
