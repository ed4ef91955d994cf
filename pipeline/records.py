r"""Batches of records as they come from Kafka, read whatever their headers are called.

Kafka takes any bytes as the name of a header. kafka-python and aiokafka take UTF-8 alone, and a consumer that meets
another name never gets past its record: one such record on `requests` would stop every replica for good. Here such a
name is read with its stray bytes written out (`\xff`), so that its record is judged by its value like any other.
Neither library has a setting for that. What stands here takes the place of their own class: `MemoryRecords` is called
so, and has the same methods, in both. aiokafka's is in C, ten times as fast, and reads all that it can.
"""

from typing import Any, SupportsIndex

from aiokafka.record.memory_records import MemoryRecords as RawRecords
from kafka.consumer.fetcher import Fetcher
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatch


class Records(MemoryRecords):  # type: ignore[misc]
    """What one fetch brought of one partition, batch by batch."""

    def next_batch(self) -> Any:
        """The next batch; None after the last one."""
        batch = super().next_batch()
        if isinstance(batch, DefaultRecordBatch):  # older ones, of message format 0 and 1, have no headers
            batch.__class__ = _Batch
        return batch


def read_by_aiokafka(fetched: bytes) -> Any:
    """For the name `MemoryRecords` in aiokafka's fetcher: its own class, or `Records` where that cannot read them all.

    One read tells: it costs about a microsecond a record, and twice the decompression.
    """
    tried = RawRecords(fetched)
    try:
        while tried.has_next():
            for _ in tried.next_batch():
                pass
    except Exception:  # noqa: BLE001  (a stray name, or damage, of which `Records` says what it is)
        return Records(fetched)
    return RawRecords(fetched)


class PartitionRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
    """For the attribute of this name that a consumer of kafka-python has in its fetcher."""

    def _unpack_records(self, tp: Any, records: Any, *deserializers: Any) -> Any:
        return super()._unpack_records(tp, Records(records._buffer), *deserializers)  # noqa: SLF001  (likewise)


class _Batch(DefaultRecordBatch):  # type: ignore[misc]
    __slots__ = ()  # so that a batch can become one where it is

    def _read_msg(self) -> Any:
        try:
            return super()._read_msg()
        except UnicodeDecodeError:  # of a name; it was to be read from where the last record ended
            self._buffer = _Lenient(self._buffer)  # type: ignore[has-type,misc]
            return super()._read_msg()


class _Lenient(bytearray):
    """Bytes of which any part can be decoded."""

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        return _Lenient(found) if isinstance(index, slice) else found

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        del errors
        return super().decode(encoding, "backslashreplace")
