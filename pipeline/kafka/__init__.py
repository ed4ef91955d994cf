"""Kafka: clients, topics, permissions, TLS, and reading a topic to its end."""

from gracestream.pipeline.kafka.clients import consumer, ping_kafka, producer, wait_for_kafka
from gracestream.pipeline.kafka.dead_letters import QUEUES, DeadLetterError, Letter, Source, letters, rejected, replay
from gracestream.pipeline.kafka.delta_reader import DELTA_OPTIONS, error_at, read_history
from gracestream.pipeline.kafka.lenient_records import LARGEST, install_in_aiokafka, record_bytes
from gracestream.pipeline.kafka.permissions import ACCESS, require_access
from gracestream.pipeline.kafka.reader import ANSWER_SECONDS, read_bulk, read_topic
from gracestream.pipeline.kafka.reply_addressing import ORDINARY, Address, Header, address_of
from gracestream.pipeline.kafka.security import describe_error, kafka_security, kafka_tls
from gracestream.pipeline.kafka.tls import load_client_cert, message_of, tls_refusal, trust_context
from gracestream.pipeline.kafka.topics import (
    BROKERS_CHOICE,
    DELTAS,
    EDITS,
    FEEDBACK,
    FEEDBACK_DLQ,
    PREDICTIONS,
    REQUESTS,
    REQUESTS_DLQ,
    SNAPSHOTS,
    TopicError,
    create_topics,
    layout,
    missing_topic,
    require_topics,
    timestamps_of_sender,
)
from gracestream.pipeline.kafka.waiting import (
    AccessDeniedError,
    ProgressCallback,
    UnreachableError,
    wait_until_reachable,
)

__all__ = [
    "ACCESS",
    "ANSWER_SECONDS",
    "BROKERS_CHOICE",
    "DELTAS",
    "DELTA_OPTIONS",
    "EDITS",
    "FEEDBACK",
    "FEEDBACK_DLQ",
    "LARGEST",
    "ORDINARY",
    "PREDICTIONS",
    "QUEUES",
    "REQUESTS",
    "REQUESTS_DLQ",
    "SNAPSHOTS",
    "AccessDeniedError",
    "Address",
    "DeadLetterError",
    "Header",
    "Letter",
    "ProgressCallback",
    "Source",
    "TopicError",
    "UnreachableError",
    "address_of",
    "consumer",
    "create_topics",
    "describe_error",
    "error_at",
    "install_in_aiokafka",
    "kafka_security",
    "kafka_tls",
    "layout",
    "letters",
    "load_client_cert",
    "message_of",
    "missing_topic",
    "ping_kafka",
    "producer",
    "read_bulk",
    "read_history",
    "read_topic",
    "record_bytes",
    "rejected",
    "replay",
    "require_access",
    "require_topics",
    "timestamps_of_sender",
    "tls_refusal",
    "trust_context",
    "wait_for_kafka",
    "wait_until_reachable",
]
