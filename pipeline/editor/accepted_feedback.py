"""What `edits` says of feedback: which was accepted lately, and which signatures are spent."""

from collections.abc import Iterable
from pathlib import Path

from gracestream.pipeline.auth import RATE_WINDOW_MS, AcceptedFeedback, Admission, AuthorsFile
from gracestream.pipeline.kafka import EDITS, read_topic
from gracestream.pipeline.settings import Settings, SettingsError
from gracestream.schemas import headers
from gracestream.schemas.headers import SPENT_MARK_HEADER, feedback_offset_of

MAX_CLOCK_SKEW_MS = RATE_WINDOW_MS
"""How far the clocks of two brokers may disagree; `feedback` and `edits` may have different leaders."""


def admission_from_settings(settings: Settings) -> Admission:
    """The admission of an editor with these settings.

    Raises:
        SettingsError: signatures are required, and no list says whose.
        AuthorsError: the list of authors cannot be used.
    """
    if settings.require_signature and not settings.authors:
        raise SettingsError("GRACESTREAM_REQUIRE_SIGNATURE needs a list of authors; set GRACESTREAM_AUTHORS")
    return Admission(
        settings.codebook,
        AuthorsFile(Path(settings.authors).expanduser()).load if settings.authors else None,
        require_signature=settings.require_signature,
        per_minute=settings.edits_per_minute,
        accepted_since=lambda since: accepted_since(settings, since),
        marks=lambda since: spent_marks_since(settings, since),
    )


def accepted_since(settings: Settings, since_ms: int) -> list[AcceptedFeedback]:
    """The admitted records from a time in ms on, as the headers of their outcomes tell."""
    found_headers = [
        dict(record.headers)
        for record in read_topic(settings, EDITS, start_time_ms=max(0, since_ms - MAX_CLOCK_SKEW_MS))
    ]
    outcomes = [found for found in found_headers if headers.ACCEPTED_AT_HEADER in found]
    admitted = [
        AcceptedFeedback(found[headers.AUTHOR_HEADER].decode(), int(found[headers.ACCEPTED_AT_HEADER]))
        for found in outcomes
    ]
    return [one for one in admitted if one.time_ms > since_ms]


def spent_marks_since(settings: Settings, since_offset: int) -> Iterable[tuple[int, bytes | None, int]]:
    """The marks in `edits`, as `MarkReader` has them.

    Raises:
        KafkaError: it cannot be read.
    """
    for record in read_topic(settings, EDITS, since_offset):
        header = dict(record.headers).get(SPENT_MARK_HEADER)
        yield record.offset, None if header is None else bytes.fromhex(header.decode()), feedback_offset_of(record)
