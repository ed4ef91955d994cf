"""A password in the URL of snapshots is used for the store and shown nowhere."""

from collections.abc import Callable

import msgspec
import pytest
from structlog.typing import EventDict

from gracestream.deploy.local.processes import find_free_port
from gracestream.pipeline.kafka.topics import SNAPSHOTS
from gracestream.pipeline.stores.snapshot_files import SnapshotError, SnapshotStore, split_url_secrets
from tests.integration.snapshots.snapshot_parts import newest, snapshot, write_manifest
from tests.support.forked_commands import Command
from tests.support.running import records
from tests.support.written_history import History

PASSWORD = "pass/w%2Frd"


def test_no_manifest_and_no_log_event_has_it(
    history: History, logged: list[EventDict], prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"memory://user:{PASSWORD}@bucket/{prefix}?token=secret"
    settings = history.settings.replace(snapshot_url=url)
    manifest = snapshot(settings, 4)
    assert manifest.uri.startswith(f"memory://bucket/{prefix}/")
    found = newest(settings)
    assert found is not None, "the store needs the password"
    assert found.codebook.seq == 4
    write_manifest(history, msgspec.structs.replace(manifest, uri=f"{url}/other.safetensors", seq=5))
    theirs = records(settings, SNAPSHOTS)[-1].offset
    assert newest(settings) is not None
    assert any(event["event"] == "snapshot_rejected" for event in logged)
    written = repr([record.value for record in records(settings, SNAPSHOTS) if record.offset != theirs])
    shown = written + repr(logged) + repr(settings) + "".join(capfd.readouterr())
    for secret in (PASSWORD, "pass/w/rd", "user:", "token=secret"):
        assert secret not in shown


def test_no_error_of_the_store_has_it(run: Callable[..., Command], history: History) -> None:
    port = find_free_port()
    for url, shown in (
        (f"ftp://user:{PASSWORD}@127.0.0.1:{port}/", f"ftp://127.0.0.1:{port}/"),
        (f"nothing://user:{PASSWORD}@host/path", "nothing://host/path"),
        (f"s3://user:{PASSWORD}@bucket/path", "s3://bucket/path"),
    ):
        command = run("snapshot", settings=history.settings, snapshot_url=url)
        assert f"GRACESTREAM_SNAPSHOT_URL={shown} cannot be used: " in command.stderr()
        assert "pass" not in command.stderr() + command.stdout()
        with pytest.raises(SnapshotError) as caught:
            SnapshotStore(url)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/srv/a@b:c@d?e", "/srv/a@b:c@d?e"),
        ("file:///srv/a:b@c", "file:///srv/a:b@c"),
        ("s3://bucket/path", "s3://bucket/path"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("s3://key:sec/re+t==@bucket/path", "s3://bucket/path"),
        ("https://token@host/path?signature=1", "https://host/path"),
        ("simplecache::s3://key:secret@bucket/path", "simplecache::s3://bucket/path"),
        ("redis://:p@ss@host:1/0", "redis://host:1/0"),
    ],
)
def test_the_shown_part_of_a_url(url: str, shown: str) -> None:
    assert split_url_secrets(url)[0] == shown
