"""The topics as the code has them are those of the published document, and dead letters say where they came from."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import schemas
from pipeline.clients import MAX_DELTA_BYTES
from pipeline.settings import SettingsError, load_settings
from pipeline.topics import TOPICS, Topic, rejected_headers, rejected_key

DOCUMENT = yaml.safe_load((Path(schemas.__file__).parent / "asyncapi.yaml").read_text(encoding="utf-8"))
by_topic = pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)


def channel(topic: Topic) -> Any:
    return DOCUMENT["channels"][topic.name]


def test_every_topic_is_published_and_no_other() -> None:
    assert {topic.name for topic in TOPICS} == set(DOCUMENT["channels"])
    assert len({topic.name for topic in TOPICS}) == len(TOPICS)


@by_topic
def test_its_partitions_are_the_published_ones(topic: Topic) -> None:
    assert channel(topic)["x-partitions"] == (topic.partitions or "many")


@by_topic
def test_what_kafka_may_throw_away_is_what_is_published(topic: Topic) -> None:
    published = channel(topic)["bindings"]["kafka"]["topicConfiguration"]
    assert topic.config["cleanup.policy"] == ",".join(published["cleanup.policy"])
    for option in ("retention.ms", "retention.bytes"):
        if option in published:
            assert topic.config[option] == str(published[option])


@pytest.mark.parametrize("name", ["feedback", "edits", "deltas"])
def test_the_history_is_kept_for_ever_in_one_order(name: str) -> None:
    (topic,) = (topic for topic in TOPICS if topic.name == name)
    assert topic.partitions == 1
    assert topic.config["cleanup.policy"] == "delete"
    assert topic.config["retention.ms"] == topic.config["retention.bytes"] == "-1"


@by_topic
def test_the_address_has_the_prefix_before_the_name(topic: Topic) -> None:
    assert channel(topic)["address"] == f"{{prefix}}{topic.name}"
    assert load_settings(prefix="mine-").topic(topic.name) == f"mine-{topic.name}"


@pytest.mark.parametrize("name", ["requests.dlq", "feedback.dlq"])
def test_a_dead_letter_queue_takes_what_its_topic_took_and_headers_on_top(name: str) -> None:
    (topic,) = (topic for topic in TOPICS if topic.name == name)
    assert int(topic.config["max.message.bytes"]) == MAX_DELTA_BYTES


@given(
    reason=st.text(),
    name=st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True),
    partition=st.integers(0, 2**31 - 1),
    offset=st.integers(0, 2**63 - 1),
)
def test_headers_of_a_dead_letter_tell_the_reason_and_the_place(
    reason: str, name: str, partition: int, offset: int
) -> None:
    headers = dict(rejected_headers(reason, name, partition, offset))
    assert {header: value.decode() for header, value in headers.items()} == {
        "reason": reason,
        "source_topic": name,
        "source_partition": str(partition),
        "source_offset": str(offset),
    }


def test_headers_of_a_dead_letter_are_the_published_ones() -> None:
    published = DOCUMENT["components"]["messages"]["rejected"]["headers"]
    assert [header for header, _ in rejected_headers("why", "requests", 0, 0)] == published["required"]


@given(key=st.none() | st.binary(), value=st.none() | st.binary())
def test_a_dead_letter_keeps_its_key_and_can_always_be_sent(key: bytes | None, value: bytes | None) -> None:
    kept = rejected_key(key, value)
    assert kept == key or (kept == b"" and key is None and value is None)
    assert not (kept is None and value is None)


@given(
    prefix=st.text(min_size=1).filter(lambda text: not all(c.isascii() and (c.isalnum() or c in "._-") for c in text))
)
def test_a_prefix_that_kafka_would_refuse_is_refused(prefix: str) -> None:
    with pytest.raises(SettingsError, match="GRACESTREAM_PREFIX"):
        load_settings(prefix=prefix)
