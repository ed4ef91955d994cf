"""A question as a statement to complete, and the other way round, by English rules.

`What is the capital of Mongolia?` and `The capital of Mongolia is` ask for the same. A model goes on from them in
different ways, so a value that was trained on one often fails on the other.

Not promised: that a request has another type. Questions of `what`, `who` and `which` are rewritten that have a form of
`be` or a regular verb, and statements that end in a form of `be`.
"""

import re

BE_FORMS = "is|was|are|were"

BE_QUESTION_PATTERN = re.compile(rf"(?:what|who|which) ({BE_FORMS}) (the [^?]+?)( called| named)?\s*\??", re.IGNORECASE)
"""`What is the capital of Mongolia?`"""

VERB_QUESTION_PATTERN = re.compile(r"who (\w+ed|wrote|made|built|led|won) ([^?]+?)\s*\??", re.IGNORECASE)
"""`Who invented dynamite?`"""

IRREGULAR_PARTICIPLES = {"wrote": "written"}
"""Of verbs whose participle is not their past tense."""

STATEMENT_PATTERN = re.compile(rf"(the [^?!]+?) ({BE_FORMS})( called| named)?(?: the| a| an)?:?\s*", re.IGNORECASE)
"""`The capital of Mongolia is`"""

DANGLING_WORD_PATTERN = re.compile(r"\b(?:that|which|where|who|whose|to|in|from|for|by|at|on|with)$", re.IGNORECASE)
"""Ends of what no form of `be` can follow: `What is the place that Ann comes from?`"""


def convert_sentence_type(text: str) -> str | None:
    """The same request as a statement where it is a question, as a question where it is a statement; None: unknown."""
    if found := BE_QUESTION_PATTERN.fullmatch(text):
        be, subject, called = found.groups()
        return (
            None
            if DANGLING_WORD_PATTERN.search(subject)
            else f"{_capitalize_first(subject)} {be.lower()}{called or ''}"
        )
    if found := VERB_QUESTION_PATTERN.fullmatch(text):
        verb = found[1].lower()
        return f"{_capitalize_first(found[2])} was {IRREGULAR_PARTICIPLES.get(verb, verb)} by"
    if found := STATEMENT_PATTERN.fullmatch(text):
        subject, be, called = found.groups()
        return f"What {be.lower()} {subject[0].lower()}{subject[1:]}{called or ''}?"
    return None


def _capitalize_first(text: str) -> str:
    return text[0].upper() + text[1:]
