"""Prometheus metrics of the workers.

Metrics of both kinds of worker are in the default registry of prometheus-client, with the metrics of the process. Each
kind has a further registry, so that no worker exports metrics of the other kind as zeros.
"""

from typing import get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gracestream.schemas.messages import Status

REPLICA_REGISTRY = CollectorRegistry()
"""Metrics of inference replicas."""

EDITOR_REGISTRY = CollectorRegistry()
"""Metrics of the editor."""

LATENCY_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histograms of times, in seconds."""

ROUND_TRIP_BUCKETS_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Upper bounds for a round trip to a near server, and for waits of its order."""

LOOKUP_BUCKETS_SECONDS = (0.00005, *ROUND_TRIP_BUCKETS_SECONDS)
"""Upper bounds for lookups: one request in a small codebook takes less than 0.1 ms."""

# Both kinds of worker.
CODEBOOK_SEQ = Gauge("gracestream_codebook_seq", "Newest delta that the codebook in use has applied.")
CODEBOOK_TERM = Gauge("gracestream_codebook_term", "Term of that delta.")
CODEBOOK_ENTRIES = Gauge("gracestream_codebook_entries", "Entries of the codebook in use.")
DEGRADED = Gauge("gracestream_degraded", "1 while Redis does not answer or contradicts the log, else 0.")
READY = Gauge("gracestream_ready", "1 while /ready answers 200, else 0.")
STALLED = Gauge("gracestream_stalled", "1 while /live answers 503, else 0.")

# Inference replicas.
HEAD_SEQ = Gauge("gracestream_head_seq", "Newest published delta, according to Redis.", registry=REPLICA_REGISTRY)
REQUESTS_TOTAL = Counter("gracestream_requests_total", "Requests by outcome.", ["outcome"], registry=REPLICA_REGISTRY)
REQUESTS_RESTARTED = Counter(
    "gracestream_requests_restarted_total",
    "Requests that started again, one after the other, because a step of several failed, as without enough memory.",
    registry=REPLICA_REGISTRY,
)
REPLIES_REJECTED = Counter(
    "gracestream_replies_rejected_total",
    "Replies that their topic rejected; an error or a dead letter replaces each.",
    registry=REPLICA_REGISTRY,
)
EDITED_ANSWERS = Counter(
    "gracestream_edited_answers_total", "Answers that an entry of the codebook gave.", registry=REPLICA_REGISTRY
)
NEAR_MISSES = Counter(
    "gracestream_near_misses_total",
    "Unedited answers where an entry might have applied: its value failed (answer), the words disagree (wording), or"
    " the prompt names the same and lies a little outside the radius (distance).",
    ["reason"],
    registry=REPLICA_REGISTRY,
)
REQUEST_SECONDS = Histogram(
    "gracestream_request_seconds",
    "From the record's timestamp to its answer.",
    buckets=LATENCY_BUCKETS_SECONDS,
    registry=REPLICA_REGISTRY,
)
STEP_SECONDS = Histogram(
    "gracestream_step_seconds",
    "One step of the engine: whole answers (batch engine), or a token of each request (continuous engine).",
    buckets=LATENCY_BUCKETS_SECONDS,
    registry=REPLICA_REGISTRY,
)
LOOKUP_SECONDS = Histogram(
    "gracestream_lookup_seconds",
    "The lookup of the requests that join a step: key search and comparison of words; on a GPU with the wait for the"
    " queries.",
    buckets=LOOKUP_BUCKETS_SECONDS,
    registry=REPLICA_REGISTRY,
)
BATCH_WAIT_SECONDS = Histogram(
    "gracestream_batch_wait_seconds",
    "Time that requests taken from Kafka waited for more, to be taken together.",
    buckets=ROUND_TRIP_BUCKETS_SECONDS,
    registry=REPLICA_REGISTRY,
)
STEP_REQUESTS = Histogram(
    "gracestream_step_requests",
    "Requests in one step of the engine.",
    buckets=(1, 2, 4, 8, 16, 32, 64),
    registry=REPLICA_REGISTRY,
)
REDIS_READ_SECONDS = Histogram(
    "gracestream_redis_read_seconds",
    "Round trips of reading the head that Redis answered, also if too late.",
    buckets=ROUND_TRIP_BUCKETS_SECONDS,
    registry=REPLICA_REGISTRY,
)
OFFSET_COMMIT_SECONDS = Histogram(
    "gracestream_offset_commit_seconds",
    "Kafka's time for a commit of the offsets of answered requests.",
    buckets=LATENCY_BUCKETS_SECONDS,
    registry=REPLICA_REGISTRY,
)
RADIUS_MISMATCH = Counter(
    "gracestream_radius_mismatch_total",
    "Radii in Redis that differ from the log; the log's radii served.",
    registry=REPLICA_REGISTRY,
)
SNAPSHOTS_REJECTED = Counter(
    "gracestream_snapshots_rejected_total",
    "Snapshots skipped at start: missing, corrupt, or of another log.",
    registry=REPLICA_REGISTRY,
)

# The editor.
FEEDBACK_TOTAL = Counter(
    "gracestream_feedback_total", "Feedback records by outcome.", ["status"], registry=EDITOR_REGISTRY
)
FEEDBACK_LAG = Gauge("gracestream_feedback_lag", "Feedback records that are waiting.", registry=EDITOR_REGISTRY)
FEEDBACK_BLOCKED = Gauge(
    "gracestream_feedback_blocked",
    "Feedback records behind a transaction that was left open.",
    registry=EDITOR_REGISTRY,
)
DECISION_SECONDS = Histogram(
    "gracestream_decision_seconds",
    "From reading a feedback record to publishing its delta.",
    buckets=LATENCY_BUCKETS_SECONDS,
    registry=EDITOR_REGISTRY,
)
TRANSACTION_SECONDS = Histogram(
    "gracestream_transaction_seconds",
    "From the beginning of a Kafka transaction to its commit; each holds a delta or several outcomes.",
    buckets=LATENCY_BUCKETS_SECONDS,
    registry=EDITOR_REGISTRY,
)
TRAINING_STEPS = Histogram(
    "gracestream_training_steps",
    "Optimisation steps of a value.",
    buckets=(1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000),
    registry=EDITOR_REGISTRY,
)
TRAFFIC_SAMPLE_QUERIES = Gauge(
    "gracestream_traffic_sample_queries",
    "Unflagged recent queries in the editor's traffic sample.",
    registry=EDITOR_REGISTRY,
)
SNAPSHOT_SEQ = Gauge("gracestream_snapshot_seq", "Newest delta that a snapshot holds.", registry=EDITOR_REGISTRY)
SNAPSHOT_FAILURES = Counter(
    "gracestream_snapshot_failures_total", "Snapshots that could not be written.", registry=EDITOR_REGISTRY
)

# Create each series at 0. Prometheus computes no increase for a series that first appears at 1.
for _outcome in ("ok", "error", "rejected"):
    REQUESTS_TOTAL.labels(_outcome)
for _status in (*get_args(Status), "unreadable"):
    FEEDBACK_TOTAL.labels(_status)


def set_codebook_gauges(seq: int, term: int, entries: int) -> None:
    """Set the gauges of the codebook in use: seq and term of its newest delta, and its number of entries."""
    CODEBOOK_SEQ.set(seq)
    CODEBOOK_TERM.set(term)
    CODEBOOK_ENTRIES.set(entries)


def render_metrics(*registries: CollectorRegistry) -> bytes:
    """The answer of `/metrics`: the shared metrics, and those in `registries`."""
    return b"".join(generate_latest(registry) for registry in (REGISTRY, *registries))
