"""Reading a topic ends, also where Kafka goes away meanwhile."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import TopicPartition
from kafka.errors import KafkaTimeoutError

from gracestream.pipeline.kafka import reader as reading
from gracestream.pipeline.kafka.reader import read_topic
from gracestream.pipeline.settings import load_settings

END = 10


class Consumer:
    """Of a partition of `END` records, of which those from `last` on never come."""

    def __init__(self, last: int) -> None:
        self._position, self._last = 0, last
        self.closed = False

    def partitions_for_topic(self, _topic: str) -> set[int]:
        return {0}

    def assignment(self) -> set[TopicPartition]:
        return set()

    def assign(self, _partitions: Any) -> None:
        pass

    def end_offsets(self, partitions: Any, **_: Any) -> dict[Any, int]:
        return dict.fromkeys(partitions, END)

    def seek(self, _partition: Any, offset: int) -> None:
        self._position = offset

    def position(self, _partition: Any, **_: Any) -> int:
        return self._position

    def poll(self, **_: Any) -> dict[Any, Any]:
        if self._position >= self._last:
            return {}
        self._position += 1
        return {TopicPartition("edits", 0): [SimpleNamespace(offset=self._position - 1)]}

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("last", [0, 4, END])
def test_where_nothing_comes_any_more_that_is_an_error(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    consumer, found = Consumer(last), list[int]()
    monkeypatch.setattr(reading, "open_reader_client", lambda *_, **__: consumer)
    monkeypatch.setattr(reading, "READ_TIMEOUT_SECONDS", 0.1)
    late = pytest.raises(
        KafkaTimeoutError, match=f"edits could not be read on from offset {last}: Kafka sent nothing for 0.1 s"
    )
    with nullcontext() if last == END else late:
        found.extend(record.offset for record in read_topic(load_settings().kafka, "edits"))
    assert found == list(range(last))
    assert consumer.closed
