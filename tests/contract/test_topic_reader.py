"""`TopicReader` on the real Kafka and on its test double."""

from collections.abc import Iterator
from typing import Any

import pytest

from gracestream.pipeline.kafka.reader import FIRST_WINDOW, TopicReader
from gracestream.pipeline.kafka.topics import EDITS
from tests.support.editor_clusters import Cluster
from tests.support.running import wait_until


@pytest.fixture
def reader(cluster: Cluster) -> Iterator[TopicReader]:
    with cluster.reader(EDITS) as made:
        yield made


class Transactions:
    """Transactions on `edits`. Each takes one more offset for its control record."""

    def __init__(self, cluster: Cluster, reader: TopicReader) -> None:
        self._topic, self._reader = cluster.settings.kafka.topic(EDITS), reader
        self._writer = cluster.producer(transactional_id=f"{cluster.settings.kafka.topic_prefix}transactions")
        self._writer.init_transactions()

    def write(self, *values: bytes, end: str | None = "commit") -> None:
        """Write one transaction, including its end; without `end` it stays open."""
        self._writer.begin_transaction()
        for value in values:
            offset = self._writer.send(self._topic, value=value, partition=0).get(timeout=30).offset
        if end is not None:
            getattr(self._writer, f"{end}_transaction")()
            wait_until(lambda: self._reader.end_offset() == offset + 2)

    def end(self) -> None:
        self._writer.abort_transaction()


@pytest.fixture
def transactions(cluster: Cluster, reader: TopicReader) -> Transactions:
    return Transactions(cluster, reader)


def found(records: Any) -> list[tuple[int, bytes]]:
    return [(record.offset, record.value) for record in records]


def test_an_empty_topic_has_no_record(reader: TopicReader) -> None:
    assert (reader.first_offset(), reader.end_offset()) == (0, 0)
    assert found(reader.read()) == []
    assert reader.at(0) is None
    assert reader.last(3) == []
    assert reader.find_last(lambda _: True) is None


def test_a_range_has_the_records_from_its_start_to_before_its_end(cluster: Cluster, reader: TopicReader) -> None:
    cluster.send(EDITS, b"0", b"1", b"2", b"3")
    assert found(reader.read()) == [(0, b"0"), (1, b"1"), (2, b"2"), (3, b"3")]
    assert found(reader.read(1, 3)) == [(1, b"1"), (2, b"2")]
    assert found(reader.read(4)) == found(reader.read(3, 2)) == []


def test_a_range_ends_at_its_end_although_more_records_arrived(cluster: Cluster, reader: TopicReader) -> None:
    cluster.send(EDITS, b"0", b"1")
    records = reader.read()
    first = next(records)
    cluster.send(EDITS, b"2")
    assert found([first, *records]) == [(0, b"0"), (1, b"1")]


def test_aborted_and_control_records_are_skipped(
    cluster: Cluster, reader: TopicReader, transactions: Transactions
) -> None:
    transactions.write(b"0", b"1")
    transactions.write(b"aborted", end="abort")
    cluster.send(EDITS, b"5")
    transactions.write(b"aborted too", b"and this", end="abort")
    everything = [(0, b"0"), (1, b"1"), (5, b"5")]
    assert reader.end_offset() == 9
    assert found(reader.read()) == everything
    assert found(reader.read(2, 5)) == found(reader.read(6)) == []
    assert found(reader.last(2)) == everything[1:]
    assert found(reader.last(9)) == everything
    assert [None if (record := reader.at(offset)) is None else record.value for offset in range(10)] == [
        b"0", b"1", None, None, None, b"5", None, None, None, None,
    ]  # fmt: skip


def test_an_open_transaction_ends_the_topic(cluster: Cluster, reader: TopicReader, transactions: Transactions) -> None:
    cluster.send(EDITS, b"0")
    transactions.write(b"open", end=None)
    cluster.send(EDITS, b"2")
    assert reader.end_offset() == 1
    assert found(reader.read()) == found(reader.last(5)) == [(0, b"0")]
    assert reader.at(2) is None
    transactions.end()
    wait_until(lambda: reader.end_offset() == 4)
    assert found(reader.read()) == [(0, b"0"), (2, b"2")]


@pytest.mark.parametrize("behind", [0, 1, FIRST_WINDOW // 2 - 1, FIRST_WINDOW // 2, 5 * FIRST_WINDOW])
def test_the_last_record_is_found_behind_any_number_of_aborted_ones(
    cluster: Cluster, reader: TopicReader, transactions: Transactions, behind: int
) -> None:
    cluster.send(EDITS, b"a", b"b", b"a", b"b")
    for _ in range(min(behind, 3)):
        transactions.write(b"a", end="abort")
    cluster.send(EDITS, *([b"c"] * max(0, 2 * behind - 6)))
    assert found([reader.find_last(lambda record: record.value == b"a")]) == [(2, b"a")]
    assert reader.find_last(lambda record: record.value == b"d") is None
    assert found(reader.last(10**6)) == found(reader.read())


def test_a_search_from_the_end_reads_each_record_at_most_once(cluster: Cluster, reader: TopicReader) -> None:
    cluster.send(EDITS, *(b"%d" % number for number in range(12 * FIRST_WINDOW)))
    seen: list[int] = []
    assert reader.find_last(lambda record: seen.append(record.offset)) is None
    assert sorted(seen) == list(range(12 * FIRST_WINDOW))
    seen.clear()
    reader.find_last(lambda record: seen.append(record.offset) or record.offset == 12 * FIRST_WINDOW - 5)  # type: ignore[func-returns-value]
    assert len(seen) == FIRST_WINDOW


def test_a_follower_gets_existing_and_new_records(
    cluster: Cluster, reader: TopicReader, transactions: Transactions
) -> None:
    cluster.send(EDITS, b"0", b"1")
    batches = reader.follow(1)
    taken: list[Any] = []
    next_offset = 0

    def follow_to(end: int) -> bool:
        nonlocal next_offset
        records, next_offset = next(batches)
        taken.extend(records)
        return next_offset == end

    wait_until(lambda: follow_to(2))
    transactions.write(b"aborted", end="abort")
    cluster.send(EDITS, b"4")
    wait_until(lambda: follow_to(5))
    assert found(taken) == [(1, b"1"), (4, b"4")]
    batches.close()
