"""A folder of snapshots holds what is whole, and soon nothing else."""

import os
import time
from pathlib import Path

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.stores.snapshot_files import ABANDONED_SECONDS, SnapshotStore
from tests.support.tiny_models import LAYER, MODEL


def test_what_a_killed_writer_left_is_deleted_and_what_another_is_at_is_not(tmp_path: Path) -> None:
    left, at_work = tmp_path / ".writing-left", tmp_path / ".writing-now"
    for folder in (left, at_work):
        folder.mkdir()
        (folder / "codebook").write_bytes(b"half")
    other = tmp_path / "not ours"
    other.mkdir()
    long_ago = time.time() - ABANDONED_SECONDS - 60
    for folder in (left, other):
        os.utime(folder, (long_ago, long_ago))
    stored = SnapshotStore(str(tmp_path)).put(Codebook("default", MODEL, LAYER), "default")
    expected = {at_work.name, other.name, stored.uri.rpartition("/")[2]}
    assert {path.name for path in tmp_path.iterdir()} == expected
