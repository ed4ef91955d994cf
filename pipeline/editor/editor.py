"""The editor: decides on feedback, one record at a time, and publishes the resulting deltas.

Its life (docs/explanation/consistency.md):

1. Stand by: read the log, join the group, and follow the deltas of the leading editor until this one is elected.
2. Acquire leadership: fence the predecessor, read its last deltas, begin a term.
3. For each feedback record: decide (train a value where needed), commit delta, outcome and offset in one Kafka
   transaction, apply the delta, publish it in Redis.

Values of waiting corrections are trained as one batch before the decisions, since training takes most of the time.
Requests are read before each correction and while no feedback waits, so that new radii keep clear of unflagged traffic.

After a Kafka error the editor begins again with step 1, in the same process and with the codebook that it has. If
another editor has led meanwhile, it stops.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import structlog
from kafka.errors import KafkaError
from msgspec import UNSET

from gracestream.pipeline.editing import DraftValue, EditEngine
from gracestream.pipeline.editor.feedback import DecidedFeedback, FeedbackRecord, ParsedFeedback
from gracestream.pipeline.editor.feedback_processor import FeedbackProcessor
from gracestream.pipeline.editor.log import EditorLog, is_retriable
from gracestream.pipeline.editor.redis_publisher import RedisPublisher
from gracestream.pipeline.editor.snapshot_writer import SnapshotWriter
from gracestream.pipeline.editor.traffic_reader import TrafficReader
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka import history_error_at
from gracestream.pipeline.observability import Health, metrics
from gracestream.pipeline.stores import StaleHeadError

log = structlog.get_logger()

MAX_FEEDBACK_PER_ROUND = 64
"""Feedback records, plus at most one batch, between two polls of traffic."""

MAX_UNCOMMITTED_BYTES = 2**20
"""Bytes of feedback, keys included, that wait for a decision or a commit.

