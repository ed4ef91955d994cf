"""Decides which feedback is accepted: signatures, the list of authors, rate limits and spent signatures."""

from gracestream.pipeline.auth.admission import (
    RATE_WINDOW_MS,
    AcceptedFeedback,
    Admission,
    DuplicateFeedback,
    FeedbackRejected,
)
from gracestream.pipeline.auth.authors import AuthorsFile
from gracestream.pipeline.auth.signing import create_key_file, encode_public_key, read_key_file, sign
from gracestream.pipeline.auth.spent_signatures import mark_header

__all__ = [
    "RATE_WINDOW_MS",
    "AcceptedFeedback",
    "Admission",
    "AuthorsFile",
    "DuplicateFeedback",
    "FeedbackRejected",
    "create_key_file",
    "encode_public_key",
    "mark_header",
    "read_key_file",
    "sign",
]
