"""Names and limits of the Kafka headers that gracestream reads or writes (docs/explanation/messages-and-topics.md).

Values are UTF-8 text; numbers are decimal.
"""

from typing import Any

REPLY_TO_HEADER = "reply_to"
"""On a request: the full name of the topic for the answer. If there are several, the last one counts."""

FEEDBACK_OFFSET_HEADER = "feedback_offset"
"""On an outcome: the offset of the feedback record."""

AUTHOR_HEADER, ACCEPTED_AT_HEADER = "author", "admitted"
"""On an outcome of accepted feedback: its author, and the time in ms at which it counts towards the rate limit."""

SPENT_MARK_HEADER = "spends"
"""On an outcome of signed feedback: the mark, in hex, by which a copy of this feedback is recognised."""

TERM_HEADER, CODEBOOK_SEQ_HEADER, CONTEXT_HEADER, STANDING_HEADER = "term", "codebook_seq", "seen", "standing"
"""On an outcome without a delta: the inputs of the decision.

These are the term and the newest delta of the codebook, the decision context (`seen`, in JSON) and the sender's
standing (in JSON).
"""

REASON_HEADER = "reason"
"""On a dead letter: the fault of the record, in one line."""

SOURCE_TOPIC_HEADER, SOURCE_PARTITION_HEADER, SOURCE_OFFSET_HEADER = "source_topic", "source_partition", "source_offset"
"""On a dead letter: the topic, partition and offset of the record."""

UNANSWERED_HEADER = "unanswered"
"""On a dead letter of `requests.dlq`: no topic accepted an answer to this request, so the sender got none."""

RESENT_FROM_HEADER = "replayed_from"
"""On a resent record: the dead-letter queue and the offset of its dead letter, as `feedback.dlq/17`."""

TRUNCATION_HEADERS = tuple(f"{part}_{what}" for part in ("key", "value") for what in ("bytes", "sha256"))
"""On a truncated dead letter: size in bytes and SHA-256 of the whole key and of the whole value."""

MAX_COPIED_HEADERS = 32
"""Limit on the number of headers copied from a request to its answer."""

MAX_COPIED_HEADER_BYTES = 8192
"""Limit on the bytes of names and values of the copied headers; a W3C `baggage` header may have as many."""

RESERVED_HEADERS = frozenset(
    {
        REPLY_TO_HEADER,
        FEEDBACK_OFFSET_HEADER,
        AUTHOR_HEADER,
        ACCEPTED_AT_HEADER,
        SPENT_MARK_HEADER,
        TERM_HEADER,
        CODEBOOK_SEQ_HEADER,
        CONTEXT_HEADER,
        STANDING_HEADER,
        REASON_HEADER,
        SOURCE_TOPIC_HEADER,
        SOURCE_PARTITION_HEADER,
        SOURCE_OFFSET_HEADER,
        UNANSWERED_HEADER,
        RESENT_FROM_HEADER,
        *TRUNCATION_HEADERS,
    }
)
"""All headers with a meaning to gracestream; headers of a request with these names are not copied to its answer."""


def feedback_offset_of(record: Any) -> int:
    """The offset of the feedback record that an outcome on `edits` belongs to; -1 if the header is missing."""
    return read_offset_header(FEEDBACK_OFFSET_HEADER, record)


def read_offset_header(header: str, record: Any) -> int:
    """The offset in this header of a record; -1 if the header is missing or holds no offset."""
    digits = dict(record.headers).get(header) or b""
    # Offsets are int64. 18 digits always fit, and the limit keeps a hostile header from becoming a huge integer.
    return int(digits) if digits.isdigit() and len(digits) < 19 else -1
