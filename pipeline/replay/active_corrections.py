"""The corrections in force: the feedback to send to a codebook of another model, layer or name."""

from collections.abc import Iterator

from gracestream.pipeline.codebook import Codebook, EditMemory
from gracestream.pipeline.kafka import FEEDBACK, read_topic
from gracestream.pipeline.replay.replay import replay_deltas
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.deltas import Delta


def iter_active_corrections(settings: KafkaSettings, seq: int | None = None) -> Iterator[bytes]:
    """The records of `feedback` behind the edits in force after delta `seq`, or now, in their order.

    Without feedback that was undone, or superseded by a later correction of the same input. With corrections that the
    unedited model already answered correctly, since these answers are protected, too.

    Raises:
        HistoryError: the log is not one history, or has no such delta.
        KafkaError: the log cannot be read.
    """
    memory = EditMemory()

    def apply_to_memory(_record: bytes, delta: Delta, codebook: Codebook) -> None:
        memory.apply_delta(delta, codebook)

    replay_deltas(settings, seq, on_applied=apply_to_memory)
    offsets = {memory.offsets[memory.feedback_id_of(name)] for name in memory.feedback_ids}
    if offsets:
        records = read_topic(settings, FEEDBACK, min(offsets))
        yield from (record.value for record in records if record.offset in offsets)
