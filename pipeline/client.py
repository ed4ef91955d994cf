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

from gracestream.pipeline.kafka import EDITS, FEEDBACK, PREDICTIONS, REQUESTS, consumer, missing_topic, producer
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import (
    VERSION,
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


class Replies(Generic[M]):
    """What comes back on one topic from the moment this was opened; the first reply to an id counts."""

    def __init__(self, reader: KafkaConsumer, kind: type[M], id_of: Callable[[M], str]) -> None:
        self._reader = reader
        self._kind: type[M] = kind
        self._id_of: Callable[[M], str] = id_of
        self._seen: dict[str, M] = {}

    def wait(self, ids: Collection[str], timeout: float, on_reply: Callable[[M], None] | None = None) -> dict[str, M]:
        """The replies to these ids; after `timeout` seconds without a new one, those that came."""
        missing = set(ids) - self._seen.keys()
        deadline = time.monotonic() + timeout
        while missing and time.monotonic() < deadline:
            for records in self._reader.poll(timeout_ms=100).values():
                for record in records:
                    try:
                        reply = decode(record.value, self._kind)
                    except InvalidMessage:
                        continue  # not of this pipeline's making
                    reply_id = self._id_of(reply)
                    self._seen.setdefault(reply_id, reply)
                    if reply_id in missing:
                        missing.discard(reply_id)
                        deadline = time.monotonic() + timeout
                        if on_reply is not None:
                            on_reply(reply)
        return {reply_id: self._seen[reply_id] for reply_id in ids if reply_id in self._seen}


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
    def predictions(self) -> Iterator[Replies[Prediction]]:
        """What `predictions` gets from now on."""
        with self._from_now(PREDICTIONS) as reader:
            yield Replies(reader, Prediction, lambda prediction: prediction.request_id)

    @contextmanager
    def outcomes(self) -> Iterator[Replies[Outcome]]:
        """What `edits` gets from now on."""
        with self._from_now(EDITS) as reader:
            yield Replies(reader, Outcome, lambda outcome: outcome.feedback_id)

    @contextmanager
    def _from_now(self, topic: str) -> Iterator[KafkaConsumer]:
        name = self._settings.topic(topic)
        reader = consumer(self._settings, fetch_max_wait_ms=50)
        try:
            numbers = reader.partitions_for_topic(name)
            if not numbers:
                raise missing_topic(name)
            partitions = [TopicPartition(name, number) for number in sorted(numbers)]
            reader.assign(partitions)
            for partition, end in reader.end_offsets(partitions).items():
                reader.seek(partition, end)
            yield reader
        finally:
            reader.close()


def request(fields: Mapping[str, object] | str) -> Request:
    """A request from what a person writes: a text alone, or an object that may lack `v` and `request_id`.

    Raises:
        InvalidMessage: it is no request.
    """
    return _complete(fields, Request, "request_id", "inputs")


def feedback(fields: Mapping[str, object] | str) -> Feedback:
    """Feedback from what a person writes: an object that may lack `v` and `feedback_id`.

    Raises:
        InvalidMessage: it is no feedback.
    """
    return _complete(fields, Feedback, "feedback_id", "inputs")


def feedback_text(fields: Mapping[str, object] | str, author: str) -> bytes:
    """What an author signs (`pipeline.auth.signing`): likewise, in JSON of ASCII alone, with all fields that are given.

    Raises:
        InvalidMessage: it is no feedback, is signed already, or names another author.
    """
    whole = _whole(fields, "feedback_id", "inputs")
    if "signature" in whole:
        raise InvalidMessage("it is signed already")
    if whole.setdefault("author", author) != author:
        raise InvalidMessage(f"it names another author, {whole['author']!r}")
    text = json.dumps(whole, separators=(",", ":")).encode()
    decode(text, Feedback)
    return text


def signed_feedback(record: bytes) -> SignedFeedback:
    """Feedback that was signed: a whole record, to which nothing can be added.

    Raises:
        InvalidMessage: it is no feedback.
    """
    return SignedFeedback(decode(record, Feedback).feedback_id, record)


W = TypeVar("W", bound=Message)


def _complete(fields: Mapping[str, object] | str, kind: type[W], id_field: str, text_field: str) -> W:
    try:
        return decode(msgspec.json.encode(_whole(fields, id_field, text_field)), kind)
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"a text is not Unicode: {error.reason}") from error


def _whole(fields: Mapping[str, object] | str, id_field: str, text_field: str) -> dict[str, object]:
    if not isinstance(fields, str | Mapping):
        raise InvalidMessage("neither a text nor an object")
    given = {text_field: fields} if isinstance(fields, str) else fields
    return {"v": VERSION, id_field: str(uuid.uuid4()), **given}
