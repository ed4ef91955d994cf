r"""Parses batches of Kafka records, whatever a producer has put into them, in bounded memory.

Anyone who may write to `requests` or `feedback` can write a batch that kafka-python or aiokafka cannot read, or reads
wrongly. One such batch would stop every worker for good, or let it commit an offset after records that it never read.

Workarounds for faults in the parsers of both libraries:

1. A header name may be any bytes, but the libraries accept only UTF-8. Here other bytes are escaped (`\xff`).
2. The attributes of a record are one unused byte, but the libraries parse a varint, which may have several bytes. Here
   they are skipped as one byte.
3. The broker checks the offset inside a record only if the batch is compressed, but the libraries trust it. Here a
   record of a batch without gaps has the offset of its position in the batch.
4. A record that still cannot be parsed is returned with its raw bytes as the value, so that it can be dead-lettered.

Limits, because `max.message.bytes` limits the stored size of a batch, and a compressed batch may expand a thousandfold.
The libraries decompress a whole batch at once, and return any number of bytes from one call:

5. A compressed batch is decompressed as a stream, record by record. Only aiokafka's parser gets whole batches, of at
   most `MAX_EAGER_BYTES`.
6. In a stream, a key or a value of more than `MAX_UNTRUNCATED_BYTES` becomes a `TruncatedBytes`. On `deltas` the
   limit is `MAX_DELTA_BYTES`.
7. Decompression of a batch stops after `MAX_BATCH_BYTES`, or at an error. One record with a `TruncatedBytes` value then
   replaces the remaining records. It has the last offset of the batch, so that readers continue after the batch.
8. One call returns records until they have `MAX_POLL_BYTES`, and at least one record.
9. Only the first `MAX_RECORD_HEADERS` headers of a record are read. Kafka does not limit them, and an empty header has
   only two bytes.

Neither library has options for this, so the classes here replace theirs. aiokafka's parser in C is ten times as fast.
It still reads every batch that is small enough and that it reads correctly.

The faults and missing limits are in kafka-python 3.0.12 and aiokafka 0.14.0, the newest releases in November 2026. No
release ends them yet. No issue of either library is known for them.
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
"""Limit on the bytes of a key or a value that is kept whole, except on `deltas`.

It is about Kafka's default limit for an uncompressed batch. No setting of gracestream allows a larger message.
"""

TRUNCATED_BYTES = 2**14
"""Bytes that are kept of a truncated key or value: enough to recognise it."""

MAX_BATCH_BYTES = MAX_DELTA_BYTES + 2**20
"""Limit on the decompressed bytes of one batch: the largest delta, and room for its key, headers and lengths."""

MAX_EAGER_BYTES = 4 * 2**20
"""Limit on the decompressed bytes of a batch that is parsed at once, by aiokafka's parser."""

MAX_POLL_BYTES = 4 * 2**20
"""Bytes of memory after which a call returns its records (`record_memory_bytes`)."""

MAX_RECORD_HEADERS = 1000
"""Limit on the headers that are read from one record: far more than in practice, and parsed within a millisecond."""

MAX_BATCH_HEADERS = 2**16
"""Limit on the headers of a batch for aiokafka's parser, which reads a whole batch at once, in a few tens of ms."""

HEADER_OVERHEAD_BYTES = 160
"""Memory of one header beside its name and value: the objects tuple, str and bytes, and a list slot."""

RECORD_OVERHEAD_BYTES = 300
"""Memory of a record beside key, value and headers, in either library."""

_CHUNK_BYTES = 2**16
"""Bytes that are decompressed or skipped at a time."""


def topic_truncation_limit(topic: str) -> int:
    """Limit on the bytes of a key or value that is kept whole on a topic. A valid delta is never truncated."""
    return MAX_DELTA_BYTES if topic.endswith("deltas") else MAX_UNTRUNCATED_BYTES


