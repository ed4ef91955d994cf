"""A replica starts from the newest valid snapshot; with the later deltas it equals the whole history."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from structlog.typing import EventDict

from gracestream.pipeline.kafka.clients import admin
from gracestream.pipeline.kafka.topics import DELTAS, create_topics
from gracestream.pipeline.replay.replay import replay_deltas
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.settings import Settings
from tests.integration.snapshots.snapshot_parts import file_of, loaded, newest, reasons, snapshot
from tests.support.running import wait_until
from tests.support.written_history import History, same


class TestStart:
    def test_a_replica_starts_from_the_newest_snapshot_and_reads_only_later_deltas(
        self, history: History, url: str, codebook_replica_of: Callable[..., CodebookReplica], logged: list[EventDict]
    ) -> None:
        settings = history.settings.replace(snapshot_url=url)
        for seq in (3, 8):
            snapshot(settings, seq)
        history.add("e7", [5.0, 5.0])
        history.publish()
        codebook_replica = codebook_replica_of(settings)
        assert codebook_replica.codebook.seq == 8
        assert codebook_replica.catch_up(20)
        assert same(codebook_replica.codebook, history.codebook)
        assert loaded(logged) == [8]
        assert [event["seq"] for event in logged if event["event"] == "delta_applied"] == [9, 10, 11]
        nearest = codebook_replica.index.nearest(torch.tensor([[5.0, 4.9]]))
        assert codebook_replica.codebook.entry_ids[int(nearest.slots_B[0])] == "e7"

    @pytest.mark.slow
    def test_each_snapshot_and_the_later_deltas_give_the_codebook_of_the_whole_log(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        for seq in range(1, 11):
            snapshot(history.settings, seq)
            codebook_replica = codebook_replica_of(history.settings)
            assert codebook_replica.codebook.seq == seq
            assert codebook_replica.catch_up(20)
            assert same(codebook_replica.codebook, history.codebook), seq

    def test_it_is_never_ahead_of_the_head(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica], logged: list[EventDict]
    ) -> None:
        history.publish()
        history.add("e7", [5.0, 5.0])
        for seq in (4, 11):
            snapshot(history.settings, seq)
        codebook_replica = codebook_replica_of(history.settings)
        assert loaded(logged) == [4]
        assert codebook_replica.catch_up(20)
        assert codebook_replica.codebook.seq == 10

    def test_later_deltas_of_a_fenced_editor_do_not_count(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        stale = replay_deltas(history.settings.kafka, 8)
        assert stale is not None
        snapshot(history.settings)
        other = History(history.settings)
        other.codebook = stale
        for number in range(3):
            other.add(f"stale-{number}", [7.0, 7.0])
        other.close()
        history.add("e7", [5.0, 5.0])
        codebook_replica = codebook_replica_of(history.settings)
        assert codebook_replica.catch_up(20)
        assert same(codebook_replica.codebook, history.codebook)

    def test_a_replica_reads_the_log_if_there_is_no_store(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica], logged: list[EventDict]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings.replace(snapshot_url="nothing://of/the/kind"))
        assert codebook_replica.catch_up(20)
        assert same(codebook_replica.codebook, history.codebook)
        assert "snapshot_search_failed" in [event["event"] for event in logged]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (flip, "its SHA-256 differs"),
    "cut short": (shorten, "it must have"),
    "too long": (lengthen, "the file has more bytes"),
    "gone": (Path.unlink, "the file is not there"),
    "a folder in its place": (replace_by_folder, "the file cannot be read"),
}


class TestDamage:
    @pytest.mark.slow
    def test_a_damaged_snapshot_is_replaced_by_an_older_one_and_then_by_the_log(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica], logged: list[EventDict]
    ) -> None:
        for damage, (harm, reason) in DAMAGE.items():
            older, newer = (snapshot(history.settings, seq) for seq in (4, 8))
            for manifest, left in ((newer, 4), (older, 0)):
                logged.clear()
                harm(file_of(manifest))
                codebook_replica = codebook_replica_of(history.settings)
                assert codebook_replica.codebook.seq == left, damage
                assert loaded(logged) == ([4] if left else []), damage
                assert all(reason in message for message in reasons(logged)), damage
                assert len(reasons(logged)) == (1 if left else 2), damage
                assert codebook_replica.catch_up(20)
                assert same(codebook_replica.codebook, history.codebook)
            for manifest in (older, newer):
                if file_of(manifest).is_dir():
                    file_of(manifest).rmdir()

    def test_another_write_repairs_a_file(self, history: History) -> None:
        manifest = snapshot(history.settings, 8)
        flip(file_of(manifest))
        assert snapshot(history.settings, 8) == manifest
        found = newest(history.settings)
        assert found is not None
        assert found.codebook.seq == 8


class TestAnotherLog:
    def recreate(self, settings: Settings) -> None:
        """Create the topic again, as an operator does who lost the history."""
        client = admin(settings.kafka)
        try:
            client.delete_topics([settings.kafka.topic(DELTAS)])
            wait_until(lambda: settings.kafka.topic(DELTAS) not in client.list_topics())
        finally:
            client.close()
        create_topics(settings.kafka, partitions=4, replication=1)

    def test_a_snapshot_ahead_of_a_new_log_is_rejected(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica], logged: list[EventDict]
    ) -> None:
        snapshot(history.settings)
        self.recreate(history.settings)
        again = History(history.settings)
        try:
            again.lead()
            again.add("other", [1.0])
            codebook_replica = codebook_replica_of(history.settings)
            assert reasons(logged) == ["the log does not hold its delta at offset 9: was the topic lost, or made anew?"]
            assert codebook_replica.catch_up(20)
            assert same(codebook_replica.codebook, again.codebook)
        finally:
            again.close()

    def test_a_snapshot_of_another_log_is_rejected_even_if_the_new_log_is_longer(
        self, history: History, logged: list[EventDict]
    ) -> None:
        snapshot(history.settings)
        self.recreate(history.settings)
        again = History(history.settings)
        try:
            again.lead()
            for number in range(20):
                again.add(f"x{number}", [float(number), 1.0])
            assert newest(history.settings) is None
            assert ["made anew" in message for message in reasons(logged)] == [True]
        finally:
            again.close()
