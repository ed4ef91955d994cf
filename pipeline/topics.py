"""The topics (design, section 1): their partitions and what Kafka may throw away of them."""

from dataclasses import dataclass

from kafka.admin import ConfigResource, ConfigResourceType, NewTopic
from kafka.errors import TopicAlreadyExistsError

from pipeline.clients import MAX_DELTA_BYTES, admin
from pipeline.errors import UserError
from pipeline.settings import Settings

KAFKAS_CLOCK = {"message.timestamp.type": "LogAppendTime"}
FOREVER = {**KAFKAS_CLOCK, "cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
BY_AGE = {**KAFKAS_CLOCK, "cleanup.policy": "delete", "retention.ms": str(7 * 24 * 3600 * 1000)}
REJECTED = {**BY_AGE, "max.message.bytes": str(MAX_DELTA_BYTES)}
"""A record as large as its own topic takes goes here with headers on top."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic. `partitions` None: as many as the deployment wants, for work that is shared out."""

    name: str
    partitions: int | None
    config: dict[str, str]


REQUESTS = "requests"
PREDICTIONS = "predictions"
FEEDBACK = "feedback"
EDITS = "edits"
DELTAS = "deltas"
SNAPSHOTS = "snapshots"
REQUESTS_DLQ = "requests.dlq"
FEEDBACK_DLQ = "feedback.dlq"

TOPICS = (
    Topic(REQUESTS, None, BY_AGE),
    Topic(PREDICTIONS, None, BY_AGE),
    Topic(FEEDBACK, 1, FOREVER),
    Topic(EDITS, 1, FOREVER),
    Topic(DELTAS, 1, {**FOREVER, "max.message.bytes": str(MAX_DELTA_BYTES)}),
    Topic(SNAPSHOTS, 1, {"cleanup.policy": "compact"}),
    Topic(REQUESTS_DLQ, 1, REJECTED),
    Topic(FEEDBACK_DLQ, 1, REJECTED),
)


def rejected_headers(reason: str, topic: str, partition: int, offset: int) -> list[tuple[str, bytes]]:
    """Headers of a record in a dead letter queue: why it is there and where it came from."""
    return [
        ("reason", reason.encode()),
        ("source_topic", topic.encode()),
        ("source_partition", str(partition).encode()),
        ("source_offset", str(offset).encode()),
    ]


def rejected_key(key: bytes | None, value: bytes | None) -> bytes | None:
    """Key of a record in a dead letter queue: its own, but clients send no record without both key and value."""
    return b"" if key is None and value is None else key


class TopicError(UserError):
    """A topic that exists, but not as it must; the text says what to change."""


def create_topics(settings: Settings, partitions: int, replication: int) -> list[str]:
    """Create what is missing and check what is there; the names of those created.

    Args:
        settings: Which cluster, and the prefix of names.
        partitions: Of `requests` and `predictions`.
        replication: Copies of each partition.

    Raises:
        TopicError: a topic that must have one partition has more, or one that must be kept for ever is not.
    """
    client = admin(settings)
    try:
        wanted = {settings.topic(topic.name): topic for topic in TOPICS}
        missing = sorted(set(wanted) - set(client.list_topics()))
        for name in missing:
            topic = wanted[name]
            new = NewTopic(name, topic.partitions or partitions, replication, topic_configs=topic.config)
            try:
                client.create_topics([new], wait_for_metadata=True)
            except TopicAlreadyExistsError:
                continue
        existing = [name for name in wanted if name not in missing]
        if existing:
            _check(client, {name: wanted[name] for name in existing})
            _check_kept(client, [name for name in existing if wanted[name].config.items() >= FOREVER.items()])
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
        _check(client, wanted)
    finally:
        client.close()


def _check(client: object, topics: dict[str, Topic]) -> None:
    for described in client.describe_topics(list(topics)):  # type: ignore[attr-defined]
        name, partitions = described["name"], len(described["partitions"])
        if topics[name].partitions is not None and partitions != topics[name].partitions:
            raise TopicError(f"topic {name!r} has {partitions} partitions and must have {topics[name].partitions}")


def _check_kept(client: object, names: list[str]) -> None:
    asked = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
    described = client.describe_configs(asked, config_filter="all")["topic"] if names else {}  # type: ignore[attr-defined]
    for name in names:
        for option, value in FOREVER.items():
            if (found := described[name][option]["value"]) != value:
                raise TopicError(f"topic {name!r} has {option}={found} and must have {option}={value}: it is history")
