"""The client for users: sends requests and feedback, and collects predictions and outcomes.

The command line, the demo and tests use it. It is optional: any Kafka client and the JSON messages of `schemas/` are
enough. The README has a complete example.
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
    check_field_names,
    decode,
    encode,
)

M = TypeVar("M", Prediction, Outcome)


@dataclass(frozen=True, slots=True)
class SignedFeedback:
    """Signed feedback: the exact bytes that the signature covers, including fields unknown to this code."""

    feedback_id: str
    record: bytes


class ReplyCollector(Generic[M]):
    """Collects the replies on one topic since it was opened. If an id has several replies, the first counts."""

    def __init__(self, reader: KafkaConsumer, message_type: type[M], get_id: Callable[[M], str]) -> None:
        self._reader = reader
        self._message_type: type[M] = message_type
        self._get_id: Callable[[M], str] = get_id
        self._replies_by_id: dict[str, M] = {}

    def wait(self, ids: Collection[str], timeout: float, on_reply: Callable[[M], None] | None = None) -> dict[str, M]:
        """Wait for the replies to these ids, and return them by id.

        After `timeout` seconds without a new one, it returns the replies received so far. `on_reply` is called for each
        of them when it arrives.
        """
        missing = set(ids) - self._replies_by_id.keys()
        deadline = time.monotonic() + timeout
        while missing and time.monotonic() < deadline:
            for records in self._reader.poll(timeout_ms=100).values():
                for record in records:
                    try:
                        reply = decode(record.value, self._message_type)
                    except InvalidMessage:
                        continue  # from another program, which may write to the topic too
                    reply_id = self._get_id(reply)
                    self._replies_by_id.setdefault(reply_id, reply)
                    if reply_id in missing:
                        missing.discard(reply_id)
                        deadline = time.monotonic() + timeout
                        if on_reply is not None:
                            on_reply(reply)
        return {reply_id: self._replies_by_id[reply_id] for reply_id in ids if reply_id in self._replies_by_id}


class Client:
    """Sends requests and feedback. Open `predictions` or `outcomes` before sending: they show only later replies."""

    def __init__(self, settings: Settings) -> None:
        self._kafka = settings.kafka
        self._producer = producer(settings.kafka)

    def close(self) -> None:
        """Send what is buffered, within 10 s, and close the connections."""
        self._producer.close(timeout=10)

    def send(self, messages: Iterable[Request | Feedback | SignedFeedback], partition: int | None = None) -> None:
        """Send requests or feedback, and return when Kafka has acknowledged all of them.

        Without `partition`, the hash of the id chooses the partition.

        Raises:
            KafkaError: a record was not acknowledged.
        """
        futures = []
        for message in messages:
            topic, key = (
                (REQUESTS, message.request_id) if isinstance(message, Request) else (FEEDBACK, message.feedback_id)
            )
            value = message.record if isinstance(message, SignedFeedback) else encode(message)
            futures.append(
                self._producer.send(self._kafka.topic(topic), value=value, key=key.encode(), partition=partition)
            )
        self._producer.flush()
        for future in futures:
            future.get(timeout=30)

    @contextmanager
    def predictions(self) -> Iterator[ReplyCollector[Prediction]]:
        """A collector of the predictions written from now on.

        Raises:
            TopicError: the topic does not exist.
        """
        with self._open_at_end(PREDICTIONS) as reader:
            yield ReplyCollector(reader, Prediction, lambda prediction: prediction.request_id)

    @contextmanager
    def outcomes(self) -> Iterator[ReplyCollector[Outcome]]:
        """A collector of the outcomes written from now on.

        Raises:
            TopicError: the topic does not exist.
        """
        with self._open_at_end(EDITS) as reader:
            yield ReplyCollector(reader, Outcome, lambda outcome: outcome.feedback_id)

    @contextmanager
    def _open_at_end(self, topic: str) -> Iterator[KafkaConsumer]:
        name = self._kafka.topic(topic)
        reader = consumer(self._kafka, fetch_max_wait_ms=50)
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
    """Build a request from a text, or from an object that may lack `v` and `request_id`.

    Raises:
        InvalidMessage: the result is not a valid request, or has an unknown field.
    """
    return _build_message(fields, Request, "request_id")


def build_feedback(fields: Mapping[str, object] | str) -> Feedback:
    """Build feedback from an object that may lack `v` and `feedback_id`.

    Raises:
        InvalidMessage: the result is not valid feedback, or has an unknown field.
    """
    return _build_message(fields, Feedback, "feedback_id")


def feedback_to_sign(fields: Mapping[str, object] | str, author: str) -> bytes:
    """The text that an author signs (`pipeline.auth.signing`), built as by `build_feedback`.

    It is JSON in ASCII.

    Raises:
        InvalidMessage: the result is not valid feedback, has an unknown field, is signed already, or names another
            author.
    """
    members = _with_defaults(fields, Feedback, "feedback_id")
    if "signature" in members:
        raise InvalidMessage("it is signed already")
    if members.setdefault("author", author) != author:
        raise InvalidMessage(f"it names another author, {members['author']!r}")
    text = json.dumps(members, separators=(",", ":")).encode()
    decode(text, Feedback)  # only checks it
    return text


def parse_signed_feedback(record: bytes) -> SignedFeedback:
    """Read a signed record. It must be complete, because any change would break its signature.

    It may have unknown fields, as on the wire: its author has signed them.

    Raises:
        InvalidMessage: the record is not valid feedback.
    """
    return SignedFeedback(decode(record, Feedback).feedback_id, record)


W = TypeVar("W", bound=Message)


def _build_message(fields: Mapping[str, object] | str, message_type: type[W], id_field: str) -> W:
    try:
        return decode(msgspec.json.encode(_with_defaults(fields, message_type, id_field)), message_type)
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"a text is not Unicode: {error.reason}") from error


def _with_defaults(fields: Mapping[str, object] | str, message_type: type[Message], id_field: str) -> dict[str, object]:
    if not isinstance(fields, str | Mapping):
        raise InvalidMessage("neither a text nor an object")
    check_field_names(fields, message_type)
    members = {"inputs": fields} if isinstance(fields, str) else fields
    return {"v": SCHEMA_VERSION, id_field: str(uuid.uuid4()), **members}