A batch stops growing beyond it, and results that change nothing are committed even though more feedback waits.
"""

KAFKA_RETRY_SECONDS = 1.0
"""Seconds between a Kafka error and the next attempt."""

LAG_CHECK_SECONDS = 1.0
"""Seconds between two requests to Kafka for the amount of waiting feedback."""

BLOCKED_AFTER_SECONDS = 5.0
"""Seconds after which an open transaction on `feedback` is reported as abandoned."""

BLOCKED_REMEDY = (
    "a producer has left a transaction open; find it with `kafka-transactions.sh find-hanging`, end it with"
    " `kafka-transactions.sh abort`, and allow transactions to no writer of feedback (deploy/acls.sh)"
)

KEEP_ALIVE_SECONDS = 1.0
"""Minimum seconds between two polls that keep the partition during long work."""


@dataclass(frozen=True, slots=True)
class EditorServices:
    """The parts that an editor works with; `environment` is recorded in each `lead` delta."""

    engine: EditEngine
    log: EditorLog
    feedback_processor: FeedbackProcessor
    traffic_reader: TrafficReader
    redis_publisher: RedisPublisher
    snapshot_writer: SnapshotWriter
    environment: dict[str, str]


class Editor:
    """Stands by, leads and edits. The values of up to `batch_size` feedback records are trained as one batch."""

    def __init__(
        self, services: EditorServices, health: Health, batch_size: int, idle: threading.Event | None = None
    ) -> None:
        """`idle` is set while the editor waits for Kafka or for the history and has no work in progress."""
        self._services, self._health, self._batch_size = services, health, batch_size
        self._idle = threading.Event() if idle is None else idle
        self._leadership: Literal["starting", "standby", "leading"] = "starting"
        self._lead_delta: bytes | None = None
        """The `lead` delta of this editor's last term; None before the first."""
        self._lag, self._lag_checked_at = 0, -LAG_CHECK_SECONDS
        """The feedback that waited when Kafka was last asked, and the monotonic time of that request."""
        self._blocked_since, self._blocked_records = time.monotonic(), 0
        """Monotonic time since which records are blocked, and their number once it is reported."""
        self._uncommitted: list[DecidedFeedback] = []
        """Decisions that wait for a commit. None of them changes the codebook."""
        health.state = self._state

    def run(self, stop: threading.Event) -> None:
        """Stand by, lead and decide until `stop` is set; begin again after a retriable Kafka error.

        Raises:
            HistoryError: the history is broken, or belongs to another codebook, model or layer.
            DeviceLostError: the device that runs the model failed.
            StaleHeadError: another editor has led since this one did, or Redis holds a newer history.
            KafkaError: of a kind that would come again (`is_retriable`).
        """
        try:
            while not stop.is_set():
                try:
                    if self._stand_by(stop):
                        self._acquire_leadership(stop)
                        self._edit_until(stop)
                except KafkaError as error:
                    if not is_retriable(error):
                        raise
                    reason = str(error) or type(error).__name__
                    self._set_leadership("starting", f"Kafka failed: {reason}")
                    log.warning(
                        "kafka_connection_lost",
                        reason=reason,
                        retry_seconds=KAFKA_RETRY_SECONDS,
                        consequence="this editor leads no more and begins again; feedback waits for a leading editor",
                    )
                    self._services.log.close()
                    self._reset_leader_reports()
                    self._health.end("editor")
                    self._idle.set()
                    stop.wait(KAFKA_RETRY_SECONDS)
        finally:
            for part in (self._services.log, self._services.traffic_reader, self._services.snapshot_writer):
                part.close()

    def _stand_by(self, stop: threading.Event) -> bool:
        """Read the history, join the group, and follow the leading editor; True once this one is elected."""
        services = self._services
        self._uncommitted.clear()
        self._apply_new_deltas()
        services.feedback_processor.catch_up()
        services.traffic_reader.warm_up()
        self._idle.clear()
        services.log.join()
        while not stop.is_set():
            self._health.begin("editor")
            membership = services.log.membership(0.05)
            self._apply_new_deltas()
            if membership == "elected":
                return True
            if membership == "standby" and self._leadership != "standby":
                self._set_leadership("standby")
            services.traffic_reader.poll(0.05)
            self._report_sizes()
        return False

    def _acquire_leadership(self, stop: threading.Event) -> None:
        """Begin a term.

        1. Fence the predecessor.
        2. Apply the deltas that it committed last.
        3. Wait until Redis is not ahead of the log.
        4. Commit the `lead` delta of the next term, and apply it.
        5. Reconcile Redis, where the predecessor may have published half.
        """
        services = self._services
        services.log.fence()
        self._apply_new_deltas()
        if not services.redis_publisher.wait_until_not_ahead(stop):
            return
        self._lead_delta = services.engine.lead_delta(services.environment)
        position = services.log.write_lead(self._lead_delta)
        services.engine.apply(self._lead_delta)
        services.feedback_processor.reset()
        services.redis_publisher.reconcile()
        self._set_leadership("leading", feedback_offset=position)

    def _apply_new_deltas(self) -> None:
        """Apply the deltas that other editors have written.

        Raises:
            HistoryError: a delta cannot be applied.
            StaleHeadError: another editor has begun a term since this one led.
        """
        for offset, record in self._services.log.read_new_deltas():
            try:
                applied = self._services.engine.apply(record)
            except HistoryError as fault:
                raise history_error_at(offset, fault) from fault
            if applied is not None and applied.delta.op == "lead" and self._lead_delta not in (None, record):
                raise StaleHeadError(f"another editor has taken the lead, in term {applied.delta.term}")

    def _edit_until(self, stop: threading.Event) -> None:
        """Decide on feedback as it comes, and read traffic in between, until `stop` is set."""
        services = self._services
        while not stop.is_set():
            processed = 0
            while processed < MAX_FEEDBACK_PER_ROUND and (records := self._next_records()) and not stop.is_set():
                self._edit_batch(records, stop)
                processed += len(records)
            self._commit()
            self._apply_new_deltas()  # finds another writer of `deltas`
            services.traffic_reader.poll(0.0 if processed else 0.05)
            services.redis_publisher.reconcile()
            services.snapshot_writer.maybe_write(services.engine.codebook)
            self._update_lag()
            self._report_sizes()

    def _next_records(self) -> list[FeedbackRecord]:
        """The feedback records that wait, up to one batch; empty if none waits.

        Waits for the first record only if no result waits for a commit.
        """
        log, records, size_bytes = self._services.log, list[FeedbackRecord](), 0
        self._health.begin("editor")
        while len(records) < self._batch_size and size_bytes < MAX_UNCOMMITTED_BYTES:
            if (record := log.poll(0.0 if records or self._uncommitted else 0.05)) is None:
                break
            records.append(record)
            size_bytes += record.size_bytes
        return records

    def _edit_batch(self, records: Sequence[FeedbackRecord], stop: threading.Event) -> None:
        """Train the values of a batch together, then decide on its records one after the other."""
        self._update_lag(len(records))
        processor, started = self._services.feedback_processor, time.perf_counter()
        parsed_batch = [processor.parse(record) for record in records]
        drafts = processor.draft_values(parsed_batch)
        draft_seconds = (time.perf_counter() - started) / max(1, len(drafts))
        for decided_count, parsed in enumerate(parsed_batch):
            self._update_lag(len(records) - decided_count)
            self._health.begin("editor")
            self._services.log.keep_alive(KEEP_ALIVE_SECONDS)
            if stop.is_set():
                return
            self._edit(parsed, drafts.get(parsed.offset), draft_seconds if parsed.offset in drafts else 0.0)

    def _update_lag(self, received: int = 0) -> None:
        """Report the amount of waiting feedback.

        That is Kafka's last answer, or the `received` records that are not decided yet if these are more.
        """
        if (now := time.monotonic()) > self._lag_checked_at + LAG_CHECK_SECONDS:
            self._lag, self._lag_checked_at = self._services.log.lag(), now
            self._update_blocked(now)
        metrics.FEEDBACK_LAG.set(max(self._lag, received))

    def _report_sizes(self) -> None:
        """Report the sizes of the codebook and of the traffic sample, leading or not."""
        engine = self._services.engine
        metrics.TRAFFIC_SAMPLE_QUERIES.set(len(engine.traffic_sample))
        metrics.set_codebook_gauges(engine.codebook.seq, engine.codebook.term, len(engine.codebook))

    def _reset_leader_reports(self) -> None:
        """Report no waiting feedback and no problem of Redis: only a leading editor knows of them."""
        self._lag, self._lag_checked_at = 0, -LAG_CHECK_SECONDS
        self._blocked_since, self._blocked_records = time.monotonic(), 0
        metrics.FEEDBACK_LAG.set(0)
        metrics.FEEDBACK_BLOCKED.set(0)
        self._services.redis_publisher.stand_by()

    def _update_blocked(self, now: float) -> None:
        """Report an abandoned transaction on `feedback`: nobody can read the corrections behind it."""
        blocked = self._services.log.blocked_records()
        if not blocked:
            self._blocked_since, self._blocked_records = now, 0
        elif now > self._blocked_since + BLOCKED_AFTER_SECONDS:
            if not self._blocked_records:
                log.warning(
                    "feedback_blocked",
                    records=blocked,
                    consequence="no feedback behind the open transaction can be read or decided",
                    remedy=BLOCKED_REMEDY,
                )
            self._blocked_records = blocked
        metrics.FEEDBACK_BLOCKED.set(self._blocked_records)

    def _edit(self, parsed: ParsedFeedback, draft: DraftValue | None, earlier_seconds: float) -> None:
        """Decide on one record, and commit, apply and publish its delta.

        1. Decide.
        2. Commit. A result without a delta waits for the next commit, so that several share a transaction.
        3. Apply the delta. Only a committed delta may change the codebook.
        4. Publish it in Redis, and write a snapshot if one is due.

        Args:
            parsed: The feedback record.
            draft: Its value as trained in the batch; None if it was not.
            earlier_seconds: This record's share of the time that the batch took so far, for the outcome's `seconds`.
        """
        services, started = self._services, time.perf_counter() - earlier_seconds
        decided = services.feedback_processor.decide(parsed, draft)
        self._uncommitted.append(decided.with_seconds(round(time.perf_counter() - started, 4)))
        if decided.result.delta_record is not None:
            self._commit()
            applied = services.engine.apply(decided.result.delta_record)
            assert applied is not None
            services.redis_publisher.publish(applied)
            services.snapshot_writer.maybe_write(services.engine.codebook)
            metrics.DECISION_SECONDS.observe(time.perf_counter() - started)
        elif sum(waiting.size_bytes for waiting in self._uncommitted) > MAX_UNCOMMITTED_BYTES:
            self._commit()

    def _commit(self) -> None:
        """Commit the waiting decisions in one transaction, and report them."""
        if self._uncommitted:
            self._services.log.commit(*self._uncommitted)
        for decided in self._uncommitted:
            _report(decided)
        self._uncommitted.clear()

    def _set_leadership(
        self, leadership: Literal["starting", "standby", "leading"], reason: str = "", **fields: object
    ) -> None:
        """Set and report the state of the leadership.

        A standby counts as ready: only the leading editor keeps it from leading.
        """
        self._leadership = leadership
        if leadership == "starting":
            self._health.set_not_ready(reason)
        else:
            self._health.set_ready()
            book = self._services.engine.codebook
            log.info("worker_ready", leadership=leadership, term=book.term, seq=book.seq, entries=len(book), **fields)

    def _state(self) -> dict[str, object]:
        engine = self._services.engine
        return {
            **engine.codebook.describe(),
            "leadership": self._leadership,
            "edits": len(engine.memory),
            "traffic": len(engine.traffic_sample),
            "feedback_blocked": self._blocked_records,
            "degraded": self._leadership == "leading" and not self._services.redis_publisher.in_sync,
        }


def _report(decided: DecidedFeedback) -> None:
    """Count a committed decision in the metrics, and log its outcome."""
    offset, outcome = decided.record.offset, decided.result.outcome
    if outcome is None:
        metrics.FEEDBACK_TOTAL.labels("unreadable").inc()
        log.warning(
            "feedback_dead_lettered",
            offset=offset,
            reason=decided.result.dead_letter_reason,
            consequence="the record is on feedback.dlq, and changed nothing",
        )
        return
    metrics.FEEDBACK_TOTAL.labels(outcome.status).inc()
    if outcome.steps is not UNSET:
        metrics.TRAINING_STEPS.observe(outcome.steps)
    log.info("feedback_decided", offset=offset, **msgspec.to_builtins(outcome))
