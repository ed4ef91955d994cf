"""What a prompt asks for, in words: comparison of wordings, and requests about a subject."""

from gracestream.pipeline.wording.comparison import ELLIPSIS, disagreement, in_context, rules, wording_of
from gracestream.pipeline.wording.relations import SUBJECT, relations
from gracestream.pipeline.wording.request import request_in
from gracestream.pipeline.wording.same_names import SameNames
from gracestream.pipeline.wording.same_words import SameWords, bounds_radius
from gracestream.pipeline.wording.sentence_type import other_type
from gracestream.pipeline.wording.subject import subject_of

__all__ = [
    "ELLIPSIS",
    "SUBJECT",
    "SameNames",
    "SameWords",
    "bounds_radius",
    "disagreement",
    "in_context",
    "other_type",
    "relations",
    "request_in",
    "rules",
    "subject_of",
    "wording_of",
]
