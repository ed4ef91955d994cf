"""Batches that Kafka takes and its Python clients do not read, or read wrongly, come out record by record."""

from typing import Any

import pytest
from kafka.record.default_records import DefaultRecordBatchBuilder

from pipeline.records import Records, read_by_aiokafka
from tests.hostile import Unreadable, odd_batches

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


@pytest.fixture(params=[Records, read_by_aiokafka], ids=["kafka-python", "aiokafka"])
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
