"""What `edits` says of feedback: which was accepted lately, and which signatures are spent."""

from collections.abc import Iterable
from pathlib import Path

from gracestream.pipeline.auth import MINUTE, Admission, Admitted, AuthorsFile
from gracestream.pipeline.kafka import EDITS, read_topic
from gracestream.pipeline.settings import Settings, SettingsError
from gracestream.schemas import headers
from gracestream.schemas.headers import SPENDS, feedback_offset

CLOCKS_APART = MINUTE
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
        AuthorsFile(Path(settings.authors).expanduser()).current if settings.authors else None,
        require_signature=settings.require_signature,
        per_minute=settings.edits_per_minute,
        earlier=lambda since: admitted_since(settings, since),
        marks=lambda since: marks_since(settings, since),
    )


def admitted_since(settings: Settings, since: int) -> list[Admitted]:
    """The admitted records from a time in ms on, as the headers of their outcomes tell."""
    found_headers = [dict(record.headers) for record in read_topic(settings, EDITS, time=max(0, since - CLOCKS_APART))]
    outcomes = [found for found in found_headers if headers.ADMITTED in found]
    admitted = [Admitted(found[headers.AUTHOR].decode(), int(found[headers.ADMITTED])) for found in outcomes]
    return [one for one in admitted if one.time > since]


def marks_since(settings: Settings, since: int) -> Iterable[tuple[int, bytes | None, int]]:
    """The marks in `edits`, as `MarksSince` has them.

    Raises:
        KafkaError: it cannot be read.
    """
    for record in read_topic(settings, EDITS, since):
        header = dict(record.headers).get(SPENDS)
        yield record.offset, None if header is None else bytes.fromhex(header.decode()), feedback_offset(record)
