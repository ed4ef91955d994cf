"""`snapshot`: writing a snapshot on demand."""

from typing import Annotated

import msgspec
import typer

from gracestream.pipeline.errors import UserError
from gracestream.workers.cli.common import (
    NO_DELTAS_MESSAGE,
    JsonOption,
    KafkaOption,
    PrefixOption,
    connect,
    print_fields,
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="History")(snapshot)


def snapshot(
    seq: Annotated[int | None, typer.Option(min=1, help="The codebook after this delta; default: the newest.")] = None,
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Replay `deltas`, checking every digest, and write a snapshot to GRACESTREAM_SNAPSHOT_URL for starting replicas.

    Needs no model and no editor. Example: gracestream snapshot --seq 41
    """
    from gracestream.pipeline.replay import replay_with_offset
    from gracestream.pipeline.stores import SnapshotError, write_snapshot

    settings = connect(kafka=kafka, topic_prefix=prefix)
    if settings.snapshots.url is None:
        raise SnapshotError("there is nowhere to write to; set GRACESTREAM_SNAPSHOT_URL to a folder or a URL")
    replayed = replay_with_offset(settings.kafka, seq)
    if replayed is None:
        raise UserError(NO_DELTAS_MESSAGE)
    print_fields(
        msgspec.to_builtins(write_snapshot(settings.kafka, replayed, settings.snapshots.url, settings.snapshots.keep)),
        as_json=as_json,
    )
