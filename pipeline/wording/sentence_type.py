"""Conversion of a question to a statement to complete, and the reverse, by English rules.

`What is the capital of Mongolia?` and `The capital of Mongolia is` ask for the same. A model continues them in
different ways, so a value trained on one often fails on the other.

Not promised: that a request can be converted. The rules cover

1. questions of `what`, `who` and `which` with a form of `be`;
2. questions of `who` with a regular verb, or one of a few irregular verbs;
3. statements that end in a form of `be`.
"""

import re

BE_FORMS = "is|was|are|were"

BE_QUESTION_PATTERN = re.compile(rf"(?:what|who|which) ({BE_FORMS}) (the [^?]+?)( called| named)?\s*\??", re.IGNORECASE)
"""Matches `What is the capital of Mongolia?`."""

VERB_QUESTION_PATTERN = re.compile(r"who (\w+ed|wrote|made|built|led|won) ([^?]+?)\s*\??", re.IGNORECASE)
"""Matches `Who invented dynamite?`."""

IRREGULAR_PARTICIPLES = {"wrote": "written"}
"""Participles that differ from the past tense, by past tense."""

STATEMENT_PATTERN = re.compile(rf"(the [^?!]+?) ({BE_FORMS})( called| named)?(?: the| a| an)?:?\s*", re.IGNORECASE)
"""Matches `The capital of Mongolia is`."""

DANGLING_WORD_PATTERN = re.compile(r"\b(?:that|which|where|who|whose|to|in|from|for|by|at|on|with)$", re.IGNORECASE)
"""Ends of a subject that no form of `be` can follow, as in `What is the place that Ann comes from?`."""


def convert_sentence_type(text: str) -> str | None:
    """A question as a statement, or a statement as a question. None: no rule applies."""
    if match := BE_QUESTION_PATTERN.fullmatch(text):
        be, subject, suffix = match.groups()
        return (
            None
            if DANGLING_WORD_PATTERN.search(subject)
            else f"{_capitalize_first(subject)} {be.lower()}{suffix or ''}"
        )
    if match := VERB_QUESTION_PATTERN.fullmatch(text):
        verb = match[1].lower()
        return f"{_capitalize_first(match[2])} was {IRREGULAR_PARTICIPLES.get(verb, verb)} by"
    if match := STATEMENT_PATTERN.fullmatch(text):
        subject, be, suffix = match.groups()
        return f"What {be.lower()} {subject[0].lower()}{subject[1:]}{suffix or ''}?"
    return None


def _capitalize_first(text: str) -> str:
    return text[0].upper() + text[1:]
