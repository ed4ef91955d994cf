"""The editor: corrections in, deltas and outcomes out (design, sections 1, 4 and 5).

It learns the codebook from the log, takes a term, and then decides on one feedback record at a time: train, commit
delta, outcome and offset in one Kafka transaction, fold the delta, make it live in Redis. While no feedback waits it
reads requests, so that new radii keep clear of traffic that nobody flagged.
"""

import platform
import threading
import time

import faiss
import msgspec
import numpy as np
import structlog
import torch
import transformers
from kafka.errors import KafkaError
from redis.exceptions import RedisError

from pipeline import metrics
from pipeline.clients import redis_client
from pipeline.codebook import Applied, DeltaFault
from pipeline.editing import Edited, EditEngine, Plan
from pipeline.editor_log import EditorLog, Result
from pipeline.follower import read_history
from pipeline.radius_store import RadiusStore, StaleError
from pipeline.request_tail import RequestTail
from pipeline.settings import Settings
from pipeline.training import Recipe
from schemas.messages import VERSION, Feedback, InvalidMessage, Outcome, decode, peek_id
from workers.boot import Worker, worker

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
            log.exception("editor_stopped", reason=str(error) or type(error).__name__)
            return 1
        finally:
            editor.close()
        return 0


def plan_of(settings: Settings) -> Plan:
    """How to edit, as the settings say."""
    return Plan(
        policy=settings.policy,
        radius=settings.radius,
        radius_unit=settings.radius_unit,
        expand=settings.expand,
        guard=settings.guard,
        traffic=settings.traffic,
        seed=settings.seed,
        init=settings.init,
        recipe=Recipe(settings.max_steps, settings.learning_rate, settings.margin),
    )


class Editor:
    """The engine, its log, its view of traffic, and the projection of radii to Redis."""

    def __init__(self, started: Worker, settings: Settings) -> None:
        self._worker, self._settings = started, settings
        self._engine = EditEngine(started.model, settings.codebook, plan_of(settings))
        self._log = EditorLog(settings)
        self._traffic = RequestTail(settings, self._engine)
        self._store = RadiusStore(redis_client(settings), settings)
        self._projected = False
        started.health.state = self._state

    def start(self) -> None:
        """Fold the history, take the next term, and finish what a predecessor left undone in Redis."""
        read_history(self._settings, lambda record, _offset, _time: self._fold(record))
        lead = self._engine.lead(self._environment())
        self._log.write_lead(lead)
        self._fold(lead)
        self._project()
        while self._traffic.read(0.2):
            pass
        position = self._log.seek()
        self._worker.health.become_ready()
        book = self._engine.codebook
        log.info("ready", term=book.term, seq=book.seq, entries=len(book), feedback_offset=position)

    def edit_until(self, stop: threading.Event) -> None:
        """Work on feedback as it comes; on traffic while there is none."""
        while not stop.is_set():
            for offset, value in self._log.poll(0.05):
                self._edit(offset, value)
                if stop.is_set():
                    return
            metrics.FEEDBACK_LAG.set(self._log.behind())
            self._traffic.read(0.05)
            metrics.TRAFFIC.set(len(self._engine.traffic))
            if not self._projected:
                self._project()

    def close(self) -> None:
        """Leave the log."""
        self._log.close()
        self._traffic.close()

    def _edit(self, offset: int, value: bytes | None) -> None:
        started = time.perf_counter()
        try:
            edited = self._engine.edit(decode(value, Feedback, self._settings.max_record_bytes), offset)
        except InvalidMessage as error:
            edited = _unreadable(value, str(error))
        outcome = edited.outcome
        if outcome is not None:
            outcome = msgspec.structs.replace(outcome, seconds=round(time.perf_counter() - started, 4))
        rejected = edited.reason if edited.invalid else None
        self._log.commit(Result(offset, outcome, edited.record, rejected, value))
        if edited.record is not None:
            self._fold(edited.record)
            self._project()
        self._tell(offset, edited, time.perf_counter() - started)

    def _fold(self, record: bytes) -> None:
        applied = self._engine.apply(record)
        if applied is not None:
            self._applied: Applied = applied
            book = self._engine.codebook
            metrics.CODEBOOK_SEQ.set(book.seq)
            metrics.CODEBOOK_TERM.set(book.term)
            metrics.CODEBOOK_ENTRIES.set(len(book))

    def _project(self) -> None:
        """Make the newest delta live; without Redis it stays undone, and the whole projection is made later."""
        try:
            if self._projected:
                self._store.publish(self._applied, self._engine.codebook)
            else:
                self._store.rebuild(self._engine.codebook)
        except RedisError as error:
            self._projected = False
            metrics.DEGRADED.set(1)
            log.warning("redis_lost", error=str(error), seq=self._engine.codebook.seq)
        else:
            self._projected = True
            metrics.DEGRADED.set(0)

    def _tell(self, offset: int, edited: Edited, seconds: float) -> None:
        outcome = edited.outcome
        status = "unreadable" if outcome is None else outcome.status
        metrics.FEEDBACK.labels(status).inc()
        if edited.record is not None and outcome is not None:
            metrics.EDIT_SECONDS.observe(seconds)
            if outcome.steps is not msgspec.UNSET:
                metrics.EDIT_STEPS.observe(outcome.steps)
        told = {} if outcome is None else msgspec.to_builtins(outcome)
        log.info("feedback", offset=offset, unreadable=edited.reason if outcome is None else None, **told)

    def _environment(self) -> dict[str, str]:
        settings, model = self._settings, self._worker.model
        kept = [
            "policy",
            "radius",
            "radius_unit",
            "expand",
            "guard",
            "traffic",
            "seed",
            "init",
            "max_steps",
            "learning_rate",
            "margin",
        ]
        device = torch.cuda.get_device_name() if model.device.type == "cuda" else platform.processor() or "cpu"
        libraries = {"torch": torch, "transformers": transformers, "faiss": faiss, "numpy": np}
        return {
            "editor": self._worker.name,
            "device": device,
            "dtype": model.dtype,
            "python": platform.python_version(),
            **{name: str(library.__version__) for name, library in libraries.items()},
            **{name: str(getattr(settings, name)) for name in kept},
        }

    def _state(self) -> dict[str, object]:
        book = self._engine.codebook
        return {
            "codebook": book.name,
            "model": book.model,
            "layer": book.layer,
            "term": book.term,
            "seq": book.seq,
            "digest": book.digest.hex(),
            "entries": len(book),
            "state_digest": book.state_digest(),
            "edits": len(self._engine.memory),
            "traffic": len(self._engine.traffic),
            "degraded": not self._projected,
        }


def _unreadable(value: bytes | None, reason: str) -> Edited:
    """Feedback that is no message: to the dead letter queue, and an outcome where it has an id to bear."""
    feedback_id = peek_id(value, "feedback_id")
    outcome = None
    if feedback_id is not None:
        outcome = Outcome(v=VERSION, feedback_id=feedback_id, status="rejected", reason=reason)
    return Edited(outcome, invalid=True, reason=reason)
