r"""Batches of records as they come from Kafka, read whatever a producer has put into them.

Kafka takes batches that kafka-python and aiokafka do not read, or read wrongly, and one such on `requests` or
`feedback` would stop every worker for good, or make it commit an offset that lies beyond records it has not seen:

- the name of a header may be any bytes; they take UTF-8 alone. Here stray bytes are written out (`\xff`);
- a record's attributes are one byte, which nobody uses; they read a number of several bytes;
- a record's own offset is not checked, unless its batch is compressed; they believe it. Here a record that is whole
  with its batch has the offset that Kafka gave to its place in it.

A record that cannot be read even so is given by its raw bytes, and is judged by its value like any other. Neither
library has a setting for that. What stands here takes the place of their own class: `MemoryRecords` is called so, and
has the same methods, in both. aiokafka's is in C, ten times as fast, and reads all that it can.
"""

from typing import Any, SupportsIndex

from aiokafka.record.memory_records import MemoryRecords as RawRecords
from kafka.consumer.fetcher import Fetcher
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecord, DefaultRecordBatch
from kafka.record.util import decode_varint


class Records(MemoryRecords):  # type: ignore[misc]
    """What one fetch brought of one partition, batch by batch."""

    def next_batch(self) -> Any:
        """The next batch; None after the last one."""
        batch = super().next_batch()
        if isinstance(batch, DefaultRecordBatch):  # older ones, of message format 0 and 1, are not written any more
            batch.__class__ = _Batch
        return batch


def read_by_aiokafka(fetched: bytes) -> Any:
    """For the name `MemoryRecords` in aiokafka's fetcher: its own class, or `Records` where that reads them wrongly.

    One read tells: it costs about a microsecond a record, and twice the decompression.
    """
    tried = RawRecords(fetched)
    try:
        while tried.has_next():
            batch = tried.next_batch()
            offsets = [record.offset for record in batch]
            whole = range(batch.base_offset, batch.next_offset)
            if len(offsets) == len(whole) and offsets != list(whole):
                return Records(fetched)
    except Exception:  # noqa: BLE001  (whatever it is, `Records` knows what to do with it)
        return Records(fetched)
    return RawRecords(fetched)


class PartitionRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
    """For the attribute of this name that a consumer of kafka-python has in its fetcher."""

    def _unpack_records(self, tp: Any, records: Any, *deserializers: Any) -> Any:
        return super()._unpack_records(tp, Records(records._buffer), *deserializers)  # noqa: SLF001  (likewise)


class _Batch(DefaultRecordBatch):  # type: ignore[misc]
    __slots__ = ()  # so that a batch can become one where it is
    _buffer: bytearray
    _pos: int

    def _read_msg(self) -> Any:
        begin = self._pos
        try:
            record = super()._read_msg()
        except Exception:  # noqa: BLE001  (each of its steps fails in another way)
            record = self._read_odd(begin)
        if self.records_count == self.last_offset_delta + 1:  # none was compacted away
            record._offset = self.base_offset + self._next_record_index  # noqa: SLF001
        return record

    def _read_odd(self, begin: int) -> Any:
        """The record that begins there, its attributes unread and its headers with any names; or its raw bytes."""
        if not isinstance(self._buffer, _Lenient):  # once, however many are odd
            self._buffer = _Lenient(self._buffer)  # type: ignore[misc]
        body, end = begin, len(self._buffer)  # it takes the rest where it does not say how long it is
        attributes = None
        try:
            size, body = decode_varint(self._buffer, begin)
            end = body + size if 0 < size <= end - body else end
            attributes, self._buffer[body] = self._buffer[body], 0
            self._pos = begin  # type: ignore[misc]
            return super()._read_msg()
        except Exception:  # noqa: BLE001  (likewise)
            self._pos = end  # type: ignore[misc]
            if attributes is not None:
                self._buffer[body] = attributes
            raw = bytes(self._buffer[body:end])
            return DefaultRecord(
                len(raw), self.base_offset, self.max_timestamp, self.timestamp_type, None, bytes(raw), []
            )


class _Lenient(bytearray):
    """Bytes of which any part can be decoded."""

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        return _Lenient(found) if isinstance(index, slice) else found

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        del errors
        return super().decode(encoding, "backslashreplace")
