r"""Batches of records as they come from Kafka, read whatever a producer has put into them, in bounded memory.

Kafka takes batches that kafka-python and aiokafka do not read, or read wrongly, and one such on `requests` or
`feedback` would stop every worker for good, or make it commit an offset that lies beyond records it has not seen:

- the name of a header may be any bytes; they take UTF-8 alone. Here stray bytes are written out (`\xff`);
- a record's attributes are one byte, which nobody uses; they read a number of several bytes;
- a record's own offset is not checked, unless its batch is compressed; they believe it. Here a record that is whole
  with its batch has the offset that Kafka gave to its place in it.

A record that cannot be read even so is given by its raw bytes, and is judged by its value like any other.

A topic's `max.message.bytes` limits a batch as Kafka stores it, so a compressed batch may hold a thousand times that.
Both libraries decompress a batch at once, and hand out any number of bytes at once. Here:

1. A compressed batch of more than `MAX_EAGER_BYTES` is decompressed as a stream, one record at a time.
2. Of a key or a value in such a batch that has more than `MAX_UNTRUNCATED_BYTES` bytes only the start is kept: it is a
   `TruncatedBytes`. `deltas` is exempt.
3. After `MAX_BATCH_BYTES` the rest of a batch stays compressed. One record with a `TruncatedBytes` value takes its
   place, at the last offset of the batch, so that its readers go on behind it. The same holds where decompression
   fails.
4. One call hands out records until they have `MAX_POLL_BYTES`, and at least one.
5. Of a record's headers the first `MAX_RECORD_HEADERS` are read. Kafka does not limit them, and an empty one has two
   bytes.

Neither library has a setting for any of that. What stands here takes the place of their own classes. aiokafka's parser
is in C, ten times as fast, and reads every batch that it reads rightly and that is small enough.
"""

import gzip
import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, SupportsIndex

import lz4.frame
import snappy
import zstandard
from aiokafka.consumer import fetcher
from aiokafka.record.default_records import DefaultRecordBatch as RawBatch
from aiokafka.record.legacy_records import LegacyRecordBatch as RawLegacyBatch
from kafka.consumer.fetcher import Fetcher
from kafka.errors import CorruptRecordError
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecord, DefaultRecordBatch
from kafka.record.util import calc_crc32c, decode_varint

from gracestream.schemas.deltas import MAX_DELTA_BYTES
from gracestream.schemas.messages import TruncatedBytes

MAX_UNTRUNCATED_BYTES = 2**20
"""Bytes of a key or a value that are kept whole, but for those of `deltas`: what Kafka takes uncompressed, unless it is
configured otherwise. No setting allows a larger message."""

TRUNCATED_BYTES = 2**14
"""Bytes that are kept of a key or a value that is cut: enough to see what it was."""

MAX_BATCH_BYTES = MAX_DELTA_BYTES + 2**20
"""Bytes of one batch that are decompressed: the largest delta, and what surrounds it."""

MAX_EAGER_BYTES = 4 * 2**20
"""Bytes to which a batch may decompress to be parsed at once."""

MAX_POLL_BYTES = 4 * 2**20
"""Bytes of keys, values and headers after which a call hands out what it has."""

MAX_RECORD_HEADERS = 1000
"""Headers of one record that are read: far more than anyone sends, and parsed in a millisecond."""

MAX_BATCH_HEADERS = 2**16
"""Headers of one batch that aiokafka's parser may read: it reads all of a batch at once, in a few tens of ms."""

HEADER_OVERHEAD_BYTES = 160
"""Bytes of memory for one header besides its name and its value: a tuple, a string, a bytes and a place in a list."""

RECORD_OVERHEAD_BYTES = 300
"""Bytes of memory for a record besides key, value and headers, in either library."""

_CHUNK_BYTES = 2**16


