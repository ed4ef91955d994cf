"""Headers of requests and of what comes back for them."""

REPLY_TO = "reply_to"
"""Header of a request: the whole name of the topic for its answer. Of several the last counts."""

UNANSWERED = "unanswered"
"""Header of a dead letter on `requests.dlq`: no topic took an answer to this request, so its sender got none."""

MOST_HEADERS = 32
"""Headers that are copied to an answer."""

HEADER_BYTES = 8192
"""Of their names and values; W3C's `baggage` may take as much."""

OURS = frozenset(
    {
        REPLY_TO,
        UNANSWERED,
        "reason",
        "source_topic",
        "source_partition",
        "source_offset",
        "replayed_from",
        "feedback_offset",
    }
    | {"author", "admitted", "spends", "term", "codebook_seq", "seen", "standing"}
    | {"key_bytes", "key_sha256", "value_bytes", "value_sha256"}
)
"""Names of headers that gracestream gives a meaning, on any of its topics."""
