"""The editor: corrections in, deltas and outcomes out (design, sections 1, 4 and 5).

It learns the codebook from the log, waits as standby while another editor leads, takes a term, and then decides on one
feedback record at a time: train, commit delta, outcome and offset in one Kafka transaction, fold the delta, make it
live in Redis. Values of corrections that wait are trained together before they are decided on, since that is most of
the work. It reads requests too, before each correction and while none waits, so that new radii keep clear of traffic
that nobody flagged. Where Kafka fails it begins again, in the same process and with what it has folded; where another
editor has led meanwhile, it stops.
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
from gracestream.pipeline.editor.feedback_processor import FeedbackProcessor, ParsedFeedback
from gracestream.pipeline.editor.log import EditorLog, FeedbackResult, is_retriable
from gracestream.pipeline.editor.redis_publisher import RedisPublisher
from gracestream.pipeline.editor.snapshot_writer import SnapshotWriter
from gracestream.pipeline.editor.traffic_reader import TrafficReader
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka import history_error_at
from gracestream.pipeline.observability import Health, metrics
from gracestream.pipeline.stores import StaleHeadError

log = structlog.get_logger()

MAX_FEEDBACK_PER_ROUND = 64
"""Feedback records in a row, or a few more, after which traffic is looked at again."""

MAX_UNCOMMITTED_BYTES = 2**20
"""Of feedback records with their keys. No more are trained together, and what changes nothing is committed then, though
more of it may wait."""

KAFKA_RETRY_SECONDS = 1.0
"""Between a failure of Kafka and the next attempt."""

LAG_CHECK_SECONDS = 1.0
"""Between two questions to Kafka how much feedback waits."""

BLOCKED_AFTER_SECONDS = 5.0
"""After so long a transaction on `feedback` counts as left open."""

BLOCKED_REMEDY = (
    "a producer has left a transaction open; find it with `kafka-transactions.sh find-hanging`, end it with"
    " `kafka-transactions.sh abort`, and allow transactions to no writer of feedback (deploy/acls.sh)"
)

KEEP_ALIVE_SECONDS = 1.0
"""How often the group is told that a long undo goes on."""

FeedbackRecord = tuple[int, int, bytes | None, bytes | None]
"""Of `feedback`: offset, timestamp in ms, key, value."""


@dataclass(frozen=True, slots=True)
class EditorServices:
    """The parts that an editor works with."""

    engine: EditEngine
    log: EditorLog
    feedback_processor: FeedbackProcessor
    traffic_reader: TrafficReader
    redis_publisher: RedisPublisher
    snapshot_writer: SnapshotWriter
    environment: dict[str, str]


class Editor:
    """Stands by, leads and edits; values of up to `batch_size` feedback records are trained together."""

    def __init__(
        self, services: EditorServices, health: Health, batch_size: int, idle: threading.Event | None = None
    ) -> None:
        """`idle` is set while it waits for Kafka or for the history, and has nothing in hand."""
        self._services, self._health, self._batch_size = services, health, batch_size
        self._idle = threading.Event() if idle is None else idle
        self._role: Literal["starting", "standby", "leading"] = "starting"
        self._lead_delta: bytes | None = None
        self._lag, self._lag_checked_at = 0, -LAG_CHECK_SECONDS
        """The feedback that waited, and when that was asked."""
        self._blocked_since, self._blocked_records = time.monotonic(), 0
        self._uncommitted: list[FeedbackResult] = []
        """On what a commit waits; none of it changes the codebook."""
        health.state = self._state

    def run(self, stop: threading.Event) -> None:
        """Stand by, lead and edit until told to stop; where Kafka failed, begin again.

        Raises:
            HistoryError: the history is not of this editor's codebook, model or layer, or it is broken; also where that
                comes to pass while this editor leads.
            DeviceFault: the device that runs the model failed.
            StaleError: another editor has led since this one did, or Redis holds a newer history.
            KafkaError: of a kind that would come again.
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
                    self._set_role("starting", f"Kafka failed: {reason}")
                    log.warning("log_lost", reason=reason, retry_seconds=KAFKA_RETRY_SECONDS)
                    self._services.log.close()
                    self._health.end("editor")
                    self._idle.set()
                    stop.wait(KAFKA_RETRY_SECONDS)
        finally:
            for part in (self._services.log, self._services.traffic_reader, self._services.snapshot_writer):
                part.close()

    def _stand_by(self, stop: threading.Event) -> bool:
        """Learn the history, enter the group, and follow the one who leads; whether this editor is to lead now."""
        services = self._services
        self._uncommitted.clear()
        self._reset_lag()
        self._apply_new_deltas()
        services.feedback_processor.catch_up()
        services.traffic_reader.warm_up()
        self._idle.clear()
        services.log.join()
        while not stop.is_set():
            self._health.begin("editor")
            place = services.log.membership(0.05)
            self._apply_new_deltas()
            if place == "chosen":
                return True
            if place == "standby" and self._role != "standby":
                self._set_role("standby")
            services.traffic_reader.poll(0.05)
            metrics.set_codebook_gauges(
                services.engine.codebook.seq, services.engine.codebook.term, len(services.engine.codebook)
            )
        return False

    def _acquire_leadership(self, stop: threading.Event) -> None:
        """Fence the predecessor, learn what it committed last, take the next term, and mend what it left in Redis."""
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
        self._set_role("leading", feedback_offset=position)

    def _apply_new_deltas(self) -> None:
        """Apply what others have written to the log."""
        for offset, record in self._services.log.read_new_deltas():
            try:
                applied = self._services.engine.apply(record)
            except HistoryError as fault:
                raise history_error_at(offset, fault) from fault
            if applied is not None and applied.delta.op == "lead" and self._lead_delta not in (None, record):
                raise StaleHeadError(f"another editor has taken the lead, in term {applied.delta.term}")

    def _edit_until(self, stop: threading.Event) -> None:
        """Work on feedback as it comes; on traffic while there is none."""
        services = self._services
        while not stop.is_set():
            done = 0
            while done < MAX_FEEDBACK_PER_ROUND and (records := self._next_records()) and not stop.is_set():
                self._edit_batch(records, stop)
                done += len(records)
            self._commit()
            self._apply_new_deltas()  # nobody else is to write there, and who does so is met here
            services.traffic_reader.poll(0.0 if done else 0.05)
            services.redis_publisher.reconcile()
            services.snapshot_writer.maybe_write(services.engine.codebook)
            self._update_lag()
            metrics.TRAFFIC_RESERVOIR_SIZE.set(len(services.engine.reservoir))
            metrics.set_codebook_gauges(
                services.engine.codebook.seq, services.engine.codebook.term, len(services.engine.codebook)
            )

    def _next_records(self) -> list[FeedbackRecord]:
        """The feedback records that wait, up to as many as are trained together; waits for a first one."""
        log, found, held = self._services.log, list[FeedbackRecord](), 0
        self._health.begin("editor")
        while len(found) < self._batch_size and held < MAX_UNCOMMITTED_BYTES:
            if (record := log.poll(0.0 if found or self._uncommitted else 0.05)) is None:
                break
            found.append(record)
            held += len(record[2] or b"") + len(record[3] or b"")
        return found

    def _edit_batch(self, records: Sequence[FeedbackRecord], stop: threading.Event) -> None:
        """Train for what can be trained together, and then decide on one after the other."""
        self._update_lag(len(records))
        intake, started = self._services.feedback_processor, time.perf_counter()
        read = [intake.parse(offset, timestamp, value) for offset, timestamp, _, value in records]
        ahead = intake.draft_values(read)
        share = (time.perf_counter() - started) / max(1, len(ahead))
        for done, (record, one) in enumerate(zip(records, read, strict=True)):
            self._update_lag(len(records) - done)
            self._health.begin("editor")
            self._services.log.keep_alive(KEEP_ALIVE_SECONDS)
            if stop.is_set():
                return
            self._edit(record, one, ahead.get(one.offset), share if one.offset in ahead else 0.0)

    def _update_lag(self, received: int = 0) -> None:
        """Tell how much feedback waits: what Kafka said a moment ago, and no less than what was taken of it."""
        if (now := time.monotonic()) > self._lag_checked_at + LAG_CHECK_SECONDS:
            self._lag, self._lag_checked_at = self._services.log.lag(), now
            self._update_blocked(now)
        metrics.FEEDBACK_LAG.set(max(self._lag, received))

    def _reset_lag(self) -> None:
        """Report no feedback that waits: only the editor that leads knows of any."""
        self._lag, self._lag_checked_at = 0, -LAG_CHECK_SECONDS
        self._blocked_since, self._blocked_records = time.monotonic(), 0
        metrics.FEEDBACK_LAG.set(0)
        metrics.FEEDBACK_BLOCKED.set(0)

    def _update_blocked(self, now: float) -> None:
        """Report a transaction on `feedback` that stays open: corrections behind it cannot be read."""
        blocked = self._services.log.blocked_records()
        if not blocked:
            self._blocked_since, self._blocked_records = now, 0
        elif now > self._blocked_since + BLOCKED_AFTER_SECONDS:
            if not self._blocked_records:
                log.warning("feedback_blocked", records=blocked, remedy=BLOCKED_REMEDY)
            self._blocked_records = blocked
        metrics.FEEDBACK_BLOCKED.set(self._blocked_records)

    def _edit(
        self, record: FeedbackRecord, parsed: ParsedFeedback, draft: DraftValue | None, earlier_seconds: float
    ) -> None:
        """Decide, commit, fold, make live; what changes nothing is committed together with what comes next.

        `earlier_seconds`: the seconds that were spent on it before.
        """
        services, started = self._services, time.perf_counter() - earlier_seconds
        taken = services.feedback_processor.decide(parsed, draft)
        edited, outcome = taken.result, taken.result.outcome
        if outcome is not None:
            outcome = msgspec.structs.replace(outcome, seconds=round(time.perf_counter() - started, 4))
        set_aside = edited.reason if edited.is_dead_letter else None
        offset, _, key, value = record
        self._uncommitted.append(
            FeedbackResult(offset, outcome, edited.delta_record, set_aside, key, value, taken.headers)
        )
        if edited.delta_record is not None:
            self._commit()
            applied = services.engine.apply(edited.delta_record)
            assert applied is not None
            services.redis_publisher.publish(applied)
            services.snapshot_writer.maybe_write(services.engine.codebook)
            metrics.EDIT_SECONDS.observe(time.perf_counter() - started)
        elif sum(result.size_bytes for result in self._uncommitted) > MAX_UNCOMMITTED_BYTES:
            self._commit()

    def _commit(self) -> None:
        """Write what is decided in one transaction, and tell of it."""
        if self._uncommitted:
            self._services.log.commit(*self._uncommitted)
        for result in self._uncommitted:
            _report(result)
        self._uncommitted.clear()

    def _set_role(self, role: Literal["starting", "standby", "leading"], reason: str = "", **fields: object) -> None:
        """Take a role, and say so. A standby is ready: nothing keeps it from leading but the one who leads."""
        self._role = role
        if role == "starting":
            self._health.set_not_ready(reason)
        else:
            self._health.set_ready()
            book = self._services.engine.codebook
            log.info("ready", role=role, term=book.term, seq=book.seq, entries=len(book), **fields)

    def _state(self) -> dict[str, object]:
        engine = self._services.engine
        return {
            **engine.codebook.describe(),
            "role": self._role,
            "edits": len(engine.memory),
            "traffic": len(engine.reservoir),
            "feedback_blocked": self._blocked_records,
            "degraded": self._role == "leading" and not self._services.redis_publisher.in_sync,
        }


def _report(result: FeedbackResult) -> None:
    """Count a record, and write what became of it to the log."""
    outcome = result.outcome
    if outcome is None:
        metrics.FEEDBACK_TOTAL.labels("unreadable").inc()
        log.warning("feedback_unreadable", offset=result.offset, reason=result.dead_letter_reason)
        return
    metrics.FEEDBACK_TOTAL.labels(outcome.status).inc()
    if outcome.steps is not UNSET:
        metrics.EDIT_STEPS.observe(outcome.steps)
    log.info("feedback", offset=result.offset, **msgspec.to_builtins(outcome))