def topic_truncation_limit(topic: str) -> int:
    """Bytes of a key or a value that are kept whole; a delta is never cut, since its digest covers all of it."""
    return MAX_DELTA_BYTES if topic.endswith("deltas") else MAX_UNTRUNCATED_BYTES


class LenientMemoryRecords(MemoryRecords):  # type: ignore[misc]
    """What one fetch brought of one partition, batch by batch. `whole`: bytes of a key or a value that are kept."""

    whole = MAX_UNTRUNCATED_BYTES

    def next_batch(self) -> Any:
        """The next batch; None after the last one."""
        found = self._next_slice
        if found is None or len(found) < self.MIN_SLICE or found[self.MAGIC_OFFSET] < 2:
            return super().next_batch()  # of message format 0 or 1, which is not written any more
        self._cache_next()
        return _LenientBatch(found, self.whole)


class AiokafkaMemoryRecords(LenientMemoryRecords):
    """For the name `MemoryRecords` in aiokafka's fetcher: batches of its own class, where that reads them rightly."""

    def next_batch(self) -> Any:
        """As above. One read tells whether the parser in C reads it rightly: about a microsecond a record."""
        found = self._next_slice
        if found is not None and len(found) >= self.MIN_SLICE and found[self.MAGIC_OFFSET] < 2:
            self._cache_next()
            return RawLegacyBatch(bytes(found), found[self.MAGIC_OFFSET])
        batch = super().next_batch()
        if batch is None:
            return None
        try:
            raw = _decompress_batch(bytes(found), batch)
            if raw is not None and _has_few_headers(raw, batch):
                offsets = [
                    record.offset if len(record.headers) <= MAX_RECORD_HEADERS else None for record in RawBatch(raw)
                ]
                places = range(batch.base_offset, batch.next_offset)
                if None not in offsets and (len(offsets) != len(places) or offsets == list(places)):
                    return RawBatch(raw)
        except Exception:  # noqa: BLE001  (whatever it is, `_LenientBatch` knows what to do with it)
            return batch
        return batch


class BoundedFetcher(Fetcher):  # type: ignore[misc]
    """For the class of a kafka-python consumer's fetcher."""

    class PartitionRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
        """The records of one partition that one fetch brought."""

        record_iterator: Any
        handed = 0

        def _unpack_records(self, tp: Any, records: Any, *deserializers: Any) -> Any:
            ours = LenientMemoryRecords(records._buffer)  # noqa: SLF001  (it has no public name)
            ours.whole = topic_truncation_limit(tp.topic)
            return super()._unpack_records(tp, ours, *deserializers)

        def take(self, n: int | None = None) -> Any:
            """As in the base class, but no more than `MAX_POLL_BYTES` and one record."""
            records, self.handed = self.record_iterator, 0
            self.record_iterator = self._bounded(records)
            try:
                return super().take(n)
            finally:
                if self.record_iterator is not None:  # the last record sets it to None
                    self.record_iterator = records

        def _bounded(self, records: Iterator[Any]) -> Iterator[Any]:
            while self.handed < MAX_POLL_BYTES and (record := next(records, None)) is not None:
                self.handed += record_memory_bytes(record)
                yield record

    def fetched_records(self, *args: Any, **options: Any) -> Any:
        """As in the base class."""
        self._handed = 0
        return super().fetched_records(*args, **options)

    def _append(self, drained: Any, part: Any, max_records: int, update_offsets: Any) -> int:
        """As in the base class; once there are bytes enough for one call, as many records as were asked for."""
        appended: int = super()._append(drained, part, max_records, update_offsets)
        self._handed += part.handed if appended else 0
        return max_records if self._handed >= MAX_POLL_BYTES else appended


class _TruncatingPartitionRecords(fetcher.PartitionRecords):  # type: ignore[misc]
    """For the name `PartitionRecords` in aiokafka's fetcher, which alone knows the topic of its records."""

    def __init__(self, tp: Any, records: Any, *options: Any) -> None:
        records.whole = topic_truncation_limit(tp.topic)
        super().__init__(tp, records, *options)


