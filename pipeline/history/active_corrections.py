"""The corrections in force: what a codebook of another model, layer or name would have to be taught anew."""

from collections.abc import Iterator

from gracestream.pipeline.codebook import Codebook, EditMemory
from gracestream.pipeline.history.replay import replay_deltas
from gracestream.pipeline.kafka import FEEDBACK, read_topic
from gracestream.pipeline.settings import Settings
from gracestream.schemas.deltas import Delta


def iter_active_corrections(settings: Settings, seq: int | None = None) -> Iterator[bytes]:
    """The records of `feedback` behind the edits that hold after delta `seq`, or now, in the order in which they came.

    Those that were undone, or that a later correction of the same input has superseded, are none. Those that the model
    fulfilled already are some: they too are to stay right.

    Raises:
        HistoryError: the log is not one history, or there is no such delta.
        KafkaError: it cannot be read.
    """
    memory = EditMemory()

    def fold(_record: bytes, delta: Delta, codebook: Codebook) -> None:
        memory.apply_delta(delta, codebook)

    replay_deltas(settings, seq, on_applied=fold)
    offsets = {memory.offsets[memory.feedback_id_of(name)] for name in memory.feedback_ids}
    if offsets:
        found = read_topic(settings, FEEDBACK, min(offsets))
        yield from (record.value for record in found if record.offset in offsets)