class LenientMemoryRecords(MemoryRecords):  # type: ignore[misc]
    """The records of one partition in one fetch, batch by batch; replaces kafka-python's MemoryRecords."""

    whole = MAX_UNTRUNCATED_BYTES
    """Limit on the bytes of a key or value that is kept whole."""

    def next_batch(self) -> Any:
        """The next batch; None after the last one."""
        batch_bytes = self._next_slice
        if batch_bytes is None or len(batch_bytes) < self.MIN_SLICE or batch_bytes[self.MAGIC_OFFSET] < 2:
            return super().next_batch()  # the end, or message format 0 or 1, which Kafka 3.0 and newer do not write
        self._cache_next()
        return _LenientBatch(batch_bytes, self.whole)


class AiokafkaMemoryRecords(LenientMemoryRecords):
    """Replaces `MemoryRecords` in aiokafka's fetcher. Batches are of aiokafka's class if it reads them correctly."""

    def next_batch(self) -> Any:
        """The next batch; None after the last one.

        A trial read shows whether aiokafka's parser reads the batch correctly. It takes about 1 µs per record.
        """
        batch_bytes = self._next_slice
        if batch_bytes is not None and len(batch_bytes) >= self.MIN_SLICE and batch_bytes[self.MAGIC_OFFSET] < 2:
            self._cache_next()
            return RawLegacyBatch(bytes(batch_bytes), batch_bytes[self.MAGIC_OFFSET])
        batch = super().next_batch()
        if batch is None:
            return None
        try:
            raw = _decompress_batch(bytes(batch_bytes), batch)
            if raw is not None and _has_few_headers(raw, batch):
                offsets = [
                    record.offset if len(record.headers) <= MAX_RECORD_HEADERS else None for record in RawBatch(raw)
                ]
                # Correct if no record has too many headers (None), and if in a batch without gaps each record has the
                # offset of its position. A compacted batch has fewer records than offsets, and its offsets are trusted.
                expected = range(batch.base_offset, batch.next_offset)
                if None not in offsets and (len(offsets) != len(expected) or offsets == list(expected)):
                    return RawBatch(raw)
        except Exception:  # noqa: BLE001  (`_LenientBatch` reads any batch)
            return batch
        return batch


class BoundedFetcher(Fetcher):  # type: ignore[misc]
    """Replaces the class of a kafka-python consumer's fetcher: lenient parsing, and at most `MAX_POLL_BYTES` a call."""

    class PartitionRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
        """The records of one partition in one fetch."""

        record_iterator: Any
        taken_bytes = 0
        """Memory of the records that the last `take` returned."""

        def _unpack_records(self, tp: Any, records: Any, *deserializers: Any) -> Any:
            lenient = LenientMemoryRecords(records._buffer)  # noqa: SLF001  (it has no public name)
            lenient.whole = topic_truncation_limit(tp.topic)
            return super()._unpack_records(tp, lenient, *deserializers)

        def take(self, n: int | None = None) -> Any:
            """Up to `n` records, until they have `MAX_POLL_BYTES`."""
            records, self.taken_bytes = self.record_iterator, 0
            self.record_iterator = self._bounded(records)
            try:
                return super().take(n)
            finally:
                if self.record_iterator is not None:  # None: the base class has read the last record
                    self.record_iterator = records

        def _bounded(self, records: Iterator[Any]) -> Iterator[Any]:
            while self.taken_bytes < MAX_POLL_BYTES and (record := next(records, None)) is not None:
                self.taken_bytes += record_memory_bytes(record)
                yield record

    def fetched_records(self, *args: Any, **options: Any) -> Any:
        """The fetched records for one poll, until they have `MAX_POLL_BYTES`."""
        self._polled_bytes = 0
        return super().fetched_records(*args, **options)

    def _append(self, drained: Any, part: Any, max_records: int, update_offsets: Any) -> int:
        """Append the records of one partition, and return their number.

        At `MAX_POLL_BYTES` it returns `max_records` instead, so that the base class ends the poll.
        """
        appended: int = super()._append(drained, part, max_records, update_offsets)
        self._polled_bytes += part.taken_bytes if appended else 0
        return max_records if self._polled_bytes >= MAX_POLL_BYTES else appended


