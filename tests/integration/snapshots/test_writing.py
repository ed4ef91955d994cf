"""Writing snapshots, by a running editor and by a command."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.typing import EventDict

from gracestream.pipeline.editor.snapshot_writer import SnapshotWriter
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores.snapshot_files import SnapshotError
from gracestream.pipeline.stores.snapshots import find_delta_offset, list_manifests
from gracestream.schemas.messages import SnapshotManifest
from tests.integration.snapshots.snapshot_parts import file_of
from tests.support.forked_commands import Command, Forked, sentence, status_of
from tests.support.running import Users, flag, wait_until
from tests.support.tiny_models import added, sealed, texts
from tests.support.written_history import History, same

PROMPTS = texts(12, seed=7, shortest=6, longest=9)


class TestEditor:
    def test_the_writer_writes_a_snapshot_every_interval(self, history: History) -> None:
        settings = history.settings.replace(snapshot_interval=4)
        writer = SnapshotWriter(settings.kafka, settings.snapshots)
        for number in range(10, 21):
            writer.maybe_write(history.codebook)
            writer.close(30)
            history.add(f"e{number}", [float(number), 0.0])
        assert [manifest.seq for manifest in list_manifests(settings.kafka, settings.model.codebook).values()] == [
            10,
            14,
            18,
        ]
        later = SnapshotWriter(settings.kafka, settings.snapshots)
        later.maybe_write(history.codebook)
        later.close(30)
        assert len(list_manifests(settings.kafka, settings.model.codebook)) == 3, (
            "a new writer knows the existing snapshots"
        )

    @pytest.mark.parametrize("chosen", [{"snapshot_url": None}, {"snapshot_interval": None}])
    def test_the_writer_writes_none_without_an_interval(self, history: History, chosen: dict[str, Any]) -> None:
        settings = history.settings.replace(**{"snapshot_interval": 1, **chosen})
        writer = SnapshotWriter(settings.kafka, settings.snapshots)
        writer.maybe_write(history.codebook)
        writer.close(30)
        assert list_manifests(history.settings.kafka, history.settings.model.codebook) == {}

    @pytest.mark.parametrize("url", ["nothing://of/the/kind", "/dev/null/snapshots"])
    def test_a_failing_store_does_not_stop_the_editor(
        self, history: History, logged: list[EventDict], url: str
    ) -> None:
        settings = history.settings.replace(snapshot_interval=1, snapshot_url=url)
        writer = SnapshotWriter(settings.kafka, settings.snapshots)
        for _ in range(3):
            writer.maybe_write(history.codebook)
            writer.close(30)
        assert [event["event"] for event in logged].count("snapshot_failed") == 1, "not again for a minute"
        assert list_manifests(history.settings.kafka, history.settings.model.codebook) == {}

    def test_a_delta_that_the_log_does_not_hold_gets_no_snapshot(self, history: History) -> None:
        ahead = history.codebook.copy()
        ahead.apply(sealed(history.codebook, added("unwritten", [1.0, 1.0], 1.0)))
        with pytest.raises(SnapshotError, match="the log does not hold delta 11"):
            find_delta_offset(history.settings.kafka, ahead)
        assert find_delta_offset(history.settings.kafka, history.codebook) == 9

    def test_a_running_editor_writes_snapshots_and_a_replica_starts_from_one(
        self, deploy: Callable[..., Settings], prefix: str, users_of: Callable[[Settings], Users], folder: Path
    ) -> None:
        settings = deploy("llama", prefix, snapshot_url=str(folder / "snapshots"), snapshot_interval=2)
        users = users_of(settings)
        with Forked("editor", "edit", settings, folder) as editor:
            editor.wait_ready(90)
            users.correct(*(flag(f"f{number}", prompt, "museum") for number, prompt in enumerate(PROMPTS[:5])))
            wait_until(lambda: list_manifests(settings.kafka, settings.model.codebook), what="a snapshot")
            with Forked("replica", "infer", settings, folder) as replica:
                replica.wait_ready(90)
                wait_until(lambda: replica.state()["seq"] == editor.state()["seq"], what="the head")
                assert replica.state()["state_digest"] == editor.state()["state_digest"]
                assert replica.state()["digest"] == editor.state()["digest"]
                assert '"event": "snapshot_loaded"' in replica.stderr()


class TestCommand:
    def test_it_writes_a_snapshot_without_a_model_or_an_editor(
        self, history: History, run: Callable[..., Command], codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        command = run("snapshot", "--seq", "4", "--json", settings=history.settings)
        assert status_of(command) == 0, command.stderr()
        manifest = msgspec.json.decode(command.stdout(), type=SnapshotManifest)
        assert (manifest.seq, manifest.entries, manifest.offset) == (4, 3, 3)
        assert hashlib.sha256(file_of(manifest).read_bytes()).hexdigest() == manifest.sha256
        whole = run("snapshot", settings=history.settings)
        assert re.search(r"seq\s+│ 10 ", whole.stdout()), whole.stdout()
        codebook_replica = codebook_replica_of(history.settings)
        assert codebook_replica.codebook.seq == 10
        assert codebook_replica.catch_up(20)
        assert same(codebook_replica.codebook, history.codebook)

    def test_the_error_for_a_failed_write_is_one_sentence(self, history: History, run: Callable[..., Command]) -> None:
        nowhere = run("snapshot", settings=history.settings, snapshot_url="")
        assert sentence(nowhere).startswith("there is nowhere to write to; set GRACESTREAM_SNAPSHOT_URL")
        unknown = run("snapshot", settings=history.settings, snapshot_url="nothing://at/all")
        assert sentence(unknown).startswith("GRACESTREAM_SNAPSHOT_URL=nothing://at/all cannot be used: ")
        ahead = run("snapshot", "--seq", "99", settings=history.settings)
        assert sentence(ahead) == "the log ends at delta 10; there is no 99 yet"