class _BoundedFetchResult(fetcher.FetchResult):  # type: ignore[misc]
    """For the name `FetchResult` in aiokafka's fetcher: hands out no more than `MAX_POLL_BYTES` and one record."""

    _partition_records: Any

    def getall(self, max_records: int | None = None) -> list[Any]:
        """As in the base class."""
        found: list[Any] = []
        if not self.check_assignment(self._topic_partition) or not self.has_more():
            return found
        held, records = 0, self._partition_records
        while (max_records is None or len(found) < max_records) and held < MAX_POLL_BYTES:
            if (record := next(records, None)) is None:
                self._partition_records = None  # so that `has_more` is False
                break
            found.append(record)
            held += record_memory_bytes(record)
        self._assignment.state_value(self._topic_partition).consumed_to(records.next_fetch_offset)
        return found


def install_lenient_parser() -> None:
    """Let all of aiokafka's consumers read so, faust's among them; it lets nobody choose their parts."""
    fetcher.MemoryRecords = AiokafkaMemoryRecords
    fetcher.PartitionRecords = _TruncatingPartitionRecords
    fetcher.FetchResult = _BoundedFetchResult


class _LenientBatch(DefaultRecordBatch):  # type: ignore[misc]
    _buffer: bytearray
    _pos: int
    _decompressed: bool
    _next_record_index: int

    def __init__(self, buffer: Any, truncation_limit: int) -> None:
        super().__init__(buffer)
        self._stream: _DecompressedStream | None = None
        self._truncation_limit = truncation_limit

    def _maybe_uncompress(self) -> None:
        if not self._decompressed and self.compression_type != self.CODEC_NONE:
            self._stream = self.open_stream()
            self._buffer, self._pos = bytearray(), 0
        self._decompressed = True

    def open_stream(self) -> "_DecompressedStream":
        """The records, decompressed while they are read."""
        self._assert_has_codec(self.compression_type)
        return _DecompressedStream(self.compression_type, bytes(memoryview(self._buffer)[self._pos :]))

    def _read_msg(self) -> Any:
        if self._stream is None:
            record = self._read_lenient()
        else:
            try:
                record = self._read_streamed(self._stream)
            except Exception as error:  # noqa: BLE001  (each codec fails in its own way)
                record = self._unreadable_remainder(error)
        if self.records_count == self.last_offset_delta + 1:  # none was compacted away
            record._offset = self.base_offset + self._next_record_index  # noqa: SLF001
        return record

    def _read_lenient(self) -> Any:
        """The record that begins at `_pos`, whatever is in it."""
        begin = self._pos
        try:
            return self._read_bounded()
        except Exception:  # noqa: BLE001  (each of its steps fails in another way)
            return self._read_malformed(begin)

    def _read_bounded(self) -> Any:
        """The record that begins at `_pos`, with its first `MAX_RECORD_HEADERS` headers."""
        if len(self._buffer) - self._pos <= 2 * MAX_RECORD_HEADERS:  # there is no room for more
            return super()._read_msg()
        size, body = decode_varint(self._buffer, self._pos)
        count, place = _read_header_count(self._buffer, body)
        if count <= MAX_RECORD_HEADERS:
            return super()._read_msg()
        end = body + size
        if end > len(self._buffer):
            raise CorruptRecordError(f"a record of {size} bytes ends behind its batch")
        headers = _read_headers(self._buffer[:end], count, place)
        later, place = decode_varint(self._buffer, body + 1)
        further, place = decode_varint(self._buffer, place)
        key, place = _read_part(self._buffer, place)
        value, place = _read_part(self._buffer, place)
        self._pos = end
        return self._build_record(size, later, further, key, value, headers)

    def _build_record(
        self,
        size: int,
        timestamp_delta: int,
        offset_delta: int,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes | None]],
    ) -> Any:
        timestamp = (
            self.max_timestamp
            if self.timestamp_type == self.LOG_APPEND_TIME
            else self.first_timestamp + timestamp_delta
        )
        return DefaultRecord(size, self.base_offset + offset_delta, timestamp, self.timestamp_type, key, value, headers)

    def _read_streamed(self, stream: "_DecompressedStream") -> Any:
        prefix, size = stream.read_varint()
        if not 0 <= size <= MAX_UNTRUNCATED_BYTES:
            return self._read_large(stream, size)
        self._buffer, self._pos = bytearray(prefix + stream.read(size)), 0
        return self._read_lenient()

    def _read_large(self, stream: "_DecompressedStream", size: int) -> Any:
        """A record that may have parts to be cut; its headers are left out where they are large or cannot be read."""
        end = stream.position + size
        stream.read(1)  # its attributes
        (_, later), (_, further) = stream.read_varint(), stream.read_varint()
        key, value = stream.read_part(self._truncation_limit), stream.read_part(self._truncation_limit)
        left = end - stream.position
        if left < 0:
            raise CorruptRecordError(f"a record of {size} bytes has parts that end behind it")
        headers: list[tuple[str, bytes | None]] = []
        if left <= MAX_UNTRUNCATED_BYTES:
            raw = stream.read(left)
            with suppress(Exception):  # the next record begins behind them, whatever is in them
                headers = _read_headers(raw, *decode_varint(raw, 0))
        else:
            stream.skip(left)
        self._buffer, self._pos = bytearray(), 0
        return self._build_record(size, later, further, key, value, headers)

    def _unreadable_remainder(self, error: Exception) -> Any:
        """One record for all that are left of the batch."""
        first, last = self.base_offset + self._next_record_index, self.last_offset
        which = f"the record at offset {last}" if first == last else f"the records at offsets {first} to {last}"
        start, size = b"", 0
        if isinstance(error, _BatchTooLargeError):
            start, size = error.start, error.size
            reason = f"the batch decompresses to more than {MAX_BATCH_BYTES} bytes, so {which} cannot be read"
        else:
            reason = f"{which} cannot be decompressed: {error or type(error).__name__}"
        self._next_record_index = self._num_records - 1
        self._buffer, self._pos, self._stream = bytearray(), 0, None
        value = TruncatedBytes(start, size, reason=reason)
        return DefaultRecord(size, last, self.max_timestamp, self.timestamp_type, None, value, [])

    def _read_malformed(self, begin: int) -> Any:
        """The record that begins there, its attributes unread and its headers with any names; or its raw bytes."""
        if not isinstance(self._buffer, _LenientBytes):  # once, however many are odd
            self._buffer = _LenientBytes(self._buffer)
        body, end = begin, len(self._buffer)  # it takes the rest where it does not say how long it is
        attributes = None
        try:
            size, body = decode_varint(self._buffer, begin)
            end = body + size if 0 < size <= end - body else end
            attributes, self._buffer[body] = self._buffer[body], 0
            self._pos = begin
            return self._read_bounded()
        except Exception:  # noqa: BLE001  (likewise)
            self._pos = end
            if attributes is not None:
                self._buffer[body] = attributes
            raw = bytes(self._buffer[body:end])
            return DefaultRecord(
                len(raw), self.base_offset, self.max_timestamp, self.timestamp_type, None, bytes(raw), []
            )