class _TruncatingPartitionRecords(fetcher.PartitionRecords):  # type: ignore[misc]
    """Replaces `PartitionRecords` in aiokafka's fetcher: only there the topic of the records is known."""

    def __init__(self, tp: Any, records: Any, *options: Any) -> None:
        records.whole = topic_truncation_limit(tp.topic)
        super().__init__(tp, records, *options)


class _BoundedFetchResult(fetcher.FetchResult):  # type: ignore[misc]
    """Replaces `FetchResult` in aiokafka's fetcher: a call returns records until they have `MAX_POLL_BYTES`."""

    _partition_records: Any

    def getall(self, max_records: int | None = None) -> list[Any]:
        """Up to `max_records` records, until they have `MAX_POLL_BYTES`."""
        result: list[Any] = []
        if not self.check_assignment(self._topic_partition) or not self.has_more():
            return result
        memory_bytes, records = 0, self._partition_records
        while (max_records is None or len(result) < max_records) and memory_bytes < MAX_POLL_BYTES:
            if (record := next(records, None)) is None:
                self._partition_records = None  # so that `has_more` is False
                break
            result.append(record)
            memory_bytes += record_memory_bytes(record)
        self._assignment.state_value(self._topic_partition).consumed_to(records.next_fetch_offset)
        return result


def install_lenient_parser() -> None:
    """Make every aiokafka consumer of this process use these classes, also those of faust.

    aiokafka has no option for its classes, so the names in its module are replaced. Calling this twice is harmless.
    """
    fetcher.MemoryRecords = AiokafkaMemoryRecords
    fetcher.PartitionRecords = _TruncatingPartitionRecords
    fetcher.FetchResult = _BoundedFetchResult


