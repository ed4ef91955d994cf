"""The delta follower: it reads `deltas` and hands its records out in order (design, section 5).

What it guarantees:

1. Every committed record of the topic comes out once, in order of offset, from the start of the history or from the
   place that it was given; but for those of a lower term than one before them, which a fenced editor may have left.
2. `take(seq)` hands out only records up to that delta; none of a later one.
3. A record that cannot be read is a fault: `take` raises it at that place and hands out nothing after it;
   `next_record` tells of it at once.
4. It holds records of at most some 64 MiB that were not taken yet, or one record, with what they are decoded to, and
   reads on as they are taken.

It does not judge whether a record continues the history: that is the codebook's to say.
"""

import math
import threading
import time
from collections import deque
from contextlib import closing
from typing import Any

import structlog
from kafka import TopicPartition
from kafka.errors import KafkaError, KafkaTimeoutError

from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka import DELTA_CONSUMER_OPTIONS, DELTAS, consumer, read_bulk
from gracestream.pipeline.settings import Settings
from gracestream.schemas.deltas import DecodedDelta
from gracestream.schemas.messages import InvalidMessage

log = structlog.get_logger()

MAX_BUFFERED_BYTES = 64 * 2**20
"""Of the records that a follower holds and that were not taken yet; what they are decoded to takes as much again."""

END_OFFSET_TIMEOUT_MS = 1000
"""How long Kafka has to say where the topic ends."""


class DeltaFollower:
    """A thread that keeps what `deltas` holds until it is taken. Start it once; close it at the end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._buffer: deque[tuple[int, int, bytes]] = deque()
        self._buffered_bytes = 0
        self._condition = threading.Condition()
        self._fault: HistoryError | None = None
        self._term = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self.latest_seq = 0
        """The newest delta read; nothing says that it is live."""
        self.next_offset = 0
        """The next offset to be read."""
        self.initial_end = 0
        """The end of the topic as it was when reading began."""
        self.at_end = False
        """Whether all that the topic held when reading began was read, or a fault was met."""
        self.caught_up_at = -math.inf
        """When (monotonic time) the topic held nothing that has not been read; `find_end` brings it up to date."""
        self._end_check_requested = threading.Event()

    def start(self, offset: int = 0, seq: int = 0, term: int = 0) -> None:
        """Begin to read: at `next_offset`, after delta `seq` of `term`."""
        self.next_offset, self.latest_seq, self._term = offset, seq, term
        self._thread.start()

    def request_end_check(self) -> None:
        """Let `caught_up_at` become a later time, once the topic has been read to its end."""
        self._end_check_requested.set()

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        with self._condition:
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def poll(self, max_seq: int, timeout: float) -> list[tuple[int, bytes]]:
        """Offsets and records not taken yet, up to delta `max_seq`; waits up to `timeout` seconds until there is one.

        Raises:
            HistoryError: the next record cannot be read.
        """
        deadline = time.monotonic() + timeout
        with self._condition:
            while not self._buffer and self.latest_seq < max_seq and self._fault is None:
                if not self._condition.wait(max(0.0, deadline - time.monotonic())):
                    break
            taken = []
            while self._buffer and self._buffer[0][0] <= max_seq:
                taken.append(self._buffer.popleft()[1:])
            self._buffered_bytes -= sum(len(record) for _, record in taken)
            self._condition.notify_all()
        if not taken:
            self.raise_if_failed()
        return taken

    def raise_if_failed(self) -> None:
        """Raises HistoryError where reading met one and all before it has been taken."""
        with self._condition:
            if self._fault is not None and not self._buffer:
                raise self._fault

    def peek(self) -> tuple[int, bytes] | None:
        """Offset and record of what `poll` hands out next, whether it is live or not.

        Raises:
            HistoryError: reading met a record that cannot be read, be it this one or a later one.
        """
        with self._condition:
            if self._fault is not None:
                raise self._fault
            return self._buffer[0][1:] if self._buffer else None

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._read()
            except (KafkaError, OSError) as error:
                log.warning("deltas_unreachable", error=str(error) or type(error).__name__, offset=self.next_offset)
                self._stop.wait(1.0)
            except HistoryError as fault:
                self._fail(fault)
            except Exception as error:  # noqa: BLE001  (a thread that ends unseen would leave the replica behind)
                self._fail(HistoryError(f"reading {DELTAS} failed at offset {self.next_offset}: {error!r}"))

    def _fail(self, fault: HistoryError) -> None:
        log.error("deltas_fault", reason=str(fault), offset=self.next_offset)
        with self._condition:
            self._fault = fault
            self._condition.notify_all()
        self.at_end = True
        self._stop.set()

    def _read(self) -> None:
        partition = TopicPartition(self._settings.topic(DELTAS), 0)
        reader = consumer(self._settings, fetch_max_wait_ms=100, **DELTA_CONSUMER_OPTIONS)
        try:
            reader.assign([partition])
            self.initial_end = reader.end_offsets([partition])[partition]
            with closing(
                read_bulk(self._settings, partition, self.next_offset, self.initial_end, **DELTA_CONSUMER_OPTIONS)
            ) as bulk:
                for records, following in bulk:
                    self._buffer_records([(record.offset, record.value) for record in records])
                    if self._stop.is_set():
                        return
                    self.next_offset = following
            reader.seek(partition, self.next_offset)
            while not self._stop.is_set():
                self.at_end = self.at_end or reader.position(partition) >= self.initial_end
                if self._end_check_requested.is_set():
                    self._check_end(reader, partition)
                for records in reader.poll(timeout_ms=200).values():
                    self._buffer_records([(record.offset, record.value) for record in records])
        finally:
            reader.close()

    def _check_end(self, reader: Any, partition: TopicPartition) -> None:
        now = time.monotonic()
        try:
            end = reader.end_offsets([partition], timeout_ms=END_OFFSET_TIMEOUT_MS)[partition]
        except KafkaTimeoutError:
            return  # and asked again after the next poll
        if reader.position(partition) >= end:
            self.caught_up_at = now
            self._end_check_requested.clear()

    def _buffer_records(self, records: list[tuple[int, bytes]]) -> None:
        with self._condition:
            for offset, record in records:
                while self._buffered_bytes > MAX_BUFFERED_BYTES and not self._stop.is_set():
                    self._condition.notify_all()
                    self._condition.wait()
                if self._stop.is_set():
                    return
                try:
                    decoded = DecodedDelta.from_record(record)
                except InvalidMessage as error:
                    raise HistoryError(f"the record at offset {offset} of {DELTAS} cannot be read: {error}") from error
                self.next_offset = offset + 1
                delta = decoded.delta
                if delta.term < self._term:
                    log.warning("delta_dropped", seq=delta.seq, term=delta.term, newer=self._term)
                    continue
                self._term = delta.term
                self._buffer.append((delta.seq, offset, decoded))
                self._buffered_bytes += len(record)
                self.latest_seq = max(delta.seq, self.latest_seq)
            self._condition.notify_all()
