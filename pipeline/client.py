"""A user's end of the pipeline: send requests or feedback, and wait for what becomes of them.

For the command line, the demo and tests. A program of one's own needs no more than a Kafka client and the JSON of
`schemas/`; the README has a complete example.
"""

import json
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from kafka import KafkaConsumer, TopicPartition

from gracestream.pipeline.kafka import EDITS, FEEDBACK, PREDICTIONS, REQUESTS, consumer, missing_topic_error, producer
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import (
    SCHEMA_VERSION,
    Feedback,
    InvalidMessage,
    Message,
    Outcome,
    Prediction,
    Request,
    decode,
    encode,
)

M = TypeVar("M", Prediction, Outcome)


@dataclass(frozen=True, slots=True)
class SignedFeedback:
    """Feedback as its signature covers it: byte for byte, with what this code does not know of."""

    feedback_id: str
    record: bytes


class ReplyCollector(Generic[M]):
    """What comes back on one topic from the moment this was opened; the first reply to an id counts."""

    def __init__(self, reader: KafkaConsumer, message_type: type[M], get_id: Callable[[M], str]) -> None:
        self._reader = reader
        self._message_type: type[M] = message_type
        self._get_id: Callable[[M], str] = get_id
        self._replies_by_id: dict[str, M] = {}

    def wait(self, ids: Collection[str], timeout: float, on_reply: Callable[[M], None] | None = None) -> dict[str, M]:
        """The replies to these ids; after `timeout` seconds without a new one, those that came."""
        missing = set(ids) - self._replies_by_id.keys()
        deadline = time.monotonic() + timeout
        while missing and time.monotonic() < deadline:
            for records in self._reader.poll(timeout_ms=100).values():
                for record in records:
                    try:
                        reply = decode(record.value, self._message_type)
                    except InvalidMessage:
                        continue  # not of this pipeline's making
                    reply_id = self._get_id(reply)
                    self._replies_by_id.setdefault(reply_id, reply)
                    if reply_id in missing:
                        missing.discard(reply_id)
                        deadline = time.monotonic() + timeout
                        if on_reply is not None:
                            on_reply(reply)
        return {reply_id: self._replies_by_id[reply_id] for reply_id in ids if reply_id in self._replies_by_id}


class Client:
    """Sends, and opens views of what comes back; open the view before sending."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._producer = producer(settings)

    def close(self) -> None:
        """Send what waits, and leave."""
        self._producer.close(timeout=10)

    def send(self, messages: Iterable[Request | Feedback | SignedFeedback], partition: int | None = None) -> None:
        """Send requests or feedback, and return when Kafka has them all; to one partition, or as the ids hash."""
        sent = []
        for message in messages:
            topic, key = (
                (REQUESTS, message.request_id) if isinstance(message, Request) else (FEEDBACK, message.feedback_id)
            )
            value = message.record if isinstance(message, SignedFeedback) else encode(message)
            sent.append(
                self._producer.send(self._settings.topic(topic), value=value, key=key.encode(), partition=partition)
            )
        self._producer.flush()
        for future in sent:
            future.get(timeout=30)

    @contextmanager
    def predictions(self) -> Iterator[ReplyCollector[Prediction]]:
        """What `predictions` gets from now on."""
        with self._open_at_end(PREDICTIONS) as reader:
            yield ReplyCollector(reader, Prediction, lambda prediction: prediction.request_id)

    @contextmanager
    def outcomes(self) -> Iterator[ReplyCollector[Outcome]]:
        """What `edits` gets from now on."""
        with self._open_at_end(EDITS) as reader:
            yield ReplyCollector(reader, Outcome, lambda outcome: outcome.feedback_id)

    @contextmanager
    def _open_at_end(self, topic: str) -> Iterator[KafkaConsumer]:
        name = self._settings.topic(topic)
        reader = consumer(self._settings, fetch_max_wait_ms=50)
        try:
            numbers = reader.partitions_for_topic(name)
            if not numbers:
                raise missing_topic_error(name)
            partitions = [TopicPartition(name, number) for number in sorted(numbers)]
            reader.assign(partitions)
            for partition, end in reader.end_offsets(partitions).items():
                reader.seek(partition, end)
            yield reader
        finally:
            reader.close()


def build_request(fields: Mapping[str, object] | str) -> Request:
    """A request from what a person writes: a text alone, or an object that may lack `v` and `request_id`.

    Raises:
        InvalidMessage: it is no request.
    """
    return _build_message(fields, Request, "request_id", "inputs")


def build_feedback(fields: Mapping[str, object] | str) -> Feedback:
    """Feedback from what a person writes: an object that may lack `v` and `feedback_id`.

    Raises:
        InvalidMessage: it is no feedback.
    """
    return _build_message(fields, Feedback, "feedback_id", "inputs")


def feedback_to_sign(fields: Mapping[str, object] | str, author: str) -> bytes:
    """What an author signs (`pipeline.auth.signing`): likewise, in JSON of ASCII alone, with all fields that are given.

    Raises:
        InvalidMessage: it is no feedback, is signed already, or names another author.
    """
    whole = _with_defaults(fields, "feedback_id", "inputs")
    if "signature" in whole:
        raise InvalidMessage("it is signed already")
    if whole.setdefault("author", author) != author:
        raise InvalidMessage(f"it names another author, {whole['author']!r}")
    text = json.dumps(whole, separators=(",", ":")).encode()
    decode(text, Feedback)
    return text


def parse_signed_feedback(record: bytes) -> SignedFeedback:
    """Feedback that was signed: a whole record, to which nothing can be added.

    Raises:
        InvalidMessage: it is no feedback.
    """
    return SignedFeedback(decode(record, Feedback).feedback_id, record)


W = TypeVar("W", bound=Message)


def _build_message(fields: Mapping[str, object] | str, message_type: type[W], id_field: str, text_field: str) -> W:
    try:
        return decode(msgspec.json.encode(_with_defaults(fields, id_field, text_field)), message_type)
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"a text is not Unicode: {error.reason}") from error


def _with_defaults(fields: Mapping[str, object] | str, id_field: str, text_field: str) -> dict[str, object]:
    if not isinstance(fields, str | Mapping):
        raise InvalidMessage("neither a text nor an object")
    given = {text_field: fields} if isinstance(fields, str) else fields
    return {"v": SCHEMA_VERSION, id_field: str(uuid.uuid4()), **given}
