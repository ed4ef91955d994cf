"""What a worker must be allowed on a Kafka cluster with an authorizer: what `deploy/acls.sh` allows it.

Asked once, at the start: without it, a replica that may not write predictions would take requests and try for ever.
"""

from dataclasses import dataclass
from typing import Any

from kafka.errors import GroupAuthorizationFailedError, KafkaError, TopicAuthorizationFailedError

from gracestream.pipeline.kafka.clients import admin
from gracestream.pipeline.kafka.security import ACL_HINT, describe_kafka_user
from gracestream.pipeline.kafka.topics import (
    DELTAS,
    EDITS,
    FEEDBACK,
    FEEDBACK_DLQ,
    PREDICTIONS,
    REQUESTS,
    REQUESTS_DLQ,
    SNAPSHOTS,
    TOPICS,
)
from gracestream.pipeline.kafka.waiting import AccessDeniedError
from gracestream.pipeline.settings import Settings


@dataclass(frozen=True, slots=True)
class TopicPermissions:
    """Topics that are read and written, and the consumer group."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    group: str


REQUIRED_PERMISSIONS = {
    "editor": TopicPermissions(
        reads=(FEEDBACK, DELTAS, EDITS, SNAPSHOTS, REQUESTS, FEEDBACK_DLQ),
        writes=(DELTAS, EDITS, SNAPSHOTS, FEEDBACK_DLQ),
        group="editor",
    ),
    "inference": TopicPermissions(
        reads=(REQUESTS, DELTAS, SNAPSHOTS),
        writes=(PREDICTIONS, REQUESTS_DLQ),
        group="inference",
    ),
}
"""By kind of worker."""


def require_permissions(settings: Settings, permissions: TopicPermissions) -> None:
    """What a worker does before it starts; a topic that is not there at all is not this function's to report.

    Raises:
        AccessDeniedError: something is not allowed.
    """
    wanted = [(settings.topic(name), "READ") for name in permissions.reads]
    wanted += [(settings.topic(name), "WRITE") for name in permissions.writes]
    wanted += [(settings.topic(topic.name), "DESCRIBE_CONFIGS") for topic in TOPICS]  # for `require_topics`
    client = admin(settings)
    try:
        topics = {topic["name"]: topic for topic in client.describe_topics(sorted({name for name, _ in wanted}))}
        lacking = [
            f"{operation} topic {name}" for name, operation in wanted if not _is_allowed(topics[name], operation)
        ]
        try:
            client.list_group_offsets({settings.topic(permissions.group): None})
        except GroupAuthorizationFailedError:
            lacking.append(f"READ group {settings.topic(permissions.group)}")
        except KafkaError:
            pass  # the group's coordinator is on its way, and no authorizer has refused
    finally:
        client.close()
    if lacking:
        raise AccessDeniedError(
            f"Kafka at {settings.kafka} does not allow {describe_kafka_user(settings)} to {', '.join(lacking)};"
            f" {ACL_HINT}"
        )


def _is_allowed(topic: dict[str, Any], operation: str) -> bool:
    if topic["error_code"] == TopicAuthorizationFailedError.errno:
        return False
    operations = topic["authorized_operations"]  # none where the topic is missing, or the broker too old to say
    return not operations or operation in operations
