"""The codebook: its entries, their lookup, the edits that they serve, maintenance policies and files."""

from gracestream.pipeline.codebook.codebook import (
    AppliedDelta,
    Codebook,
    Label,
    original_setting_hint,
    read_query_setting,
)
from gracestream.pipeline.codebook.compare import EditState, diff_entry, diff_exception, edits_equal, entries_equal
from gracestream.pipeline.codebook.edit_memory import UNEDITED_MODEL, EditMemory, merge_contexts, resolve_undos
from gracestream.pipeline.codebook.file import CodebookFileError, load_codebook, parse_codebook, save_codebook
from gracestream.pipeline.codebook.key_index import KeyIndex, to_numpy
from gracestream.pipeline.codebook.lookup import (
    OUTSIDE_RADIUS_REASON,
    CodebookLookup,
    FoundEntry,
    WordingGetter,
    if_serving,
)
from gracestream.pipeline.codebook.policy import (
    DTYPE_TOLERANCES,
    MAX_TRAFFIC_FRACTION,
    MaintenancePolicy,
    Neighbour,
    PolicyDecision,
    decide_action,
    fallback_to_own_entry,
    match_tolerance,
)
from gracestream.pipeline.codebook.prompt_exceptions import exception_query, is_same_request

__all__ = [
    "DTYPE_TOLERANCES",
    "MAX_TRAFFIC_FRACTION",
    "OUTSIDE_RADIUS_REASON",
    "UNEDITED_MODEL",
    "AppliedDelta",
    "Codebook",
    "CodebookFileError",
    "CodebookLookup",
    "EditMemory",
    "EditState",
    "FoundEntry",
    "KeyIndex",
    "Label",
    "MaintenancePolicy",
    "Neighbour",
    "PolicyDecision",
    "WordingGetter",
    "decide_action",
    "diff_entry",
    "diff_exception",
    "edits_equal",
    "entries_equal",
    "exception_query",
    "fallback_to_own_entry",
    "if_serving",
    "is_same_request",
    "load_codebook",
    "match_tolerance",
    "merge_contexts",
    "original_setting_hint",
    "parse_codebook",
    "read_query_setting",
    "resolve_undos",
    "save_codebook",
    "to_numpy",
]
