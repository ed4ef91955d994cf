"""Fixtures of the tests of snapshots: a history, stores, and log events."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gracestream.pipeline.settings import Settings
from gracestream.schemas.deltas import EntryChange
from tests.support.tiny_models import added
from tests.support.written_history import History


@pytest.fixture(params=["a folder", "a file:// URL", "memory://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store, of three kinds, all without a network."""
    folder = tmp_path / "snapshots" / "of this test"
    return {
        "a folder": str(folder),
        "a file:// URL": folder.as_uri().replace("%20", " "),
        "memory://": f"memory://{secrets.token_hex(4)}/snapshots",
    }[request.param]


@pytest.fixture
def settings(deploy: Callable[..., Settings], prefix: str, tmp_path: Path) -> Settings:
    return deploy("llama", prefix, redis_outage_grace=0.6, snapshot_url=str(tmp_path / "snapshots"))


@pytest.fixture
def history(settings: Settings) -> Iterator[History]:
    """A history of two terms, with entries that were added, moved to other slots and removed."""
    made = History(settings)
    made.lead()
    for number in range(6):
        made.add(f"e{number}", [float(number), 1.0], 0.25)
    made.step(EntryChange(entry_id="e1", removed=True), op="undo")
    made.lead()
    made.step(EntryChange(entry_id="e0", radius=0.5), added("e6", [9.0, 9.0], 0.5, (1, 2, 3)), op="split")
    yield made
    made.close()
