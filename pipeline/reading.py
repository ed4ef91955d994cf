"""Reading a topic once, from some offset to where it ends now."""

from collections.abc import Generator
from typing import Any

from kafka import TopicPartition

from pipeline.clients import consumer
from pipeline.settings import Settings
from pipeline.topics import TopicError


def read_topic(
    settings: Settings, name: str, since: int = 0, time: int | None = None, **options: Any
) -> Generator[Any, None, None]:
    """Every committed record of a topic's partitions from offset `since` to their present ends, each in its order.

    Or, where `time` is given, from the first record of that time in ms on. `options` are the consumer's.
    Control records of transactions lie between offsets, so the end is where the position reaches it, not a count.

    Raises:
        TopicError: there is no such topic.
    """
    topic = settings.topic(name)
    reader = consumer(settings, **options)
    try:
        partitions = [TopicPartition(topic, number) for number in sorted(reader.partitions_for_topic(topic) or ())]
        if not partitions:
            raise TopicError(
                f"there is no topic {topic!r} that we may see; create the topics with `gracestream topics`"
            )
        reader.assign(partitions)
        starts, ends = reader.beginning_offsets(partitions), reader.end_offsets(partitions)
        if time is not None:
            found = reader.offsets_for_times(dict.fromkeys(partitions, time))
            starts = {part: ends[part] if first is None else first.offset for part, first in found.items()}
        for partition in partitions:
            reader.seek(partition, max(since, starts[partition]))
        while any(reader.position(partition) < end for partition, end in ends.items()):
            for partition, records in reader.poll(timeout_ms=500).items():
                yield from (record for record in records if record.offset < ends[partition])
    finally:
        reader.close()
