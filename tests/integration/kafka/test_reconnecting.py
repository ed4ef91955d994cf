"""Readers and writers pause before they connect again to a Kafka that is away."""

import time
from contextlib import ExitStack, closing, suppress

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.errors import KafkaError

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.kafka.clients import consumer, producer
from gracestream.pipeline.kafka.topics import DELTAS, EDITS, FEEDBACK, create_topics
from gracestream.pipeline.settings import Settings
from tests.support.closing_listener import ClosingListener

AWAY = 3.0
"""Seconds for which Kafka is away: about seven attempts of each connection."""

CONNECTIONS = 6
"""Of the clients below: the member of a group and the transactional writer also connect to their coordinator."""


def give_up(writer: KafkaProducer) -> None:
    """Close a writer whose records cannot be sent."""
    writer._sender.force_close()
    writer._sender.join()
    writer.close(timeout=1)


@pytest.mark.kafka
def test_a_proxy_without_a_broker_is_connected_to_a_few_times(own_kafka: LocalKafka, deployment: Settings) -> None:
    settings = deployment.replace(kafka=own_kafka.bootstrap).kafka
    create_topics(settings, partitions=1, replication=1)
    with ExitStack() as clients:
        follower, member = (clients.enter_context(closing(consumer(settings, group_id=group))) for group in (None, "g"))
        follower.assign([TopicPartition(settings.topic(DELTAS), 0)])
        member.subscribe([settings.topic(FEEDBACK)])
        writers = [producer(settings), producer(settings, transactional_id="writer")]
        for writer in writers:
            clients.callback(give_up, writer)
        writers[1].init_transactions()
        writers[1].begin_transaction()
        for writer in writers:
            writer.send(settings.topic(EDITS), value=b"one", partition=0).get(timeout=30)
        for reader in (follower, member):
            reader.poll(timeout_ms=1000)
        own_kafka.kill()
        with ClosingListener(int(own_kafka.bootstrap.rpartition(":")[2])) as listener:
            for writer in writers:
                writer.send(settings.topic(EDITS), value=b"two", partition=0)
            deadline = time.monotonic() + AWAY
            while time.monotonic() < deadline:
                for reader in (follower, member):
                    with suppress(KafkaError):
                        reader.poll(timeout_ms=50)
            attempts = listener.connections
        assert len(writers) + 2 <= attempts <= 10 * CONNECTIONS
