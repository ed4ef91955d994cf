"""Who may correct: signatures, the list of authors, rate limits and spent signatures."""

from gracestream.pipeline.auth.admission import MINUTE, Admission, Admitted, Copied, Refused
from gracestream.pipeline.auth.authors import AuthorsFile
from gracestream.pipeline.auth.signing import new_key_file, read_key_file, sign, spelled
from gracestream.pipeline.auth.spent_signatures import mark_header

__all__ = [
    "MINUTE",
    "Admission",
    "Admitted",
    "AuthorsFile",
    "Copied",
    "Refused",
    "mark_header",
    "new_key_file",
    "read_key_file",
    "sign",
    "spelled",
]
