"""Dead letters: records that no worker could take, set aside with the reason for those who run the deployment.

What it guarantees:

1. A dead letter has the key and the value of its record, byte for byte; headers say why it is there and where the
   record lies.
2. It always fits its queue. Of a record larger than `MAX_UNTRUNCATED_BYTES` only the start is kept. Headers give the
   size and, where all of it was read, the SHA-256 of what was cut; such a one is never replayed.
3. A replay sends equal records once: a letter that came back from a replay, or that two replicas set aside because one
   of them died, is not multiplied.
4. Unless it is named by its offset, a request whose sender got an error for an answer is not sent again: the sender may
   have sent a better one under the same id. A replica answers each request that it dead-letters and whose id it can
   read. Where no topic takes the answer, the letter says so in a header and is sent again.
"""

import hashlib
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

from kafka import TopicPartition
from kafka.errors import MessageSizeTooLargeError

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.kafka.clients import consumer, producer
from gracestream.pipeline.kafka.lenient_records import MAX_UNTRUNCATED_BYTES, TRUNCATED_BYTES
from gracestream.pipeline.kafka.reader import read_topic
from gracestream.pipeline.kafka.topics import FEEDBACK_DLQ, REQUESTS_DLQ, missing_topic_error
from gracestream.pipeline.settings import Settings
from gracestream.schemas.headers import (
    REASON_HEADER,
    REPLAYED_FROM_HEADER,
    SOURCE_OFFSET_HEADER,
    SOURCE_PARTITION_HEADER,
    SOURCE_TOPIC_HEADER,
    UNANSWERED_HEADER,
)
from gracestream.schemas.messages import TruncatedBytes, escape_unprintable, peek_id

DeadLetterSource = Literal["requests", "feedback"]
DLQ_TOPICS: dict[DeadLetterSource, str] = {"requests": REQUESTS_DLQ, "feedback": FEEDBACK_DLQ}
"""The dead letter queue of each topic."""

MAX_REASON_CHARACTERS = 1000
"""Characters of a reason that are kept."""


class DeadLetterError(UserError):
    """A dead letter that is not there, or that cannot be replayed; the text says which."""


@dataclass(frozen=True, slots=True)
class DeadLetterRecord:
    """What is to be written into a dead letter queue."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter as it lies in its queue; `timestamp` in seconds, `size` in bytes of the value as it was."""

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
class ReplayResult:
    """The offsets of dead letters: sent again; cut, answered or equal to one that is sent; refused as too large.

    A record that was compressed may be larger on its way than its topic takes.
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
    """The dead letter of one record of `topic`, cut where key and value have more than `max_bytes` bytes.

    `unanswered`: no topic took an answer, so the record's sender got none.
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
        key = b""  # clients send no record without both
    # Clients send no subclass of `bytes`.
    return DeadLetterRecord(key if key is None else bytes(key), value if value is None else bytes(value), headers)


def _truncate(part: bytes | None) -> bytes | None:
    """Its start, unless it is short or cut already."""
    if part is None or len(part) <= TRUNCATED_BYTES:
        return part
    return TruncatedBytes(part[:TRUNCATED_BYTES], len(part), hashlib.sha256(part).hexdigest())


def list_dead_letters(settings: Settings, source: DeadLetterSource, last: int | None = None) -> Iterator[DeadLetter]:
    """The dead letters of a topic in order, one at a time; or only the `last` so many.

    Raises:
        TopicError: there is no such queue.
    """
    if last is None:
        yield from (_parse_dead_letter(record, source) for record in read_topic(settings, DLQ_TOPICS[source]))
        return
    # Transactions leave records of their own between letters, so how far back the last so many lie is found out.
    end, window = _end_offset(settings, source), 2 * last + 16
    while True:
        start = max(0, end - window)
        found = deque(
            (_parse_dead_letter(record, source) for record in read_topic(settings, DLQ_TOPICS[source], start)),
            maxlen=last,
        )
        if len(found) == last or start == 0:
            yield from found
            return
        window *= 8


