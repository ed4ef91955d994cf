"""Prepares request records, and answers them with an engine.

Guarantees:

1. `prepare` and `step` are separate, so that one thread prepares requests while the model runs others.
2. Bad requests do not affect others. A record that cannot be read is dead-lettered. A request on which the model fails
   gets a prediction with `error`.
3. A reply carries its request's headers and goes to the topic that they name (`pipeline.kafka.resolve_reply_address`).

Not promised: any effect on Kafka. The caller sends the replies (`pipeline.replica.replies`).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog
from msgspec import UNSET, UnsetType
from torch import Tensor

from gracestream.pipeline.codebook import OUTSIDE_RADIUS_REASON, CodebookLookup, FoundEntry, WordingGetter
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
from gracestream.pipeline.model import AnswerEngine, EditableModel, Finished, InputError, Prompt
from gracestream.pipeline.observability import metrics
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.messages import (
    SCHEMA_VERSION,
    AppliedEdit,
    InvalidMessage,
    NearMiss,
    NearMissReason,
    Parameters,
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
    """A record of `requests`. `timestamp` is Kafka's, in seconds."""

    value: bytes | None
    topic: str
    partition: int
    offset: int
    timestamp: float
    key: bytes | None = None
    headers: Sequence[Header] = ()


def no_fallback(_reason: str) -> None:
    """The fallback of a reply without one."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A record to send.

    Attributes:
        topic: Without the deployment's prefix.
        key: Of the record.
        value: Of the record.
        headers: Of the record.
        reply_to: The full name of the topic that the request names; empty: send to `topic`.
        fallback: Returns the reply to send if Kafka rejects this one, given the reason; None if there is none.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] = ()
    reply_to: str = ""
    fallback: Callable[[str], "Reply | None"] = field(default=no_fallback, compare=False)


@dataclass(frozen=True, slots=True)
class ReplyChunk:
    """Some of the replies to a batch of records.

    Attributes:
        replies: To send.
        released: The number of further records that delay no other batch: they are answered, or wait for something that
            may take long.
    """

    replies: list[Reply]
    released: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be answered.

    Attributes:
        record: The record that it came in.
        request: As decoded.
        prompt: Its tokens.
        batch_key: Requests with the same key may share a batch.
        address: The topic and headers of its reply.
    """

    record: RequestRecord
    request: Request
    prompt: Prompt
    batch_key: object
    address: ReplyAddress = DEFAULT_REPLY_ADDRESS

    @property
    def min_seq(self) -> int:
        """The delta that the answer must include; 0: any."""
        return 0 if self.request.min_seq is UNSET else self.request.min_seq

    @property
    def parameters(self) -> Parameters:
        """The options of generation."""
        return self.request.parameters


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Prepared records: the requests to answer, and the replies that need no answer."""

    requests: list[PreparedRequest]
    replies: list[Reply]

    def split(self, seq: int) -> tuple["PreparedBatch", "PreparedBatch"]:
        """What a codebook at delta `seq` can answer, with the finished replies, and what needs a later delta."""
        answerable = [request for request in self.requests if request.min_seq <= seq]
        waiting = [request for request in self.requests if request.min_seq > seq]
        return PreparedBatch(answerable, self.replies), PreparedBatch(waiting, [])


class TimedLookup(CodebookLookup):
    """A lookup that observes its time."""

    def find_entries(self, queries_BD: Tensor, get_wording: WordingGetter) -> list[FoundEntry | None]:
        """As `CodebookLookup.find_entries`."""
        started = time.perf_counter()
        found_entries = super().find_entries(queries_BD, get_wording)
        metrics.LOOKUP_SECONDS.observe(time.perf_counter() - started)
        return found_entries


EngineFactory = Callable[[CodebookLookup], AnswerEngine[PreparedRequest]]
"""Makes the engine that answers requests with a lookup."""


class RequestHandler:
    """Answers with one model and one codebook replica. `step` runs in the model's thread; the rest in any.

    Attributes:
        engine: Runs the model.
    """

    def __init__(
        self,
        model: EditableModel,
        codebook_replica: CodebookReplica,
        kafka: KafkaSettings,
        replica_name: str,
        make_engine: EngineFactory,
    ) -> None:
        self._model, self._codebook_replica = model, codebook_replica
        self._kafka, self._replica_name = kafka, replica_name
        self.engine = make_engine(TimedLookup(codebook_replica.codebook, codebook_replica.index))

    def prepare(self, records: Iterable[RequestRecord]) -> PreparedBatch:
        """Decode and tokenise records. Those that cannot be answered get their replies at once."""
        batch = PreparedBatch([], [])
        for record in records:
            try:
                request = decode(record.value, Request, self._kafka.max_record_bytes)
                address = resolve_reply_address(record.headers, self._kafka)
                if address.error:
                    batch.replies.append(
                        self._error_reply(PreparedRequest(record, request, Prompt(()), None, address), address.error)
                    )
                    continue
                prompt = self._model.task.tokenize(request.inputs)
                batch.requests.append(
                    PreparedRequest(
                        record, request, prompt, self._model.task.batch_key(prompt, request.parameters), address
                    )
                )
            except (InvalidMessage, InputError) as error:
                batch.replies.extend(self._reject(record, to_one_line(error)))
        return batch

    def min_seq_timeouts(self, requests: Iterable[PreparedRequest]) -> list[Reply]:
        """Error replies for requests that have waited too long for their delta."""
        seq = self._codebook_replica.codebook.seq
        return [
            self._error_reply(request, f"min_seq {request.min_seq} is not reached: the codebook is at {seq}")
            for request in requests
        ]

    def step(self, joining: Sequence[PreparedRequest]) -> list[tuple[PreparedRequest, Reply]]:
        """Run one step of the engine; the requests that finished, with their replies.

        Joining requests are answered from the codebook as it is now.

        Raises:
            DeviceLostError: the device failed, so no request can be answered.
        """
        metrics.STEP_REQUESTS.observe(len(joining) + self.engine.active)
        num_restarted = self.engine.num_restarted
        with metrics.STEP_SECONDS.time():
            finished = self.engine.step(joining)
        self._report_restarts(self.engine.num_restarted - num_restarted)
        return [(one.request, self._finished_reply(one)) for one in finished]

    def _report_restarts(self, requests: int) -> None:
        """Count and log requests that start again, if there are any."""
        if requests:
            metrics.REQUESTS_RESTARTED.inc(requests)
            log.warning(
                "requests_restarted",
                requests=requests,
                reason=self.engine.restart_reason,
                consequence="they are answered one after the other, and no other request joins until then",
                remedy="if memory ran out, lower GRACESTREAM_REQUEST_BATCH_SIZE",
            )

    def _finished_reply(self, finished: Finished[PreparedRequest]) -> Reply:
        """The prediction for an answer, with the edit that served it or the near miss; or an error."""
        served, view = finished.served, finished.view
        if served is None or view is None:
            log.warning(
                "request_failed",
                request_id=finished.request.request.request_id,
                reason=finished.failure,
                consequence="its prediction has an error instead of an answer; other requests are not affected",
            )
            return self._error_reply(finished.request, f"the model failed: {finished.failure}")
        metrics.REQUESTS_TOTAL.labels("ok").inc()
        served_by = served.served_by
        if served_by is not None:
            metrics.EDITED_ANSWERS.inc()
        edit = (
            UNSET
            if served_by is None
            else AppliedEdit(entry_id=served_by.entry_id, distance=served_by.distance, radius=served_by.radius)
        )
        near_miss: NearMiss | UnsetType = UNSET
        if (missed := served.near_miss) is not None:
            reason = near_miss_reason(missed)
            metrics.NEAR_MISSES.labels(reason).inc()
            near_miss = NearMiss(
                entry_id=missed.entry_id,
                distance=missed.distance,
                radius=missed.radius,
                reason=reason,
                detail=missed.reason_not_served or UNSET,
                target=self._model.task.decode_label(view.label),
            )
        score = UNSET if served.answer.score is None else served.answer.score
        prediction = self._empty_prediction(finished.request.request.request_id, finished.request.record)
        prediction = msgspec.structs.replace(
            prediction,
            codebook_seq=view.seq,
            term=view.term,
            outputs=served.answer.outputs,
            score=score,
            edit=edit,
            near_miss=near_miss,
        )
        return _prediction_reply(prediction, finished.request.record, finished.request.address)

    def _error_reply(self, prepared: PreparedRequest, reason: str) -> Reply:
        """A prediction with `error` instead of an answer."""
        metrics.REQUESTS_TOTAL.labels("error").inc()
        prediction = self._empty_prediction(prepared.request.request_id, prepared.record)
        return _prediction_reply(msgspec.structs.replace(prediction, error=reason), prepared.record, prepared.address)

    def _reject(self, record: RequestRecord, reason: str) -> list[Reply]:
        """A dead letter for a record, and an error prediction if its request id can be read."""
        metrics.REQUESTS_TOTAL.labels("rejected").inc()
        log.warning(
            "request_rejected",
            partition=record.partition,
            offset=record.offset,
            reason=reason,
            consequence="the record is on requests.dlq; if its id can be read, the sender gets an error",
        )
        replies = [_dead_letter_reply(record, reason)]
        if (request_id := peek_id(record.value, "request_id")) is not None:
            prediction = msgspec.structs.replace(self._empty_prediction(request_id, record), error=reason)
            replies.append(_prediction_reply(prediction, record, resolve_reply_address(record.headers, self._kafka)))
        return replies

    def _empty_prediction(self, request_id: str, record: RequestRecord) -> Prediction:
        """A prediction with every field but the answer; observes the latency."""
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
    """A prediction as a reply whose fallback is the same prediction with an error."""
    fallback = partial(_error_fallback, prediction, record, address)
    key = prediction.request_id.encode()
    return Reply(PREDICTIONS, key, encode(prediction), address.headers, address.topic, fallback)


def _error_fallback(prediction: Prediction, record: RequestRecord, address: ReplyAddress, reason: str) -> Reply:
    """An error in place of an answer that Kafka rejects; its fallback is a dead letter."""
    error = reason if prediction.error is UNSET else f"{prediction.error}; {reason}"
    error_prediction = msgspec.structs.replace(
        prediction, outputs=UNSET, score=UNSET, edit=UNSET, near_miss=UNSET, error=error
    )
    key = error_prediction.request_id.encode()
    return Reply(
        PREDICTIONS,
        key,
        encode(error_prediction),
        address.headers,
        address.topic,
        partial(_dead_letter_reply, record, unanswered=True),
    )


def near_miss_reason(missed: FoundEntry) -> NearMissReason:
    """Why the nearest entry did not answer: distance, wording, or its value's answer."""
    if missed.reason_not_served == OUTSIDE_RADIUS_REASON:
        return "distance"
    return "wording" if missed.reason_not_served else "answer"


def _dead_letter_reply(
    record: RequestRecord, reason: str, *, unanswered: bool = False, max_bytes: int = MAX_UNTRUNCATED_BYTES
) -> Reply:
    """A dead letter of a request.

    If Kafka rejects it, its fallback has the key and value truncated (`max_bytes` 0). `unanswered`: no topic accepted
    an answer.
    """
    position = (record.topic, record.partition, record.offset)
    dead_letter = dead_letter_for(
        reason, record.key, record.value, *position, max_bytes=max_bytes, unanswered=unanswered
    )
    fallback = (
        no_fallback
        if max_bytes == 0
        else lambda _: _dead_letter_reply(record, reason, unanswered=unanswered, max_bytes=0)
    )
    return Reply(REQUESTS_DLQ, dead_letter.key, dead_letter.value, dead_letter.headers, fallback=fallback)
