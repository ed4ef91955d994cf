"""Transactions during an outage of Kafka: each ends, and the caller gets the result."""

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka import TopicPartition
from kafka.errors import KafkaTimeoutError
from kafka.structs import OffsetAndMetadata

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.kafka.topics import EDITS, FEEDBACK, create_topics
from gracestream.pipeline.settings import Settings
from tests.support.running import hang, records, wait_for_open_transactions

AWAY = 3.0
"""Seconds without an answer, enough for several attempts to connect."""


@pytest.fixture
def own_kafka(folder: Path) -> Iterator[LocalKafka]:
    with LocalKafka(folder / "kafka") as server:
        yield server


@pytest.fixture
def settings(deployment: Settings, own_kafka: LocalKafka) -> Settings:
    found = deployment.replace(kafka=own_kafka.bootstrap)
    create_topics(found.kafka, partitions=1, replication=1)
    return found


def begun(settings: Settings) -> Any:
    """A writer in a transaction with one record on `edits`."""
    writer = producer(settings.kafka, transactional_id=settings.kafka.topic("editor"))
    writer.init_transactions()
    writer.begin_transaction()
    writer.send(settings.kafka.topic(EDITS), value=b"one", partition=0).get(timeout=30)
    return writer


def offsets(settings: Settings) -> tuple[dict[TopicPartition, OffsetAndMetadata], str]:
    """An offset in `feedback` of the editors' group."""
    return {TopicPartition(settings.kafka.topic(FEEDBACK), 0): OffsetAndMetadata(1, "", -1)}, settings.kafka.topic(
        "editor"
    )


@pytest.mark.slow
def test_a_transaction_is_committed_once_kafka_answers_again(settings: Settings, own_kafka: LocalKafka) -> None:
    writer = begun(settings)
    own_kafka.kill()

    def commit() -> None:
        writer.send_offsets_to_transaction(*offsets(settings))
        writer.commit_transaction()

    waiting = threading.Thread(target=commit, daemon=True)
    waiting.start()
    waiting.join(AWAY)
    assert waiting.is_alive(), "it cannot be committed without Kafka"
    own_kafka.start()
    waiting.join(40)
    assert not waiting.is_alive()
    wait_for_open_transactions(settings, EDITS)
    assert [record.value for record in records(settings, EDITS)] == [b"one"]
    writer.close()


CALLS: dict[str, Callable[[Any, Settings], None]] = {
    "offsets": lambda writer, settings: writer.send_offsets_to_transaction(*offsets(settings)),
    "commit": lambda writer, _: writer.commit_transaction(),
    "abort": lambda writer, _: writer.abort_transaction(),
}


@pytest.mark.slow
@pytest.mark.parametrize("step", CALLS)
def test_a_wait_for_a_silent_kafka_fails_in_time(settings: Settings, own_kafka: LocalKafka, step: str) -> None:
    writer = begun(settings)
    writer.config["max_block_ms"] = 2000
    hang(own_kafka)
    try:
        with pytest.raises(KafkaTimeoutError, match="within 2 s"):
            CALLS[step](writer, settings)
        writer.close(timeout=0)
    finally:
        own_kafka.child.send_signal(signal.SIGCONT)
    writer = begun(settings)  # ends the open transaction
    writer.commit_transaction()
    wait_for_open_transactions(settings, EDITS)
    assert records(settings, EDITS)[-1].value == b"one"
    writer.close()
