"""Late requests of a transaction: each test holds or copies a request in a proxy."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from kafka import TopicPartition
from kafka.structs import OffsetAndMetadata

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.kafka.clients import admin, consumer, producer
from gracestream.pipeline.kafka.topics import EDITS, FEEDBACK, create_topics
from gracestream.pipeline.kafka.transactions import TransactionalProducer
from gracestream.pipeline.settings import Settings
from tests.support.kafka_proxy import Api, Fault, KafkaProxy, Moment, proxied_kafka
from tests.support.running import records, wait_for_open_transactions, wait_until


@dataclass(frozen=True, slots=True)
class Proxied:
    """A transactional producer behind a proxy. `settings` have the address of the same Kafka without the proxy."""

    writer: TransactionalProducer
    proxy: KafkaProxy
    settings: Settings

    def write(self, value: bytes) -> None:
        """Begin a transaction with one record."""
        self.writer.begin_transaction()
        self.writer.send(self.settings.kafka.topic(EDITS), value=value, partition=0).get(timeout=30)

    def take_offset(self, offset: int) -> None:
        """Add an offset of a group to the transaction."""
        position = {TopicPartition(self.settings.kafka.topic(FEEDBACK), 0): OffsetAndMetadata(offset, "", -1)}
        self.writer.send_offsets_to_transaction(position, self.settings.kafka.topic("editor"))

    def committed(self) -> list[bytes]:
        """The committed records."""
        wait_for_open_transactions(self.settings, EDITS)
        return [record.value for record in records(self.settings, EDITS)]

    def offset(self) -> int | None:
        """The group's committed offset."""
        reader = consumer(self.settings.kafka, group_id=self.settings.kafka.topic("editor"))
        try:
            found: int | None = reader.committed(TopicPartition(self.settings.kafka.topic(FEEDBACK), 0))
            return found
        finally:
            reader.close()


@pytest.fixture(scope="module")
def kafka_behind_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaProxy, LocalKafka]]:
    with proxied_kafka(tmp_path_factory.mktemp("kafka")) as found:
        yield found


@pytest.fixture(params=[2, 1], ids=["transaction.version=2", "transaction.version=1"])
def proxied(
    request: pytest.FixtureRequest, kafka_behind_proxy: tuple[KafkaProxy, LocalKafka], deployment: Settings
) -> Iterator[Proxied]:
    """A producer on a cluster whose EndTxn raises the epoch, and on the cluster after a downgrade of that feature."""
    proxy, server = kafka_behind_proxy
    settings = deployment.replace(kafka=server.bootstrap)
    create_topics(settings.kafka, partitions=1, replication=1)
    finalise(settings, request.param)
    through = settings.replace(kafka=proxy.address)
    writer = producer(through.kafka, transactional_id=settings.kafka.topic("editor"), retry_backoff_ms=5)
    assert writer._transaction_manager.end_raises_epoch == (request.param == 2)
    writer.init_transactions()
    yield Proxied(writer, proxy, settings)
    proxy.arm()
    writer.close(timeout=5)


def finalise(settings: Settings, level: int) -> None:
    """Set the cluster's `transaction.version`."""
    with admin(settings.kafka) as client:
        change = "UPGRADE" if level == 2 else "SAFE_DOWNGRADE"
        client.update_features({"transaction.version": (change, level)})
        wait_until(lambda: client.describe_features()["transaction.version"]["finalized"][1] == level)


def test_a_late_end_ends_no_other_transaction(proxied: Proxied) -> None:
    proxied.write(b"one")
    proxied.proxy.arm(fault := Fault(Api.END_TXN, "hold", Moment("before", Api.ADD_OFFSETS)))
    proxied.writer.commit_transaction()
    proxied.write(b"two")
    proxied.take_offset(7)  # the late commit arrives when `two` is in the log, but not its offset
    assert fault.released
    assert fault.error not in (0, None), "the broker counted it as the end of the second transaction"
    assert [record.value for record in records(proxied.settings, EDITS)] == [b"one"]
    proxied.writer.abort_transaction()
    proxied.write(b"three")
    proxied.take_offset(8)
    proxied.writer.commit_transaction()
    assert proxied.committed() == [b"one", b"three"]
    assert proxied.offset() == 8


LAST_EPOCH = 2**15 - 1


@pytest.mark.timeout(1800)
def test_transactions_go_on_when_the_epochs_of_a_producer_id_run_out(
    proxied: Proxied, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--chaos"):
        pytest.skip("raising an epoch 32,000 times takes minutes; `make chaos` does it")
    manager = proxied.writer._transaction_manager
    first = manager.producer_id_and_epoch.producer_id
    while manager.producer_id_and_epoch.epoch < LAST_EPOCH - 4:
        proxied.writer._wait(manager.begin_epoch_raise(), "raise the epoch")
    values = [str(number).encode() for number in range(8)]
    for offset, value in enumerate(values):
        proxied.proxy.arm(Fault(Api.END_TXN, "hold", Moment("before", Api.ADD_OFFSETS)))
        proxied.write(value)
        proxied.take_offset(offset)
        proxied.writer.commit_transaction()
    assert manager.producer_id_and_epoch.producer_id != first
    assert proxied.committed() == values
    assert proxied.offset() == len(values) - 1
