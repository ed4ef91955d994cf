"""The codebook: entries, their lookup, the edits that they serve, and files of them."""

from gracestream.pipeline.codebook.codebook import Applied, Codebook, Label, as_it_was, query_in
from gracestream.pipeline.codebook.compare import Fold, entry_change, exception_change, same_edit, same_entry
from gracestream.pipeline.codebook.edit_memory import BARE_MODEL, EditMemory, still_undone, together
from gracestream.pipeline.codebook.file import FileError, load_codebook, parse, save
from gracestream.pipeline.codebook.key_index import KeyIndex, on_host
from gracestream.pipeline.codebook.lookup import OUTSIDE, Asked, CodebookLookup, Hit, serving
from gracestream.pipeline.codebook.policy import (
    ROUNDINGS,
    TRAFFIC_SHARE,
    Decision,
    Neighbour,
    Policy,
    batch_noise,
    decide,
    without_expanding,
)
from gracestream.pipeline.codebook.prompt_exceptions import query_of, same_request

__all__ = [
    "BARE_MODEL",
    "OUTSIDE",
    "ROUNDINGS",
    "TRAFFIC_SHARE",
    "Applied",
    "Asked",
    "Codebook",
    "CodebookLookup",
    "Decision",
    "EditMemory",
    "FileError",
    "Fold",
    "Hit",
    "KeyIndex",
    "Label",
    "Neighbour",
    "Policy",
    "as_it_was",
    "batch_noise",
    "decide",
    "entry_change",
    "exception_change",
    "load_codebook",
    "on_host",
    "parse",
    "query_in",
    "query_of",
    "same_edit",
    "same_entry",
    "same_request",
    "save",
    "serving",
    "still_undone",
    "together",
    "without_expanding",
]
