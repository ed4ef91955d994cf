"""The editor: corrections in, deltas and outcomes out (design, sections 1, 4 and 5).

It learns the codebook from the log, takes a term, and then decides on one feedback record at a time: train, commit
delta, outcome and offset in one Kafka transaction, fold the delta, make it live in Redis. While no feedback waits it
reads requests, so that new radii keep clear of traffic that nobody flagged.
"""

import threading
import time

import msgspec
import structlog
from kafka.errors import KafkaError

from pipeline import metrics
from pipeline.clients import redis_client
from pipeline.codebook import DeltaFault
from pipeline.editing import Edited, EditEngine
from pipeline.editor_log import EditorLog, Result
from pipeline.environment import environment
from pipeline.follower import read_history
from pipeline.projection import Projection
from pipeline.radius_store import RadiusStore, StaleError
from pipeline.request_tail import RequestTail
from pipeline.settings import Settings
from schemas.messages import VERSION, Feedback, InvalidMessage, Outcome, decode, one_line, peek_id
from workers.boot import Worker, plan_of, worker

log = structlog.get_logger()


def run(settings: Settings) -> int:
    """Run the editor until it is told to stop, or another one takes over; the exit status."""
    with worker("editor", settings) as started:
        editor = Editor(started, settings)
        try:
            editor.start()
            editor.edit_until(started.stop)
        except (DeltaFault, StaleError, KafkaError) as error:
            started.health.not_ready(str(error))
            log.error("editor_stopped", reason=str(error) or type(error).__name__)  # noqa: TRY400  (no defect)
            return 1
        finally:
            editor.close()
        return 0


class Editor:
    """The engine, its log, its view of traffic, and the projection of radii to Redis."""

    def __init__(self, started: Worker, settings: Settings) -> None:
        self._worker, self._settings = started, settings
        self._engine = EditEngine(started.model, settings.codebook, plan_of(settings))
        self._log = EditorLog(settings)
        self._traffic = RequestTail(settings, self._engine)
        self._projection = Projection(RadiusStore(redis_client(settings), settings), self._engine.codebook)
        started.health.state = self._state

    def start(self) -> None:
        """Fold the history, take the next term, and finish what a predecessor left undone in Redis."""
        read_history(self._settings, lambda record, _offset, _time: self._engine.apply(record))
        lead = self._engine.lead(environment(self._worker.name, self._worker.model, self._engine.plan))
        self._log.write_lead(lead)
        self._engine.apply(lead)
        self._projection.repair()
        self._traffic.catch_up()
        position = self._log.seek()
        self._worker.health.become_ready()
        book = self._engine.codebook
        log.info("ready", term=book.term, seq=book.seq, entries=len(book), feedback_offset=position)

    def edit_until(self, stop: threading.Event) -> None:
        """Work on feedback as it comes; on traffic while there is none."""
        while not stop.is_set():
            for offset, key, value in self._log.poll(0.05):
                self._edit(offset, key, value)
                if stop.is_set():
                    return
            self._traffic.read(0.05)
            self._projection.repair()
            metrics.FEEDBACK_LAG.set(self._log.behind())
            metrics.TRAFFIC.set(len(self._engine.traffic))
            metrics.show(self._engine.codebook)

    def close(self) -> None:
        """Leave the log."""
        self._log.close()
        self._traffic.close()

    def _edit(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        started = time.perf_counter()
        try:
            edited = self._engine.edit(decode(value, Feedback, self._settings.max_record_bytes), offset)
        except InvalidMessage as error:
            edited = _unreadable(value, str(error))
        except Exception as error:  # whatever one record does to the model, the stream moves on
            log.exception("edit_failed", offset=offset)
            edited = _unreadable(value, f"the model failed: {type(error).__name__}: {one_line(error)}")
        outcome = edited.outcome
        if outcome is not None:
            outcome = msgspec.structs.replace(outcome, seconds=round(time.perf_counter() - started, 4))
        rejected = edited.reason if edited.invalid else None
        self._log.commit(Result(offset, outcome, edited.record, rejected, key, value))
        if edited.record is not None and (applied := self._engine.apply(edited.record)) is not None:
            self._projection.make_live(applied)
            metrics.EDIT_SECONDS.observe(time.perf_counter() - started)
        metrics.FEEDBACK.labels("unreadable" if outcome is None else outcome.status).inc()
        if outcome is None:
            log.warning("feedback_unreadable", offset=offset, reason=edited.reason)
        else:
            if outcome.steps is not msgspec.UNSET:
                metrics.EDIT_STEPS.observe(outcome.steps)
            log.info("feedback", offset=offset, **msgspec.to_builtins(outcome))

    def _state(self) -> dict[str, object]:
        return {
            **self._engine.codebook.facts(),
            "edits": len(self._engine.memory),
            "traffic": len(self._engine.traffic),
            "degraded": not self._projection.complete,
        }


def _unreadable(value: bytes | None, reason: str) -> Edited:
    """Feedback that cannot be taken: to the dead letter queue, and an outcome where it has an id to bear."""
    feedback_id = peek_id(value, "feedback_id")
    outcome = None
    if feedback_id is not None:
        outcome = Outcome(v=VERSION, feedback_id=feedback_id, status="rejected", reason=reason)
    return Edited(outcome, invalid=True, reason=reason)