class _LenientBytes(bytearray):
    """Bytes of which any part can be decoded."""

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        return _LenientBytes(found) if isinstance(index, slice) else found

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        del errors
        return super().decode(encoding, "backslashreplace")


class _BatchTooLargeError(Exception):
    """A batch decompresses to more than `MAX_BATCH_BYTES`. Carries start and size of the excess part, if known."""

    def __init__(self, start: bytes = b"", size: int = 0) -> None:
        super().__init__()
        self.start, self.size = start, size


class _DecompressedStream:
    """The content of a compressed batch, of which little more is held than what is being read."""

    def __init__(self, codec: int, compressed: bytes) -> None:
        self._chunks = _DECOMPRESSORS[codec](compressed)
        self._buffered = bytearray()
        self._decompressed_bytes = 0
        self.position = 0
        """Bytes that were taken."""

    def read(self, count: int) -> bytes:
        """So many bytes.

        Raises:
            EOFError: there are no more.
            _BatchTooLargeError: there are too many.
        """
        while len(self._buffered) < count:
            chunk = next(self._chunks, b"")
            self._decompressed_bytes += len(chunk)
            if not chunk:
                raise EOFError("it ends within a record")
            if self._decompressed_bytes > MAX_BATCH_BYTES:
                raise _BatchTooLargeError
            self._buffered += chunk
        taken = bytes(memoryview(self._buffered)[:count])
        del self._buffered[:count]
        self.position += count
        return taken

    def skip(self, count: int) -> None:
        """Read over so many bytes."""
        for length in _chunk_lengths(count):
            self.read(length)

    def read_varint(self) -> tuple[bytes, int]:
        """A number, and the bytes that it is written in."""
        raw = self.read(1)
        while raw[-1] & 0x80 and len(raw) < 10:
            raw += self.read(1)
        return raw, decode_varint(bytearray(raw), 0)[0]

    def read_part(self, truncation_limit: int) -> bytes | None:
        """A key or a value with its length before it; `TruncatedBytes` where it is longer than `truncation_limit`."""
        _, size = self.read_varint()
        if size < 0:
            return None
        if size <= truncation_limit:
            return self.read(size)
        start = self.read(min(size, TRUNCATED_BYTES))
        if self.position + size > MAX_BATCH_BYTES:  # known before it is decompressed
            raise _BatchTooLargeError(start, size)
        digest = hashlib.sha256(start)
        for length in _chunk_lengths(size - len(start)):
            digest.update(self.read(length))
        return TruncatedBytes(start, size, digest.hexdigest())

    def read_all(self, limit: int) -> bytes | None:
        """All of it; None where it is longer than `limit`."""
        for chunk in self._chunks:
            self._buffered += chunk
            if len(self._buffered) > limit:
                return None
        return bytes(self._buffered)


