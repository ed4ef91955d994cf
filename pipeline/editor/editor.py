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

from gracestream.pipeline.editing import Ahead, EditEngine
from gracestream.pipeline.editor.feedback_processor import Intake, Read
from gracestream.pipeline.editor.log import EditorLog, Result, may_pass
from gracestream.pipeline.editor.redis_publisher import Projection
from gracestream.pipeline.editor.snapshot_writer import SnapshotWriter
from gracestream.pipeline.editor.traffic_reader import RequestTail
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka import error_at
from gracestream.pipeline.observability import Health, metrics
from gracestream.pipeline.stores import StaleError

log = structlog.get_logger()

MAX_FEEDBACK_PER_ROUND = 64
"""Feedback records in a row, or a few more, after which traffic is looked at again."""

MAX_UNCOMMITTED_BYTES = 2**20
"""Of feedback records with their keys. No more are trained together, and what changes nothing is committed then, though
more of it may wait."""

RETRY_SECONDS = 1.0
"""Between a failure of Kafka and the next attempt."""

COUNT_SECONDS = 1.0
"""Between two questions to Kafka how much feedback waits."""

BLOCKED_SECONDS = 5.0
"""After so long a transaction on `feedback` counts as left open."""

BLOCKED_REMEDY = (
    "a producer has left a transaction open; find it with `kafka-transactions.sh find-hanging`, end it with"
    " `kafka-transactions.sh abort`, and allow transactions to no writer of feedback (deploy/acls.sh)"
)

STAY_SECONDS = 1.0
"""How often the group is told that a long undo goes on."""

Record = tuple[int, int, bytes | None, bytes | None]
"""Of `feedback`: offset, timestamp in ms, key, value."""


@dataclass(frozen=True, slots=True)
class EditorServices:
    """The parts that an editor works with."""

    engine: EditEngine
    log: EditorLog
    intake: Intake
    traffic: RequestTail
    projection: Projection
    snapshots: SnapshotWriter
    environment: dict[str, str]


