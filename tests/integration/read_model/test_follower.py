"""A read model that follows real topics."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kafka.admin import NewPartitions

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.kafka import PREDICTIONS, REQUESTS, cluster_id, create_topics, producer
from gracestream.pipeline.kafka.clients import admin
from gracestream.pipeline.read_model import (
    PredictionFilter,
    ReadModelStore,
    TopicFollower,
    find_feedback,
    find_predictions,
    follower,
    timeline,
)
from gracestream.pipeline.settings import KafkaSettings, Settings
from gracestream.schemas.messages import Feedback, Outputs, Prediction, Request, encode
from tests.support.running import TIMEOUT, hang, resume, settings_for, wait_until
from tests.support.tiny_models import added
from tests.support.written_history import History

Following = Callable[[], tuple[ReadModelStore, TopicFollower]]


@pytest.fixture
def settings(kafka: str, redis_url: str, prefix: str) -> Settings:
    made = settings_for(kafka, redis_url, prefix)
    create_topics(made.kafka, partitions=3, replication=1)
    return made


@pytest.fixture
def follow(settings: Settings, tmp_path: Path) -> Iterator[Following]:
    """Starts a follower on one file; the one before ends first."""
    running: list[tuple[ReadModelStore, TopicFollower]] = []

    def end() -> None:
        while running:
            store, thread = running.pop()
            thread.stop()
            store.close()

    def start() -> tuple[ReadModelStore, TopicFollower]:
        end()
        store = ReadModelStore(tmp_path / "model.db", cluster_id(settings.kafka), settings.kafka.topic_prefix, 1000)
        thread = TopicFollower(settings.kafka, store)
        running.append((store, thread))
        thread.start()
        assert thread.caught_up.wait(TIMEOUT), thread.failure
        return running[-1]

    yield start
    end()


def ask(settings: KafkaSettings, *request_ids: str) -> None:
    """A request and an answer for each id, in partitions by the id."""
    writer = producer(settings)
    for request_id in request_ids:
        writer.send(
            settings.topic(REQUESTS),
            key=request_id.encode(),
            value=encode(Request(v=1, request_id=request_id, inputs="q")),
        )
        prediction = Prediction(
            v=1, request_id=request_id, outputs=Outputs(text="a"), codebook_seq=1, term=1, model="m", replica="r",
            latency_ms=1.0,
        )  # fmt: skip
        writer.send(settings.topic(PREDICTIONS), key=request_id.encode(), value=encode(prediction))
    writer.flush()
    writer.close()


def asked(store: ReadModelStore) -> set[str]:
    """The ids of the predictions that are stored with their requests."""
    with closing(store.reader()) as reader:
        rows = find_predictions(reader, PredictionFilter(), limit=1000).rows
    return {row.request_id for row in rows if row.text == "q"}


def test_it_shows_what_was_there_and_what_comes(settings: Settings, follow: Following) -> None:
    with closing(History(settings)) as history:
        history.lead()
        history.step(added("e1", [1.0, 2.0], 1.0), feedback=Feedback(v=1, feedback_id="f1", inputs="q", target="t"))
        ask(settings.kafka, *(f"r{number}" for number in range(30)))
        store, _ = follow()
        assert asked(store) == {f"r{number}" for number in range(30)}
        with closing(store.reader()) as reader:
            assert [(row.op, row.target) for row in timeline(reader).rows] == [("add", "t"), ("lead", None)]
            assert [row.status for row in find_feedback(reader)] == [None]
        before = store.change_count
        ask(settings.kafka, "later")
        wait_until(lambda: "later" in asked(store))
        assert store.change_count > before


def test_a_new_process_reads_only_what_is_new(
    settings: Settings, follow: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(settings.kafka, *(f"r{number}" for number in range(10)))
    follow()[1].stop()
    ask(settings.kafka, "later")
    stored: list[str] = []
    write = ReadModelStore.add

    def counting(store, records, positions):  # type: ignore[no-untyped-def]
        records = list(records)
        stored.extend(topic for topic, _ in records)
        write(store, records, positions)

    monkeypatch.setattr(ReadModelStore, "add", counting)
    store, _ = follow()
    assert asked(store) == {*(f"r{number}" for number in range(10)), "later"}
    assert sorted(stored) == [PREDICTIONS, REQUESTS]


def test_topics_that_were_created_again_are_read_again(settings: Settings, follow: Following) -> None:
    ask(settings.kafka, *(f"r{number}" for number in range(10)))
    follow()[1].stop()
    names = [settings.kafka.topic(name) for name in (REQUESTS, PREDICTIONS)]
    with closing(admin(settings.kafka)) as client:
        client.delete_topics(names)
        wait_until(lambda: not set(names) & set(client.list_topics()))
    create_topics(settings.kafka, partitions=3, replication=1)
    ask(settings.kafka, "new")
    store, _ = follow()
    assert asked(store) == {"new"}


def test_new_partitions_are_found(settings: Settings, follow: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "REFRESH_SECONDS", 0.5)
    store, _ = follow()
    with closing(admin(settings.kafka)) as client:
        client.create_partitions({settings.kafka.topic(name): NewPartitions(9) for name in (REQUESTS, PREDICTIONS)})
    ids = [f"r{number}" for number in range(50)]
    ask(settings.kafka, *ids)
    wait_until(lambda: asked(store) == set(ids), 2 * TIMEOUT)


def test_a_kafka_that_hangs_stalls_and_loses_nothing(own_kafka: LocalKafka, tmp_path: Path) -> None:
    settings = settings_for(own_kafka.bootstrap, "redis://unused", "").kafka
    create_topics(settings, partitions=1, replication=1)
    with ReadModelStore(tmp_path / "model.db", cluster_id(settings), "", 1000) as store:
        thread = TopicFollower(settings, store)
        thread.start()
        assert thread.caught_up.wait(TIMEOUT)
        hang(own_kafka)
        assert asked(store) == set()
        resume(own_kafka)
        ask(settings, "r1")
        wait_until(lambda: asked(store) == {"r1"})
        thread.stop()


def test_missing_topics_are_named_and_waited_for(
    kafka: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "RETRY_SECONDS", 0.2)
    settings = settings_for(kafka, "redis://unused", prefix).kafka
    with ReadModelStore(tmp_path / "model.db", "cluster", prefix, 1000) as store:
        thread = TopicFollower(settings, store)
        thread.start()
        wait_until(lambda: "there is no topic" in thread.failure)
        create_topics(settings, partitions=1, replication=1)
        assert thread.caught_up.wait(TIMEOUT)
        assert thread.failure == ""
        thread.stop()