def _decompress_batch(raw: bytes, batch: _LenientBatch) -> bytes | None:
    """The same batch uncompressed; None where that is large, or where the batch is not as it was written."""
    if batch.compression_type == batch.CODEC_NONE:
        return raw
    content = batch.open_stream().read_all(MAX_EAGER_BYTES)
    if content is None or not batch.validate_crc():
        return None
    size, attributes = batch.HEADER_STRUCT.size, batch.ATTRIBUTES_OFFSET
    made = bytearray(raw[:size] + content)
    made[8:12] = (len(made) - batch.AFTER_LEN_OFFSET).to_bytes(4, "big")
    made[attributes : attributes + 2] = (batch.attributes & ~batch.CODEC_MASK).to_bytes(2, "big", signed=True)
    made[batch.CRC_OFFSET : attributes] = calc_crc32c(memoryview(made)[attributes:]).to_bytes(4, "big")
    return bytes(made)


def _has_few_headers(raw: bytes, batch: _LenientBatch) -> bool:
    """Whether aiokafka's parser finds no more than `MAX_BATCH_HEADERS` in an uncompressed batch.

    A small batch has no room for more. In a larger one only the number of each record's headers is read.
    """
    if len(raw) <= 2 * MAX_BATCH_HEADERS:
        return True
    left, place = MAX_BATCH_HEADERS, batch.HEADER_STRUCT.size
    for _ in range(batch.records_count):
        size, body = decode_varint(raw, place)
        count, _ = _read_header_count(raw, body)
        left -= count
        if size <= 0 or count > MAX_RECORD_HEADERS or left < 0:
            return False
        place = body + size
    return True