class Editor:
    """Stands by, leads and edits; values of up to `together` feedback records are trained together."""

    def __init__(
        self, services: EditorServices, health: Health, together: int, idle: threading.Event | None = None
    ) -> None:
        """`idle` is set while it waits for Kafka or for the history, and has nothing in hand."""
        self._services, self._health, self._together = services, health, together
        self._idle = threading.Event() if idle is None else idle
        self._role: Literal["starting", "standby", "leading"] = "starting"
        self._lead: bytes | None = None
        self._behind, self._counted = 0, -COUNT_SECONDS
        """The feedback that waited, and when that was asked."""
        self._blocked_since, self._blocked = time.monotonic(), 0
        self._decided: list[Result] = []
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
                        self._take_over(stop)
                        self._edit_until(stop)
                except KafkaError as error:
                    if not may_pass(error):
                        raise
                    reason = str(error) or type(error).__name__
                    self._turn("starting", f"Kafka failed: {reason}")
                    log.warning("log_lost", reason=reason, retry_seconds=RETRY_SECONDS)
                    self._services.log.close()
                    self._health.at_rest("editor")
                    self._idle.set()
                    stop.wait(RETRY_SECONDS)
        finally:
            for part in (self._services.log, self._services.traffic, self._services.snapshots):
                part.close()

    def _stand_by(self, stop: threading.Event) -> bool:
        """Learn the history, enter the group, and follow the one who leads; whether this editor is to lead now."""
        services = self._services
        self._decided.clear()
        self._count_anew()
        self._fold()
        services.intake.catch_up()
        services.traffic.catch_up()
        self._idle.clear()
        services.log.join()
        while not stop.is_set():
            self._health.at_work("editor")
            place = services.log.place(0.05)
            self._fold()
            if place == "chosen":
                return True
            if place == "standby" and self._role != "standby":
                self._turn("standby")
            services.traffic.read(0.05)
            metrics.show_codebook(
                services.engine.codebook.seq, services.engine.codebook.term, len(services.engine.codebook)
            )
        return False

    def _take_over(self, stop: threading.Event) -> None:
        """Fence the predecessor, learn what it committed last, take the next term, and mend what it left in Redis."""
        services = self._services
        services.log.fence()
        self._fold()
        if not services.projection.await_no_newer(stop):
            return
        self._lead = services.engine.lead(services.environment)
        position = services.log.lead(self._lead)
        services.engine.apply(self._lead)
        services.intake.begin()
        services.projection.repair()
        self._turn("leading", feedback_offset=position)

    def _fold(self) -> None:
        """Apply what others have written to the log."""
        for offset, record in self._services.log.deltas():
            try:
                applied = self._services.engine.apply(record)
            except HistoryError as fault:
                raise error_at(offset, fault) from fault
            if applied is not None and applied.delta.op == "lead" and self._lead not in (None, record):
                raise StaleError(f"another editor has taken the lead, in term {applied.delta.term}")

    def _edit_until(self, stop: threading.Event) -> None:
        """Work on feedback as it comes; on traffic while there is none."""
        services = self._services
        while not stop.is_set():
            done = 0
            while done < MAX_FEEDBACK_PER_ROUND and (records := self._waiting()) and not stop.is_set():
                self._edit_all(records, stop)
                done += len(records)
            self._commit()
            self._fold()  # nobody else is to write there, and who does so is met here
            services.traffic.read(0.0 if done else 0.05)
            services.projection.repair()
            services.snapshots.offer(services.engine.codebook)
            self._count()
            metrics.TRAFFIC.set(len(services.engine.traffic))
            metrics.show_codebook(
                services.engine.codebook.seq, services.engine.codebook.term, len(services.engine.codebook)
            )

    def _waiting(self) -> list[Record]:
        """The feedback records that wait, up to as many as are trained together; waits for a first one."""
        log, found, held = self._services.log, list[Record](), 0
        self._health.at_work("editor")
        while len(found) < self._together and held < MAX_UNCOMMITTED_BYTES:
            if (record := log.poll(0.0 if found or self._decided else 0.05)) is None:
                break
            found.append(record)
            held += len(record[2] or b"") + len(record[3] or b"")
        return found

    def _edit_all(self, records: Sequence[Record], stop: threading.Event) -> None:
        """Train for what can be trained together, and then decide on one after the other."""
        self._count(len(records))
        intake, started = self._services.intake, time.perf_counter()
        read = [intake.read(offset, timestamp, value) for offset, timestamp, _, value in records]
        ahead = intake.train_ahead(read)
        share = (time.perf_counter() - started) / max(1, len(ahead))
        for done, (record, one) in enumerate(zip(records, read, strict=True)):
            self._count(len(records) - done)
            self._health.at_work("editor")
            self._services.log.stay(STAY_SECONDS)
            if stop.is_set():
                return
            self._edit(record, one, ahead.get(one.offset), share if one.offset in ahead else 0.0)

    def _count(self, taken: int = 0) -> None:
        """Tell how much feedback waits: what Kafka said a moment ago, and no less than what was taken of it."""
        if (now := time.monotonic()) > self._counted + COUNT_SECONDS:
            self._behind, self._counted = self._services.log.behind(), now
            self._watch_blocked(now)
        metrics.FEEDBACK_LAG.set(max(self._behind, taken))

    def _count_anew(self) -> None:
        """Report no feedback that waits: only the editor that leads knows of any."""
        self._behind, self._counted = 0, -COUNT_SECONDS
        self._blocked_since, self._blocked = time.monotonic(), 0
        metrics.FEEDBACK_LAG.set(0)
        metrics.FEEDBACK_BLOCKED.set(0)

    def _watch_blocked(self, now: float) -> None:
        """Report a transaction on `feedback` that stays open: corrections behind it cannot be read."""
        blocked = self._services.log.blocked()
        if not blocked:
            self._blocked_since, self._blocked = now, 0
        elif now > self._blocked_since + BLOCKED_SECONDS:
            if not self._blocked:
                log.warning("feedback_blocked", records=blocked, remedy=BLOCKED_REMEDY)
            self._blocked = blocked
        metrics.FEEDBACK_BLOCKED.set(self._blocked)

    def _edit(self, record: Record, read: Read, ahead: Ahead | None, earlier: float) -> None:
        """Decide, commit, fold, make live; what changes nothing is committed together with what comes next.

        `earlier`: the seconds that were spent on it before.
        """
        services, started = self._services, time.perf_counter() - earlier
        taken = services.intake.decide(read, ahead)
        edited, outcome = taken.edited, taken.edited.outcome
        if outcome is not None:
            outcome = msgspec.structs.replace(outcome, seconds=round(time.perf_counter() - started, 4))
        set_aside = edited.reason if edited.invalid else None
        offset, _, key, value = record
        self._decided.append(Result(offset, outcome, edited.record, set_aside, key, value, taken.headers))
        if edited.record is not None:
            self._commit()
            applied = services.engine.apply(edited.record)
            assert applied is not None
            services.projection.make_live(applied)
            services.snapshots.offer(services.engine.codebook)
            metrics.EDIT_SECONDS.observe(time.perf_counter() - started)
        elif sum(result.size for result in self._decided) > MAX_UNCOMMITTED_BYTES:
            self._commit()

    def _commit(self) -> None:
        """Write what is decided in one transaction, and tell of it."""
        if self._decided:
            self._services.log.commit(*self._decided)
        for result in self._decided:
            _tell(result)
        self._decided.clear()

    def _turn(self, role: Literal["starting", "standby", "leading"], reason: str = "", **fields: object) -> None:
        """Take a role, and say so. A standby is ready: nothing keeps it from leading but the one who leads."""
        self._role = role
        if role == "starting":
            self._health.not_ready(reason)
        else:
            self._health.become_ready()
            book = self._services.engine.codebook
            log.info("ready", role=role, term=book.term, seq=book.seq, entries=len(book), **fields)

    def _state(self) -> dict[str, object]:
        engine = self._services.engine
        return {
            **engine.codebook.facts(),
            "role": self._role,
            "edits": len(engine.memory),
            "traffic": len(engine.traffic),
            "feedback_blocked": self._blocked,
            "degraded": self._role == "leading" and not self._services.projection.complete,
        }


def _tell(result: Result) -> None:
    """Count a record, and write what became of it to the log."""
    outcome = result.outcome
    if outcome is None:
        metrics.FEEDBACK.labels("unreadable").inc()
        log.warning("feedback_unreadable", offset=result.offset, reason=result.rejected)
        return
    metrics.FEEDBACK.labels(outcome.status).inc()
    if outcome.steps is not UNSET:
        metrics.EDIT_STEPS.observe(outcome.steps)
    log.info("feedback", offset=result.offset, **msgspec.to_builtins(outcome))