class _LenientBatch(DefaultRecordBatch):  # type: ignore[misc]
    """A batch that can be read to its end, whatever is in it.

    The base class parses `_buffer` from `_pos`. A compressed batch has a stream; each of its records is put into
    `_buffer` alone.
    """

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
        """A stream of the records, which are decompressed while they are read."""
        self._assert_has_codec(self.compression_type)
        return _DecompressedStream(self.compression_type, bytes(memoryview(self._buffer)[self._pos :]))

    def _read_msg(self) -> Any:
        if self._stream is None:
            record = self._read_lenient()
        else:
            try:
                record = self._read_streamed(self._stream)
            except Exception as error:  # noqa: BLE001  (each codec raises its own errors)
                record = self._unreadable_remainder(error)
        # Without gaps from compaction, the position of a record gives its offset, and its own claim is ignored.
        if self.records_count == self.last_offset_delta + 1:
            record._offset = self.base_offset + self._next_record_index  # noqa: SLF001
        return record

    def _read_lenient(self) -> Any:
        """The record that begins at `_pos`, also if it is malformed."""
        begin = self._pos
        try:
            return self._read_bounded()
        except Exception:  # noqa: BLE001  (each step of the parser raises its own errors)
            return self._read_malformed(begin)

    def _read_bounded(self) -> Any:
        """The record that begins at `_pos`, with its first `MAX_RECORD_HEADERS` headers."""
        if len(self._buffer) - self._pos <= 2 * MAX_RECORD_HEADERS:  # no room for more headers, of 2 bytes each
            return super()._read_msg()
        size, body = decode_varint(self._buffer, self._pos)
        count, position = _read_header_count(self._buffer, body)
        if count <= MAX_RECORD_HEADERS:
            return super()._read_msg()
        end = body + size
        if end > len(self._buffer):
            raise CorruptRecordError(f"a record of {size} bytes ends behind its batch")
        headers = _read_headers(self._buffer[:end], count, position)
        timestamp_delta, position = decode_varint(self._buffer, body + 1)  # after the attributes, one byte
        offset_delta, position = decode_varint(self._buffer, position)
        key, position = _read_part(self._buffer, position)
        value, position = _read_part(self._buffer, position)
        self._pos = end
        return self._build_record(size, timestamp_delta, offset_delta, key, value, headers)

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
        """A record of more than `MAX_UNTRUNCATED_BYTES`, with truncated parts, if any.

        Headers are left out if they are larger than this limit or cannot be parsed.
        """
        end = stream.position + size
        stream.read(1)  # the attributes
        (_, timestamp_delta), (_, offset_delta) = stream.read_varint(), stream.read_varint()
        key, value = stream.read_part(self._truncation_limit), stream.read_part(self._truncation_limit)
        remaining = end - stream.position
        if remaining < 0:
            raise CorruptRecordError(f"a record of {size} bytes has parts that end behind it")
        headers: list[tuple[str, bytes | None]] = []
        if remaining <= MAX_UNTRUNCATED_BYTES:
            raw = stream.read(remaining)
            with suppress(Exception):  # malformed headers do not hide the next record: the stream is at its start
                headers = _read_headers(raw, *decode_varint(raw, 0))
        else:
            stream.skip(remaining)
        self._buffer, self._pos = bytearray(), 0
        return self._build_record(size, timestamp_delta, offset_delta, key, value, headers)

    def _unreadable_remainder(self, error: Exception) -> Any:
        """One record in place of the remaining records of the batch, at its last offset."""
        first, last = self.base_offset + self._next_record_index, self.last_offset
        unread = f"the record at offset {last}" if first == last else f"the records at offsets {first} to {last}"
        start, size = b"", 0
        if isinstance(error, _BatchTooLargeError):
            start, size = error.start, error.size
            reason = f"the batch decompresses to more than {MAX_BATCH_BYTES} bytes, so {unread} cannot be read"
        else:
            reason = f"{unread} cannot be decompressed: {error or type(error).__name__}"
        self._next_record_index = self._num_records - 1  # the base class ends the batch after this record
        self._buffer, self._pos, self._stream = bytearray(), 0, None
        value = TruncatedBytes(start, size, reason=reason)
        return DefaultRecord(size, last, self.max_timestamp, self.timestamp_type, None, value, [])

    def _read_malformed(self, begin: int) -> Any:
        """Parse the record at `begin` again, ignoring its attributes and escaping header names; else its raw bytes."""
        if not isinstance(self._buffer, _LenientBytes):  # at most one copy per buffer
            self._buffer = _LenientBytes(self._buffer)
        body, end = begin, len(self._buffer)  # without a readable size, the record is the whole remainder
        attributes = None
        try:
            size, body = decode_varint(self._buffer, begin)
            end = body + size if 0 < size <= end - body else end
            attributes, self._buffer[body] = self._buffer[body], 0
            self._pos = begin
            return self._read_bounded()
        except Exception:  # noqa: BLE001  (each step of the parser raises its own errors)
            self._pos = end
            if attributes is not None:
                self._buffer[body] = attributes  # restore the byte, so that the raw bytes are those of the record
            raw = bytes(self._buffer[body:end])
            return DefaultRecord(
                len(raw), self.base_offset, self.max_timestamp, self.timestamp_type, None, bytes(raw), []
            )