def _read_header_count(buffer: bytes | bytearray, body: int) -> tuple[int, int]:
    """The number of headers of the record whose attributes are there, and the place behind that number.

    Raises:
        CorruptRecordError: the libraries would read its attributes wrongly, and so all that follows.
    """
    if buffer[body] & 0x80:
        raise CorruptRecordError(f"a record has the attributes {buffer[body]}, more than the 7 bits that can be read")
    _, place = decode_varint(buffer, body + 1)  # its timestamp
    _, place = decode_varint(buffer, place)  # its offset
    size, place = decode_varint(buffer, place)
    size, place = decode_varint(buffer, place + max(0, size))
    count, place = decode_varint(buffer, place + max(0, size))
    return count, place


def _read_part(buffer: bytes | bytearray, position: int) -> tuple[bytes | None, int]:
    """The bytes, or None, whose length is there, and the place behind them."""
    size, position = decode_varint(buffer, position)
    return (None, position) if size < 0 else (bytes(buffer[position : position + size]), position + size)


def _read_headers(raw: bytes | bytearray, count: int, position: int) -> list[tuple[str, bytes | None]]:
    """The first `MAX_RECORD_HEADERS` of so many headers of a record, which begin there."""
    found = []
    for _ in range(min(count, MAX_RECORD_HEADERS)):
        name, position = _read_part(raw, position)
        value, position = _read_part(raw, position)
        found.append(((name or b"").decode(errors="backslashreplace"), value))
    return found


def _chunk_lengths(count: int) -> Iterator[int]:
    """The lengths of the chunks that so many bytes are read in."""
    while count > 0:
        yield min(count, _CHUNK_BYTES)
        count -= _CHUNK_BYTES


def record_memory_bytes(record: Any) -> int:
    """Bytes that a record of either library takes in memory."""
    headers = sum(HEADER_OVERHEAD_BYTES + len(name) + len(value or b"") for name, value in record.headers)
    return RECORD_OVERHEAD_BYTES + len(record.key or b"") + len(record.value or b"") + headers


def _file_chunks(open_file: Callable[[Any], Any]) -> Callable[[bytes], Iterator[bytes]]:
    def chunks(compressed: bytes) -> Iterator[bytes]:
        with open_file(io.BytesIO(compressed)) as content:
            while chunk := content.read(_CHUNK_BYTES):
                yield chunk

    return chunks


def _snappy_chunks(compressed: bytes) -> Iterator[bytes]:
    """One block, or the blocks of the framing of the xerial library, which Kafka's own clients write."""
    if not compressed.startswith(b"\x82SNAPPY\x00"):
        yield _snappy_block(compressed)
        return
    place = 16
    while place < len(compressed):
        size = int.from_bytes(compressed[place : place + 4], "big", signed=True)
        if not 0 < size <= len(compressed) - place - 4:
            raise CorruptRecordError(f"a block of snappy has {size} bytes")
        place += 4 + size
        yield _snappy_block(compressed[place - size : place])


def _snappy_block(block: bytes) -> bytes:
    """A block begins with its length, unsigned: so much memory the library takes before it reads any more."""
    length = shift = 0
    for byte in block[:5]:
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if length > MAX_BATCH_BYTES:
        raise _BatchTooLargeError
    found: bytes = snappy.decompress(block)
    return found


_DECOMPRESSORS: dict[int, Callable[[bytes], Iterator[bytes]]] = {
    DefaultRecordBatch.CODEC_GZIP: _file_chunks(lambda content: gzip.GzipFile(fileobj=content)),
    DefaultRecordBatch.CODEC_SNAPPY: _snappy_chunks,
    DefaultRecordBatch.CODEC_LZ4: _file_chunks(lz4.frame.open),
    DefaultRecordBatch.CODEC_ZSTD: _file_chunks(
        lambda content: zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True)
    ),
}
"""The content of a batch in chunks, by codec."""
