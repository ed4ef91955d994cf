"""The topics in the code are those of the AsyncAPI document."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gracestream import schemas
from gracestream.pipeline.kafka import topics
from gracestream.pipeline.kafka.topics import TOPICS, Topic, topic_layout
from gracestream.pipeline.settings import SettingsError, load_settings
from gracestream.schemas.deltas import MAX_DELTA_BYTES

DOCUMENT = yaml.safe_load((Path(schemas.__file__).parent / "asyncapi.yaml").read_text(encoding="utf-8"))
by_topic = pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)


def channel(topic: Topic) -> Any:
    return DOCUMENT["channels"][topic.name]


def test_exactly_the_topics_are_documented() -> None:
    assert {topic.name for topic in TOPICS} == set(DOCUMENT["channels"])
    assert len({topic.name for topic in TOPICS}) == len(TOPICS)


@by_topic
def test_its_partitions_are_the_documented_ones(topic: Topic) -> None:
    assert channel(topic)["x-partitions"] == (topic.partitions or "many")


@by_topic
def test_its_configuration_is_the_documented_one(topic: Topic) -> None:
    documented = channel(topic)["bindings"]["kafka"]["topicConfiguration"]
    configured = {
        option: ",".join(value) if isinstance(value, list) else str(value) for option, value in documented.items()
    }
    assert configured == topic.required_config


@pytest.mark.parametrize("name", ["feedback", "edits", "deltas"])
def test_the_history_is_kept_for_ever_in_one_order(name: str) -> None:
    (topic,) = (topic for topic in TOPICS if topic.name == name)
    assert topic.partitions == 1
    assert topic.config["cleanup.policy"] == "delete"
    assert topic.config["retention.ms"] == topic.config["retention.bytes"] == "-1"


@by_topic
def test_the_address_has_the_prefix_before_the_name(topic: Topic) -> None:
    assert channel(topic)["address"] == f"{{prefix}}{topic.name}"
    assert load_settings(topic_prefix="mine-").kafka.topic(topic.name) == f"mine-{topic.name}"


@pytest.mark.parametrize("name", ["requests.dlq", "feedback.dlq"])
def test_a_dead_letter_queue_takes_what_its_topic_took_and_headers_on_top(name: str) -> None:
    (topic,) = (topic for topic in TOPICS if topic.name == name)
    assert int(topic.config["max.message.bytes"]) == MAX_DELTA_BYTES


@by_topic
def test_only_how_long_records_are_kept_by_age_is_a_deployment_s_to_choose(topic: Topic) -> None:
    chosen = topic.config.keys() - topic.required_config.keys()
    assert chosen == ({"retention.ms"} if topic.config.get("retention.ms", "-1") != "-1" else set())


@pytest.mark.parametrize(("partitions", "copies"), [(1, 1), (8, 3)])
def test_a_branch_gets_as_many_partitions_and_copies_as_its_source(
    monkeypatch: pytest.MonkeyPatch, partitions: int, copies: int
) -> None:
    described = {
        "p-requests": [{"replica_nodes": [1, 2]}] * partitions,
        "p-deltas": [{"replica_nodes": list(range(copies))}],
    }
    client = SimpleNamespace(
        describe_topics=lambda names: [{"name": name, "partitions": described[name]} for name in names],
        close=lambda: None,
    )
    monkeypatch.setattr(topics, "admin", lambda _settings: client)
    assert topic_layout(load_settings(topic_prefix="p-").kafka) == (partitions, copies)


@pytest.mark.parametrize(("copies", "in_sync"), [(-1, None), (1, None), (2, None), (3, "2"), (4, "2")])
def test_of_three_copies_two_must_have_a_record(
    monkeypatch: pytest.MonkeyPatch, copies: int, in_sync: str | None
) -> None:
    made: list[Any] = []
    client = SimpleNamespace(list_topics=list, create_topics=lambda new, **_: made.extend(new), close=lambda: None)
    monkeypatch.setattr(topics, "admin", lambda _settings: client)
    created = topics.create_topics(load_settings(topic_prefix="p-").kafka, 4, copies)
    assert {topic.name for topic in made} == set(created)
    assert {topic.replication_factor for topic in made} == {copies}
    assert {topic.topic_configs.get("min.insync.replicas") for topic in made} == {in_sync}


@given(
    prefix=st.text(min_size=1).filter(lambda text: not all(c.isascii() and (c.isalnum() or c in "._-") for c in text))
)
def test_a_prefix_that_kafka_would_reject_is_rejected(prefix: str) -> None:
    with pytest.raises(SettingsError, match="GRACESTREAM_TOPIC_PREFIX"):
        load_settings(topic_prefix=prefix)
