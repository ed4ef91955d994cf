"""Rules on the text of prompts: extraction and comparison of requests, their names and their subject."""

from gracestream.pipeline.wording.comparison import (
    ELLIPSIS,
    extract_wording,
    find_disagreement,
    mark_as_excerpt,
    rules_digest,
)
from gracestream.pipeline.wording.relations import SUBJECT_PLACEHOLDER, relation_templates
from gracestream.pipeline.wording.request import extract_request
from gracestream.pipeline.wording.same_names import SameNamesIndex
from gracestream.pipeline.wording.same_words import SameWordsIndex, limits_radius
from gracestream.pipeline.wording.sentence_type import convert_sentence_type
from gracestream.pipeline.wording.subject import extract_subject

__all__ = [
    "ELLIPSIS",
    "SUBJECT_PLACEHOLDER",
    "SameNamesIndex",
    "SameWordsIndex",
    "convert_sentence_type",
    "extract_request",
    "extract_subject",
    "extract_wording",
    "find_disagreement",
    "limits_radius",
    "mark_as_excerpt",
    "relation_templates",
    "rules_digest",
]
