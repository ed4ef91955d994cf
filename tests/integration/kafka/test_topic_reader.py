"""`TopicReader` on the real Kafka: compaction, deleted starts, and a broker that hangs."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from kafka import TopicPartition
from kafka.admin import NewTopic
from kafka.errors import KafkaError, KafkaTimeoutError

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.kafka import reader as reading
from gracestream.pipeline.kafka.clients import admin, producer
from gracestream.pipeline.kafka.dead_letters import list_dead_letters
from gracestream.pipeline.kafka.reader import TopicReader, open_readers, read_topic
from gracestream.pipeline.kafka.topics import DELTAS, FEEDBACK_DLQ, SNAPSHOTS, create_topics
from gracestream.pipeline.settings import KafkaSettings
from gracestream.pipeline.stores.snapshots import find_delta_offset
from tests.support.running import hang, resume, settings_for, wait_until
from tests.support.tiny_models import LAYER, MODEL

TIMEOUT = 2.0
"""Seconds after which readers of a hanging broker fail."""


def send(settings: KafkaSettings, topic: str, *values: bytes, key: bytes | None = None) -> None:
    writer = producer(settings)
    for value in values:
        writer.send(settings.topic(topic), value=value, key=key, partition=0)
    writer.flush()
    writer.close()


def offsets(records: Any) -> list[int]:
    return [record.offset for record in records]


class TestDeletedStart:
    """Topics whose first records were deleted by retention or an operator."""

    @pytest.fixture
    def settings(self, kafka: str, prefix: str) -> KafkaSettings:
        made = settings_for(kafka, "redis://unused", prefix).kafka
        create_topics(made, partitions=1, replication=1)
        send(made, FEEDBACK_DLQ, *(b"%d" % number for number in range(200)))
        return made

    @staticmethod
    def delete_before(settings: KafkaSettings, offset: int) -> None:
        client = admin(settings)
        client.delete_records({TopicPartition(settings.topic(FEEDBACK_DLQ), 0): offset})
        client.close()

    def test_a_range_starts_at_the_first_existing_record(self, settings: KafkaSettings) -> None:
        self.delete_before(settings, 150)
        with TopicReader(settings, FEEDBACK_DLQ) as reader:
            assert (reader.first_offset(), reader.end_offset()) == (150, 200)
            assert offsets(reader.read()) == offsets(reader.read(149)) == list(range(150, 200))
            assert offsets(reader.read(0, 152)) == [150, 151]
            assert offsets(reader.read(0, 100)) == []
            assert reader.at(149) is None
            assert offsets([reader.at(150)]) == [150]
            assert reader.find_last(lambda record: record.value == b"149") is None
            assert offsets(reader.last(1000)) == list(range(150, 200))
            records, next_offset = next(batch for batch in reader.follow(10) if batch[0])
            assert (records[0].offset, next_offset) == (150, records[-1].offset + 1)
        assert [letter.value for letter in list_dead_letters(settings, "feedback", last=2)] == [b"198", b"199"]

    def test_a_topic_without_remaining_records_is_empty(self, settings: KafkaSettings) -> None:
        self.delete_before(settings, 200)
        with TopicReader(settings, FEEDBACK_DLQ) as reader:
            assert (reader.first_offset(), reader.end_offset()) == (200, 200)
            assert offsets(reader.read()) == offsets(reader.last(3)) == []
            assert reader.at(199) is reader.find_last(lambda _: True) is None
        assert list(list_dead_letters(settings, "feedback", last=2)) == []

    @pytest.mark.parametrize("bulk_from", [1, 10**6], ids=["aiokafka", "kafka-python"])
    def test_records_deleted_during_the_read_are_skipped(
        self, settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch, bulk_from: int
    ) -> None:
        monkeypatch.setattr(reading, "BULK_MIN_OFFSETS", bulk_from)
        with TopicReader(settings, FEEDBACK_DLQ, max_poll_records=10) as reader:
            records = reader.read()
            taken = [next(records)]
            self.delete_before(settings, 195)
            taken += records
        assert offsets(taken) == sorted(set(offsets(taken)))
        assert taken[-1].offset == 199


def test_gaps_of_compaction_are_skipped(kafka: str, prefix: str) -> None:
    settings = settings_for(kafka, "redis://unused", prefix).kafka
    client = admin(settings)
    eager = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    client.create_topics([NewTopic(settings.topic(SNAPSHOTS), 1, 1, topic_configs=eager)])
    client.close()
    for number in range(5):
        send(settings, SNAPSHOTS, b"%d" % number, key=b"key")
        time.sleep(0.15)  # a new segment, because the active segment is never compacted
    with TopicReader(settings, SNAPSHOTS) as reader:

        def is_compacted() -> bool:
            send(settings, SNAPSHOTS, b"roll", key=b"roll")
            return len([record for record in reader.read() if record.key == b"key"]) == 1

        wait_until(is_compacted, 60, "the compaction")
        assert offsets(record for record in reader.read(0, 5)) == [4]
        assert offsets(reader.read(0, 4)) == []
        assert reader.at(2) is None
        found = reader.find_last(lambda record: record.key == b"key")
        assert found is not None
        assert (found.offset, found.value) == (4, b"4")
        assert [record.key for record in reader.last(10**4)].count(b"key") == 1


READS: dict[str, Callable[[TopicReader], object]] = {
    "its first offset": lambda reader: reader.first_offset(),
    "its end": lambda reader: reader.end_offset(),
    "a range": lambda reader: list(reader.read(0, 100)),
    "an offset": lambda reader: reader.at(3),
    "the last": lambda reader: reader.last(3),
    "the last that matches": lambda reader: reader.find_last(lambda _: False),
    "a time": lambda reader: reader.offset_at(1),
}


@pytest.fixture
def short_timeout(own_kafka: LocalKafka, monkeypatch: pytest.MonkeyPatch) -> KafkaSettings:
    """A separate cluster with 100 deltas, and readers with a short timeout."""
    settings = settings_for(own_kafka.bootstrap, "redis://unused", "hung-").kafka
    create_topics(settings, partitions=1, replication=1)
    send(settings, DELTAS, *(b"%d" % number for number in range(100)))
    monkeypatch.setattr(reading, "READ_TIMEOUT_SECONDS", TIMEOUT)
    return settings


def test_a_broker_that_hangs_is_an_error_within_the_timeout(
    own_kafka: LocalKafka, short_timeout: KafkaSettings
) -> None:
    settings, codebook = short_timeout, Codebook("default", MODEL, LAYER)

    def fails_in_time(what: str, read: Callable[[], object], error: type[KafkaError], match: str | None = None) -> None:
        started = time.monotonic()
        with pytest.raises(error, match=match):
            read()
        seconds = time.monotonic() - started
        assert seconds < 3 * TIMEOUT + 2, f"{what} took {seconds:.1f} s"

    message = "hung-deltas could not be read .*: Kafka sent nothing for 2 s; do all brokers of .* answer"
    with TopicReader(settings, DELTAS) as reader, open_readers(settings, DELTAS) as (other,):
        half_read = reader.read(0, 10**6)
        assert next(half_read).offset == 0
        hang(own_kafka)
        fails_in_time("a half-read range", lambda: list(half_read), KafkaTimeoutError, message)
        for what, read in READS.items():
            fails_in_time(what, lambda read=read: read(reader), KafkaTimeoutError, message)  # type: ignore[misc]
        fails_in_time("a shared client", other.end_offset, KafkaTimeoutError, message)
        fails_in_time("a search for a delta", lambda: find_delta_offset(settings, codebook), KafkaError)
        fails_in_time("a new reader", lambda: TopicReader(settings, DELTAS), KafkaError)
        fails_in_time("a whole topic", lambda: list(read_topic(settings, DELTAS)), KafkaError)
        resume(own_kafka)
        assert offsets(reader.read()) == list(range(100))


def test_a_search_for_a_delta_ends_when_the_broker_begins_to_hang(
    own_kafka: LocalKafka, short_timeout: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_offset = TopicReader.first_offset

    def then_hang(reader: TopicReader) -> int:
        first = first_offset(reader)
        end = reader.end_offset()
        hang(own_kafka)
        monkeypatch.setattr(TopicReader, "end_offset", lambda _: end)
        return first

    monkeypatch.setattr(TopicReader, "first_offset", then_hang)
    started = time.monotonic()
    with pytest.raises(KafkaTimeoutError, match="hung-deltas could not be read on from offset 36"):
        find_delta_offset(short_timeout, Codebook("default", MODEL, LAYER))
    assert TIMEOUT <= time.monotonic() - started < 3 * TIMEOUT + 2
    resume(own_kafka)