class _LenientBytes(bytearray):
    """Bytes whose slices decode without errors: what is not UTF-8 is written as escapes."""

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        item = super().__getitem__(index)
        return _LenientBytes(item) if isinstance(index, slice) else item

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Decode with escapes, whatever `errors` is: the libraries call it without."""
        del errors
        return super().decode(encoding, "backslashreplace")


class _BatchTooLargeError(Exception):
    """A batch decompresses to more than `MAX_BATCH_BYTES`. It has start and size of the excessive part, if known."""

    def __init__(self, start: bytes = b"", size: int = 0) -> None:
        super().__init__()
        self.start, self.size = start, size


class _DecompressedStream:
    """The content of a compressed batch. It holds little more than the part that is being read."""

    def __init__(self, codec: int, compressed: bytes) -> None:
        self._chunks = _DECOMPRESSORS[codec](compressed)
        self._buffered = bytearray()
        self._decompressed_bytes = 0
        self.position = 0
        """Bytes that were read so far."""

    def read(self, count: int) -> bytes:
        """The next `count` bytes.

        Raises:
            EOFError: the content ends before.
            _BatchTooLargeError: the content has more than `MAX_BATCH_BYTES`.
        """
        while len(self._buffered) < count:
            chunk = next(self._chunks, b"")
            self._decompressed_bytes += len(chunk)
            if not chunk:
                raise EOFError("it ends within a record")
            if self._decompressed_bytes > MAX_BATCH_BYTES:
                raise _BatchTooLargeError
            self._buffered += chunk
        data = bytes(memoryview(self._buffered)[:count])
        del self._buffered[:count]
        self.position += count
        return data

    def skip(self, count: int) -> None:
        """Skip the next `count` bytes, in chunks, so that they are never held together."""
        for length in _chunk_lengths(count):
            self.read(length)

    def read_varint(self) -> tuple[bytes, int]:
        """The bytes of the next varint, and its value."""
        raw = self.read(1)
        # 7 bits a byte, so 64 bits take at most 10 bytes; `decode_varint` rejects longer ones.
        while raw[-1] & 0x80 and len(raw) < 10:
            raw += self.read(1)
        return raw, decode_varint(bytearray(raw), 0)[0]

    def read_part(self, truncation_limit: int) -> bytes | None:
        """The next key or value, after its length; a `TruncatedBytes` if it is longer than `truncation_limit`."""
        _, size = self.read_varint()
        if size < 0:
            return None
        if size <= truncation_limit:
            return self.read(size)
        start = self.read(min(size, TRUNCATED_BYTES))
        if self.position + size > MAX_BATCH_BYTES:  # fail before decompressing it
            raise _BatchTooLargeError(start, size)
        digest = hashlib.sha256(start)
        for length in _chunk_lengths(size - len(start)):
            digest.update(self.read(length))
        return TruncatedBytes(start, size, digest.hexdigest())

    def read_all(self, limit: int) -> bytes | None:
        """The whole content; None if it has more than `limit` bytes."""
        for chunk in self._chunks:
            self._buffered += chunk
            if len(self._buffered) > limit:
                return None
        return bytes(self._buffered)


def _decompress_batch(raw: bytes, batch: _LenientBatch) -> bytes | None:
    """The same batch, uncompressed; None if it has more than `MAX_EAGER_BYTES` or its checksum is wrong."""
    if batch.compression_type == batch.CODEC_NONE:
        return raw
    content = batch.open_stream().read_all(MAX_EAGER_BYTES)
    if content is None or not batch.validate_crc():
        return None
    # Write a new batch header: its length, its attributes without the codec, and a checksum for both.
    size, attributes = batch.HEADER_STRUCT.size, batch.ATTRIBUTES_OFFSET
    plain = bytearray(raw[:size] + content)
    plain[8:12] = (len(plain) - batch.AFTER_LEN_OFFSET).to_bytes(4, "big")
    plain[attributes : attributes + 2] = (batch.attributes & ~batch.CODEC_MASK).to_bytes(2, "big", signed=True)
    plain[batch.CRC_OFFSET : attributes] = calc_crc32c(memoryview(plain)[attributes:]).to_bytes(4, "big")
    return bytes(plain)


def _has_few_headers(raw: bytes, batch: _LenientBatch) -> bool:
    """Whether an uncompressed batch has at most `MAX_BATCH_HEADERS`, and each record at most `MAX_RECORD_HEADERS`.

    It reads only the number of headers of each record.
    """
    if len(raw) <= 2 * MAX_BATCH_HEADERS:  # no room for more, of 2 bytes each; the caller checks each record
        return True
    headers_left, position = MAX_BATCH_HEADERS, batch.HEADER_STRUCT.size
    for _ in range(batch.records_count):
        size, body = decode_varint(raw, position)
        count, _ = _read_header_count(raw, body)
        headers_left -= count
        if size <= 0 or count > MAX_RECORD_HEADERS or headers_left < 0:
            return False
        position = body + size
    return True


def _read_header_count(buffer: bytes | bytearray, body: int) -> tuple[int, int]:
    """The number of headers of a record, and the position after this number. `body` is the position of its attributes.

    Raises:
        CorruptRecordError: the libraries would read the attributes, and so the whole record, wrongly.
    """
    if buffer[body] & 0x80:
        raise CorruptRecordError(f"a record has the attributes {buffer[body]}, more than the 7 bits that can be read")
    _, position = decode_varint(buffer, body + 1)  # timestamp
    _, position = decode_varint(buffer, position)  # offset
    size, position = decode_varint(buffer, position)  # key; -1 for none
    size, position = decode_varint(buffer, position + max(0, size))  # value; -1 for none
    count, position = decode_varint(buffer, position + max(0, size))
    return count, position


def _read_part(buffer: bytes | bytearray, position: int) -> tuple[bytes | None, int]:
    """The bytes after the length at `position`, None for a negative length, and the position after them."""
    size, position = decode_varint(buffer, position)
    return (None, position) if size < 0 else (bytes(buffer[position : position + size]), position + size)


def _read_headers(raw: bytes | bytearray, count: int, position: int) -> list[tuple[str, bytes | None]]:
    """The first `MAX_RECORD_HEADERS` of the `count` headers of a record that begin at `position`."""
    headers = []
    for _ in range(min(count, MAX_RECORD_HEADERS)):
        name, position = _read_part(raw, position)
        value, position = _read_part(raw, position)
        headers.append(((name or b"").decode(errors="backslashreplace"), value))
    return headers


def _chunk_lengths(count: int) -> Iterator[int]:
    """The lengths of the chunks of `count` bytes."""
    while count > 0:
        yield min(count, _CHUNK_BYTES)
        count -= _CHUNK_BYTES


def record_memory_bytes(record: Any) -> int:
    """Memory in bytes of a record of either library, estimated."""
    headers = sum(HEADER_OVERHEAD_BYTES + len(name) + len(value or b"") for name, value in record.headers)
    return RECORD_OVERHEAD_BYTES + len(record.key or b"") + len(record.value or b"") + headers


def _file_chunks(open_file: Callable[[Any], Any]) -> Callable[[bytes], Iterator[bytes]]:
    def chunks(compressed: bytes) -> Iterator[bytes]:
        with open_file(io.BytesIO(compressed)) as content:
            while chunk := content.read(_CHUNK_BYTES):
                yield chunk

    return chunks


def _snappy_chunks(compressed: bytes) -> Iterator[bytes]:
    """The blocks of the xerial framing, which Kafka's own clients write; or a single block without framing."""
    if not compressed.startswith(b"\x82SNAPPY\x00"):
        yield _snappy_block(compressed)
        return
    position = 16  # after the magic and two version numbers
    while position < len(compressed):
        size = int.from_bytes(compressed[position : position + 4], "big", signed=True)
        if not 0 < size <= len(compressed) - position - 4:
            raise CorruptRecordError(f"a block of snappy has {size} bytes")
        position += 4 + size
        yield _snappy_block(compressed[position - size : position])


def _snappy_block(block: bytes) -> bytes:
    """Decompress one block.

    A block begins with its decompressed length, as an unsigned varint. The library allocates this much memory at once,
    so the length is checked first.
    """
    length = shift = 0
    for byte in block[:5]:  # a length has 32 bits, so at most 5 bytes of 7 bits
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if length > MAX_BATCH_BYTES:
        raise _BatchTooLargeError
    content: bytes = snappy.decompress(block)
    return content


_DECOMPRESSORS: dict[int, Callable[[bytes], Iterator[bytes]]] = {
    DefaultRecordBatch.CODEC_GZIP: _file_chunks(lambda content: gzip.GzipFile(fileobj=content)),
    DefaultRecordBatch.CODEC_SNAPPY: _snappy_chunks,
    DefaultRecordBatch.CODEC_LZ4: _file_chunks(lz4.frame.open),
    DefaultRecordBatch.CODEC_ZSTD: _file_chunks(
        lambda content: zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True)
    ),
}
"""By codec, a function that decompresses the content of a batch in chunks."""