def replay_dead_letters(
    settings: Settings,
    source: DeadLetterSource,
    offsets: Collection[int] | None = None,
    *,
    include_answered: bool = False,
    dry_run: bool = False,
) -> ReplayResult:
    """Send dead letters to their topic again, key and value as they were.

    Without `offsets`: all that were not cut, and of requests those alone that have no answer, unless
    `include_answered`. Of equal records the first is sent. With `dry_run` nothing is sent.

    Raises:
        DeadLetterError: there is no letter at one of the offsets, or it was cut; then none is sent.
        TopicError: there is no such queue.
    """
    chosen = _select_letters(
        settings, source, None if offsets is None else set(offsets), include_answered=include_answered
    )
    if dry_run or not chosen.sent:
        return chosen
    wanted = set(chosen.sent)
    # A record that is too large takes others with it: what is sent at once and, if idempotent, all that comes after.
    sender, refused = producer(settings, compression_type="gzip", enable_idempotence=False), []
    try:
        for letter in list_dead_letters(settings, source):
            if letter.offset in wanted:
                headers = [(REPLAYED_FROM_HEADER, f"{letter.queue}/{letter.offset}".encode())]
                try:
                    sender.send(settings.topic(source), letter.value, letter.key, headers).get(timeout=30)
                except MessageSizeTooLargeError:
                    refused.append(letter.offset)
    finally:
        sender.close(timeout=10)
    sent = [offset for offset in chosen.sent if offset not in refused]
    return ReplayResult(sent, chosen.truncated, chosen.answered, chosen.duplicates, refused)


def _select_letters(
    settings: Settings, source: DeadLetterSource, offsets: set[int] | None, *, include_answered: bool
) -> ReplayResult:
    chosen: dict[bytes, int] = {}
    seen, cut, skipped, equal = set(), [], [], []
    for letter in list_dead_letters(settings, source):
        if offsets is not None and letter.offset not in offsets:
            continue
        seen.add(letter.offset)
        if offsets is None and not include_answered and _was_answered(letter, source):
            skipped.append(letter.offset)
        elif not letter.truncated:
            content = hashlib.sha256(repr((letter.key, letter.value)).encode()).digest()
            if chosen.setdefault(content, letter.offset) != letter.offset:
                equal.append(letter.offset)
        elif offsets is None:
            cut.append(letter.offset)
        else:
            raise DeadLetterError(
                f"the dead letter at offset {letter.offset} of {letter.queue} had {letter.size} bytes and was cut to"
                f" {len(letter.value or b'')}, so it cannot be replayed"
            )
    if missing := sorted((offsets or set()) - seen):
        raise DeadLetterError(
            f"there is no dead letter at offset {', '.join(map(str, missing))} of {settings.topic(DLQ_TOPICS[source])};"
            " `gracestream dlq list` shows those that are there"
        )
    return ReplayResult(sorted(chosen.values()), cut, skipped, equal)


def _was_answered(letter: DeadLetter, source: DeadLetterSource) -> bool:
    """Whether the sender of a request got an error: wherever its id can be read, unless no topic took the error."""
    if source != "requests" or letter.truncated or letter.unanswered:
        return False
    return peek_id(letter.value, "request_id") is not None


def _end_offset(settings: Settings, source: DeadLetterSource) -> int:
    partition = TopicPartition(settings.topic(DLQ_TOPICS[source]), 0)
    with closing(consumer(settings)) as reader:
        if not reader.partitions_for_topic(partition.topic):
            raise missing_topic_error(partition.topic)
        end: int = reader.end_offsets([partition])[partition]
    return end


def _parse_dead_letter(record: Any, source: DeadLetterSource) -> DeadLetter:
    """As far as its headers tell: whoever may write to the queue may have left some out."""
    headers = {name: (value or b"").decode(errors="backslashreplace") for name, value in record.headers}

    def number(name: str, otherwise: int) -> int:
        text = headers.get(name, "")
        return int(text) if text.isdecimal() and len(text) < 20 else otherwise

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
