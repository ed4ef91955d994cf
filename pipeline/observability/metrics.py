"""Prometheus metrics of the workers.

What both kinds have is in prometheus-client's own registry, with the figures of the process. Each kind has another one
beside it, so that no worker shows zeros of the other kind.
"""

from typing import get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gracestream.schemas.messages import Status

REPLICA = CollectorRegistry()
EDITOR = CollectorRegistry()

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# Both kinds of worker.
CODEBOOK_SEQ = Gauge("gracestream_codebook_seq", "Newest delta that the codebook in use has applied.")
CODEBOOK_TERM = Gauge("gracestream_codebook_term", "Term of that delta.")
CODEBOOK_ENTRIES = Gauge("gracestream_codebook_entries", "Entries of the codebook in use.")
DEGRADED = Gauge("gracestream_degraded", "1 while Redis is out of reach, else 0.")
READY = Gauge("gracestream_ready", "1 while /ready answers 200, else 0.")
STUCK = Gauge("gracestream_stuck", "1 while /live answers 503, else 0.")

# Inference replicas.
HEAD_SEQ = Gauge("gracestream_head_seq", "Newest delta that is live, as Redis says.", registry=REPLICA)
REQUESTS = Counter("gracestream_requests_total", "Requests by what became of them.", ["outcome"], registry=REPLICA)
REPLIES_REFUSED = Counter(
    "gracestream_replies_refused_total",
    "Replies that their topic did not take, and that an error or a dead letter stands for.",
    registry=REPLICA,
)
EDITED = Counter("gracestream_edited_total", "Answers that an entry of the codebook gave.", registry=REPLICA)
NEAR_MISSES = Counter(
    "gracestream_near_misses_total",
    "Unedited answers where an entry might have applied: its value failed (answer), the words disagree (wording), or"
    " the prompt names the same and lies a little outside the radius (distance).",
    ["reason"],
    registry=REPLICA,
)
REQUEST_SECONDS = Histogram(
    "gracestream_request_seconds", "From the record's timestamp to its answer.", buckets=SECONDS, registry=REPLICA
)
MODEL_SECONDS = Histogram(
    "gracestream_model_seconds", "The model's time for one batch.", buckets=SECONDS, registry=REPLICA
)
BATCH_SIZE = Histogram(
    "gracestream_batch_size", "Requests of one batch.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=REPLICA
)
RADIUS_MISMATCH = Counter(
    "gracestream_radius_mismatch_total", "Radii in Redis that are not the log's; the log's served.", registry=REPLICA
)
SNAPSHOTS_REFUSED = Counter(
    "gracestream_snapshots_refused_total",
    "Snapshots that a start passed over: missing, corrupt, or of another log.",
    registry=REPLICA,
)

# The editor.
FEEDBACK = Counter("gracestream_feedback_total", "Feedback records by outcome.", ["status"], registry=EDITOR)
FEEDBACK_LAG = Gauge("gracestream_feedback_lag", "Feedback records that wait.", registry=EDITOR)
FEEDBACK_BLOCKED = Gauge(
    "gracestream_feedback_blocked", "Feedback records behind a transaction that was left open.", registry=EDITOR
)
EDIT_SECONDS = Histogram(
    "gracestream_edit_seconds", "From taking a feedback record to its live delta.", buckets=SECONDS, registry=EDITOR
)
EDIT_STEPS = Histogram(
    "gracestream_edit_steps",
    "Optimisation steps of a value.",
    buckets=(1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000),
    registry=EDITOR,
)
TRAFFIC = Gauge("gracestream_traffic_queries", "Unflagged recent queries in the editor's reservoir.", registry=EDITOR)
SNAPSHOT_SEQ = Gauge("gracestream_snapshot_seq", "Newest delta that a snapshot holds.", registry=EDITOR)
SNAPSHOT_FAILURES = Counter(
    "gracestream_snapshot_failures_total", "Snapshots that could not be written.", registry=EDITOR
)

# From the first scrape on each series is there: the increase of one that begins at 1 would be none.
for _outcome in ("ok", "error", "rejected"):
    REQUESTS.labels(_outcome)
for _status in (*get_args(Status), "unreadable"):
    FEEDBACK.labels(_status)


def show_codebook(seq: int, term: int, entries: int) -> None:
    """Set the gauges of the codebook in use: its newest delta, that delta's term, and its number of entries."""
    CODEBOOK_SEQ.set(seq)
    CODEBOOK_TERM.set(term)
    CODEBOOK_ENTRIES.set(entries)


def exposition(*own: CollectorRegistry) -> bytes:
    """What `/metrics` answers: the shared metrics, and those of the worker's own kind."""
    return b"".join(generate_latest(registry) for registry in (REGISTRY, *own))
