"""Headers that gracestream gives a meaning, on any of its topics. Values are UTF-8 text, numbers in decimal."""

from typing import Any

REPLY_TO_HEADER = "reply_to"
"""Of a request: the whole name of the topic for its answer. Of several the last counts."""

FEEDBACK_OFFSET_HEADER = "feedback_offset"
"""Of an outcome: the offset of its feedback."""

AUTHOR_HEADER, ACCEPTED_AT_HEADER = "author", "admitted"
"""Of an outcome whose feedback was accepted: its author, and the time in ms at which it counts for the rate limit."""

SPENT_MARK_HEADER = "spends"
"""Of an outcome of signed feedback: the mark by which a copy of that feedback is known, in hex."""

TERM_HEADER, CODEBOOK_SEQ_HEADER, CONTEXT_HEADER, STANDING_HEADER = "term", "codebook_seq", "seen", "standing"
"""Of the outcome of a decision without a delta: what that decision saw. `seen` and `standing` are JSON."""

REASON_HEADER = "reason"
"""Of a dead letter: what is wrong with the record, in one line."""

SOURCE_TOPIC_HEADER, SOURCE_PARTITION_HEADER, SOURCE_OFFSET_HEADER = "source_topic", "source_partition", "source_offset"
"""Of a dead letter: where the record lies."""

UNANSWERED_HEADER = "unanswered"
"""Of a dead letter on `requests.dlq`: no topic took an answer to this request, so its sender got none."""

REPLAYED_FROM_HEADER = "replayed_from"
"""Of a record that was sent again: the queue and the offset of its dead letter."""

TRUNCATION_HEADERS = tuple(f"{part}_{what}" for part in ("key", "value") for what in ("bytes", "sha256"))
"""Of a dead letter that was cut: the size and the digest of the whole key and value."""

MAX_COPIED_HEADERS = 32
"""Headers that are copied to an answer."""

MAX_COPIED_HEADER_BYTES = 8192
"""Of their names and values; W3C's `baggage` may take as much."""

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
        REPLAYED_FROM_HEADER,
        *TRUNCATION_HEADERS,
    }
)
"""All of them: a client's own headers of these names are not copied to an answer."""


def feedback_offset_of(record: Any) -> int:
    """The offset of the feedback that an outcome on `edits` belongs to; -1 where it does not say."""
    return read_offset_header(FEEDBACK_OFFSET_HEADER, record)


def read_offset_header(header: str, record: Any) -> int:
    """The offset in a header of a record; -1 where it has none."""
    said = dict(record.headers).get(header) or b""
    return int(said) if said.isdigit() and len(said) < 19 else -1
