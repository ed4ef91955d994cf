"""Creates and checks the topics: their partitions, retention and limits.

docs/explanation/messages-and-topics.md describes the topics for users.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kafka.admin import ConfigResource, ConfigResourceType, NewTopic
from kafka.errors import TopicAlreadyExistsError

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.kafka.clients import admin
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.deltas import MAX_DELTA_BYTES

LOG_APPEND_TIME = {"message.timestamp.type": "LogAppendTime"}
CREATE_TIME = {"message.timestamp.type": "CreateTime"}
KEEP_FOREVER = {**LOG_APPEND_TIME, "cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
RETENTION_BY_AGE = {**LOG_APPEND_TIME, "cleanup.policy": "delete", "retention.ms": str(7 * 24 * 3600 * 1000)}
DLQ_CONFIG = {**RETENTION_BY_AGE, "max.message.bytes": str(MAX_DELTA_BYTES)}
"""The limit is that of deltas, so that the largest record of `requests` or `feedback` fits with its added headers."""

BROKER_DEFAULT = -1
"""As a replication factor: the broker's own default."""

MIN_REPLICAS_FOR_ISR, MIN_ISR_CONFIG = 3, {"min.insync.replicas": "2"}
"""With 3 or more copies, a record counts as written only when 2 brokers have it.

One copy can then be lost, and another broker unavailable, without losing an acknowledged record.
"""


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic. `partitions` is None if the deployment chooses their number, because replicas share the work."""

    name: str
    partitions: int | None
    config: dict[str, str]

    @property
    def required_config(self) -> dict[str, str]:
        """The options that must not differ. Where retention is finite, a deployment may choose its length."""
        keeps_forever = self.config.get("retention.ms") == KEEP_FOREVER["retention.ms"]
        return {option: value for option, value in self.config.items() if keeps_forever or option != "retention.ms"}


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
    """A topic is missing or has the wrong configuration. The text gives the remedy."""


def missing_topic_error(name: str) -> TopicError:
    """The error for a topic that Kafka does not list, because it is missing or because the user may not see it."""
    return TopicError(
        f"there is no topic {name!r}, or this user may not see it; create the topics with `gracestream topics`, or"
        " correct the prefix, GRACESTREAM_TOPIC_PREFIX"
    )


def create_topics(settings: KafkaSettings, partitions: int, replication: int = BROKER_DEFAULT) -> list[str]:
    """Create the missing topics, check the existing ones, and return the names of the created ones.

    Args:
        settings: Address of the cluster, and prefix of the names.
        partitions: Number of partitions of `requests` and of `predictions`.
        replication: Copies of each partition; by default the broker's `default.replication.factor`.

    Raises:
        TopicError: an existing topic has the wrong number of partitions or the wrong configuration.
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
                continue  # another process created it at the same moment
        _check_topics(client, settings, {name: topic for name, topic in wanted.items() if name not in missing})
        return missing
    finally:
        client.close()


def require_topics(settings: KafkaSettings) -> None:
    """Check every topic; a worker does so before it starts.

    Raises:
        TopicError: a topic is missing, or has the wrong number of partitions or the wrong configuration.
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
def use_sender_timestamps(settings: KafkaSettings, names: Sequence[str]) -> Iterator[None]:
    """Within this context, records of the topics have the timestamps of their senders; afterwards Kafka's clock again.

    Each batch stores the type of its timestamps, so the records written meanwhile keep theirs.
    """
    client = admin(settings)
    resources = [ConfigResource(ConfigResourceType.TOPIC, settings.topic(name)) for name in names]

    def alter(config: dict[str, str]) -> None:
        for resource in resources:
            resource.configs = config
        client.alter_configs(resources)

    try:
        alter(CREATE_TIME)
        yield
    finally:
        try:
            alter(LOG_APPEND_TIME)
        finally:
            client.close()


def topic_layout(settings: KafkaSettings) -> tuple[int, int]:
    """The number of partitions of `requests`, and the smallest number of copies of a partition of `deltas`."""
    requests, deltas = settings.topic(REQUESTS), settings.topic(DELTAS)
    client = admin(settings)
    try:
        partitions = {topic["name"]: topic["partitions"] for topic in client.describe_topics([requests, deltas])}
    finally:
        client.close()
    return len(partitions[requests]) or 1, min(len(partition["replica_nodes"]) for partition in partitions[deltas])


def _check_topics(client: Any, settings: KafkaSettings, topics: dict[str, Topic]) -> None:
    if not topics:
        return
    for described in client.describe_topics(list(topics)):
        name, partitions = described["name"], len(described["partitions"])
        if topics[name].partitions is not None and partitions != topics[name].partitions:
            raise TopicError(
                f"topic {name!r} has {partitions} partitions and must have {topics[name].partitions}; choose another"
                " GRACESTREAM_TOPIC_PREFIX, or delete the topic, and create it with `gracestream topics`"
            )
    resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in topics]
    configs = client.describe_configs(resources, config_filter="all")["topic"]
    for name, topic in topics.items():
        actual = {option: configs[name][option]["value"] for option in topic.required_config}
        wrong = [
            option for option, value in topic.required_config.items() if not _satisfies(option, actual[option], value)
        ]
        if wrong:
            required = _format_config(topic.required_config, wrong)
            raise TopicError(
                f"topic {name!r} has {_format_config(actual, wrong)} and must have {required}; set it with"
                f" `kafka-configs.sh --bootstrap-server {settings.servers} --alter --entity-type topics"
                f" --entity-name {name} --add-config {required}`"
            )


def _satisfies(option: str, actual: str, required: str) -> bool:
    # A larger record limit does no harm; every other option must be equal.
    return int(actual) >= int(required) if option == "max.message.bytes" else actual == required


def _format_config(config: dict[str, str], options: list[str]) -> str:
    return ",".join(f"{option}={config[option]}" for option in options)
