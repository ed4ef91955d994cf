"""Answering request records, a micro-batch at a time, each from one state of the codebook.

Reading (`read`) and answering (`answer`) are apart, so that some requests are read while the model runs others. What
cannot be read goes to the dead letter queue; what fails on its own is answered with `error`; neither touches its
neighbours. An answer takes along its request's headers, and goes where they say (`pipeline.kafka.reply_addressing`).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog
from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook import OUTSIDE, Hit
from gracestream.pipeline.device import raise_if_broken
from gracestream.pipeline.kafka import (
    LARGEST,
    ORDINARY,
    PREDICTIONS,
    REQUESTS_DLQ,
    Address,
    Header,
    address_of,
    rejected,
)
from gracestream.pipeline.model import EditableModel, InputError, Prompt, Served
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.replica.codebook_replica import Mirror
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import (
    VERSION,
    AppliedEdit,
    InvalidMessage,
    NearMiss,
    NearMissReason,
    Prediction,
    Request,
    decode,
    encode,
    one_line,
    peek_id,
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Record:
    """One record of `requests`; `timestamp` is Kafka's, in seconds."""

    value: bytes | None
    topic: str
    partition: int
    offset: int
    timestamp: float
    key: bytes | None = None
    headers: Sequence[Header] = ()


def nothing(_reason: str) -> None:
    """For replies that nothing can be sent instead of."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One record to send.

    Attributes:
        topic: Without the deployment's prefix.
        reply_to: The whole name of the topic that its request has chosen; empty: `topic`.
        instead: What to send where Kafka refuses it, for the reason given; None: nothing.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] = ()
    reply_to: str = ""
    instead: Callable[[str], "Reply | None"] = field(default=nothing, compare=False)


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the replies to the records that were taken.

    Attributes:
        replies: To be sent.
        settled: So many more of the records are done with by these replies, or wait for something that may take long;
            they hold up no others.
    """

    replies: list[Reply]
    settled: int


@dataclass(frozen=True, slots=True)
class Question:
    """A request that can be answered: its tokens, and the group of requests it can share a micro-batch with."""

    record: Record
    request: Request
    prompt: Prompt
    group: object
    address: Address = ORDINARY

    @property
    def min_seq(self) -> int:
        """The delta that the answer must have seen; 0: any."""
        return 0 if self.request.min_seq is UNSET else self.request.min_seq


@dataclass(frozen=True, slots=True)
class Work:
    """Records as read: what to answer, and the replies that are certain already."""

    questions: list[Question]
    replies: list[Reply]

    def split(self, seq: int) -> tuple["Work", "Work"]:
        """What a codebook at delta `seq` can answer, with the replies that are certain; and what needs a later one."""
        now = [question for question in self.questions if question.min_seq <= seq]
        later = [question for question in self.questions if question.min_seq > seq]
        return Work(now, self.replies), Work(later, [])


