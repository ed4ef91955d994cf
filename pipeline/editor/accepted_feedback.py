"""What earlier editors left on `edits` for admission: recently accepted feedback, and spent signatures.

`pipeline.auth` decides on admission and knows no Kafka. This module connects the two.
"""

from collections.abc import Iterable
from pathlib import Path

from gracestream.pipeline.auth import RATE_WINDOW_MS, AcceptedFeedback, Admission, AuthorsFile
from gracestream.pipeline.kafka import EDITS, read_topic
from gracestream.pipeline.settings import AuthSettings, KafkaSettings, SettingsError
from gracestream.schemas import headers
from gracestream.schemas.headers import SPENT_MARK_HEADER, feedback_offset_of

MAX_CLOCK_SKEW_MS = RATE_WINDOW_MS
"""Allowed difference of two brokers' clocks: `feedback` and `edits` may have different leaders."""


def admission_from_settings(auth: AuthSettings, kafka: KafkaSettings, codebook: str) -> Admission:
    """The admission that these settings ask for, of feedback for one codebook.

    Raises:
        SettingsError: signatures are required, but no list of authors is set.
        AuthorsError: the list of authors cannot be used.
    """
    if auth.require_signature and auth.authors_file is None:
        raise SettingsError("GRACESTREAM_REQUIRE_SIGNATURE needs a list of authors; set GRACESTREAM_AUTHORS_FILE")
    return Admission(
        codebook,
        None if auth.authors_file is None else AuthorsFile(Path(auth.authors_file).expanduser()).load,
        require_signature=auth.require_signature,
        per_minute=auth.feedback_rate_limit,
        accepted_since=lambda since: accepted_since(kafka, since),
        marks=lambda since: spent_marks_since(kafka, since),
    )


def accepted_since(settings: KafkaSettings, since_ms: int) -> list[AcceptedFeedback]:
    """The records accepted after `since_ms` (Kafka's clock), from the headers of their outcomes.

    An outcome is written after its feedback, perhaps by a broker whose clock is behind. So reading starts
    `MAX_CLOCK_SKEW_MS` earlier.
    """
    all_headers = [
        dict(record.headers)
        for record in read_topic(settings, EDITS, start_time_ms=max(0, since_ms - MAX_CLOCK_SKEW_MS))
    ]
    with_acceptance = [
        outcome_headers for outcome_headers in all_headers if headers.ACCEPTED_AT_HEADER in outcome_headers
    ]
    accepted = [
        AcceptedFeedback(
            outcome_headers[headers.AUTHOR_HEADER].decode(), int(outcome_headers[headers.ACCEPTED_AT_HEADER])
        )
        for outcome_headers in with_acceptance
    ]
    return [feedback for feedback in accepted if feedback.time_ms > since_ms]


def spent_marks_since(settings: KafkaSettings, since_offset: int) -> Iterable[tuple[int, bytes | None, int]]:
    """The records of `edits` from an offset on, as (offset, spent mark or None, offset of the feedback).

    This is a `pipeline.auth` MarkReader.

    Raises:
        KafkaError: `edits` cannot be read.
    """
    for record in read_topic(settings, EDITS, since_offset):
        header = dict(record.headers).get(SPENT_MARK_HEADER)
        yield record.offset, None if header is None else bytes.fromhex(header.decode()), feedback_offset_of(record)
