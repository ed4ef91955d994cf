"""Both libraries read a topic equally, and no record is lost if one of them gives up."""

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.kafka import reader as reading
from gracestream.pipeline.kafka.clients import aiokafka_consumer, producer
from gracestream.pipeline.kafka.reader import RecordsAndNext, read_topic
from gracestream.pipeline.kafka.topics import DELTAS, PREDICTIONS, TopicError, create_topics
from gracestream.pipeline.replay.replay import replay_deltas
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.settings import KafkaSettings, Settings, load_settings
from tests.support.hostile import Unreadable, odd_batches
from tests.support.running import kafka_outages, records, settings_for, wait_for_open_transactions
from tests.support.secured_servers import SUPER_USER, SecuredKafka
from tests.support.written_history import History, same

CODECS = (None, "gzip", "snappy", "lz4", "zstd")


@pytest.fixture
def by_aiokafka(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every partition be read in bulk; yields the offsets read that way."""
    offsets: list[int] = []
    read_bulk = reading.read_bulk

    def noted(*args: Any, **options: Any) -> Iterator[RecordsAndNext]:
        for batch in read_bulk(*args, **options):
            offsets.extend(record.offset for record in batch[0])
            yield batch

    monkeypatch.setattr(reading, "BULK_MIN_OFFSETS", 1)
    monkeypatch.setattr(reading, "read_bulk", noted)
    return offsets


class Writer:
    """Writes records of any kind to partition 0 of `deltas`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def plain(self, *values: bytes | None, name: str = "name", codec: str | None = None) -> None:
        """Write records without a transaction, in as few batches as possible."""
        writer = producer(self._settings.kafka, compression_type=codec, linger_ms=50)
        for value in values:
            writer.send(
                self._settings.kafka.topic(DELTAS), value=value, key=b"key", headers=[(name, b"\xff")], partition=0
            )
        writer.flush()
        writer.close()

    def transaction(self, *values: bytes, end: str) -> Any:
        """Write records in a transaction that is committed, aborted, or left open; returns its producer."""
        name = f"{self._settings.kafka.topic_prefix}{values[0].decode()}"
        writer = producer(self._settings.kafka, transactional_id=name)
        writer.init_transactions()
        writer.begin_transaction()
        for value in values:
            writer.send(self._settings.kafka.topic(DELTAS), value=value, partition=0)
        writer.flush()
        if end != "open":
            getattr(writer, f"{end}_transaction")()
            writer.close()
        return writer


@pytest.fixture
def settings(kafka: str, prefix: str) -> Settings:
    """Settings of empty topics."""
    made = settings_for(kafka, "redis://unused", prefix)
    create_topics(made.kafka, partitions=2, replication=1)
    return made


@pytest.fixture
def writer(settings: Settings) -> Writer:
    return Writer(settings)


def fields_of(found: Any) -> list[tuple[Any, ...]]:
    return [(each.offset, each.timestamp, each.key, each.value, list(each.headers)) for each in found]


def test_aiokafka_and_kafka_python_read_the_same(settings: Settings, writer: Writer, by_aiokafka: list[int]) -> None:
    for codec in CODECS:
        writer.plain(b"", None, b"x" * 5_000, b"y" * 100_000, codec=codec)
        writer.transaction(f"kept {codec}".encode(), b"too", end="commit")
        writer.transaction(f"aborted {codec}".encode(), b"too", end="abort")
    writer.plain(b"large" * 5_000_000)
    wait_for_open_transactions(settings, DELTAS)
    expected = records(settings, DELTAS)
    assert len(expected) == 6 * len(CODECS) + 1
    assert fields_of(read_topic(settings.kafka, DELTAS)) == fields_of(expected)
    assert by_aiokafka == [record.offset for record in expected]
    middle = expected[9]
    assert fields_of(read_topic(settings.kafka, DELTAS, middle.offset)) == fields_of(expected[9:])
    later = [record for record in expected if record.timestamp >= middle.timestamp]
    assert fields_of(read_topic(settings.kafka, DELTAS, start_time_ms=middle.timestamp)) == fields_of(later)


def test_odd_records_are_read_at_their_offsets(
    settings: Settings, writer: Writer, by_aiokafka: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.plain(b"1", b"2")
    writer.plain(b"3", b"4", name=Unreadable("odd"))
    for attributes, delta in ((0x80, 1), (0, 7), (0, -5)):
        with monkeypatch.context() as odd:
            odd_batches(odd, attributes, delta)
            writer.plain(b"5", b"odd", b"6")
    values = [b"1", b"2", b"3", b"4", *[b"5", b"odd", b"6"] * 3]
    found = list(read_topic(settings.kafka, DELTAS))
    assert [(record.offset, record.value) for record in found] == list(enumerate(values))
    assert fields_of(found) == fields_of(records(settings, DELTAS))
    assert by_aiokafka == list(range(len(values)))


def test_reading_ends_before_an_open_transaction(settings: Settings, writer: Writer, by_aiokafka: list[int]) -> None:
    writer.plain(b"1", b"2")
    pending = writer.transaction(b"open", end="open")
    writer.plain(b"3")
    assert [record.value for record in read_topic(settings.kafka, DELTAS)] == [b"1", b"2"]
    assert by_aiokafka == [0, 1]
    pending.abort_transaction()
    pending.close()
    wait_for_open_transactions(settings, DELTAS)
    assert [record.value for record in read_topic(settings.kafka, DELTAS)] == [b"1", b"2", b"3"]


def test_partitions_are_read_one_after_the_other(settings: Settings, by_aiokafka: list[int]) -> None:
    sender = producer(settings.kafka)
    for number in range(30):
        sender.send(settings.kafka.topic(PREDICTIONS), value=b"%d" % number, partition=number % 2)
    sender.close()
    values = [int(record.value) for record in read_topic(settings.kafka, PREDICTIONS)]
    assert values == [*range(0, 30, 2), *range(1, 30, 2)]
    assert by_aiokafka == [*range(15), *range(15)]


def test_kafka_python_reports_missing_permissions(
    secured_kafka: SecuredKafka, prefix: str, by_aiokafka: list[int]
) -> None:
    secured_kafka.add_users(prefix)
    settings = load_settings(topic_prefix=prefix, **secured_kafka.as_user(SUPER_USER))
    create_topics(settings.kafka, partitions=1, replication=1)
    Writer(settings).plain(b"1", b"2")
    assert [record.value for record in read_topic(settings.kafka, DELTAS)] == [b"1", b"2"]
    assert by_aiokafka == [0, 1]
    stranger = load_settings(topic_prefix=prefix, **secured_kafka.as_user(prefix))
    with pytest.raises(TopicError, match="no topic"):
        list(read_topic(stranger.kafka, DELTAS))


@pytest.mark.slow
@kafka_outages
def test_a_bulk_read_waits_for_a_kafka_that_is_unavailable_for_a_while(
    own_kafka: LocalKafka,
    leave: Callable[[LocalKafka], None],
    come_back: Callable[[LocalKafka], None],
    by_aiokafka: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings_for(own_kafka.bootstrap, "redis://unused", "left-")
    create_topics(settings.kafka, partitions=1, replication=1)
    Writer(settings).plain(*(b"%d" % number + b"." * 50_000 for number in range(1000)))
    monkeypatch.setattr(reading, "BULK_FETCH_BYTES", 2**20)
    monkeypatch.setattr(reading, "BULK_TIMEOUT_SECONDS", 1.0)
    again = threading.Timer(5.0, come_back, [own_kafka])
    values: list[int] = []
    for record in read_topic(settings.kafka, DELTAS):
        values.append(int(record.value.partition(b".")[0]))
        if len(values) == 200:
            leave(own_kafka)
            again.start()
    again.join()
    assert values == list(range(1000))
    assert 200 <= len(by_aiokafka) < 1000


def test_ctrl_c_ends_a_bulk_read(
    settings: Settings, writer: Writer, by_aiokafka: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(settings: KafkaSettings, **options: Any) -> Any:
        reader = aiokafka_consumer(settings, **options)
        stop = reader.stop

        async def interrupt() -> None:
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                await stop()

        reader.stop = interrupt
        return reader

    writer.plain(b"1", b"2")
    monkeypatch.setattr(reading, "aiokafka_consumer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(read_topic(settings.kafka, DELTAS))
    assert by_aiokafka == [0, 1]


def test_replay_and_a_starting_replica_read_in_bulk(
    deployment: Settings,
    by_aiokafka: list[int],
    codebook_replica_of: Callable[..., CodebookReplica],
) -> None:
    history = History(deployment)
    try:
        history.lead()
        for number in range(20):
            history.add(f"e{number}", [float(number)])
        history.lead()
        folded = replay_deltas(deployment.kafka)
        assert folded is not None
        assert same(folded, history.codebook)
        assert len(by_aiokafka) == 22
        codebook_replica = codebook_replica_of(deployment)
        assert codebook_replica.catch_up(30)
        assert len(by_aiokafka) == 44
        history.add("later", [7.0])
        history.publish()
        assert codebook_replica.catch_up(30)
        assert same(codebook_replica.codebook, history.codebook)
    finally:
        history.close()
