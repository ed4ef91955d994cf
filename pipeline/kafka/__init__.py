"""Everything about Kafka: clients, topics, permissions, TLS, dead letters, and reading a topic to its end."""

from gracestream.pipeline.kafka.clients import consumer, ping_kafka, producer, wait_for_kafka
from gracestream.pipeline.kafka.dead_letters import (
    DLQ_TOPICS,
    DeadLetter,
    DeadLetterError,
    DeadLetterSource,
    dead_letter_for,
    list_dead_letters,
    resend_dead_letters,
)
from gracestream.pipeline.kafka.delta_reader import DELTA_CONSUMER_OPTIONS, history_error_at, read_history
from gracestream.pipeline.kafka.lenient_records import (
    MAX_UNTRUNCATED_BYTES,
    install_lenient_parser,
    record_memory_bytes,
)
from gracestream.pipeline.kafka.permissions import REQUIRED_PERMISSIONS, require_permissions
from gracestream.pipeline.kafka.reader import (
    READ_TIMEOUT_SECONDS,
    TopicReader,
    open_reader_client,
    open_readers,
    read_topic,
)
from gracestream.pipeline.kafka.reply_addressing import (
    DEFAULT_REPLY_ADDRESS,
    Header,
    ReplyAddress,
    resolve_reply_address,
)
from gracestream.pipeline.kafka.security import describe_error, kafka_security_options, kafka_tls_context
from gracestream.pipeline.kafka.tls import create_tls_context, error_message, load_client_cert, permanent_tls_failure
from gracestream.pipeline.kafka.topics import (
    BROKER_DEFAULT,
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
    missing_topic_error,
    require_topics,
    topic_layout,
    use_sender_timestamps,
)
from gracestream.pipeline.kafka.waiting import (
    AccessDeniedError,
    ProgressCallback,
    UnreachableError,
    wait_until_reachable,
)

__all__ = [
    "BROKER_DEFAULT",
    "DEFAULT_REPLY_ADDRESS",
    "DELTAS",
    "DELTA_CONSUMER_OPTIONS",
    "DLQ_TOPICS",
    "EDITS",
    "FEEDBACK",
    "FEEDBACK_DLQ",
    "MAX_UNTRUNCATED_BYTES",
    "PREDICTIONS",
    "READ_TIMEOUT_SECONDS",
    "REQUESTS",
    "REQUESTS_DLQ",
    "REQUIRED_PERMISSIONS",
    "SNAPSHOTS",
    "AccessDeniedError",
    "DeadLetter",
    "DeadLetterError",
    "DeadLetterSource",
    "Header",
    "ProgressCallback",
    "ReplyAddress",
    "TopicError",
    "TopicReader",
    "UnreachableError",
    "consumer",
    "create_tls_context",
    "create_topics",
    "dead_letter_for",
    "describe_error",
    "error_message",
    "history_error_at",
    "install_lenient_parser",
    "kafka_security_options",
    "kafka_tls_context",
    "list_dead_letters",
    "load_client_cert",
    "missing_topic_error",
    "open_reader_client",
    "open_readers",
    "permanent_tls_failure",
    "ping_kafka",
    "producer",
    "read_history",
    "read_topic",
    "record_memory_bytes",
    "require_permissions",
    "require_topics",
    "resend_dead_letters",
    "resolve_reply_address",
    "topic_layout",
    "use_sender_timestamps",
    "wait_for_kafka",
    "wait_until_reachable",
]