class Server:
    """Answers with one model and one mirror of the codebook. `answer` is the model's thread's; the rest is any's."""

    def __init__(self, model: EditableModel, mirror: Mirror, settings: Settings, replica: str) -> None:
        self._model, self._mirror, self._settings, self._replica = model, mirror, settings, replica

    def read(self, records: Iterable[Record]) -> Work:
        """Decode and tokenise."""
        work = Work([], [])
        for record in records:
            try:
                request = decode(record.value, Request, self._settings.max_record_bytes)
                address = address_of(record.headers, self._settings)
                if address.fault:
                    work.replies.append(
                        self._failed(Question(record, request, Prompt(()), None, address), address.fault)
                    )
                    continue
                prompt = self._model.task.tokenize(request.inputs)
                work.questions.append(
                    Question(record, request, prompt, self._model.task.admit(prompt, request.parameters), address)
                )
            except (InvalidMessage, InputError) as error:
                work.replies.extend(self._rejected(record, one_line(error)))
        return work

    def unreached(self, questions: Iterable[Question]) -> list[Reply]:
        """Answers to requests for whose delta it is of no use to wait."""
        seq = self._mirror.codebook.seq
        return [
            self._failed(question, f"min_seq {question.min_seq} is not reached: the codebook is at {seq}")
            for question in questions
        ]

    def answer(self, questions: Sequence[Question]) -> list[Reply]:
        """Answer requests of one group, one reply each, all from the codebook as it is now.

        Raises:
            DeviceFault: the device is broken, so none of these is an answer.
        """
        metrics.BATCH_SIZE.observe(len(questions))
        try:
            with metrics.MODEL_SECONDS.time():
                served = self._model.answer(
                    [question.prompt for question in questions],
                    [question.request.parameters for question in questions],
                    self._mirror.lookup,
                    checked=self._settings.check_answers,
                )
        except Exception as error:  # noqa: BLE001  (whatever one request does to the model, the others are answered)
            raise_if_broken(error)
            failure = f"{type(error).__name__}: {one_line(error)}"
        else:
            return [self._answered(question, answer) for question, answer in zip(questions, served, strict=True)]
        # Here, and not above: as long as the error is at hand, so is all that its stack holds in the device's memory.
        if len(questions) == 1:
            log.warning("request_failed", request_id=questions[0].request.request_id, error=failure)
            return [self._failed(questions[0], f"the model failed: {failure}")]
        return [reply for question in questions for reply in self.answer([question])]

    def _answered(self, question: Question, served: Served) -> Reply:
        metrics.REQUESTS.labels("ok").inc()
        hit = served.hit
        if hit is not None:
            metrics.EDITED.inc()
        edit = UNSET if hit is None else AppliedEdit(entry_id=hit.entry_id, distance=hit.distance, radius=hit.radius)
        near_miss: NearMiss | UnsetType = UNSET
        if (missed := served.missed) is not None:
            reason = _reason(missed)
            metrics.NEAR_MISSES.labels(reason).inc()
            near_miss = NearMiss(
                entry_id=missed.entry_id,
                distance=missed.distance,
                radius=missed.radius,
                reason=reason,
                detail=missed.disagreement or UNSET,
                target=self._model.task.text(self._mirror.codebook.labels[missed.slot]),
            )
        score = UNSET if served.answer.score is None else served.answer.score
        prediction = self._prediction(question.request.request_id, question.record)
        prediction = msgspec.structs.replace(
            prediction, outputs=served.answer.outputs, score=score, edit=edit, near_miss=near_miss
        )
        return _reply(prediction, question.record, question.address)

    def _failed(self, question: Question, reason: str) -> Reply:
        metrics.REQUESTS.labels("error").inc()
        prediction = self._prediction(question.request.request_id, question.record)
        return _reply(msgspec.structs.replace(prediction, error=reason), question.record, question.address)

    def _rejected(self, record: Record, reason: str) -> list[Reply]:
        """To the dead letter queue; and where the sender can be told, an answer that says why."""
        metrics.REQUESTS.labels("rejected").inc()
        log.warning("request_rejected", partition=record.partition, offset=record.offset, reason=reason)
        replies = [_letter(record, reason)]
        if (request_id := peek_id(record.value, "request_id")) is not None:
            prediction = msgspec.structs.replace(self._prediction(request_id, record), error=reason)
            replies.append(_reply(prediction, record, address_of(record.headers, self._settings)))
        return replies

    def _prediction(self, request_id: str, record: Record) -> Prediction:
        """An answer with everything but the answer."""
        seconds = max(0.0, time.time() - record.timestamp)
        metrics.REQUEST_SECONDS.observe(seconds)
        return Prediction(
            v=VERSION,
            request_id=request_id,
            codebook_seq=self._mirror.codebook.seq,
            term=self._mirror.codebook.term,
            model=self._model.fingerprint,
            replica=self._replica,
            latency_ms=round(1000 * seconds, 3),
        )


def _reply(prediction: Prediction, record: Record, address: Address) -> Reply:
    instead = partial(_error, prediction, record, address)
    key = prediction.request_id.encode()
    return Reply(PREDICTIONS, key, encode(prediction), address.headers, address.topic, instead)


def _error(prediction: Prediction, record: Record, address: Address, reason: str) -> Reply:
    """An error in place of an answer that Kafka refuses; where it refuses that too, a dead letter."""
    told = reason if prediction.error is UNSET else f"{prediction.error}; {reason}"
    failed = msgspec.structs.replace(prediction, outputs=UNSET, score=UNSET, edit=UNSET, near_miss=UNSET, error=told)
    key = failed.request_id.encode()
    return Reply(
        PREDICTIONS, key, encode(failed), address.headers, address.topic, partial(_letter, record, unanswered=True)
    )


def _reason(missed: Hit) -> NearMissReason:
    if missed.disagreement == OUTSIDE:
        return "distance"
    return "wording" if missed.disagreement else "answer"


def _letter(record: Record, reason: str, *, unanswered: bool = False, largest: int = LARGEST) -> Reply:
    """A dead letter; cut where its queue takes less than it should. `unanswered`: no topic took an answer."""
    place = (record.topic, record.partition, record.offset)
    letter = rejected(reason, record.key, record.value, *place, largest=largest, unanswered=unanswered)
    instead = nothing if largest == 0 else lambda _: _letter(record, reason, unanswered=unanswered, largest=0)
    return Reply(REQUESTS_DLQ, letter.key, letter.value, letter.headers, instead=instead)
