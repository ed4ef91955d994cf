"""Dead letters: unreadable records, stored with the reason for the operators of the deployment.

Guarantees:

1. A dead letter has the key and the value of its record, byte for byte. Its headers give the reason, and the topic,
   partition and offset of the record.
2. A dead letter always fits its queue. A record larger than `MAX_UNTRUNCATED_BYTES` is truncated. Headers then give its
   size and, if the whole record was read, its SHA-256. A truncated dead letter is never resent.
3. Equal records are resent once. A record can be dead-lettered several times: after it was resent, or by two replicas
   of which one died.
4. A call without offsets skips requests whose sender received an error as the answer. The sender may have sent a
   better request with the same id. A replica answers each request that it dead-letters, if it can read the id. If no
   topic accepts the answer, the dead letter has a header for this, and is resent.

Not promised: that a record is dead-lettered only once, or that a resent record can be read this time.
"""

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from kafka.errors import MessageSizeTooLargeError

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.kafka.lenient_records import MAX_UNTRUNCATED_BYTES, TRUNCATED_BYTES
from gracestream.pipeline.kafka.reader import open_readers, read_topic
from gracestream.pipeline.kafka.topics import FEEDBACK_DLQ, REQUESTS_DLQ
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.headers import (
    REASON_HEADER,
    RESENT_FROM_HEADER,
    SOURCE_OFFSET_HEADER,
    SOURCE_PARTITION_HEADER,
    SOURCE_TOPIC_HEADER,
    UNANSWERED_HEADER,
)
from gracestream.schemas.messages import TruncatedBytes, escape_unprintable, peek_id

DeadLetterSource = Literal["requests", "feedback"]
DLQ_TOPICS: dict[DeadLetterSource, str] = {"requests": REQUESTS_DLQ, "feedback": FEEDBACK_DLQ}
"""The dead-letter queue of each topic."""

MAX_REASON_CHARACTERS = 1000
"""Limit on the characters of a reason; the remainder is cut off."""


class DeadLetterError(UserError):
    """A dead letter does not exist or cannot be resent. The text names it."""


@dataclass(frozen=True, slots=True)
class DeadLetterRecord:
    """A record to write to a dead-letter queue."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter in its queue.

    Attributes:
        timestamp: Seconds since 1970.
        source_partition: Partition of the record; -1 if unknown, as for `source_offset`.
        size: Bytes of the value before it was truncated.
        unanswered: No topic accepted an answer to the request.
    """

    queue: str
    offset: int
    timestamp: float
    key: bytes | None
    value: bytes | None
    reason: str
    source_partition: int
    source_offset: int
    size: int
    truncated: bool
    unanswered: bool


@dataclass(frozen=True, slots=True)
class ResendResult:
    """The result of `resend_dead_letters`: offsets of dead letters in their queue.

    Attributes:
        sent: Sent again; with `dry_run`, would be sent.
        truncated: Skipped, because only the start of the record is known.
        answered: Skipped, because the sender received an error as the answer.
        duplicates: Skipped, because an equal dead letter is sent.
        too_large: Rejected by Kafka as too large. A compressed record may exceed the limit of its topic when it is sent
            again with another compression.
    """

    sent: list[int]
    truncated: list[int]
    answered: list[int]
    duplicates: list[int]
    too_large: list[int] = field(default_factory=list)


def dead_letter_for(
    reason: str,
    key: bytes | None,
    value: bytes | None,
    topic: str,
    partition: int,
    offset: int,
    *,
    max_bytes: int = MAX_UNTRUNCATED_BYTES,
    unanswered: bool = False,
) -> DeadLetterRecord:
    """The dead letter for one record of `topic`, truncated if key and value have more than `max_bytes` bytes.

    `unanswered` means that no topic accepted an answer to the request, so its sender got none.
    """
    headers = [
        (REASON_HEADER, escape_unprintable(reason)[:MAX_REASON_CHARACTERS].encode()),
        (SOURCE_TOPIC_HEADER, topic.encode()),
        (SOURCE_PARTITION_HEADER, str(partition).encode()),
        (SOURCE_OFFSET_HEADER, str(offset).encode()),
    ]
    if unanswered:
        headers.append((UNANSWERED_HEADER, b"true"))
    if len(key or b"") + len(value or b"") > max_bytes:
        key, value = _truncate(key), _truncate(value)
    for name, part in (("key", key), ("value", value)):
        if isinstance(part, TruncatedBytes):
            headers.append((f"{name}_bytes", str(part.size).encode()))
            if part.sha256:
                headers.append((f"{name}_sha256", part.sha256.encode()))
    if key is None and value is None:
        key = b""  # clients reject a record with neither key nor value
    # Clients reject subclasses of `bytes`, such as TruncatedBytes.
    return DeadLetterRecord(key if key is None else bytes(key), value if value is None else bytes(value), headers)


def _truncate(part: bytes | None) -> bytes | None:
    """The start of a key or value with its size and digest; unchanged if it is short or truncated already."""
    if part is None or len(part) <= TRUNCATED_BYTES:
        return part
    return TruncatedBytes(part[:TRUNCATED_BYTES], len(part), hashlib.sha256(part).hexdigest())


