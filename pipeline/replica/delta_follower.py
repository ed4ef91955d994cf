"""Reads `deltas` in a background thread and hands out its records in order.

Guarantees (docs/explanation/consistency.md):

1. Every committed record is returned once, in the order of offsets, from the given offset on. Records of a lower term
   than an earlier record are skipped: a fenced editor wrote them.
2. `poll(max_seq)` returns no record after delta `max_seq`.
3. A record that cannot be read is a fault. `peek` raises it at once, `poll` after every record before it has been
   returned.
4. Memory is bounded. The buffer holds up to 64 MiB of records and one more, plus their decoded form, and is refilled as
   records are taken.

Not promised: that a record continues the history. The codebook checks this.
"""

import math
import threading
import time
from collections import deque
from contextlib import closing

import structlog
from kafka.errors import KafkaError, KafkaTimeoutError

from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka import DELTA_CONSUMER_OPTIONS, DELTAS, TopicReader
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.deltas import DecodedDelta
from gracestream.schemas.messages import InvalidMessage

log = structlog.get_logger()

MAX_BUFFERED_BYTES = 64 * 2**20
"""Bytes of records in the buffer. Their decoded form takes about as much again."""

END_OFFSET_TIMEOUT_SECONDS = 1.0
"""Seconds that Kafka has to tell the end of the topic to a follower that is asked whether it has caught up."""

FETCH_MAX_WAIT_MS = 100
"""Milliseconds that a fetch waits for new deltas. A request for the end of the topic may wait behind it."""


class DeltaFollower:
    """A thread that buffers the records of `deltas`. Start it once, and close it at the end."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._buffer: deque[tuple[int, int, bytes]] = deque()
        """Records that were not taken yet: seq, offset, record."""
        self._buffered_bytes = 0
        self._condition = threading.Condition()
        """Guards the buffer; notified when it grows, shrinks, or reading fails."""
        self._fault: HistoryError | None = None
        self._term = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self.latest_seq = 0
        """The newest delta that was read, whether it is published or not."""
        self.next_offset = 0
        """The next offset to read."""
        self.initial_end = 0
        """The end of the topic when reading began."""
        self.at_end = False
        """True once everything before `initial_end` has been read, or reading has failed."""
        self.caught_up_at = -math.inf
        """Monotonic time at which the topic had no unread record. `request_end_check` renews it."""
        self._end_check_requested = threading.Event()

    def start(self, offset: int = 0, seq: int = 0, term: int = 0) -> None:
        """Start reading at `offset`, after delta `seq` of `term`."""
        self.next_offset, self.latest_seq, self._term = offset, seq, term
        self._thread.start()

    def request_end_check(self) -> None:
        """Let the thread set `caught_up_at` once it has read the topic to its end."""
        self._end_check_requested.set()

    def close(self) -> None:
        """Stop reading, and wait up to 5 s for the thread."""
        self._stop.set()
        with self._condition:
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def poll(self, max_seq: int, timeout: float) -> list[tuple[int, bytes]]:
        """Offsets and records up to delta `max_seq`, each returned once.

        Waits up to `timeout` seconds while no record is buffered and `max_seq` has not been read.

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
        """Report a fault, once every record before it has been taken.

        Raises:
            HistoryError: reading has failed and the buffer is empty.
        """
        with self._condition:
            if self._fault is not None and not self._buffer:
                raise self._fault

    def peek(self) -> tuple[int, bytes] | None:
        """Offset and record that `poll` returns next, published or not; None if none is buffered.

        Raises:
            HistoryError: a record cannot be read, this one or a later one.
        """
        with self._condition:
            if self._fault is not None:
                raise self._fault
            return self._buffer[0][1:] if self._buffer else None

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._read()
            except (KafkaError, OSError) as error:  # transient: `_read` goes on at `next_offset`
                log.warning(
                    "delta_read_failed",
                    reason=str(error) or type(error).__name__,
                    offset=self.next_offset,
                    consequence="the replica keeps its codebook, and reads on in a second",
                )
                self._stop.wait(1.0)
            except HistoryError as fault:
                self._fail(fault)
            except Exception as error:  # noqa: BLE001  (a thread that ends unnoticed would leave the replica behind)
                self._fail(HistoryError(f"reading {DELTAS} failed at offset {self.next_offset}: {error!r}"))

    def _fail(self, fault: HistoryError) -> None:
        log.error(
            "history_error",
            reason=str(fault),
            offset=self.next_offset,
            consequence="no later delta can be applied, so the replica stops answering",
        )
        with self._condition:
            self._fault = fault
            self._condition.notify_all()
        self.at_end = True
        self._stop.set()

    def _read(self) -> None:
        """Read from `next_offset` until `close`."""
        options = {"fetch_max_wait_ms": FETCH_MAX_WAIT_MS, **DELTA_CONSUMER_OPTIONS}
        with TopicReader(self._settings, DELTAS, **options) as reader:
            self.initial_end = reader.end_offset()
            self.at_end = self.at_end or self.next_offset >= self.initial_end
            with closing(reader.follow(self.next_offset)) as batches:
                for records, next_offset in batches:
                    self._buffer_records([(record.offset, record.value) for record in records])
                    if self._stop.is_set():
                        return
                    self.next_offset = next_offset
                    self.at_end = self.at_end or next_offset >= self.initial_end
                    if self._end_check_requested.is_set():
                        self._check_end(reader)

    def _check_end(self, reader: TopicReader) -> None:
        """Set `caught_up_at` if everything before the end of the topic has been read."""
        now = time.monotonic()  # taken before the end is read: a record that comes later is not covered
        try:
            end = reader.end_offset(END_OFFSET_TIMEOUT_SECONDS)
        except KafkaTimeoutError:
            return  # the request stands, so the next batch is followed by another check
        if self.next_offset >= end:
            self.caught_up_at = now
            self._end_check_requested.clear()

    def _buffer_records(self, records: list[tuple[int, bytes]]) -> None:
        """Decode and buffer records; waits while the buffer is full."""
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
                    log.warning(
                        "stale_delta_ignored",
                        seq=delta.seq,
                        term=delta.term,
                        newer=self._term,
                        consequence="none: a fenced editor wrote the delta, and no worker applies it",
                    )
                    continue
                self._term = delta.term
                self._buffer.append((delta.seq, offset, decoded))
                self._buffered_bytes += len(record)
                self.latest_seq = max(delta.seq, self.latest_seq)
            self._condition.notify_all()
