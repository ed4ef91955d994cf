"""Batches that Kafka takes and its Python clients do not read, or read wrongly, come out record by record."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatch as RawBatch
from kafka import TopicPartition
from kafka.record.default_records import DefaultRecordBatchBuilder

import gracestream.pipeline.kafka.lenient_records as records_module
from gracestream.pipeline.kafka.lenient_records import (
    HEADER_OVERHEAD_BYTES,
    MAX_BATCH_HEADERS,
    MAX_POLL_BYTES,
    MAX_RECORD_HEADERS,
    MAX_UNTRUNCATED_BYTES,
    RECORD_OVERHEAD_BYTES,
    TRUNCATED_BYTES,
    AiokafkaMemoryRecords,
    BoundedFetcher,
    LenientMemoryRecords,
    record_memory_bytes,
    topic_truncation_limit,
)
from gracestream.schemas.messages import TruncatedBytes
from tests.support.hostile import Unreadable, crowded_batch, odd_batches

NAMES = ("name", Unreadable("name"))
BASE = 40
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def batch(*values: bytes | None, name: str = "name", codec: str = "none") -> bytearray:
    """One batch as a broker stores it, from offset `BASE` on."""
    builder = DefaultRecordBatchBuilder(2, CODECS[codec], False, -1, -1, -1, 2**20)
    for number, value in enumerate(values):
        assert builder.append(number, 1000 + number, b"key", value, [(name, b"\xff")]) is not None
    made: bytearray = builder.build()
    made[:8] = BASE.to_bytes(8, "big")
    return made


def found(records: Any) -> list[tuple[int, bytes | None]]:
    """Offsets and values, read as both libraries read them."""
    pairs = []
    while records.has_next():
        pairs += [(record.offset, record.value) for record in records.next_batch()]
    return pairs


@pytest.fixture(params=[LenientMemoryRecords, AiokafkaMemoryRecords], ids=["kafka-python", "aiokafka"])
def read(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", NAMES, ids=["any", "odd"])
@pytest.mark.parametrize("attributes", [0, 1, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("delta", [1, 7, 0, -5, 2**31 - 1, -(2**31)])
def test_odd_records_come_out_in_their_places(
    read: Any, name: str, attributes: int, delta: int, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd_batches(monkeypatch, attributes, delta)
    made = bytes(batch(b"a", b"odd" + b"." * 200, None, b"d", name=name, codec=codec))
    expected = [(40, b"a"), (41, b"odd" + b"." * 200), (42, None), (43, b"d")]
    assert found(read(made + made)) == expected + expected


def test_headers_are_kept(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    odd_batches(monkeypatch, 0x80, 1)
    for name, seen in zip(NAMES, ("name", r"\xff\xc0name\xed\xa0\x80"), strict=True):
        _, odd = read(bytes(batch(b"a", b"odd", name=name))).next_batch()
        assert list(odd.headers) == [(seen, b"\xff")]
        assert (odd.key, odd.timestamp) == (b"key", 1001)


def test_what_nobody_can_read_is_given_raw_and_holds_up_nothing(read: Any) -> None:
    made = batch(b"first", b"second", b"third")
    place = made.index(b"second") - 1
    made[place] = 0x7F  # a value that is longer than its record
    pairs = found(read(bytes(made)))
    assert [offset for offset, _ in pairs] == [40, 41, 42]
    assert pairs[0][1] == b"first"
    assert b"second" in (pairs[1][1] or b"")
    assert pairs[2][1] == b"third"


def test_where_no_length_is_left_the_rest_of_the_batch_is_one_record(read: Any) -> None:
    made = batch(b"first", b"second", b"third")
    place = made.index(b"second") - 9
    assert made[place : place + 2] == bytes([2 * 22, 0])
    made[place : place + 2] = b"\xff\xff"
    pairs = found(read(bytes(made)))
    assert [offset for offset, _ in pairs] == [40, 41, 42]
    assert pairs[0][1] == b"first"
    assert b"second" in (pairs[1][1] or b"")
    assert b"third" in (pairs[1][1] or b"")


def test_offsets_in_a_batch_that_was_compacted_are_its_own(read: Any) -> None:
    made = batch(b"first", b"second")
    made[23:27] = (9).to_bytes(4, "big")  # it had ten records once
    assert found(read(bytes(made))) == [(40, b"first"), (41, b"second")]


HUGE = 9 * 2**20


def whole(records: Any) -> list[Any]:
    """The records, read as both libraries read them."""
    pairs = []
    while records.has_next():
        pairs += list(records.next_batch())
    return pairs


def large_batch(codec: str, *records: tuple[bytes | None, bytes | None]) -> bytes:
    """One batch of these keys and values, from offset `BASE` on, however large it is."""
    builder = DefaultRecordBatchBuilder(2, CODECS[codec], False, -1, -1, -1, 2**30)
    for number, (key, value) in enumerate(records):
        assert builder.append(number, 1000 + number, key, value, [("name", b"\xff")]) is not None
    made: bytearray = builder.build()
    made[:8] = BASE.to_bytes(8, "big")
    return bytes(made)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
class TestLargeBatches:
    def test_of_a_large_key_or_value_the_start_is_kept_and_the_others_are_whole(self, read: Any, codec: str) -> None:
        key, value = b"k" * HUGE, b"v" * HUGE
        first, second, third, fourth = whole(
            read(large_batch(codec, (b"1", b"small"), (b"2", value), (key, b"3"), (None, None)))
        )
        assert (first.key, first.value, fourth.key, fourth.value) == (b"1", b"small", None, None)
        assert (second.key, third.value, third.timestamp, list(third.headers)) == (
            b"2",
            b"3",
            1002,
            [("name", b"\xff")],
        )
        for part, given in ((second.value, value), (third.key, key)):
            assert isinstance(part, TruncatedBytes)
            assert part == given[:TRUNCATED_BYTES]
            assert (part.size, part.sha256) == (HUGE, hashlib.sha256(given).hexdigest())
        assert [record.offset for record in (first, second, third, fourth)] == [40, 41, 42, 43]

    def test_one_record_stands_for_what_is_beyond_the_limit_and_the_next_batch_is_read(
        self, read: Any, codec: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(records_module, "MAX_BATCH_BYTES", 12 * 2**20)
        large = large_batch(codec, (b"1", b"v" * HUGE), (b"2", b"w" * HUGE), (b"3", b"x"), (b"4", b"y"))
        first, rest, *after = whole(read(large + large_batch(codec, (b"5", b"small"))))
        assert (first.offset, first.value.size) == (40, HUGE)
        assert (rest.offset, rest.key, rest.value) == (43, None, b"w" * TRUNCATED_BYTES)
        assert rest.value.size == HUGE
        assert rest.value.reason == (
            "the batch decompresses to more than 12582912 bytes, so the records at offsets 41 to 43 cannot be read"
        )
        assert [record.value for record in after] == [b"small"]

    def test_what_cannot_be_decompressed_is_one_record_and_the_next_batch_is_read(self, read: Any, codec: str) -> None:
        made = bytearray(large_batch(codec, (b"1", b"v" * 500), (b"2", b"v" * 500)))
        made[61:] = b"\x00" * (len(made) - 61)
        found = whole(read(bytes(made) + large_batch(codec, (b"3", b"small"))))
        assert [record.offset for record in found] == [41, 40]
        assert "the records at offsets 40 to 41 cannot be decompressed: " in found[0].value.reason
        assert found[1].value == b"small"

    def test_batches_that_are_parsed_at_once_and_as_a_stream_are_the_same(self, read: Any, codec: str) -> None:
        given = [(b"%d" % number, b"v" * 100_000) for number in range(20)]
        for count in (20, 60):  # of 2 MB and of 6 MB
            found = whole(read(large_batch(codec, *(given * 3)[:count])))
            assert [(record.key, record.value) for record in found] == (given * 3)[:count]
            assert [record.offset for record in found] == list(range(40, 40 + count))


def test_a_large_delta_is_whole() -> None:
    records = LenientMemoryRecords(large_batch("gzip", (None, b"v" * HUGE)))
    records.whole = topic_truncation_limit("prefix-deltas")
    assert [record.value for record in whole(records)] == [b"v" * HUGE]


def test_a_block_of_snappy_that_claims_to_be_huge_takes_no_memory(read: Any) -> None:
    claim = b"\xff\xff\xff\xff\x0f"  # 4 GiB
    made = bytearray(large_batch("snappy", (None, b"v" * 500))[:61] + claim + b"\x00")
    made[8:12] = (len(made) - 12).to_bytes(4, "big")
    (record,) = whole(read(bytes(made)))
    assert "cannot be read" in record.value.reason


class TestManyHeaders:
    """A header may have two bytes, so that a record of 1 MiB may have half a million of them."""

    @pytest.fixture
    def parsed(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many headers the parser in C has made, record by record."""
        counts = []

        def counting(raw: bytes) -> Iterator[Any]:
            for record in RawBatch(raw):
                counts.append(len(record.headers))
                yield record

        monkeypatch.setattr(records_module, "RawBatch", counting)
        return counts

    @pytest.mark.parametrize("codec", ["none", "gzip", "zstd"])
    @pytest.mark.parametrize("count", [MAX_RECORD_HEADERS + 1, 80_000, 400_000])
    def test_of_a_record_the_first_thousand_are_read(
        self, read: Any, codec: str, count: int, parsed: list[int]
    ) -> None:
        made = crowded_batch(3, b"value", count, CODECS[codec])
        found = whole(read(made + bytes(batch(b"next"))))
        assert [(record.key, record.value, len(record.headers)) for record in found] == [
            *[(b"key", b"value", MAX_RECORD_HEADERS)] * 3,
            (b"key", b"next", 1),
        ]
        assert [record.offset for record in found] == [0, 1, 2, BASE]
        assert sum(parsed) <= MAX_BATCH_HEADERS

    @pytest.mark.parametrize("codec", ["none", "zstd"])
    def test_as_many_as_are_read_are_all_there(self, read: Any, codec: str) -> None:
        found = whole(read(crowded_batch(3, b"value", MAX_RECORD_HEADERS, CODECS[codec])))
        assert [list(record.headers) for record in found] == [[("", b"")] * MAX_RECORD_HEADERS] * 3

    def test_the_parser_in_c_reads_no_batch_with_many_small_records_of_many_headers(self, parsed: list[int]) -> None:
        found = whole(AiokafkaMemoryRecords(crowded_batch(400, b"value", MAX_RECORD_HEADERS, CODECS["zstd"])))
        assert [len(record.headers) for record in found] == [MAX_RECORD_HEADERS] * 400
        assert parsed == []

    def test_large_batches_with_few_headers_are_read_by_the_parser_in_c(self) -> None:
        made = crowded_batch(400, b"v" * 1000, 2, CODECS["zstd"])
        assert isinstance(AiokafkaMemoryRecords(made).next_batch(), RawBatch)

    @pytest.mark.parametrize("attributes", [0x80, 0xFF])
    def test_attributes_that_are_read_wrongly_hide_no_headers(
        self, read: Any, attributes: int, parsed: list[int]
    ) -> None:
        found = whole(read(crowded_batch(2, b"value", 200_000, attributes=attributes)))
        assert [(record.value, len(record.headers)) for record in found] == [(b"value", MAX_RECORD_HEADERS)] * 2
        assert sum(parsed) <= MAX_BATCH_HEADERS

    def test_a_record_that_ends_behind_its_batch_is_given_raw(self, read: Any) -> None:
        made = bytearray(crowded_batch(1, b"value", 200_000))
        del made[-1000:]
        made[8:12] = (len(made) - 12).to_bytes(4, "big")
        (record,) = whole(read(bytes(made)))
        assert record.headers == []
        assert b"value" in record.value

    def test_each_header_counts_with_what_it_takes_in_memory(self, read: Any) -> None:
        (record,) = read(crowded_batch(1, b"value", 500)).next_batch()
        assert (
            record_memory_bytes(record)
            == RECORD_OVERHEAD_BYTES + len(b"key") + len(b"value") + 500 * HEADER_OVERHEAD_BYTES
        )

    def test_a_call_hands_out_few_records_with_many_headers(self) -> None:
        part = BoundedFetcher.PartitionRecords(
            0, TopicPartition("requests", 0), LenientMemoryRecords(crowded_batch(100, b"value", 10_000, CODECS["zstd"]))
        )
        handed = []
        while part:
            handed.append(len(part.take(500)))
        each = MAX_RECORD_HEADERS * HEADER_OVERHEAD_BYTES
        assert sum(handed) == 100
        assert max(handed) <= MAX_POLL_BYTES // each + 1

    def test_a_call_hands_out_few_empty_records(self) -> None:
        """A record without key and value takes hundreds of bytes of memory, and fewer than ten in a batch."""
        made = batch(*[None] * 60_000, name="")
        part = BoundedFetcher.PartitionRecords(0, TopicPartition("requests", 0), LenientMemoryRecords(bytes(made)))
        handed = []
        while part:
            handed.append(len(part.take(None)))
        assert sum(handed) == 60_000
        assert max(handed) <= MAX_POLL_BYTES // RECORD_OVERHEAD_BYTES

    @pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
    def test_behind_a_large_record_with_headers_that_cannot_be_read_others_are(self, read: Any, codec: str) -> None:
        large = b"v" * (MAX_UNTRUNCATED_BYTES + 1)
        found = whole(read(crowded_batch(3, large, 5, CODECS[codec], header=b"\x7f")))
        assert [(record.offset, len(record.value), list(record.headers)) for record in found] == [
            (offset, TRUNCATED_BYTES, []) for offset in range(3)
        ]
        assert all(record.value.size == len(large) for record in found)