def list_dead_letters(
    settings: KafkaSettings, source: DeadLetterSource, last: int | None = None
) -> Iterator[DeadLetter]:
    """Iterate over the dead letters of a topic in order; with `last`, only over this many at the end.

    Raises:
        TopicError: the queue does not exist.
    """
    if last is None:
        yield from (_parse_dead_letter(record, source) for record in read_topic(settings, DLQ_TOPICS[source]))
        return
    with open_readers(settings, DLQ_TOPICS[source]) as readers:
        records = [record for reader in readers for record in reader.last(last)]
    yield from (_parse_dead_letter(record, source) for record in records)


def resend_dead_letters(
    settings: KafkaSettings,
    source: DeadLetterSource,
    offsets: Collection[int] | None = None,
    *,
    include_answered: bool = False,
    dry_run: bool = False,
) -> ResendResult:
    """Send dead letters to their topic again, with unchanged key and value.

    Args:
        settings: Address of the cluster.
        source: Topic of the records.
        offsets: Offsets of dead letters in their queue. None: all that were not truncated, without requests that were
            answered.
        include_answered: Do not skip requests that were answered.
        dry_run: Only report what would be sent.

    Raises:
        DeadLetterError: there is no dead letter at one of the offsets, or it was truncated. Nothing was sent.
        TopicError: the queue does not exist.
    """
    selection = _select_letters(
        settings, source, None if offsets is None else set(offsets), include_answered=include_answered
    )
    if dry_run or not selection.sent:
        return selection
    to_send = set(selection.sent)
    # A record that is too large fails its whole batch, and with idempotence every later record of the producer. So each
    # record is awaited before the next one is sent, and idempotence is off.
    sender, too_large = producer(settings, compression_type="gzip", enable_idempotence=False), []
    try:
        for letter in list_dead_letters(settings, source):
            if letter.offset in to_send:
                headers = [(RESENT_FROM_HEADER, f"{letter.queue}/{letter.offset}".encode())]
                try:
                    sender.send(settings.topic(source), letter.value, letter.key, headers).get(timeout=30)
                except MessageSizeTooLargeError:
                    too_large.append(letter.offset)
    finally:
        sender.close(timeout=10)
    sent = [offset for offset in selection.sent if offset not in too_large]
    return ResendResult(sent, selection.truncated, selection.answered, selection.duplicates, too_large)


def _select_letters(
    settings: KafkaSettings, source: DeadLetterSource, offsets: set[int] | None, *, include_answered: bool
) -> ResendResult:
    offset_by_content: dict[bytes, int] = {}  # by SHA-256 of key and value, the first dead letter that has them
    existing, truncated, answered, duplicates = set(), [], [], []
    for letter in list_dead_letters(settings, source):
        if offsets is not None and letter.offset not in offsets:
            continue
        existing.add(letter.offset)
        if offsets is None and not include_answered and _was_answered(letter, source):
            answered.append(letter.offset)
        elif not letter.truncated:
            content = hashlib.sha256(repr((letter.key, letter.value)).encode()).digest()
            if offset_by_content.setdefault(content, letter.offset) != letter.offset:
                duplicates.append(letter.offset)
        elif offsets is None:
            truncated.append(letter.offset)
        else:
            raise DeadLetterError(
                f"the dead letter at offset {letter.offset} of {letter.queue} had {letter.size} bytes and was truncated"
                f" to {len(letter.value or b'')}, so it cannot be resent"
            )
    if missing := sorted((offsets or set()) - existing):
        raise DeadLetterError(
            f"there is no dead letter at offset {', '.join(map(str, missing))} of {settings.topic(DLQ_TOPICS[source])};"
            " `gracestream dlq list` shows those that are there"
        )
    return ResendResult(sorted(offset_by_content.values()), truncated, answered, duplicates)


def _was_answered(letter: DeadLetter, source: DeadLetterSource) -> bool:
    """Whether the sender received an error as the answer: the id can be read, and a topic accepted the error."""
    if source != "requests" or letter.truncated or letter.unanswered:
        return False
    return peek_id(letter.value, "request_id") is not None


def _parse_dead_letter(record: Any, source: DeadLetterSource) -> DeadLetter:
    """Parse a dead letter. Any header may be missing or malformed, since other programs may write to the queue."""
    headers = {name: (value or b"").decode(errors="backslashreplace") for name, value in record.headers}

    def number(name: str, default: int) -> int:
        text = headers.get(name, "")
        return int(text) if text.isdecimal() and len(text) < 20 else default

    return DeadLetter(
        queue=DLQ_TOPICS[source],
        offset=record.offset,
        timestamp=record.timestamp / 1000,
        key=record.key,
        value=record.value,
        reason=headers.get(REASON_HEADER, ""),
        source_partition=number(SOURCE_PARTITION_HEADER, -1),
        source_offset=number(SOURCE_OFFSET_HEADER, -1),
        size=number("value_bytes", len(record.value or b"")),
        truncated="value_bytes" in headers or "key_bytes" in headers,
        unanswered=UNANSWERED_HEADER in headers,
    )
