"""Manifests: wrong manifests are skipped, and only the newest are kept."""

import time
from typing import Any

import fsspec
import msgspec
import pytest
from kafka.admin import NewTopic
from msgspec import UNSET
from structlog.typing import EventDict

from gracestream.pipeline.kafka.clients import admin
from gracestream.pipeline.kafka.topics import SNAPSHOTS
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores.snapshot_files import SnapshotError, SnapshotStore
from gracestream.pipeline.stores.snapshots import list_manifests
from tests.integration.snapshots.snapshot_parts import newest, reasons, snapshot, url_of, write_manifest
from tests.support.running import records, wait_until
from tests.support.written_history import History

LIES: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": "0" * 64}, "it is of model"),
    "another layer": ({"layer": "layer.1"}, "it is of layer"),
    "no offset": ({"offset": UNSET}, "does not say where in the log"),
    "an offset of another delta": ({"offset": 3}, "the log does not hold its delta"),
    "an offset beyond the end": ({"offset": 10**9}, "the log does not hold its delta"),
    "another digest": ({"digest": "0" * 64}, "the log does not hold its delta"),
    "another seq": ({"seq": 9}, "the log does not hold its delta"),
    "another term": ({"term": 7}, "the log does not hold its delta"),
    "another hash": ({"sha256": "0" * 64}, "its SHA-256 differs"),
    "fewer bytes": ({"bytes": 10}, "the file has more bytes"),
    "more bytes": ({"bytes": 2**20}, "it must have 1048576"),
    "more bytes than any memory": ({"bytes": 2**60}, "must fit into half of this machine"),
    "a negative size": ({"bytes": -1}, "must fit into half of this machine"),
    "a file elsewhere": ({"uri": "file:///etc/hostname"}, "is not a file in GRACESTREAM_SNAPSHOT_URL"),
    "an address in the network": ({"uri": "http://localhost/a.safetensors"}, "is not a file in"),
    "a way out of the folder": ({"uri": "../a.safetensors"}, "is not a file in"),
}


class TestManifests:
    def test_a_wrong_manifest_is_skipped(self, history: History, logged: list[EventDict]) -> None:
        snapshot(history.settings, 4)
        latest = snapshot(history.settings, 8)
        for lie, (fields, reason) in LIES.items():
            write_manifest(
                history, msgspec.structs.replace(latest, **fields), f"{history.settings.model.codebook}/8".encode()
            )
            found = newest(history.settings)
            assert found is not None
            assert found.codebook.seq == 4, lie
            assert reason in reasons(logged)[-1], lie
        assert len(reasons(logged)) == len(LIES)

    def test_a_name_cannot_leave_the_url(self, settings: Settings) -> None:
        store = SnapshotStore(url_of(settings))
        for uri in (f"{store.url}/../a.safetensors", f"{store.url}/", f"{store.url}/a", f"{store.url}/%2e%2e/a", ""):
            with pytest.raises(SnapshotError, match="is not a file in"):
                store.read(uri, 10)

    def test_a_file_with_another_codebook_than_its_manifest(self, history: History, logged: list[EventDict]) -> None:
        older, latest = (snapshot(history.settings, seq) for seq in (4, 8))
        lie = {name: getattr(older, name) for name in ("uri", "sha256", "bytes")}
        write_manifest(history, msgspec.structs.replace(latest, **lie), f"{history.settings.model.codebook}/8".encode())
        found = newest(history.settings)
        assert found is not None
        assert found.codebook.seq == 4
        assert ["than its manifest says" in message for message in reasons(logged)] == [True]

    def test_garbage_and_manifests_of_other_codebooks_are_kept(self, history: History, logged: list[EventDict]) -> None:
        manifest = snapshot(history.settings, 4)
        for garbage in (b"", b"\xff", b"[]", b'{"v":99}', b'{"v":1,"codebook":"default"}'):
            write_manifest(history, garbage)
        write_manifest(history, msgspec.structs.replace(manifest, codebook="another", seq=9))
        found = newest(history.settings)
        assert found is not None
        assert found.codebook.seq == 4
        assert [event["event"] for event in logged].count("manifest_skipped") == 5
        assert reasons(logged) == []

    def test_only_the_newest_manifests_and_files_are_kept(self, history: History, url: str) -> None:
        settings = history.settings.replace(snapshot_url=url, snapshot_keep=2)
        written = [snapshot(settings, seq) for seq in (2, 4, 6, 5)]
        assert list(list_manifests(settings.kafka, settings.model.codebook).values()) == written[2:]
        files, root = fsspec.core.url_to_fs(url)
        names = sorted(path.rpartition("/")[2] for path in files.ls(root, detail=False))
        assert names == sorted(manifest.uri.rpartition("/")[2] for manifest in written[2:])

    @pytest.mark.slow
    def test_a_compacted_topic_has_all_current_manifests(self, history: History) -> None:
        settings = history.settings.replace(snapshot_keep=2)
        client = admin(settings.kafka)
        try:
            client.delete_topics([settings.kafka.topic(SNAPSHOTS)])
            wait_until(lambda: settings.kafka.topic(SNAPSHOTS) not in client.list_topics())
        finally:
            client.close()
        eager = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.01", "delete.retention.ms": "100"}
        create_compacted(settings, eager)
        for seq in range(1, 8):
            snapshot(settings, seq)
            time.sleep(0.15)  # a new segment, because the active segment is never compacted

        def compacted() -> bool:
            write_manifest(history, b"roll", b"roll")
            return len([record for record in records(settings, SNAPSHOTS) if record.key != b"roll"]) <= 3

        wait_until(compacted, 60, "the compaction")
        assert [manifest.seq for manifest in list_manifests(settings.kafka, settings.model.codebook).values()] == [6, 7]
        found = newest(settings)
        assert found is not None
        assert found.codebook.seq == 7


def create_compacted(settings: Settings, config: dict[str, str]) -> None:
    client = admin(settings.kafka)
    try:
        config = {"cleanup.policy": "compact", **config}
        client.create_topics([NewTopic(settings.kafka.topic(SNAPSHOTS), 1, 1, topic_configs=config)])
    finally:
        client.close()
