"""The topics (design, section 1): their partitions and what Kafka may throw away of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kafka.admin import ConfigResource, ConfigResourceType, NewTopic
from kafka.errors import TopicAlreadyExistsError

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.kafka.clients import admin
from gracestream.pipeline.settings import Settings
from gracestream.schemas.deltas import MAX_DELTA_BYTES

LOG_APPEND_TIME = {"message.timestamp.type": "LogAppendTime"}
CREATE_TIME = {"message.timestamp.type": "CreateTime"}
KEEP_FOREVER = {**LOG_APPEND_TIME, "cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
RETENTION_BY_AGE = {**LOG_APPEND_TIME, "cleanup.policy": "delete", "retention.ms": str(7 * 24 * 3600 * 1000)}
DLQ_CONFIG = {**RETENTION_BY_AGE, "max.message.bytes": str(MAX_DELTA_BYTES)}
"""A record as large as its own topic takes goes here with headers on top."""

BROKER_DEFAULT = -1
"""In place of a number of copies."""

MIN_REPLICAS_FOR_ISR, MIN_ISR_CONFIG = 3, {"min.insync.replicas": "2"}
"""From so many copies on a record counts as written once two brokers have it: one may be lost, and one away."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic. `partitions` None: as many as the deployment wants, for work that is shared out."""

    name: str
    partitions: int | None
    config: dict[str, str]

    @property
    def required_config(self) -> dict[str, str]:
        """What of it no deployment may have otherwise: how many days records are kept is its own to choose."""
        for_ever = self.config.get("retention.ms") == KEEP_FOREVER["retention.ms"]
        return {option: value for option, value in self.config.items() if for_ever or option != "retention.ms"}


REQUESTS = "requests"
PREDICTIONS = "predictions"
FEEDBACK = "feedback"
EDITS = "edits"
DELTAS = "deltas"
SNAPSHOTS = "snapshots"
REQUESTS_DLQ = "requests.dlq"
FEEDBACK_DLQ = "feedback.dlq"

TOPICS = (
    Topic(REQUESTS, None, RETENTION_BY_AGE),
    Topic(PREDICTIONS, None, RETENTION_BY_AGE),
    Topic(FEEDBACK, 1, KEEP_FOREVER),
    Topic(EDITS, 1, KEEP_FOREVER),
    Topic(DELTAS, 1, {**KEEP_FOREVER, "max.message.bytes": str(MAX_DELTA_BYTES)}),
    Topic(SNAPSHOTS, 1, {"cleanup.policy": "compact"}),
    Topic(REQUESTS_DLQ, 1, DLQ_CONFIG),
    Topic(FEEDBACK_DLQ, 1, DLQ_CONFIG),
)


class TopicError(UserError):
    """A topic that exists, but not as it must; the text says what to change."""


def missing_topic_error(name: str) -> TopicError:
    """What to raise where Kafka shows no such topic, although its name is as the settings have it."""
    return TopicError(
        f"there is no topic {name!r} that we may see; create the topics with `gracestream topics`, or correct the"
        " prefix, GRACESTREAM_PREFIX"
    )


def create_topics(settings: Settings, partitions: int, replication: int = BROKER_DEFAULT) -> list[str]:
    """Create what is missing and check what is there; the names of those created.

    Args:
        settings: Which cluster, and the prefix of names.
        partitions: Of `requests` and `predictions`.
        replication: Copies of each partition; else the broker's `default.replication.factor`.

    Raises:
        TopicError: a topic that was there is not as it must be.
    """
    client = admin(settings)
    try:
        wanted = {settings.topic(topic.name): topic for topic in TOPICS}
        missing = sorted(set(wanted) - set(client.list_topics()))
        for name in missing:
            topic = wanted[name]
            config = topic.config | (MIN_ISR_CONFIG if replication >= MIN_REPLICAS_FOR_ISR else {})
            new = NewTopic(name, topic.partitions or partitions, replication, topic_configs=config)
            try:
                client.create_topics([new], wait_for_metadata=True)
            except TopicAlreadyExistsError:
                continue
        _check_topics(client, settings, {name: topic for name, topic in wanted.items() if name not in missing})
        return missing
    finally:
        client.close()


def require_topics(settings: Settings) -> None:
    """What a worker does before it starts.

    Raises:
        TopicError: a topic is missing, or is not as it must be.
    """
    client = admin(settings)
    try:
        wanted = {settings.topic(topic.name): topic for topic in TOPICS}
        missing = sorted(set(wanted) - set(client.list_topics()))
        if missing:
            raise TopicError(f"the topics {', '.join(missing)} are missing; create them with `gracestream topics`")
        _check_topics(client, settings, wanted)
    finally:
        client.close()


@contextmanager
def use_sender_timestamps(settings: Settings, names: Sequence[str]) -> Iterator[None]:
    """Let topics take the timestamps of their records from whoever sends them; Kafka's clock is back at the end.

    Kafka notes beside each batch whose its timestamps are, so those that were written meanwhile stay as they are.
    """
    client = admin(settings)
    resources = [ConfigResource(ConfigResourceType.TOPIC, settings.topic(name)) for name in names]

    def choose(config: dict[str, str]) -> None:
        for resource in resources:
            resource.configs = config
        client.alter_configs(resources)

    try:
        choose(CREATE_TIME)
        yield
    finally:
        try:
            choose(LOG_APPEND_TIME)
        finally:
            client.close()


def topic_layout(settings: Settings) -> tuple[int, int]:
    """The partitions of `requests`, and how many copies there are of each partition of `deltas`."""
    requests, deltas = settings.topic(REQUESTS), settings.topic(DELTAS)
    client = admin(settings)
    try:
        partitions = {topic["name"]: topic["partitions"] for topic in client.describe_topics([requests, deltas])}
    finally:
        client.close()
    return len(partitions[requests]) or 1, min(len(partition["replica_nodes"]) for partition in partitions[deltas])


def _check_topics(client: Any, settings: Settings, topics: dict[str, Topic]) -> None:
    if not topics:
        return
    for described in client.describe_topics(list(topics)):
        name, partitions = described["name"], len(described["partitions"])
        if topics[name].partitions is not None and partitions != topics[name].partitions:
            raise TopicError(
                f"topic {name!r} has {partitions} partitions and must have {topics[name].partitions}; choose another"
                " GRACESTREAM_PREFIX, or delete the topic, and create it with `gracestream topics`"
            )
    asked = [ConfigResource(ConfigResourceType.TOPIC, name) for name in topics]
    configs = client.describe_configs(asked, config_filter="all")["topic"]
    for name, topic in topics.items():
        found = {option: configs[name][option]["value"] for option in topic.required_config}
        wrong = [
            option for option, value in topic.required_config.items() if not _satisfies(option, found[option], value)
        ]
        if wrong:
            must = _format_config(topic.required_config, wrong)
            raise TopicError(
                f"topic {name!r} has {_format_config(found, wrong)} and must have {must}; set it with `kafka-configs.sh"
                f" --bootstrap-server {settings.kafka} --alter --entity-type topics --entity-name {name}"
                f" --add-config {must}`"
            )


def _satisfies(option: str, actual: str, required: str) -> bool:
    return int(actual) >= int(required) if option == "max.message.bytes" else actual == required


def _format_config(config: dict[str, str], options: list[str]) -> str:
    return ",".join(f"{option}={config[option]}" for option in options)
