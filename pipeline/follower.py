"""The delta follower: it reads `deltas` from the first record on and hands them out in order (design, section 5).

What it guarantees:

1. Every committed record of the topic comes out once, in order of offset, from the start of the history; but for those
   of a lower term than one before them, which a fenced editor may have left behind.
2. `take(seq)` hands out exactly the records up to that delta; none of a later one.
3. A record that cannot be read is a fault: `take` raises it at that place and hands out nothing after it.

It does not judge whether a record continues the history: that is the codebook's to say.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import structlog
from kafka import TopicPartition
from kafka.errors import KafkaError

from pipeline.clients import consumer
from pipeline.codebook import DeltaFault
from pipeline.settings import Settings
from pipeline.topics import DELTAS, TopicError
from schemas.deltas import decode_delta
from schemas.messages import InvalidMessage

log = structlog.get_logger()


class Follower:
    """A thread that keeps what `deltas` holds until it is taken. Start it once; close it at the end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._news = threading.Condition()
        self._fault: DeltaFault | None = None
        self._term = 0
        self._stop = threading.Event()
        self._at_end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self.latest_seq = 0
        """The newest delta read; nothing says that it is live."""
        self.offset = 0
        """The next offset to be read."""

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def wait_for_end(self, timeout: float) -> bool:
        """Whether, within `timeout` seconds, all that the topic held at the start was read, or a fault was met."""
        return self._at_end.wait(timeout)

    def take(self, seq: int, timeout: float) -> list[bytes]:
        """The records not taken yet, up to delta `seq`; waits up to `timeout` seconds for that delta to be read.

        Raises:
            DeltaFault: the next record cannot be read.
        """
        deadline = time.monotonic() + timeout
        with self._news:
            while self.latest_seq < seq and self._fault is None and (left := deadline - time.monotonic()) > 0:
                self._news.wait(left)
            taken = []
            while self._waiting and self._waiting[0][0] <= seq:
                taken.append(self._waiting.popleft()[1])
        if not taken:
            self.raise_fault()
        return taken

    def raise_fault(self) -> None:
        """Raises DeltaFault where reading met one and all before it has been taken."""
        with self._news:
            if self._fault is not None and not self._waiting:
                raise self._fault

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self._read()
            except (KafkaError, OSError) as error:
                log.warning("deltas_unreachable", error=str(error) or type(error).__name__, offset=self.offset)
                self._stop.wait(1.0)
            except DeltaFault as fault:
                self._fail(fault)
            except Exception as error:  # noqa: BLE001  (a thread that ends unseen would leave the replica behind)
                self._fail(DeltaFault(f"reading {DELTAS} failed at offset {self.offset}: {error!r}"))

    def _fail(self, fault: DeltaFault) -> None:
        log.error("deltas_fault", reason=str(fault), offset=self.offset)
        with self._news:
            self._fault = fault
            self._news.notify_all()
        self._at_end.set()
        self._stop.set()

    def _read(self) -> None:
        partition = TopicPartition(self._settings.topic(DELTAS), 0)
        reader = consumer(self._settings, fetch_max_wait_ms=100)
        try:
            reader.assign([partition])
            reader.seek(partition, self.offset)
            end = reader.end_offsets([partition])[partition]
            while not self._stop.is_set():
                if not self._at_end.is_set() and reader.position(partition) >= end:
                    self._at_end.set()
                for records in reader.poll(timeout_ms=200).values():
                    self._keep([(record.offset, record.value) for record in records])
        finally:
            reader.close()

    def _keep(self, records: list[tuple[int, bytes]]) -> None:
        with self._news:
            for offset, record in records:
                try:
                    delta = decode_delta(record)
                except InvalidMessage as error:
                    raise DeltaFault(f"the record at offset {offset} of {DELTAS} cannot be read: {error}") from error
                self.offset = offset + 1
                if delta.term < self._term:
                    log.warning("delta_dropped", seq=delta.seq, term=delta.term, newer=self._term)
                    continue
                self._term = delta.term
                self._waiting.append((delta.seq, record))
                self.latest_seq = max(delta.seq, self.latest_seq)
            self._news.notify_all()


def read_history(settings: Settings, on_record: Callable[[bytes, int, int], object]) -> None:
    """Every record of `deltas` up to its present end: `on_record(record, offset, timestamp in ms)` in order.

    Reading ends early when `on_record` returns False. Control records of transactions lie between offsets, so the end
    is where the consumer's position reaches it, not a count of records.

    Raises:
        TopicError: there is no such topic.
    """
    partition = TopicPartition(settings.topic(DELTAS), 0)
    history = consumer(settings)
    try:
        if not history.partitions_for_topic(partition.topic):
            raise TopicError(f"there is no topic {partition.topic!r}; create the topics with `gracestream topics`")
        history.assign([partition])
        history.seek(partition, 0)
        end = history.end_offsets([partition])[partition]
        while history.position(partition) < end:
            for records in history.poll(timeout_ms=1000).values():
                for record in records:
                    if on_record(record.value, record.offset, record.timestamp) is False:
                        return
    finally:
        history.close()
