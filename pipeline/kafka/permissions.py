"""The permissions that each worker needs on a Kafka cluster with an authorizer. `deploy/acls.sh` grants them.

A worker checks them once, at its start. Otherwise a replica without write access to `predictions` would take requests
and retry its answers for ever. Not promised: that permissions stay granted later.
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
from gracestream.pipeline.settings import KafkaSettings


@dataclass(frozen=True, slots=True)
class TopicPermissions:
    """The topics that a worker reads and writes, and its consumer group."""

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
"""The permissions by kind of worker."""


def require_permissions(settings: KafkaSettings, permissions: TopicPermissions) -> None:
    """Check the permissions of a worker before it starts. Missing topics are ignored; `require_topics` reports them.

    Raises:
        AccessDeniedError: a permission is missing.
    """
    required = [(settings.topic(name), "READ") for name in permissions.reads]
    required += [(settings.topic(name), "WRITE") for name in permissions.writes]
    required += [(settings.topic(topic.name), "DESCRIBE_CONFIGS") for topic in TOPICS]  # for `require_topics`
    client = admin(settings)
    try:
        topics = {topic["name"]: topic for topic in client.describe_topics(sorted({name for name, _ in required}))}
        missing = [
            f"{operation} topic {name}" for name, operation in required if not _is_allowed(topics[name], operation)
        ]
        try:
            client.list_group_offsets({settings.topic(permissions.group): None})
        except GroupAuthorizationFailedError:
            missing.append(f"READ group {settings.topic(permissions.group)}")
        except KafkaError:
            pass  # for example, the coordinator of the group is starting; an authorizer has rejected nothing
    finally:
        client.close()
    if missing:
        raise AccessDeniedError(
            f"Kafka at {settings.servers} does not allow {describe_kafka_user(settings)} to {', '.join(missing)};"
            f" {ACL_HINT}"
        )


def _is_allowed(topic: dict[str, Any], operation: str) -> bool:
    if topic["error_code"] == TopicAuthorizationFailedError.errno:
        return False
    operations = topic["authorized_operations"]  # empty if the topic is missing, or if the broker is too old
    return not operations or operation in operations
