"""Keeps a read model up to date with the topics, in a thread."""

import sqlite3
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import structlog
from kafka import TopicPartition
from kafka.errors import KafkaError

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.kafka import missing_topic_error, open_reader_client
from gracestream.pipeline.read_model.records import TOPICS
from gracestream.pipeline.read_model.store import Position, ReadModelStore
from gracestream.pipeline.settings import KafkaSettings

POLL_MS = 200
"""Milliseconds of one poll. An action of a person is shown after about this time."""

MAX_POLL_RECORDS = 2000
"""Records of one transaction. While one runs, the state before it is shown."""

REFRESH_SECONDS = 60.0
"""Seconds between looks at the partitions: more of them may have been added, and others cut."""

RETRY_SECONDS = 5.0
"""Pause after a failure of Kafka or of the disk."""

log = structlog.get_logger()


class TopicFollower(threading.Thread):
    """Reads the topics into a read model until it is stopped.

    A failure is logged and tried again. Nothing is lost, because positions are stored with the records.

    Attributes:
        caught_up: Set once everything is stored that the topics had at the start.
        failure: The text of the present failure; empty if there is none.
    """

    def __init__(self, settings: KafkaSettings, store: ReadModelStore) -> None:
        super().__init__(name="read-model", daemon=True)
        self._settings, self._store = settings, store
        self._names = {settings.topic(name): name for name in TOPICS}
        self._stopped = threading.Event()
        self.caught_up = threading.Event()
        self.failure = ""

    def stop(self) -> None:
        """Stop reading, and wait until the present batch is stored."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Follow the topics; the thread does this."""
        while not self._stopped.is_set():
            try:
                options: dict[str, Any] = {
                    "max_poll_records": MAX_POLL_RECORDS,
                    "metadata_max_age_ms": int(1000 * REFRESH_SECONDS),
                }
                with closing(open_reader_client(self._settings, **options)) as client:
                    self._follow(client)
            except (KafkaError, UserError, sqlite3.Error, OSError) as error:
                self.failure = str(error) or type(error).__name__
                log.warning(
                    "read_model_stalled", reason=self.failure, consequence="pages show the state before this failure"
                )
                self._stopped.wait(RETRY_SECONDS)

    def _follow(self, client: Any) -> None:
        """Store batches until the follower is stopped, or the partitions have to be looked at again."""
        ends = self._assign(client)
        refresh_at = time.monotonic() + REFRESH_SECONDS
        while not self._stopped.is_set():
            polled = client.poll(timeout_ms=POLL_MS)
            positions = self._positions(client)
            if polled or positions != self._store.positions():
                records = [(self._names[key.topic], record) for key, found in polled.items() for record in found]
                self._store.add(records, positions)
            self.failure = ""
            if not self.caught_up.is_set() and all(positions.get(key, 0) >= end for key, end in ends.items()):
                self.caught_up.set()
                log.info("read_model_ready", partitions=len(ends))
            if time.monotonic() > refresh_at:
                ends = self._assign(client)
                refresh_at = time.monotonic() + REFRESH_SECONDS

    def _assign(self, client: Any) -> Mapping[Position, int]:
        """Read all partitions from the stored positions on. Returns the present end offsets.

        A position beyond the end means that the topic was created again; then everything is read again.
        """
        partitions: dict[TopicPartition, Position] = {}
        for topic, name in self._names.items():
            numbers = client.partitions_for_topic(topic)
            if not numbers:
                raise missing_topic_error(topic)
            partitions |= {TopicPartition(topic, number): (name, number) for number in numbers}
        ends = client.end_offsets(list(partitions))
        stored = self._store.positions()
        if any(stored.get(position, 0) > ends[partition] for partition, position in partitions.items()):
            log.warning("read_model_rebuilt", consequence="pages are incomplete until all topics were read again")
            self._store.rebuild()
            stored = {}
        client.assign(list(partitions))
        for partition, position in partitions.items():
            client.seek(partition, stored.get(position, 0))
        return {position: ends[partition] for partition, position in partitions.items()}

    def _positions(self, client: Any) -> dict[Position, int]:
        positions = {
            (self._names[partition.topic], partition.partition): client.position(partition, timeout_ms=POLL_MS)
            for partition in client.assignment()
        }
        # kafka-python knows no position while it looks up the first record.
        return {position: offset for position, offset in positions.items() if offset is not None}
