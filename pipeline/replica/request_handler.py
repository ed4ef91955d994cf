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

from gracestream.pipeline.codebook import OUTSIDE_RADIUS_REASON, Hit
from gracestream.pipeline.device import raise_if_device_lost
from gracestream.pipeline.kafka import (
    DEFAULT_REPLY_ADDRESS,
    MAX_UNTRUNCATED_BYTES,
    PREDICTIONS,
    REQUESTS_DLQ,
    Header,
    ReplyAddress,
    dead_letter_for,
    resolve_reply_address,
)
from gracestream.pipeline.model import EditableModel, InputError, Prompt, ServedAnswer
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import (
    SCHEMA_VERSION,
    AppliedEdit,
    InvalidMessage,
    NearMiss,
    NearMissReason,
    Prediction,
    Request,
    decode,
    encode,
    peek_id,
    to_one_line,
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One record of `requests`; `timestamp` is Kafka's, in seconds."""

    value: bytes | None
    topic: str
    partition: int
    offset: int
    timestamp: float
    key: bytes | None = None
    headers: Sequence[Header] = ()


def no_fallback(_reason: str) -> None:
    """For replies that nothing can be sent instead of."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One record to send.

    Attributes:
        topic: Without the deployment's prefix.
        reply_to: The whole name of the topic that its request has chosen; empty: `topic`.
        fallback: What to send where Kafka refuses it, for the reason given; None: nothing.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] = ()
    reply_to: str = ""
    fallback: Callable[[str], "Reply | None"] = field(default=no_fallback, compare=False)


@dataclass(frozen=True, slots=True)
class ReplyChunk:
    """Some of the replies to the records that were taken.

    Attributes:
        replies: To be sent.
        released: So many more of the records are done with by these replies, or wait for something that may take long;
            they hold up no others.
    """

    replies: list[Reply]
    released: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be answered: its tokens, and the group of requests it can share a micro-batch with."""

    record: RequestRecord
    request: Request
    prompt: Prompt
    batch_key: object
    address: ReplyAddress = DEFAULT_REPLY_ADDRESS

    @property
    def min_seq(self) -> int:
        """The delta that the answer must have seen; 0: any."""
        return 0 if self.request.min_seq is UNSET else self.request.min_seq


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Records as read: what to answer, and the replies that are certain already."""

    requests: list[PreparedRequest]
    replies: list[Reply]

    def split(self, seq: int) -> tuple["PreparedBatch", "PreparedBatch"]:
        """What a codebook at delta `seq` can answer, with the replies that are certain; and what needs a later one."""
        now = [question for question in self.requests if question.min_seq <= seq]
        later = [question for question in self.requests if question.min_seq > seq]
        return PreparedBatch(now, self.replies), PreparedBatch(later, [])


class RequestHandler:
    """Answers with one model and one mirror of the codebook. `answer` is the model's thread's; the rest is any's."""

    def __init__(
        self, model: EditableModel, codebook_replica: CodebookReplica, settings: Settings, replica_name: str
    ) -> None:
        self._model, self._codebook_replica, self._settings, self._replica_name = (
            model,
            codebook_replica,
            settings,
            replica_name,
        )

    def prepare(self, records: Iterable[RequestRecord]) -> PreparedBatch:
        """Decode and tokenise."""
        work = PreparedBatch([], [])
        for record in records:
            try:
                request = decode(record.value, Request, self._settings.max_record_bytes)
                address = resolve_reply_address(record.headers, self._settings)
                if address.error:
                    work.replies.append(
                        self._error_reply(PreparedRequest(record, request, Prompt(()), None, address), address.error)
                    )
                    continue
                prompt = self._model.task.tokenize(request.inputs)
                work.requests.append(
                    PreparedRequest(
                        record, request, prompt, self._model.task.batch_key(prompt, request.parameters), address
                    )
                )
            except (InvalidMessage, InputError) as error:
                work.replies.extend(self._reject(record, to_one_line(error)))
        return work

    def min_seq_timeouts(self, requests: Iterable[PreparedRequest]) -> list[Reply]:
        """Answers to requests for whose delta it is of no use to wait."""
        seq = self._codebook_replica.codebook.seq
        return [
            self._error_reply(question, f"min_seq {question.min_seq} is not reached: the codebook is at {seq}")
            for question in requests
        ]

    def answer(self, requests: Sequence[PreparedRequest]) -> list[Reply]:
        """Answer requests of one group, one reply each, all from the codebook as it is now.

        Raises:
            DeviceFault: the device is broken, so none of these is an answer.
        """
        metrics.BATCH_SIZE.observe(len(requests))
        try:
            with metrics.BATCH_MODEL_SECONDS.time():
                served = self._model.answer(
                    [question.prompt for question in requests],
                    [question.request.parameters for question in requests],
                    self._codebook_replica.lookup,
                    check_answers=self._settings.check_answers,
                )
        except Exception as error:  # noqa: BLE001  (whatever one request does to the model, the others are answered)
            raise_if_device_lost(error)
            failure = f"{type(error).__name__}: {to_one_line(error)}"
        else:
            return [self._answer_reply(question, answer) for question, answer in zip(requests, served, strict=True)]
        # Here, and not above: as long as the error is at hand, so is all that its stack holds in the device's memory.
        if len(requests) == 1:
            log.warning("request_failed", request_id=requests[0].request.request_id, error=failure)
            return [self._error_reply(requests[0], f"the model failed: {failure}")]
        return [reply for question in requests for reply in self.answer([question])]

    def _answer_reply(self, prepared: PreparedRequest, served: ServedAnswer) -> Reply:
        metrics.REQUESTS_TOTAL.labels("ok").inc()
        hit = served.hit
        if hit is not None:
            metrics.EDITED_ANSWERS.inc()
        edit = UNSET if hit is None else AppliedEdit(entry_id=hit.entry_id, distance=hit.distance, radius=hit.radius)
        near_miss: NearMiss | UnsetType = UNSET
        if (missed := served.near_miss) is not None:
            reason = _near_miss_reason(missed)
            metrics.NEAR_MISSES.labels(reason).inc()
            near_miss = NearMiss(
                entry_id=missed.entry_id,
                distance=missed.distance,
                radius=missed.radius,
                reason=reason,
                detail=missed.disagreement or UNSET,
                target=self._model.task.decode_label(self._codebook_replica.codebook.labels[missed.slot]),
            )
        score = UNSET if served.answer.score is None else served.answer.score
        prediction = self._empty_prediction(prepared.request.request_id, prepared.record)
        prediction = msgspec.structs.replace(
            prediction, outputs=served.answer.outputs, score=score, edit=edit, near_miss=near_miss
        )
        return _prediction_reply(prediction, prepared.record, prepared.address)

    def _error_reply(self, prepared: PreparedRequest, reason: str) -> Reply:
        metrics.REQUESTS_TOTAL.labels("error").inc()
        prediction = self._empty_prediction(prepared.request.request_id, prepared.record)
        return _prediction_reply(msgspec.structs.replace(prediction, error=reason), prepared.record, prepared.address)

    def _reject(self, record: RequestRecord, reason: str) -> list[Reply]:
        """To the dead letter queue; and where the sender can be told, an answer that says why."""
        metrics.REQUESTS_TOTAL.labels("rejected").inc()
        log.warning("request_rejected", partition=record.partition, offset=record.offset, reason=reason)
        replies = [_dead_letter_reply(record, reason)]
        if (request_id := peek_id(record.value, "request_id")) is not None:
            prediction = msgspec.structs.replace(self._empty_prediction(request_id, record), error=reason)
            replies.append(_prediction_reply(prediction, record, resolve_reply_address(record.headers, self._settings)))
        return replies

    def _empty_prediction(self, request_id: str, record: RequestRecord) -> Prediction:
        """An answer with everything but the answer."""
        seconds = max(0.0, time.time() - record.timestamp)
        metrics.REQUEST_SECONDS.observe(seconds)
        return Prediction(
            v=SCHEMA_VERSION,
            request_id=request_id,
            codebook_seq=self._codebook_replica.codebook.seq,
            term=self._codebook_replica.codebook.term,
            model=self._model.fingerprint,
            replica=self._replica_name,
            latency_ms=round(1000 * seconds, 3),
        )


def _prediction_reply(prediction: Prediction, record: RequestRecord, address: ReplyAddress) -> Reply:
    instead = partial(_error_fallback, prediction, record, address)
    key = prediction.request_id.encode()
    return Reply(PREDICTIONS, key, encode(prediction), address.headers, address.topic, instead)


def _error_fallback(prediction: Prediction, record: RequestRecord, address: ReplyAddress, reason: str) -> Reply:
    """An error in place of an answer that Kafka refuses; where it refuses that too, a dead letter."""
    told = reason if prediction.error is UNSET else f"{prediction.error}; {reason}"
    failed = msgspec.structs.replace(prediction, outputs=UNSET, score=UNSET, edit=UNSET, near_miss=UNSET, error=told)
    key = failed.request_id.encode()
    return Reply(
        PREDICTIONS,
        key,
        encode(failed),
        address.headers,
        address.topic,
        partial(_dead_letter_reply, record, unanswered=True),
    )


def _near_miss_reason(missed: Hit) -> NearMissReason:
    if missed.disagreement == OUTSIDE_RADIUS_REASON:
        return "distance"
    return "wording" if missed.disagreement else "answer"


def _dead_letter_reply(
    record: RequestRecord, reason: str, *, unanswered: bool = False, max_bytes: int = MAX_UNTRUNCATED_BYTES
) -> Reply:
    """A dead letter; cut where its queue takes less than it should. `unanswered`: no topic took an answer."""
    place = (record.topic, record.partition, record.offset)
    letter = dead_letter_for(reason, record.key, record.value, *place, max_bytes=max_bytes, unanswered=unanswered)
    instead = (
        no_fallback
        if max_bytes == 0
        else lambda _: _dead_letter_reply(record, reason, unanswered=unanswered, max_bytes=0)
    )
    return Reply(REQUESTS_DLQ, letter.key, letter.value, letter.headers, fallback=instead)
